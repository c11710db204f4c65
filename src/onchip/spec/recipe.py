"""Weights that are not computed yet: what a rewrite or a kernel derives from other weights. Data, no closure."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from onchip.spec.types import DTYPE_BYTES, numpy_dtype

Array = np.ndarray[Any, Any]
Attribute = int | float | str | bool | None | tuple["Attribute", ...]
F = TypeVar("F", bound=Callable[..., Array])

_EVALUATORS: dict[str, Callable[..., Array]] = {}


def recipe_op(function: F) -> F:
    """Make a function of a module the NumPy evaluator of an operation: f(*sources, **attributes) -> array."""
    _EVALUATORS[_name(function)] = function
    return function


def _name(function: Callable[..., Array]) -> str:
    """Where it is found, in a process that has not imported it yet, too: "plan.rewrites.linear:merged_weight"."""
    return f"{function.__module__.removeprefix('onchip.')}:{function.__name__}"


@dataclass(frozen=True)
class Recipe:
    """A weight described by its shape, its price and the operation that makes it.

    Planning reads shape, dtype and flop; an engine evaluates it, once, when it is built. Equal recipes are one weight.
    """

    op: str  # of a function that is a recipe_op; a device may bring its own version
    sources: tuple[str | Recipe, ...]  # names of the weights it is made of, which may be recipes themselves, or recipes
    shape: tuple[int, ...]
    dtype: str
    flop: int = 0
    attributes: tuple[tuple[str, Attribute], ...] = ()  # by name, what the operation is told

    @staticmethod
    def of(
        function: Callable[..., Array], sources: Sequence[str | Recipe], shape: Sequence[int], dtype: str = "float32",
        flop: int = 0, **attributes: Attribute,
    ) -> Recipe:  # fmt: skip
        """What a recipe_op will make of the sources."""
        return Recipe(_name(function), tuple(sources), tuple(shape), dtype, flop, tuple(sorted(attributes.items())))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


Weight = Array | Recipe


def evaluate(recipe: Recipe, arrays: Sequence[Array]) -> Array:
    """What the recipe promises, made of its sources in NumPy; floats are rounded to its dtype once, at the end."""
    if recipe.op not in _EVALUATORS:
        importlib.import_module(f"onchip.{recipe.op.partition(':')[0]}")
    array = _EVALUATORS[recipe.op](*arrays, **dict(recipe.attributes))
    wanted = numpy_dtype(recipe.dtype)
    if "float" in array.dtype.name and "float" in recipe.dtype:
        array = np.asarray(array, wanted, order="C")
    if array.shape != recipe.shape or array.dtype != wanted:
        promised, got = f"{recipe.shape} {recipe.dtype}", f"{array.shape} {array.dtype}"
        raise AssertionError(f"recipe {recipe.op} promised {promised}, made {got}")
    return array


Made = dict[str | Recipe, Array]


def materialise(name: str | Recipe, weights: Mapping[str, Weight], made: Made | None = None) -> Array:
    """The array behind a weight or a recipe; recipes are evaluated, sources first, each once per `made`."""
    made = {} if made is None else made
    waiting = [name]  # not recursion: rewrites may derive a weight from a long row of others
    while waiting:
        wanted = waiting[-1]
        weight = wanted if isinstance(wanted, Recipe) else weights[wanted]
        missing = [] if not isinstance(weight, Recipe) else [s for s in weight.sources if s not in made]
        if wanted in made:
            waiting.pop()
        elif missing:
            waiting += missing
        elif isinstance(weight, Recipe):
            if weight not in made:
                made[weight] = evaluate(weight, [made[source] for source in weight.sources])
            made[waiting.pop()] = made[weight]
        else:
            made[waiting.pop()] = weight
    return made[name]


def reach(names: Iterable[str | Recipe], weights: Mapping[str, Weight]) -> dict[str | Recipe, Weight]:
    """These weights and all that they are made of, by name or, where a source has none, by its recipe."""
    found: dict[str | Recipe, Weight] = {}
    waiting = list(names)
    while waiting:
        wanted = waiting.pop()
        if wanted not in found:
            found[wanted] = weight = wanted if isinstance(wanted, Recipe) else weights[wanted]
            waiting += weight.sources if isinstance(weight, Recipe) else ()
    return found


# -- operations that many use ----------------------------------------------------------------------------------


@recipe_op
def as_is(weight: Array) -> Array:
    return weight


@recipe_op
def transposed(weight: Array, axes: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(weight.transpose(axes))
