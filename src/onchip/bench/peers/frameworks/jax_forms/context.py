"""What every layer is written with as a function of JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onchip.network.graph import Network

Value = Any  # an array of JAX
Weights = Mapping[str, Value]  # by role
Form = Callable[..., Value]  # (context, node, weights, *values it reads) -> the value it makes


@dataclass(frozen=True, eq=False)
class Context:
    jax: Any
    net: Network
    precision: Any  # of products: a jax.lax.Precision
