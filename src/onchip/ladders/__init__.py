"""Ladders: for each workload, every step from the first idea to the best one, as code that runs.

A new ladder is a file with a `LADDER` and a line in `_HOME`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onchip.errors import InputError

if TYPE_CHECKING:
    from onchip.ladders.frame import Ladder

# Imported when climbed: kernels compile when their file is loaded.
_HOME = {"decode": "onchip.ladders.decode", "backprop": "onchip.ladders.backprop"}
LADDERS = tuple(_HOME)


def find_ladder(name: str) -> Ladder[Any]:
    if name not in _HOME:
        raise InputError("unknown ladder", got=name, expected=", ".join(LADDERS), hint="onchip ladder")
    ladder: Ladder[Any] = importlib.import_module(_HOME[name]).LADDER
    return ladder
