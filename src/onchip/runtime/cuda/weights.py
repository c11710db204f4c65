"""Compute a plan's weights for a GPU: each once, on GPU or host as build_cost.py chooses; frees intermediate ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from onchip.kernels.cuda.recipes.recipes import CHECKS, RecipeLowering, Source
from onchip.network.recipe import Array, Recipe, Weight, evaluate, in_order
from onchip.network.types import DTYPE_BYTES, numpy_dtype
from onchip.plan.build_cost import canonical, device_recipes, dtype_of, is_alias, shape_of
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.gpu import Buffer, Gpu

SLICE_BYTES = 256 << 20  # of an intermediate result: larger ones are computed in slices


def make_weights(
    gpu: Gpu,
    wanted: Sequence[Recipe],
    weights: Mapping[str, Weight],
    rates: Mapping[str, float],
    on_gpu: Mapping[str | Recipe, Buffer] | None = None,
) -> dict[Recipe, Buffer]:
    """The results of the recipes on the GPU, for work on any stream.

    weights  the network's weights, by the names that recipes use for their sources
    rates    recipe_rates_of the kernels: operations that run on the GPU where that is faster
    on_gpu   weights that are already on the GPU
    """
    return _Builder(gpu, wanted, weights, rates, on_gpu or {}).make()


class _Builder:
    def __init__(
        self,
        gpu: Gpu,
        wanted: Sequence[Recipe],
        weights: Mapping[str, Weight],
        rates: Mapping[str, float],
        on_gpu: Mapping[str | Recipe, Buffer],
    ) -> None:
        self._gpu, self._wanted, self._weights = gpu, dict.fromkeys(wanted), weights
        self._order = dict.fromkeys(canonical(name, weights) for name in in_order(wanted, weights))
        self._on_device = device_recipes(wanted, weights, rates)
        self._stored = self._with_alias_targets(self._wanted)
        self._on_gpu: dict[str | Recipe, Buffer] = {**on_gpu}
        self._on_host: dict[str | Recipe, Array] = {}
        recipes = [recipe for recipe in self._order if isinstance(recipe, Recipe)]
        self._reads = Counter(source for recipe in recipes for source in self._sources(recipe))
        self._reads.update(list(self._wanted))
        self._by_slices = {source for recipe in recipes if (source := self._sliced_source(recipe)) is not None}

    def make(self) -> dict[Recipe, Buffer]:
        for recipe in self._order:
            if not isinstance(recipe, Recipe) or recipe in self._by_slices:
                continue
            if recipe in self._on_device:
                self._on_gpu[recipe] = self._make_on_gpu(recipe)
            else:
                self._on_host[recipe] = evaluate(recipe, [self._array(source) for source in self._sources(recipe)])
                if recipe in self._wanted:
                    self._buffer(recipe)
            self._release(self._sources(recipe))
        self._gpu.synchronise()  # callers may read the results on another stream
        return {recipe: self._on_gpu[recipe] for recipe in self._wanted}

    # -- on the GPU --------------------------------------------------------------------------------------------

    def _make_on_gpu(self, recipe: Recipe) -> Buffer:
        sources = self._sources(recipe)
        if is_alias(recipe, self._weights):
            return self._buffer(sources[0])
        if check := CHECKS.get(recipe.op):
            check(self._array(sources[0]))
        result = self._allocate(recipe)
        if (source := self._sliced_source(recipe)) is None:
            self._run(recipe, self._pointers(recipe), result.pointer, recipe.shape[0] if recipe.shape else 1)
        else:
            self._make_in_slices(recipe, source, result)
            self._release(self._sources(source))
        return result

    def _make_in_slices(self, recipe: Recipe, source: Recipe, result: Buffer) -> None:
        """Compute some rows of the source into a buffer, the recipe's rows from them, then the next rows."""
        V = recipe.shape[0]
        rows = max(1, V * SLICE_BYTES // source.nbytes)
        between = self._gpu.allocate(rows * source.nbytes // V)
        first, *others = self._pointers(source)
        row_bytes = self._row_bytes(self._sources(source)[0])
        for start in range(0, V, rows):
            count = min(rows, V - start)
            self._run(source, [first + start * row_bytes, *others], between.pointer, count)
            self._run(recipe, [between.pointer], result.pointer + start * recipe.nbytes // V, count)

    def _sliced_source(self, recipe: Recipe) -> Recipe | None:
        """The source that a recipe consumes in slices: it is large and has no other reader."""
        source = self._sources(recipe)[0] if recipe.sources else None
        if not isinstance(source, Recipe) or not {recipe, source} <= self._on_device or len(recipe.sources) > 1:
            return None
        fits = recipe.slice_axis == source.slice_axis == 0 and source.nbytes > SLICE_BYTES
        is_only_reader = self._reads[source] == 1 and not is_alias(recipe, self._weights)
        return source if fits and is_only_reader and not is_alias(source, self._weights) else None

    def _run(self, recipe: Recipe, sources: Sequence[int], result: int, rows: int) -> None:
        gpu, types = self._gpu, [Source(shape_of(s, self._weights), dtype_of(s, self._weights)) for s in recipe.sources]
        steps = RecipeLowering(recipe, tuple(types), gpu.device).at(rows)
        scratch = gpu.allocate(steps.scratch_bytes) if steps.scratch_bytes else None
        BoundSteps(gpu, steps).enqueue(sources, [result], scratch.pointer if scratch else 0, gpu.stream)

    def _allocate(self, recipe: Recipe) -> Buffer:
        """Results may be read on any stream. Intermediates are read on this one only, and freed in its order."""
        return self._gpu.reserve(recipe.nbytes) if recipe in self._stored else self._gpu.allocate(recipe.nbytes)

    def _with_alias_targets(self, wanted: Iterable[Recipe]) -> set[str | Recipe]:
        names: set[str | Recipe] = set()
        for recipe in wanted:
            same: str | Recipe = recipe
            names.add(same)
            while isinstance(same, Recipe) and is_alias(same, self._weights):
                same = self._sources(same)[0]
                names.add(same)
        return names

    # -- host and GPU ------------------------------------------------------------------------------------------

    def _sources(self, recipe: Recipe) -> list[str | Recipe]:
        return [canonical(source, self._weights) for source in recipe.sources]

    def _pointers(self, recipe: Recipe) -> list[int]:
        return [self._buffer(source).pointer for source in self._sources(recipe)]

    def _buffer(self, name: str | Recipe) -> Buffer:
        if name not in self._on_gpu:
            self._on_gpu[name] = self._gpu.upload(self._array(name))
        return self._on_gpu[name]

    def _array(self, name: str | Recipe) -> Array:
        if isinstance(name, str):
            weight = self._weights[name]
            assert not isinstance(weight, Recipe)
            return weight
        if name not in self._on_host:
            self._on_host[name] = self._gpu.download(self._on_gpu[name], np.empty(name.shape, numpy_dtype(name.dtype)))
        return self._on_host[name]

    def _row_bytes(self, name: str | Recipe) -> int:
        return math.prod(shape_of(name, self._weights)[1:]) * DTYPE_BYTES[dtype_of(name, self._weights)]

    def _release(self, sources: Sequence[str | Recipe]) -> None:
        """Count one read of each source; free those that have no reader left."""
        for name in sources:
            self._reads[name] -= 1
            if not self._reads[name]:
                self._on_gpu.pop(name, None)
                self._on_host.pop(name, None)
