"""Compute a plan's weights on the CPU: large ones once per machine, by all threads of all ranks, in shared memory.

A large weight whose rows are independent is split into as many slices as there are threads; one thread computes each
other weight. Slices begin at multiples of SLICE_ROWS and BLAS uses one thread, so the bits are the same for any number
of threads, ranks and machines. Several machines also split a weight and exchange the slices, if that is faster than
computing all of it on each (`plan.scale_out.pays_to_exchange`).
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from onchip.cache import print_once
from onchip.errors import OnchipError
from onchip.network.recipe import SLICE_ROWS, Array, Evaluated, Recipe, evaluate, evaluate_rows, in_order, materialise
from onchip.network.types import numpy_dtype
from onchip.plan.build_cost import canonical, host_us, is_alias
from onchip.plan.plan import Plan
from onchip.plan.scale_out import pays_to_exchange
from onchip.runtime.distributed.ranks import Ranks

LARGE_US = 20_000  # estimated time to compute: below this, every rank computes its own copy
_PENDING = np.empty(0)  # of a weight whose task sets it later


def large_weights(plan: Plan) -> list[Recipe]:
    """The recipes of a plan's weights that take long to compute, sources first."""
    weights, flops = plan.network.weights, plan.device.flops["fp32"]
    found = dict.fromkeys(canonical(name, weights) for name in in_order(_wanted(plan), weights))
    return [each for each in found if isinstance(each, Recipe) and host_us(each, weights, flops) >= LARGE_US]


def make_weights(plan: Plan, threads: int, ranks: Ranks) -> Evaluated:
    """Compute the large weights of a plan, and their sources. Every rank must call it."""
    large, built = large_weights(plan), Evaluated()
    if large:
        import threadpoolctl

        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            _Builder(plan, threads, ranks, built).make(large)
    return built


def computing_rank(plan: Plan, ranks: Ranks) -> str:
    """How several ranks compute the large weights of a plan, for messages."""
    if plan.device.kind != "cpu":
        return "on every GPU separately"
    weights, flops = plan.network.weights, plan.device.flops["fp32"]
    sliced = [recipe for recipe in large_weights(plan) if recipe.slice_axis == 0]
    if any(pays_to_exchange(host_us(each, weights, flops), each.nbytes, ranks.machines) for each in sliced):
        return f"in slices on {ranks.machines} machines, then exchanged"
    return f"once per machine, by its {ranks.local_size} ranks"


def _wanted(plan: Plan) -> list[Recipe]:
    return [recipe for group in plan.groups for recipe in group.claim.recipes.values()]


@dataclass
class _Batch:
    """Weights that are computed concurrently: none depends on another."""

    arrays: Evaluated = field(default_factory=dict)
    tasks: list[Callable[[], None]] = field(default_factory=list)  # of this rank
    exchanged: list[tuple[Recipe, list[int]]] = field(default_factory=list)  # with machines' first rows, and the end


