"""Benchmarks as commands: `onchip bench` runs the cases that are listed here and writes a result file for each.

A new one is a file with a function `cases(options)` and a line in `_HOME`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onchip.bench.frame import Case
    from onchip.bench.options import Options

_HOME = {
    "decode": "onchip.bench.decode", "digits": "onchip.bench.digits", "sentiment": "onchip.bench.sentiment",
    "faces": "onchip.bench.faces", "imported": "onchip.bench.imported", "backprop": "onchip.bench.backprop",
    "mlp": "onchip.bench.mlp", "scan": "onchip.bench.scan", "pointwise": "onchip.bench.pointwise",
    "product": "onchip.bench.product",
}  # fmt: skip


class _Cases(Mapping[str, "Callable[[Options], list[Case]]"]):
    """Name -> builder. The builder's file, and with it the compiler, is loaded when it is asked for."""

    def __getitem__(self, name: str) -> Callable[[Options], list[Case]]:
        builder: Callable[[Options], list[Case]] = importlib.import_module(_HOME[name]).cases
        return builder

    def __iter__(self) -> Iterator[str]:
        return iter(_HOME)

    def __len__(self) -> int:
        return len(_HOME)


CASES: Mapping[str, Callable[[Options], list[Case]]] = _Cases()
