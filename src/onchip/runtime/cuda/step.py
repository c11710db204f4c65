"""A network with state on a GPU: each run computes its outputs, then replaces the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from onchip.errors import InputError, PlanError
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.program import Lowering, Steps
from onchip.kernels.cuda.layout.permute import PermuteLowering
from onchip.kernels.cuda.recipes.derived import DerivedLowering, derivation_of
from onchip.kernels.cuda.recipes.recipes import LOWERINGS, RecipeLowering, Source
from onchip.network.graph import changing_weights
from onchip.network.recipe import Array, Recipe, materialise, value_of
from onchip.plan.build_cost import canonical, dtype_of, is_alias, recipe_rates_of, shape_of
from onchip.plan.plan import Plan
from onchip.runtime.cuda.batch import Batch, download, new_batch, with_rows
from onchip.runtime.cuda.bound_plan import BoundGroup, BoundPlan
from onchip.runtime.cuda.gpu import Buffer, Gpu
from onchip.runtime.cuda.status import Ticket
from onchip.runtime.cuda.timed_step import time_groups
from onchip.runtime.cuda.weights import make_weights
from onchip.runtime.step_inputs import checked_inputs


class CudaStep:
    """The state is `state`, by name: memory on the GPU that runs read and write, in the order of their stream.

    From the second run with B rows on a stream, all launches are one graph. Runs of one call share graphs, too.
    """

    is_asynchronous = True

    def __init__(self, gpu: Gpu, plan: Plan, state: Mapping[str, Buffer] | None = None) -> None:
        """state  of another step, by name: this one reads and writes the same memory"""
        plan.check_layers()
        net, shared = plan.network, state or {}
        self.gpu, self.plan = gpu, plan
        self.state = {name: shared.get(name) or gpu.upload(materialise(name, net.weights)) for name in net.state}
        builder = _Builder(gpu, plan, self.state)
        self.bound = BoundPlan(gpu, plan, builder.groups(), builder.memory)
        self.bound.max_arena_bytes = gpu.device.memory_bytes  # a batch is never split: its rows depend on each other
        self.bound.at(plan.job.batch)  # compiles the kernels
        self._begun, self._done, self._rows_ready, self._rows_read = (gpu.event() for _ in range(4))
        self._in_flight: Ticket | None = None  # of the last run

    @property
    def nbytes(self) -> int:
        """The memory on the GPU that it holds, with the state that it shares."""
        return self.bound.memory_bytes

    def enqueue(self, pointers: Mapping[str, int], B: int, stream: int, count: int = 1) -> Ticket:
        """Run B > 0 rows. pointers: of the network's inputs and outputs, 16-byte aligned, in the network's order.

        count  runs over the same inputs, of which the last one's outputs remain
        """
        return self.bound.repeat(pointers, B, stream, count)

    def run(self, inputs: Mapping[str, Array], B: int, count: int = 1) -> dict[str, Array]:
        """Run B host rows of the network's inputs, by name; returns its outputs, by name.

        count  as of `enqueue`
        """
        batch = self.hold(inputs, B)
        self.begin(batch, count)
        self.wait()
        return self.outputs(batch)

    def hold(self, inputs: Mapping[str, Array], B: int) -> Batch:
        """B host rows of the network's inputs, by name, on the GPU; compiles the kernels for as many."""
        net, gpu = self.plan.network, self.gpu
        inputs = checked_inputs(net, inputs, B)
        if B < 1:
            raise InputError("no rows in the batch", got=str(B), expected="at least 1")
        with gpu:  # of this thread, too
            self.bound.at(B)
        return new_batch(gpu, net, inputs, B)

    def with_rows(self, batch: Batch, rows: Mapping[str, Any]) -> Batch:
        """The batch with other rows of some inputs. Host rows are copied; arrays on the GPU are read by `begin`."""
        with self.gpu:
            return with_rows(self.gpu, self.plan.network, batch, rows)

    def outputs(self, batch: Batch) -> dict[str, Array]:
        """The outputs of the last run with this batch, by name."""
        return download(self.gpu, self.plan.network, batch)

    def begin(self, batch: Batch, count: int = 1) -> None:
        """Enqueue runs over the same rows, after those that were begun before."""
        gpu = self.gpu
        with gpu:
            if self._in_flight is None:
                self._begun.record()
            if batch.adapter is not None:
                self._begin_after(batch, count)
            else:
                self._in_flight = self.enqueue(batch.pointers, batch.B, gpu.stream, count)
            self._done.record()

    def _begin_after(self, batch: Batch, count: int) -> None:
        """On this GPU's stream, when the stream of the rows has computed them; that one waits until they are read."""
        assert batch.adapter is not None
        if batch.stream != self.gpu.stream:
            self._rows_ready.record(batch.stream)
            self._rows_ready.block_stream(self.gpu.stream)
        self._in_flight = self.enqueue(batch.pointers, batch.B, self.gpu.stream, count)
        if batch.stream != self.gpu.stream:
            self._rows_read.record()
            self._rows_read.block_stream(batch.stream)
        batch.adapter.launched([view.owner for view in batch.views.values()], False)

    def wait(self) -> float:
        """Wait for the runs that were begun; returns how many seconds they took. Raises the errors that they found."""
        ticket, self._in_flight = self._in_flight, None
        if ticket is None:
            return 0.0
        ticket.wait()
        with self.gpu:
            return self._done.ms_since(self._begun) / 1e3

    def time_groups(self, batch: Batch) -> list[tuple[int, float]]:
        """Microseconds of every launch of a run, one at a time, with its group's index in the plan. The state stays as
        it is; nothing if there is no memory for a copy of it.
        """
        changing = {name: self.state[name] for name, value in self.plan.network.state.items() if value}
        return time_groups(self.gpu, self.bound, batch.pointers, batch.B, changing)

    def read_state(self, names: Iterable[str] | None = None) -> dict[str, Array]:
        """Copies of the state, by name; of all, or of these."""
        weights = self.plan.network.weights
        wanted = self.state if names is None else names
        arrays = {name: np.empty(weights[name].shape, dtype_of(name, weights)) for name in wanted}
        return {name: self.gpu.download(self.state[name], array) for name, array in arrays.items()}

    def write_state(self, arrays: Mapping[str, Array]) -> None:
        with self.gpu:
            for name, array in arrays.items():
                self.gpu.write(self.state[name], np.ascontiguousarray(array), self.gpu.stream)
            self.gpu.synchronise()


