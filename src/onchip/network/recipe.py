"""Weights that are not computed yet, derived from other weights by a rewrite or a kernel. Data, not closures."""

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

SLICE_ROWS = 1024  # rows that a sliced_op computes at a time; slices at multiples of it are bit-identical

_EVALUATORS: dict[str, Callable[..., Array]] = {}
_IN_SLICES: set[str] = set()
_REARRANGING: set[str] = set()


def recipe_op(function: F) -> F:
    """Register a module function as the NumPy evaluator of an operation: f(*sources, **attributes) -> array."""
    _EVALUATORS[op_name(function)] = function
    return function


def sliced_op(function: F) -> F:
    """A recipe_op that can be computed in slices: row i of the result depends on row i of the first source.

    Slices that begin at multiples of SLICE_ROWS are bit-identical to the whole result.
    """
    _IN_SLICES.add(op_name(function))
    return recipe_op(function)


def rearranging_op(function: F) -> F:
    """A recipe_op whose every element is one of its only source, or 0: of any dtype, also of indices."""
    _REARRANGING.add(op_name(function))
    return recipe_op(function)


def op_name(function: Callable[..., Array]) -> str:
    """The import path, for processes that have not imported it: "plan.rewrites.linear:merged_weight"."""
    return f"{function.__module__.removeprefix('onchip.')}:{function.__name__}"


@dataclass(frozen=True)
class Recipe:
    """A weight described by its shape, its cost and the operation that computes it.

    Planning reads shape, dtype and flop; an engine evaluates it once, when it is built. Equal recipes are one weight.
    """

    op: str  # name of a recipe_op; a device may have its own version
    sources: tuple[str | Recipe, ...]  # names of weights (arrays or recipes), or nested recipes
    shape: tuple[int, ...]
    dtype: str
    flop: int = 0
    attributes: tuple[tuple[str, Attribute], ...] = ()  # keyword arguments of the operation

    @staticmethod
    def of(
        function: Callable[..., Array], sources: Sequence[str | Recipe], shape: Sequence[int], dtype: str = "float32",
        flop: int = 0, **attributes: Attribute,
    ) -> Recipe:  # fmt: skip
        """The result of a recipe_op on the sources."""
        return Recipe(op_name(function), tuple(sources), tuple(shape), dtype, flop, tuple(sorted(attributes.items())))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def slice_axis(self) -> int | None:
        """The axis along which it can be computed in slices: each from a slice of source 0 and all of the others."""
        _evaluator(self.op)
        return 0 if self.op in _IN_SLICES else None

    @property
    def is_rearrangement(self) -> bool:
        """Whether each element is one of its only source, or 0."""
        _evaluator(self.op)
        return self.op in _REARRANGING


Weight = Array | Recipe


def _evaluator(op: str) -> Callable[..., Array]:
    if op not in _EVALUATORS:
        importlib.import_module(f"onchip.{op.partition(':')[0]}")
    return _EVALUATORS[op]


def evaluate(recipe: Recipe, arrays: Sequence[Array], dtype: str = "") -> Array:
    """Evaluate the recipe on its sources in NumPy; floats are rounded to its dtype, or to `dtype`, once, at the end."""
    return _evaluate(recipe, arrays, recipe.shape, dtype)


def evaluate_rows(recipe: Recipe, arrays: Sequence[Array], start: int, stop: int) -> Array:
    """Rows start .. stop - 1 of a sliced_op's result; start is a multiple of SLICE_ROWS."""
    return _evaluate(recipe, [arrays[0][start:stop], *arrays[1:]], (stop - start, *recipe.shape[1:]))


def _evaluate(recipe: Recipe, arrays: Sequence[Array], shape: tuple[int, ...], dtype: str = "") -> Array:
    array = _evaluator(recipe.op)(*arrays, **dict(recipe.attributes))
    wanted = numpy_dtype(dtype if dtype and "float" in recipe.dtype else recipe.dtype)
    if "float" in array.dtype.name and "float" in recipe.dtype:
        array = np.asarray(array, wanted, order="C")
    if array.shape != shape or array.dtype != wanted:
        declared, got = f"{shape} {recipe.dtype}", f"{array.shape} {array.dtype}"
        raise AssertionError(f"recipe {recipe.op} declared {declared}, computed {got}")
    return array


def rearranged(recipe: Recipe, source: Array) -> Array:
    """A rearrangement of an array of any dtype, shaped like the recipe's source."""
    return _evaluator(recipe.op)(source, **dict(recipe.attributes)).reshape(recipe.shape)


Evaluated = dict[str | Recipe, Array]


def materialise(
    name: str | Recipe, weights: Mapping[str, Weight], made: Evaluated | None = None, dtype: str = ""
) -> Array:
    """The array of a weight or a recipe. Recipes are evaluated, sources first, each once per `made`.

    dtype  of their floats, in place of the recipes' own
    """
    made = {} if made is None else made
    for wanted in in_order([name], weights, made):
        weight = wanted if isinstance(wanted, Recipe) else weights[wanted]
        if isinstance(weight, Recipe) and weight not in made:
            made[weight] = evaluate(weight, [made[source] for source in weight.sources], dtype)
        made[wanted] = made[weight] if isinstance(weight, Recipe) else weight
    return made[name]


def in_order(
    names: Iterable[str | Recipe], weights: Mapping[str, Weight], made: Container[str | Recipe] = ()
) -> list[str | Recipe]:
    """These weights and all their sources, sources first; without those in `made` and sources that only those need."""
    order: dict[str | Recipe, None] = {}
    pending = list(names)  # no recursion: rewrites may derive a weight through a long chain
    while pending:
        wanted = pending[-1]
        weight = wanted if isinstance(wanted, Recipe) else weights[wanted]
        missing = [s for s in weight.sources if s not in order and s not in made] if isinstance(weight, Recipe) else []
        if wanted in order or wanted in made:
            pending.pop()
        elif missing:
            pending += missing
        else:
            order[pending.pop()] = None
    return list(order)


def reach(names: Iterable[str | Recipe], weights: Mapping[str, Weight]) -> dict[str | Recipe, Weight]:
    """These weights and all their sources, by name or, for a nested recipe, by the recipe itself."""
    found: dict[str | Recipe, Weight] = {}
    pending = list(names)
    while pending:
        wanted = pending.pop()
        if wanted not in found:
            found[wanted] = weight = wanted if isinstance(wanted, Recipe) else weights[wanted]
            pending += weight.sources if isinstance(weight, Recipe) else ()
    return found


# -- values as weights ------------------------------------------------------------------------------------------


def value_weight(value: str, shape: Sequence[int], dtype: str = "float32") -> Recipe:
    """A weight that a node of the network computes in each run: the only row of its output."""
    return Recipe.of(computed, (), shape, dtype, value=value)


def value_of(weight: Weight) -> str:
    """The value that a value_weight is; "" for other weights."""
    if not isinstance(weight, Recipe) or weight.op != op_name(computed):
        return ""
    return str(dict(weight.attributes).get("value"))


@recipe_op
def computed(value: str) -> Array:
    raise AssertionError(f"the weight '{value}' is computed by the network, in each run")


# -- common operations -----------------------------------------------------------------------------------------


@sliced_op
def as_is(weight: Array) -> Array:
    return weight


@rearranging_op
def transposed(weight: Array, axes: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(weight.transpose(axes))


@rearranging_op
def block_of(weight: Array, first: int, sizes: tuple[int, ...]) -> Array:
    """Consecutive elements from `first` on, in the shape `sizes`."""
    return weight.reshape(-1)[first : first + math.prod(sizes)].reshape(sizes)