class _Builder:
    def __init__(self, plan: Plan, threads: int, ranks: Ranks, built: Evaluated) -> None:
        self._weights, self._flops = plan.network.weights, plan.device.flops["fp32"]
        self._threads, self._ranks, self._built = threads, ranks, built
        self._stored = {self._target(recipe) for recipe in _wanted(plan)}
        self._is_shared = ranks.size > 1

    def make(self, large: list[Recipe]) -> None:
        self._ranks.meet()  # a rank that cannot take part reports it here
        memory = self._allocate(large)
        batch, whole_count = _Batch(), 0
        for recipe in large:
            needed = {canonical(name, self._weights) for name in in_order([recipe], self._weights, self._built)}
            if needed & batch.arrays.keys():
                self._run(batch)
                batch = _Batch()
            for source in recipe.sources:
                materialise(source, self._weights, self._built)
            whole_count = self._add_tasks(recipe, memory, batch, whole_count)
        self._run(batch)

    def _allocate(self, large: list[Recipe]) -> dict[Recipe, Array]:
        """Memory for the large weights that several threads or ranks write."""
        found: dict[Recipe, Array] = {}
        if self._is_shared:
            stored = [recipe for recipe in large if recipe in self._stored]
            others = [recipe for recipe in large if recipe not in self._stored]  # intermediates: their memory is freed
            for recipes in filter(None, (stored, others)):
                offsets = [0, *accumulate(_padded(recipe.nbytes) for recipe in recipes)]
                memory = self._ranks.share(offsets[-1])
                if memory is None:
                    self._is_shared = False
                    if self._ranks.rank == 0:
                        print_once("weights: computed on every rank, as ranks of a machine cannot share memory")
                    break
                for recipe, offset in zip(recipes, offsets, strict=False):
                    flat = np.frombuffer(memory, numpy_dtype(recipe.dtype), math.prod(recipe.shape), offset)
                    found[recipe] = flat.reshape(recipe.shape)
        if not self._is_shared:
            sliced = [recipe for recipe in large if recipe.slice_axis == 0]
            found = {recipe: np.empty(recipe.shape, numpy_dtype(recipe.dtype)) for recipe in sliced}
        return found

    def _add_tasks(self, recipe: Recipe, memory: dict[Recipe, Array], batch: _Batch, whole_count: int) -> int:
        """Add this rank's share of a weight to the batch; returns how many weights so far one rank computes whole."""
        ranks, sources = self._ranks, [self._built[source] for source in recipe.sources]

        def make_whole() -> None:
            array = evaluate(recipe, sources)
            if recipe in memory:
                memory[recipe][...] = array
            else:
                batch.arrays[recipe] = array

        def make_rows(start: int, stop: int) -> None:
            memory[recipe][start:stop] = evaluate_rows(recipe, sources, start, stop)

        batch.arrays[recipe] = memory.get(recipe, _PENDING)
        if recipe.slice_axis != 0:
            if not self._is_shared or whole_count % ranks.local_size == ranks.local_rank:
                batch.tasks.append(make_whole)
            return whole_count + 1
        start, stop = 0, recipe.shape[0]
        if self._is_shared:
            cost = host_us(recipe, self._weights, self._flops), recipe.nbytes
            if ranks.machines > 1 and pays_to_exchange(*cost, ranks.machines):
                machines = _cut(start, stop, ranks.machines)
                batch.exchanged.append((recipe, machines))
                start, stop = machines[ranks.machine], machines[ranks.machine + 1]
            start, stop = _cut(start, stop, ranks.local_size)[ranks.local_rank :][:2]
        for first, last in pairwise(_cut(start, stop, self._threads)):
            if first < last:
                batch.tasks.append(functools.partial(make_rows, first, last))
        return whole_count

    def _run(self, batch: _Batch) -> None:
        """Compute this rank's share of a batch; returns when all ranks have computed theirs."""
        failed: OnchipError | None = None
        try:
            with concurrent.futures.ThreadPoolExecutor(self._threads, thread_name_prefix="onchip-weights") as pool:
                for task in [pool.submit(task) for task in batch.tasks]:
                    task.result()
        except OnchipError as error:
            failed = error
        if self._is_shared:
            self._ranks.meet(failed)
            for recipe, machines in batch.exchanged:
                self._ranks.exchange_machines(batch.arrays[recipe], machines)
            if batch.exchanged:
                self._ranks.meet()
        elif failed is not None:
            raise failed
        self._built |= batch.arrays

    def _target(self, recipe: Recipe) -> str | Recipe:
        """The weight or recipe that a recipe is an alias of; itself if it is none."""
        found: str | Recipe = recipe
        while isinstance(found, Recipe) and is_alias(found, self._weights):
            found = canonical(found.sources[0], self._weights)
        return found


def _cut(start: int, stop: int, count: int) -> list[int]:
    """First rows of `count` near-equal slices, and the end; at multiples of SLICE_ROWS."""
    blocks = math.ceil((stop - start) / SLICE_ROWS)
    return [min(stop, start + SLICE_ROWS * (blocks * i // count)) for i in range(count + 1)]


def _padded(nbytes: int) -> int:
    """Rounded up to whole pages, so that every weight is page-aligned."""
    return (nbytes + 4095) // 4096 * 4096
