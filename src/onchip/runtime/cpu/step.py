"""A network with state on the CPU: each run computes its outputs, then replaces the state.

Kernels are bound once, to arrays that stay where they are (step_weights.py). Values of one row have an array each,
those of the batch share an arena, and a launch that may update state in place does so. Consecutive compiled launches
are one call; its table is written once per batch size.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onchip.errors import InputError
from onchip.files import check_memory
from onchip.kernels.cpu.compiler.jit import address
from onchip.kernels.cpu.memory import first_fit_offsets, unset_memory
from onchip.kernels.cpu.threading.launches import CompiledLaunch, Launch, run_table
from onchip.network.graph import value_weights
from onchip.network.recipe import Array, materialise
from onchip.network.types import numpy_dtype
from onchip.plan.plan import Group, Plan
from onchip.runtime.cpu.step_weights import StepWeights
from onchip.runtime.step_inputs import checked_inputs, checked_rows, host_array

if TYPE_CHECKING:
    from onchip.kernels.cpu import InferenceKernel

_LINE = 64  # bytes of a cache line: every value begins on one
_MOST_SIZES = 8  # batch sizes whose tables are kept
_TIMED_RUNS = 5


@dataclass(frozen=True)
class _Action:
    """A launch of a step, with the names of the arrays that it reads and writes."""

    launch: Launch
    group: int  # the plan's, that it belongs to or comes after
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Check:
    """What a launch checks in an input, before anything runs."""

    run: Callable[[Sequence[Array]], None]
    index: int  # of the input, among those of the launch
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Table:
    """Consecutive compiled launches, for run_table."""

    launches: Array
    operands: Array
    of_inputs: tuple[tuple[int, str], ...]  # operands that each run sets, and the inputs that they are
    checks: tuple[_Check, ...]
    run: Callable[[], object]

    def set_inputs(self, inputs: Mapping[str, Array]) -> None:
        for check in self.checks:
            check.run([inputs[check.name].reshape(check.shape)] * (check.index + 1))
        for i, name in self.of_inputs:
            self.operands[i] = address(inputs[name])


@dataclass(frozen=True, eq=False)
class _Call:
    """One launch that run_table cannot run."""

    arrays: list[Array]  # that it reads
    of_inputs: tuple[tuple[int, str, tuple[int, ...]], ...]  # arrays that each run sets, the inputs, in these shapes
    run: Callable[[], object]

    def set_inputs(self, inputs: Mapping[str, Array]) -> None:
        for i, name, shape in self.of_inputs:
            self.arrays[i] = inputs[name].reshape(shape)


@dataclass(frozen=True, eq=False)
class Batch:
    """The inputs of B rows."""

    B: int
    inputs: Mapping[str, Array]


class CpuStep:
    """The state is `state`, by name: arrays which the caller may read and write between runs."""

    is_asynchronous = False
    nbytes = 0  # on a GPU

    def __init__(self, plan: Plan, threads: int, state: Mapping[str, Array] | None = None) -> None:
        """state  of another step, by name: this one reads and writes the same arrays"""
        from onchip.kernels.cpu import INFERENCE
        from onchip.kernels.cpu.compiler.compile_ahead import queue_functions, queue_kernels
        from onchip.kernels.cpu.threading.threads import load_helpers, queue_helpers, start_helpers

        plan.check_layers()
        self.plan, self.threads, self._start_helpers = plan, threads, start_helpers
        net, shared = plan.network, state or {}
        self.state = {
            name: shared[name] if name in shared else materialise(name, net.weights).copy() for name in net.state
        }
        kernels = {kernel.name: kernel for kernel in INFERENCE}
        queue_kernels(kernels[group.claim.kernel] for group in plan.groups if not group.claim.is_view)
        queue_functions((run_table,))
        queue_helpers(threads)
        self._owner = {name: plan.stored_in.get(name, name) for group in plan.groups for name in _arrays(group)}
        in_place = plan.updated_in_place
        self._replaced = [(name, value) for name, value in net.state.items() if value and in_place.get(value) != name]
        self._of_one_row: dict[str, Array] = {}
        for name in dict.fromkeys(self._owner.values()):
            kind = plan.types[name]
            if name in in_place:
                self._of_one_row[name] = self.state[in_place[name]][np.newaxis]
            elif not kind.is_batched:
                array = unset_memory(kind.row_bytes).view(numpy_dtype(kind.dtype))
                self._of_one_row[name] = array.reshape(1, *kind.row_shape)
        self._offsets, self._bytes_per_row = self._arena_offsets()
        self._arena = unset_memory(0)
        weights = StepWeights(net, self.state, {name: self._array(name, 1) for name in value_weights(net)})
        self._actions = self._bind(kernels, weights)
        self._facts: dict[CompiledLaunch, tuple[int, object]] = {}
        self._parts: dict[int, list[_Table | _Call]] = {}  # by batch size
        self._seconds = 0.0  # of runs since the last `wait`
        load_helpers(threads)

    def run(self, inputs: Mapping[str, Array], B: int, count: int = 1) -> dict[str, Array]:
        """Run B rows of the network's inputs, by name; returns its outputs, by name.

        count  runs over the same inputs, of which the last one's outputs are returned
        """
        batch = self.hold(inputs, B)
        self.begin(batch, count)
        return self.outputs(batch)

    def hold(self, inputs: Mapping[str, Array], B: int) -> Batch:
        """B rows of the network's inputs, by name, which must not change; prepares the kernels for as many."""
        inputs = checked_inputs(self.plan.network, inputs, B)
        if B not in self._parts:
            self._prepare(B)
        return Batch(B, inputs)

    def with_rows(self, batch: Batch, rows: Mapping[str, Any]) -> Batch:
        """The batch with other rows of some inputs, which must not change until the next `begin` returns."""
        inputs = dict(batch.inputs)
        for name, x in rows.items():
            like = inputs[name]
            if type(x) is np.ndarray and x.shape == like.shape and x.dtype == like.dtype and x.flags.c_contiguous:
                inputs[name] = x
                continue
            if (array := host_array(x)) is None:
                got = f"{type(x).__module__}.{type(x).__name__}"
                what, hint = f"'{name}' is not an array of the host", "np.asarray(x)"
                raise InputError(what, got=got, expected="NumPy", hint=hint)
            inputs[name] = checked_rows(name, array, self.plan.network.inputs[name], batch.B)
        return Batch(batch.B, inputs)

    def outputs(self, batch: Batch) -> dict[str, Array]:
        """The outputs of the last run, by name."""
        return {name: self._array(name, batch.B).copy() for name in self.plan.network.outputs}

    def begin(self, batch: Batch, count: int = 1) -> None:
        """Run over the same rows."""
        begin, B = time.perf_counter(), batch.B
        self._start_helpers(self.threads)
        if B not in self._parts:
            self._prepare(B)
        parts = self._parts[B]
        for part in parts:
            part.set_inputs(batch.inputs)
        replaced = [(self.state[name], self._array(value, B)[0, ...]) for name, value in self._replaced]
        for _ in range(count):
            for part in parts:
                part.run()
            for old, new in replaced:
                old[...] = new
        self._seconds += time.perf_counter() - begin

    def time_groups(self, batch: Batch) -> list[tuple[int, float]]:
        """Microseconds of every launch of a run, one at a time, with its group's index in the plan. The state stays as
        it is.
        """
        kept = self.read_state(name for name, value in self.plan.network.state.items() if value)
        self._start_helpers(self.threads)
        parts = [self._part([action], batch.B) for action in self._actions]
        for part in parts:
            part.set_inputs(batch.inputs)
        runs = list[list[float]]()
        for _ in range(_TIMED_RUNS):
            runs.append([])
            for part in parts:
                begin = time.perf_counter()
                part.run()
                runs[-1].append(1e6 * (time.perf_counter() - begin))
        self.write_state(kept)
        return list(zip((action.group for action in self._actions), map(min, zip(*runs, strict=True)), strict=True))

    def wait(self) -> float:
        """How many seconds the runs took that were begun since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def read_state(self, names: Iterable[str] | None = None) -> dict[str, Array]:
        """Copies of the state, by name; of all, or of these."""
        return {name: self.state[name].copy() for name in (self.state if names is None else names)}

    def write_state(self, arrays: Mapping[str, Array]) -> None:
        for name, array in arrays.items():
            self.state[name][...] = array

    # -- what runs -------------------------------------------------------------------------------------------

    def _bind(self, kernels: Mapping[str, InferenceKernel], weights: StepWeights) -> list[_Action]:
        """All launches in order, bound to their weights, and those that compute weights, as soon as they can."""
        of_groups: list[list[_Action]] = []
        for i, group in enumerate(self.plan.groups):
            arrays = {name: weights.array(recipe) for name, recipe in group.claim.recipes.items()}
            if not group.claim.is_view:
                launch = kernels[group.claim.kernel].bind(group.claim, arrays)
                of_groups.append([_Action(launch, i, group.inputs, group.outputs)])
            elif self._owner[group.inputs[0]] == self._owner[group.outputs[0]]:
                of_groups.append([])
            else:
                of_groups.append([_Action(_copy, i, group.inputs, group.outputs)])
        first: list[_Action] = []
        written = {name: i for i, group in enumerate(self.plan.groups) for name in group.outputs}
        for values, launches in weights.updates().items():
            last = max((written[value] for value in values), default=-1)
            (first if last < 0 else of_groups[last]).extend(_Action(launch, max(0, last)) for launch in launches)
        return [*first, *itertools.chain(*of_groups)]

    # -- memory ----------------------------------------------------------------------------------------------

    def _arena_offsets(self) -> tuple[dict[str, int], int]:
        """Where the values of the batch are, in bytes per row, and their end."""
        net, uses = self.plan.network, dict[str, tuple[int, int]]()
        for i, group in enumerate(self.plan.groups):
            for name in dict.fromkeys(self._owner[each] for each in _arrays(group)):
                uses[name] = uses.get(name, (i, i))[0], i
        uses |= {name: (uses[name][0], len(self.plan.groups)) for name in uses.keys() & set(net.outputs)}
        uses = {name: use for name, use in uses.items() if name not in net.inputs and name not in self._of_one_row}
        sizes = {name: -(-self.plan.types[name].row_bytes // _LINE) * _LINE for name in uses}
        offsets = first_fit_offsets(uses, sizes)
        return offsets, max((offsets[name] + size for name, size in sizes.items()), default=0)

    def _array(self, name: str, B: int) -> Array:
        """The array of a value that is no input, for a batch of B rows."""
        owner, kind = self._owner.get(name, name), self.plan.types[name]
        shape = (kind.rows(B), *kind.row_shape)
        if owner in self._of_one_row:
            return self._of_one_row[owner].reshape(shape)
        begin = self._offsets[owner] * B
        return self._arena[begin : begin + kind.row_bytes * B].view(numpy_dtype(kind.dtype)).reshape(shape)

    def _prepare(self, B: int) -> None:
        """Write the tables of the compiled launches for a batch of B rows."""
        if B * self._bytes_per_row > len(self._arena):
            hint = f"smaller batches (batch_size=): a row needs {self._bytes_per_row:,} B"
            check_memory(B * self._bytes_per_row, f"a step of {B:,} rows", hint)
            self._parts.clear()  # with addresses in the arena that was
            self._arena = unset_memory(B * self._bytes_per_row)
        if len(self._parts) == _MOST_SIZES:
            self._parts.clear()
        parts: list[_Table | _Call] = []
        for is_compiled, group in itertools.groupby(self._actions, self._is_compiled):
            actions = list(group)
            parts += [self._part(actions, B)] if is_compiled else [self._part([action], B) for action in actions]
        self._parts[B] = parts

    def _is_compiled(self, action: _Action) -> bool:
        """Whether compiled code can run it with others: it checks nothing, or only an input."""
        launch = action.launch
        if not isinstance(launch, CompiledLaunch):
            return False
        return launch.check is None or self._owner[action.reads[launch.checked]] in self.plan.network.inputs

    def _part(self, actions: Sequence[_Action], B: int) -> _Table | _Call:
        """What runs consecutive compiled launches, or one other launch."""
        if not self._is_compiled(actions[0]):
            return self._call(actions[0], B)
        launches, operands, of_inputs = list[tuple[int, ...]](), list[int](), list[tuple[int, str]]()
        checks = list[_Check]()
        for action in actions:
            assert isinstance(action.launch, CompiledLaunch)
            facts, first = self._facts_of(action.launch), len(operands)
            if action.launch.check is not None:
                name, at = action.reads[action.launch.checked], action.launch.checked
                kind = self.plan.types[name]
                shape = (kind.rows(B), *kind.row_shape)
                checks.append(_Check(action.launch.check, at, self._owner[name], shape))
            for name in (*action.reads, *action.writes):
                owner = self._owner[name]
                if owner in self.plan.network.inputs:
                    of_inputs.append((len(operands), owner))
                operands.append(0 if owner in self.plan.network.inputs else address(self._array(name, B)))
            rows = self.plan.types[action.reads[0]].rows(B) if action.reads else 1
            launches.append((action.launch.code, facts, 8 * first, rows))
        table, memory = np.array(launches, np.int64), np.array([*operands, 0], np.int64)
        table[:, 2] += address(memory)
        run = functools.partial(run_table.load, address(table), len(table), self.threads)
        return _Table(table, memory, tuple(of_inputs), tuple(checks), run)

    def _call(self, action: _Action, B: int) -> _Call:
        read, of_inputs = list[Array](), list[tuple[int, str, tuple[int, ...]]]()
        for name in action.reads:
            owner, kind = self._owner.get(name, name), self.plan.types[name]
            if owner in self.plan.network.inputs:
                of_inputs.append((len(read), owner, (kind.rows(B), *kind.row_shape)))
                read.append(unset_memory(0))
            else:
                read.append(self._array(name, B))
        written = [self._array(name, B) for name in action.writes]
        return _Call(read, tuple(of_inputs), functools.partial(action.launch, read, written, self.threads))

    def _facts_of(self, launch: CompiledLaunch) -> int:
        if launch not in self._facts:
            self._facts[launch] = launch.facts(self.threads)
        return self._facts[launch][0]


def _copy(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
    """A view that has memory of its own."""
    outputs[0].reshape(-1)[...] = inputs[0].reshape(-1)


def _arrays(group: Group) -> tuple[str, ...]:
    return (*group.inputs, *group.outputs)
