"""The context passed to every JAX layer function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onchip.network.graph import Network

Value = Any  # a JAX array
Weights = Mapping[str, Value]  # by role
Form = Callable[..., Value]  # (context, node, weights, *inputs) -> output


@dataclass(frozen=True, eq=False)
class Context:
    jax: Any
    net: Network
    precision: Any  # of gemms: a jax.lax.Precision
