"""Registry of the layers' arithmetic: one forward and one backward function per layer class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onchip.network.layers import Layer
from onchip.network.recipe import Array

Arrays = tuple[Array, ...]
Weights = Mapping[str, Array]  # role -> array
Gradients = tuple[tuple[Array | None, ...], dict[str, Array]]  # per input value (None: no gradient), and by role
Forward = Callable[[Any, Arrays, Weights], Array]  # (layer, xs, w) -> y
Backward = Callable[[Any, Arrays, Weights, Array, Array], Gradients]  # (layer, xs, w, y, dy) -> dxs, dw

FORWARD: dict[type[Layer], Forward] = {}
BACKWARD: dict[type[Layer], Backward] = {}


def forward_of(*kinds: type[Layer]) -> Callable[[Forward], Forward]:
    def register(function: Forward) -> Forward:
        FORWARD.update(dict.fromkeys(kinds, function))
        return function

    return register


def backward_of(*kinds: type[Layer]) -> Callable[[Backward], Backward]:
    def register(function: Backward) -> Backward:
        BACKWARD.update(dict.fromkeys(kinds, function))
        return function

    return register
