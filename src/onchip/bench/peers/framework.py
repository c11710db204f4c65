"""Import the peers' networks, which need torch, JAX or Triton, when a benchmark runs them."""

from __future__ import annotations

import importlib
from typing import Any


def framework(name: str) -> Any:
    """A module of bench/peers/frameworks; ImportError if its framework is not installed."""
    return importlib.import_module(f"onchip.bench.peers.frameworks.{name}")
