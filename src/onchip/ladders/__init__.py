"""Ladders: for each workload, every step from the naive version to the fastest, as code that runs.

To add a ladder, add a file with a `LADDER` and a line in `_HOME`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onchip.errors import InputError
from onchip.network.names import known_name

if TYPE_CHECKING:
    from onchip.ladders.frame import Ladder

# By name and device. Imported on use: kernels compile when their module is loaded.
_HOME = {
    ("decode", "cpu"): "onchip.ladders.decode",
    ("decode", "cuda"): "onchip.ladders.decode_cuda",
    ("faces", "cuda"): "onchip.ladders.faces_cuda",
    ("digits", "cuda"): "onchip.ladders.digits_cuda",
    ("backprop", "cpu"): "onchip.ladders.backprop",
    ("backprop", "cuda"): "onchip.ladders.backprop_cuda",
    ("scan", "cpu"): "onchip.ladders.scan",
    ("scan", "cuda"): "onchip.ladders.scan_cuda",
    ("sentiment", "cuda"): "onchip.ladders.sentiment_cuda",
    ("linear", "cuda"): "onchip.ladders.linear_cuda",
}
LADDERS = tuple(dict.fromkeys(name for name, _ in _HOME))


def ladder_devices(name: str) -> tuple[str, ...]:
    """The devices for which a ladder has rungs: "cpu", "cuda"."""
    name = known_name(name, LADDERS, "ladder", "onchip ladder")
    return tuple(device for known, device in _HOME if known == name)


def find_ladder(name: str, device: str = "cpu") -> Ladder[Any]:
    name, devices = known_name(name, LADDERS, "ladder", "onchip ladder"), ladder_devices(name)
    if device not in devices:
        expected, hint = ", ".join(devices), f"onchip ladder {name} --list, which needs no GPU"
        raise InputError(f"ladder {name} has no rungs for this device", got=device, expected=expected, hint=hint)
    ladder: Ladder[Any] = importlib.import_module(_HOME[name, device]).LADDER
    return ladder
