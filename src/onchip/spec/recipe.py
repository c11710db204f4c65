"""Weights that are not computed yet: what a rewrite or a kernel derives from other weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.spec.types import DTYPE_BYTES, numpy_dtype

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Recipe:
    """A weight described by its shape, its price and the function that makes it.

    Planning reads shape, dtype and flop and never calls `evaluate`; an engine does, once, on its own
    device, when it is built. `op` names the derivation so that a device can bring its own version.
    """

    op: str
    sources: tuple[str, ...]  # names of the weights it is made of; these may be recipes themselves
    shape: tuple[int, ...]
    dtype: str
    flop: int
    evaluate: Callable[..., Array]  # evaluate(*sources) -> array of shape and dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


Weight = Array | Recipe


def materialise(name: str, weights: Mapping[str, Weight], made: dict[str, Array] | None = None) -> Array:
    """The array behind a weight; recipes are evaluated, sources first, each once per `made`."""
    made = {} if made is None else made
    if name not in made:
        weight = weights[name]
        if isinstance(weight, Recipe):
            array = weight.evaluate(*(materialise(s, weights, made) for s in weight.sources))
            if array.shape != weight.shape or array.dtype != numpy_dtype(weight.dtype):
                promised, got = f"{weight.shape} {weight.dtype}", f"{array.shape} {array.dtype}"
                raise AssertionError(f"recipe {weight.op} promised {promised}, made {got}")
            made[name] = array
        else:
            made[name] = weight
    return made[name]
