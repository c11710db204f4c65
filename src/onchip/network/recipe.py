"""Weights that are not computed yet: what a rewrite or a kernel derives from other weights. Data, no closure."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from onchip.network.types import DTYPE_BYTES, numpy_dtype

Array = np.ndarray[Any, Any]
Attribute = int | float | str | bool | None | tuple["Attribute", ...]
F = TypeVar("F", bound=Callable[..., Array])

SLICE_ROWS = 1024  # a sliced_op makes products of so many rows: slices that begin at multiples of it have the same bits

_EVALUATORS: dict[str, Callable[..., Array]] = {}
_IN_SLICES: set[str] = set()


def recipe_op(function: F) -> F:
    """Make a function of a module the NumPy evaluator of an operation: f(*sources, **attributes) -> array."""
    _EVALUATORS[op_name(function)] = function
    return function


def sliced_op(function: F) -> F:
    """A recipe_op that can be made in slices: row i of the result comes of row i of the first source.

    Its bits are the same in any slices that begin at multiples of SLICE_ROWS.
    """
    _IN_SLICES.add(op_name(function))
    return recipe_op(function)


def op_name(function: Callable[..., Array]) -> str:
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
        return Recipe(op_name(function), tuple(sources), tuple(shape), dtype, flop, tuple(sorted(attributes.items())))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def slice_axis(self) -> int | None:
        """The axis along which it can be made in slices, of slices of its first source and all of the others."""
        _evaluator(self.op)
        return 0 if self.op in _IN_SLICES else None


Weight = Array | Recipe


def _evaluator(op: str) -> Callable[..., Array]:
    if op not in _EVALUATORS:
        importlib.import_module(f"onchip.{op.partition(':')[0]}")
    return _EVALUATORS[op]


def evaluate(recipe: Recipe, arrays: Sequence[Array]) -> Array:
    """What the recipe promises, made of its sources in NumPy; floats are rounded to its dtype once, at the end."""
    return _evaluate(recipe, arrays, recipe.shape)


def evaluate_rows(recipe: Recipe, arrays: Sequence[Array], start: int, stop: int) -> Array:
    """Rows start .. stop - 1 of what a sliced_op makes; start is a multiple of SLICE_ROWS."""
    return _evaluate(recipe, [arrays[0][start:stop], *arrays[1:]], (stop - start, *recipe.shape[1:]))


def _evaluate(recipe: Recipe, arrays: Sequence[Array], shape: tuple[int, ...]) -> Array:
    array = _evaluator(recipe.op)(*arrays, **dict(recipe.attributes))
    wanted = numpy_dtype(recipe.dtype)
    if "float" in array.dtype.name and "float" in recipe.dtype:
        array = np.asarray(array, wanted, order="C")
    if array.shape != shape or array.dtype != wanted:
        promised, got = f"{shape} {recipe.dtype}", f"{array.shape} {array.dtype}"
        raise AssertionError(f"recipe {recipe.op} promised {promised}, made {got}")
    return array


Made = dict[str | Recipe, Array]


def materialise(name: str | Recipe, weights: Mapping[str, Weight], made: Made | None = None) -> Array:
    """The array behind a weight or a recipe; recipes are evaluated, sources first, each once per `made`."""
    made = {} if made is None else made
    for wanted in in_order([name], weights, made):
        weight = wanted if isinstance(wanted, Recipe) else weights[wanted]
        if isinstance(weight, Recipe) and weight not in made:
            made[weight] = evaluate(weight, [made[source] for source in weight.sources])
        made[wanted] = made[weight] if isinstance(weight, Recipe) else weight
    return made[name]


def in_order(
    names: Iterable[str | Recipe], weights: Mapping[str, Weight], made: Container[str | Recipe] = ()
) -> list[str | Recipe]:
    """These weights and all that they are made of, sources first; without what is made, and what only that needs."""
    order: dict[str | Recipe, None] = {}
    waiting = list(names)  # not recursion: rewrites may derive a weight from a long row of others
    while waiting:
        wanted = waiting[-1]
        weight = wanted if isinstance(wanted, Recipe) else weights[wanted]
        missing = [s for s in weight.sources if s not in order and s not in made] if isinstance(weight, Recipe) else []
        if wanted in order or wanted in made:
            waiting.pop()
        elif missing:
            waiting += missing
        else:
            order[waiting.pop()] = None
    return list(order)


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


@sliced_op
def as_is(weight: Array) -> Array:
    return weight


@recipe_op
def transposed(weight: Array, axes: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(weight.transpose(axes))
