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
    waiting = [name]  # not recursion: rewrites may derive a weight from a long row of others
    while waiting:
        weight = weights[waiting[-1]]
        missing = [] if not isinstance(weight, Recipe) else [s for s in weight.sources if s not in made]
        if waiting[-1] in made:
            waiting.pop()
        elif missing:
            waiting += missing
        else:
            made[waiting.pop()] = _evaluate(weight, made) if isinstance(weight, Recipe) else weight
    return made[name]


def _evaluate(recipe: Recipe, made: Mapping[str, Array]) -> Array:
    array = recipe.evaluate(*(made[source] for source in recipe.sources))
    if array.shape != recipe.shape or array.dtype != numpy_dtype(recipe.dtype):
        promised, got = f"{recipe.shape} {recipe.dtype}", f"{array.shape} {array.dtype}"
        raise AssertionError(f"recipe {recipe.op} promised {promised}, made {got}")
    return array
