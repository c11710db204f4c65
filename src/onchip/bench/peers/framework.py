"""Import the peers' networks, which are in the source tree but not in a wheel."""

from __future__ import annotations

import importlib
from typing import Any

from onchip.bench.frame import UnavailableError

_PACKAGE = "onchip.bench.peers.frameworks"


def framework(name: str) -> Any:
    """A module of bench/peers/frameworks; UnavailableError if it is not installed."""
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_PACKAGE):
            raise
        where = "in the source tree (src/onchip/bench/peers/frameworks), not in the wheel"
        raise UnavailableError(
            f"networks of torch, JAX and Triton are {where}: pip install -e '.[peers]' there"
        ) from None