@dataclass(frozen=True)
class _AllRows:
    """A weight's launches: as many rows as it has, whatever the batch."""

    recipe: RecipeLowering

    def at(self, B: int) -> Steps:
        shape = self.recipe.recipe.shape
        return self.recipe.at(shape[0] if shape else 1)


class _Builder:
    """The groups of a step: a launch that derives weights from state; those of the plan, each after the weights that
    are derived from values for it; and at the end the new state, where a group has not written it in place."""

    def __init__(self, gpu: Gpu, plan: Plan, state: Mapping[str, Buffer]) -> None:
        self._gpu, self._plan, self._net, self._state = gpu, plan, plan.network, state
        self._derived: dict[Recipe, str] = {}  # the weights that change: the names of their arrays
        in_place, home = plan.updated_in_place, plan.stored_in
        # Values of one row have memory of their own, as weights are made of them.
        self.memory: dict[str, Buffer] = {f"state {name}": buffer for name, buffer in state.items()}
        for name, kind in plan.types.items():
            if not kind.is_batched and home.get(name) == name and name not in self._net.outputs:
                replaced = in_place.get(name)
                self.memory[name] = state[replaced] if replaced else gpu.reserve(kind.row_bytes)
        recipes = dict.fromkeys(recipe for group in plan.groups for recipe in group.claim.recipes.values())
        self._changing = dict.fromkeys(changing_weights(recipes, self._net))
        fixed = [recipe for recipe in recipes if recipe not in self._changing and not self._is_state(recipe)]
        self._fixed = make_weights(gpu, fixed, self._net.weights, recipe_rates_of(KERNELS, gpu.device))

    def _is_state(self, recipe: Recipe) -> bool:
        """Whether it is state as it is."""
        return is_alias(recipe, self._net.weights) and recipe.sources[0] in self._state

    def groups(self) -> list[BoundGroup]:
        plan, units = self._plan, self._gpu.device.units
        groups = self._derive([recipe for recipe in self._changing if self._is_derived_from_state(recipe)], 0)
        for i, group in enumerate(plan.groups):
            inputs, outputs = (tuple(plan.stored_in[name] for name in names) for names in (group.inputs, group.outputs))
            kind, lowering = plan.types[group.inputs[0]], cast(Lowering, group.claim.facts)
            if group.claim.is_view:
                if inputs == outputs:
                    continue
                rank = len(plan.types[group.outputs[0]].shape)
                shape = plan.types[group.outputs[0]].row_shape
                lowering = PermuteLowering((kind.dtype,) * 2, shape, tuple(range(rank)), units)
            weights = {
                name: self._fixed[recipe] if recipe in self._fixed else self.memory[self._array_of(recipe, i, groups)]
                for name, recipe in group.claim.recipes.items()
            }
            groups.append(BoundGroup(i, lowering, inputs, weights, outputs, 0 if kind.is_batched else 1))
        for name, value in self._net.state.items():
            if value and value not in plan.updated_in_place:
                kind = self._net.types[value]
                lowering = PermuteLowering((kind.dtype,) * 2, (kind.row_size,), (0, 1), units)
                read, written = (plan.stored_in[value],), (f"state {name}",)
                groups.append(BoundGroup(len(plan.groups) - 1, lowering, read, {}, written, 1))
        return self._in_order(groups)

    def _in_order(self, groups: Sequence[BoundGroup]) -> list[BoundGroup]:
        """A kernel may load weights before the previous ones end: the group after one that writes weights waits."""
        read = {id(buffer) for group in groups for buffer in group.weights.values()}
        writes = [any(id(self.memory.get(name)) in read for name in group.outputs) for group in groups]
        before = [writes[-1], *writes[:-1]]  # the last step's last group is before the first one
        return [replace(group, waits=waits) for group, waits in zip(groups, before, strict=True)]

    def _is_derived_from_state(self, recipe: Recipe) -> bool:
        """Whether it is a state in another order or rounded."""
        derivation = derivation_of(recipe, self._net.weights)
        return derivation is not None and derivation.source in self._state and not is_alias(recipe, self._net.weights)

    def _derive(self, recipes: Sequence[Recipe], index: int) -> list[BoundGroup]:
        """One launch that computes these rearrangements, before group `index`."""
        sources, orders, results, weights = dict[str, int](), dict[str, int](), list[str](), list[tuple[int, ...]]()
        for recipe in recipes:
            derivation = derivation_of(recipe, self._net.weights)
            assert derivation is not None
            source, order = self._array_of(derivation.source, index, []), ""
            if derivation.rearrangements:
                order = f"order {len(self.memory)}"
                shape = shape_of(derivation.source, self._net.weights)
                self.memory[order] = self._gpu.upload(derivation.indices(shape))
            weights.append((derivation.kind, derivation.count, sources.setdefault(source, len(sources)),
                            orders.setdefault(order, len(orders)) if order else -1))  # fmt: skip
            results.append(self._add(recipe))
        if not recipes:
            return []
        rows = tuple(
            (k, count, source, len(sources) + order if order >= 0 else -1) for k, count, source, order in weights
        )
        return [BoundGroup(index, DerivedLowering(rows), (*sources, *orders), {}, tuple(results), 1)]

    def _add(self, recipe: Recipe) -> str:
        name = self._derived[recipe] = f"weight {len(self._derived)}"
        self.memory[name] = self._gpu.reserve(recipe.nbytes)
        return name

    def _array_of(self, weight: str | Recipe, index: int, groups: list[BoundGroup]) -> str:
        """The name of a weight's array; appends the groups that compute one that changes, unless they were before."""
        weights = self._net.weights
        weight = canonical(weight, weights)
        if isinstance(weight, str):
            return f"state {weight}" if weight in self._state else self._upload(weight)
        if value := value_of(weight):
            return self._plan.stored_in[value]
        if is_alias(weight, weights):
            return self._array_of(weight.sources[0], index, groups)
        if weight in self._derived:
            return self._derived[weight]
        if derivation_of(weight, weights) is not None:
            groups += self._derive([weight], index)
            return self._derived[weight]
        if weight.op not in LOWERINGS:
            expected = "a weight that the GPU can compute"
            raise PlanError("a weight cannot be computed in each step", got=weight.op, expected=expected)
        sources = tuple(self._array_of(source, index, groups) for source in weight.sources)
        types = tuple(Source(shape_of(source, weights), dtype_of(source, weights)) for source in weight.sources)
        lowering = _AllRows(RecipeLowering(weight, types, self._gpu.device))
        groups.append(BoundGroup(index, lowering, sources, {}, (self._add(weight),), 1))
        return self._derived[weight]

    def _upload(self, name: str) -> str:
        key = f"fixed {name}"
        if key not in self.memory:
            self.memory[key] = self._gpu.upload(materialise(name, self._net.weights))
        return key
