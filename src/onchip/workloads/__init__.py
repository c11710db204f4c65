"""The jobs that onchip knows by name, and loading: a name, a file or a Network becomes a Network."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from onchip.errors import InputError
from onchip.spec.load import SUFFIXES, load_file
from onchip.spec.network import Network
from onchip.workloads import decode, digits, faces, sentiment

WORKLOADS: dict[str, Callable[[], Network]] = {
    "decode": decode.network, "digits": digits.network, "faces": faces.network, "sentiment": sentiment.network,
}  # fmt: skip


def load(model: str | os.PathLike[str] | Network) -> Network:
    """A network from a file (.onnx, .safetensors) or the name of a workload, with its seeded weights."""
    if isinstance(model, Network):
        return model
    if not isinstance(model, str | os.PathLike):
        raise InputError("not a model", got=type(model).__name__, expected="a file, a workload's name or a Network")
    text = os.fspath(model)
    if text in WORKLOADS:
        return WORKLOADS[text]()
    if Path(text).suffix or os.sep in text or Path(text).exists():
        return load_file(text)
    raise InputError(
        "unknown model", got=text, expected=f"a workload ({', '.join(WORKLOADS)}) or a file ({', '.join(SUFFIXES)})",
        hint=f"{next(iter(WORKLOADS))}, or the path of a file",
    )  # fmt: skip
