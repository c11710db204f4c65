"""Compute a plan's weights on the CPU: large ones once per machine, by all threads of all ranks, in shared memory.

A large weight whose rows are independent is split into as many slices as there are threads; each other weight goes to
one thread. Slices begin at multiples of SLICE_ROWS and BLAS has one thread, so the bits are the same for any number of
threads, ranks and machines. Several machines also split a weight and exchange the slices, if that is faster than
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
from onchip.network.recipe import SLICE_ROWS, Array, Made, Recipe, evaluate, evaluate_rows, in_order, materialise
from onchip.network.types import numpy_dtype
from onchip.plan.build_cost import canonical, host_us, is_another_name
from onchip.plan.plan import Plan
from onchip.plan.scale_out import pays_to_exchange
from onchip.runtime.distributed.ranks import Ranks

LARGE_US = 20_000  # to compute, by the plan's rates: below this, every rank computes its own
_NONE = np.empty(0)


def large_weights(plan: Plan) -> list[Recipe]:
    """The recipes of a plan's weights that take long, sources first."""
    weights, flops = plan.network.weights, plan.device.flops["fp32"]
    found = dict.fromkeys(canonical(name, weights) for name in in_order(_wanted(plan), weights))
    return [each for each in found if isinstance(each, Recipe) and host_us(each, weights, flops) >= LARGE_US]


def make_weights(plan: Plan, threads: int, ranks: Ranks) -> Made:
    """The large weights of a plan's groups and their sources. Every rank calls it."""
    large, made = large_weights(plan), Made()
    if large:
        import threadpoolctl

        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            _Maker(plan, threads, ranks, made).make(large)
    return made


def who_makes(plan: Plan, ranks: Ranks) -> str:
    """How several ranks compute the large weights of a plan, for messages."""
    if plan.device.kind != "cpu":
        return "by every GPU for itself"
    weights, flops = plan.network.weights, plan.device.flops["fp32"]
    sliced = [recipe for recipe in large_weights(plan) if recipe.slice_axis == 0]
    if any(pays_to_exchange(host_us(each, weights, flops), each.nbytes, ranks.machines) for each in sliced):
        return f"in slices by {ranks.machines} machines, and exchanged"
    return f"once a machine, by its {ranks.local_size} ranks together"


def _wanted(plan: Plan) -> list[Recipe]:
    return [recipe for group in plan.groups for recipe in group.claim.recipes.values()]


@dataclass
class _Batch:
    """Weights that are computed at the same time: none depends on another."""

    arrays: Made = field(default_factory=dict)
    tasks: list[Callable[[], None]] = field(default_factory=list)  # of this rank
    exchanged: list[tuple[Recipe, list[int]]] = field(default_factory=list)  # with the first row of each machine


class _Maker:
    def __init__(self, plan: Plan, threads: int, ranks: Ranks, made: Made) -> None:
        self._weights, self._flops = plan.network.weights, plan.device.flops["fp32"]
        self._threads, self._ranks, self._made = threads, ranks, made
        self._kept = {self._real(recipe) for recipe in _wanted(plan)}
        self._is_shared = ranks.size > 1

    def make(self, large: list[Recipe]) -> None:
        self._ranks.meet()  # a rank that cannot take part reports it here
        memory = self._allocate(large)
        batch, turn = _Batch(), 0
        for recipe in large:
            needed = {canonical(name, self._weights) for name in in_order([recipe], self._weights, self._made)}
            if needed & batch.arrays.keys():
                self._run(batch)
                batch = _Batch()
            for source in recipe.sources:
                materialise(source, self._weights, self._made)
            turn = self._plan(recipe, memory, batch, turn)
        self._run(batch)

    def _allocate(self, large: list[Recipe]) -> dict[Recipe, Array]:
        """Memory for the large weights that several threads or ranks write."""
        found: dict[Recipe, Array] = {}
        if self._is_shared:
            kept = [recipe for recipe in large if recipe in self._kept]
            others = [recipe for recipe in large if recipe not in self._kept]  # intermediates: their memory is freed
            for recipes in filter(None, (kept, others)):
                places = [0, *accumulate(_padded(recipe.nbytes) for recipe in recipes)]
                memory = self._ranks.share(places[-1])
                if memory is None:
                    self._is_shared = False
                    if self._ranks.rank == 0:
                        print_once("weights: every rank makes its own, for ranks of a machine cannot share memory here")
                    break
                for recipe, place in zip(recipes, places, strict=False):
                    flat = np.frombuffer(memory, numpy_dtype(recipe.dtype), math.prod(recipe.shape), place)
                    found[recipe] = flat.reshape(recipe.shape)
        if not self._is_shared:
            sliced = [recipe for recipe in large if recipe.slice_axis == 0]
            found = {recipe: np.empty(recipe.shape, numpy_dtype(recipe.dtype)) for recipe in sliced}
        return found

    def _plan(self, recipe: Recipe, memory: dict[Recipe, Array], batch: _Batch, turn: int) -> int:
        """Add this rank's share of a weight to the batch; `turn` counts the weights that are computed whole."""
        ranks, sources = self._ranks, [self._made[source] for source in recipe.sources]

        def make_whole() -> None:
            array = evaluate(recipe, sources)
            if recipe in memory:
                memory[recipe][...] = array
            else:
                batch.arrays[recipe] = array

        def make_rows(start: int, stop: int) -> None:
            memory[recipe][start:stop] = evaluate_rows(recipe, sources, start, stop)

        batch.arrays[recipe] = memory.get(recipe, _NONE)
        if recipe.slice_axis != 0:
            if not self._is_shared or turn % ranks.local_size == ranks.local_rank:
                batch.tasks.append(make_whole)
            return turn + 1
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
        return turn

    def _run(self, batch: _Batch) -> None:
        """Do this rank's share of a batch; afterwards the whole batch is complete."""
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
        self._made |= batch.arrays

    def _real(self, recipe: Recipe) -> str | Recipe:
        """The weight or recipe that a recipe is another name of."""
        found: str | Recipe = recipe
        while isinstance(found, Recipe) and is_another_name(found, self._weights):
            found = canonical(found.sources[0], self._weights)
        return found


def _cut(start: int, stop: int, parts: int) -> list[int]:
    """First rows of `parts` near-equal parts, and the end; at multiples of SLICE_ROWS."""
    blocks = math.ceil((stop - start) / SLICE_ROWS)
    return [min(stop, start + SLICE_ROWS * (blocks * part // parts)) for part in range(parts + 1)]


def _padded(nbytes: int) -> int:
    """Rounded up to whole pages, so that each weight is page-aligned."""
    return (nbytes + 4095) // 4096 * 4096
