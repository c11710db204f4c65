"""Benchmarks as commands: `onchip bench` runs the cases listed here and writes one result file each.

To add a benchmark, add a file with a function `cases(options)` and a line in `_HOME`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onchip.bench.frame import Case
    from onchip.bench.options import Options

_NAMES = (
    "decode", "digits", "sentiment", "faces", "imported", "backprop", "mlp", "scan", "pointwise", "product",
)  # fmt: skip
_HOME = {name: f"onchip.bench.cases.{name}" for name in _NAMES} | {"training": "onchip.bench.cases.training_steps"}


class _Cases(Mapping[str, "Callable[[Options], list[Case]]"]):
    """Name -> builder. The builder's module, and with it the compiler, is imported on access."""

    def __getitem__(self, name: str) -> Callable[[Options], list[Case]]:
        builder: Callable[[Options], list[Case]] = importlib.import_module(_HOME[name]).cases
        return builder

    def __iter__(self) -> Iterator[str]:
        return iter(_HOME)

    def __len__(self) -> int:
        return len(_HOME)


CASES: Mapping[str, Callable[[Options], list[Case]]] = _Cases()
