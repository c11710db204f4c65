"""The weights of a step: arrays that kernels are bound to once, and what computes those that change, in each run.

A weight that is a state or a value, reshaped at most, is that array. Others have an array of their own. Most recipes
only move elements, and pad with zeros: that is found by evaluating them on indices, and checked on random numbers.
Their copies are one launch. The rest are evaluated by NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from onchip.errors import OnchipError
from onchip.kernels.cpu.layout.copy_runs import MAX_RUN, copy_runs
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.threading.launches import Launch
from onchip.network.graph import Network
from onchip.network.recipe import Array, Evaluated, Recipe, materialise, value_of
from onchip.network.types import numpy_dtype
from onchip.plan.build_cost import is_alias

Origins = Mapping[str | Recipe, Array]
Values = tuple[str, ...]  # those that a weight is derived from; () for a weight derived from state alone

_LOW_BITS = 12  # an index is evaluated in two parts: float32 is exact up to 24 bits


class StepWeights:
    def __init__(self, net: Network, state: Mapping[str, Array], values: Mapping[str, Array]) -> None:
        """
        state   the arrays of the network's state, by name
        values  those of the values that weights are derived from, by name: (1, ...)
        """
        self._net, self._state, self._values = net, state, values
        self._made: dict[Recipe, Array] = {}
        self._fixed: Evaluated = {}
        self._copies: dict[Values, list[Array]] = {}
        self._evaluations: dict[Values, list[Launch]] = {}

    def array(self, recipe: Recipe) -> Array:
        """The array of a weight. Its elements may change between launches; its address does not."""
        if recipe not in self._made:
            is_fixed = not self._net.changes(recipe)
            self._made[recipe] = materialise(recipe, self._net.weights, self._fixed) if is_fixed else self._make(recipe)
        return self._made[recipe]

    def updates(self) -> dict[Values, list[Launch]]:
        """What computes the weights that have arrays of their own, without operands."""
        found = {values: list(launches) for values, launches in self._evaluations.items()}
        for values, tables in self._copies.items():
            found.setdefault(values, []).append(copy_runs(np.concatenate(tables)))
        return found

    def _make(self, recipe: Recipe) -> Array:
        origins = {name: self._origin(name) for name in self._net.origins(recipe)}
        if is_alias(recipe, self._net.weights) and recipe.sources[0] in origins:  # of any dtype, also of a large array
            return origins[recipe.sources[0]].reshape(recipe.shape)
        sources = _sources(recipe, self._net, origins)
        if sources is not None and len(origins) == 1:
            (origin,) = origins.values()
            if np.array_equal(sources.reshape(-1), np.arange(1, origin.size + 1)):
                return origin.reshape(recipe.shape)
        array = aligned_zeros(math.prod(recipe.shape), numpy_dtype(recipe.dtype).type).reshape(recipe.shape)
        weights = (self._weight(name) for name in origins)
        values = tuple(sorted(filter(None, map(value_of, weights))))
        if sources is None:
            self._evaluations.setdefault(values, []).append(self._evaluation(recipe, array, origins))
        else:
            self._copies.setdefault(values, []).append(_runs(sources.reshape(-1), array, list(origins.values())))
        return array

    def _origin(self, name: str | Recipe) -> Array:
        if isinstance(name, str) and name in self._state:
            return self._state[name]
        value = value_of(self._weight(name))
        return self._values[value][0, ...] if value else materialise(name, self._net.weights, self._fixed)

    def _weight(self, name: str | Recipe) -> Array | Recipe:
        return name if isinstance(name, Recipe) else self._net.weights[name]

    def _evaluation(self, recipe: Recipe, array: Array, origins: Origins) -> Launch:
        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            array[...] = materialise(recipe, self._net.weights, {**origins})

        return run


def _sources(recipe: Recipe, net: Network, origins: Origins) -> Array | None:
    """For each element of a weight, its number among those of the origins, from 1 on, or 0 for a zero; None if the
    recipe does more than move elements."""
    if any(array.dtype != np.float32 for array in origins.values()) or recipe.dtype != "float32":
        return None
    rng, begin = np.random.default_rng(0), 1
    low, high, numbers = Evaluated(), Evaluated(), Evaluated()
    for name, array in origins.items():
        indices: Array = np.arange(begin, begin + array.size).reshape(array.shape)
        low[name], high[name] = (part.astype(np.float32) for part in (indices % (1 << _LOW_BITS), indices >> _LOW_BITS))
        numbers[name] = np.asarray(rng.standard_normal(array.shape), np.float32)
        begin += array.size
    all_numbers = np.concatenate([np.zeros(1, np.float32), *(array.reshape(-1) for array in numbers.values())])
    try:
        with np.errstate(all="ignore"):
            parts = [materialise(recipe, net.weights, made) for made in (low, high)]
            if any(((part < 0) | (part > begin) | (part != np.rint(part))).any() for part in parts):
                return None
            sources: Array = parts[0].astype(np.int64) + (parts[1].astype(np.int64) << _LOW_BITS)
            expected = materialise(recipe, net.weights, numbers)
    except OnchipError:  # of a value that the recipe refuses
        return None
    return sources if sources.max(initial=0) < begin and np.array_equal(all_numbers[sources], expected) else None


def _runs(sources: Array, array: Array, origins: Sequence[Array]) -> Array:
    """The table of copy_runs that moves elements of the origins to an array; `sources` as of _sources, one axis."""
    to = np.flatnonzero(sources)
    if not to.size:
        return np.empty((0, 4), np.int64)
    ends = np.cumsum([origin.size for origin in origins])
    number = sources[to] - 1
    of = np.searchsorted(ends, number, side="right")
    begins = ends - [origin.size for origin in origins]
    addresses = np.array([origin.ctypes.data for origin in origins])
    source = addresses[of] + 4 * (number - begins[of])
    starts = _run_starts(to, number, of)
    counts = np.diff(starts, append=len(to))
    steps = np.where(counts > 1, number[np.minimum(starts + 1, len(to) - 1)] - number[starts], 1)
    return np.stack([array.ctypes.data + 4 * to[starts], source[starts], counts, steps], axis=1)


def _run_starts(to: Array, number: Array, of: Array) -> Array:
    """The elements at which runs start: consecutive ones of one origin, evenly spaced in it, at most MAX_RUN."""
    step = np.diff(number)
    is_linked = (np.diff(to) == 1) & (np.diff(of) == 0)
    # Pairs of neighbours with equal steps are a run. A single pair next to longer runs of other steps is a gap.
    key = np.where(is_linked, step, np.iinfo(np.int64).max)
    first = np.flatnonzero(np.diff(key, prepend=key[:1] - 1))
    length = np.diff(first, append=len(key))
    longest = np.maximum(np.append(length[1:], 0), np.append(0, length[:-1]))
    is_linked[first[(length == 1) & (longest > 1)]] = False
    key = np.where(is_linked, step, np.iinfo(np.int64).max)
    continues = is_linked.copy()  # element i + 1 the run of element i
    continues[1:] &= ~is_linked[:-1] | (key[1:] == key[:-1])
    starts = np.flatnonzero(np.append(True, ~continues))
    counts = np.diff(starts, append=len(to))
    parts = [start + np.arange(0, count, MAX_RUN) for start, count in zip(starts, counts, strict=True)]
    return np.concatenate(parts) if counts.max(initial=0) > MAX_RUN else starts
