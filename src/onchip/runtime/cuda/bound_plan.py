"""A plan bound to one GPU: the launches of its groups, and one arena for the values between them."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onchip.errors import ShapeError
from onchip.kernels.cuda.common.arguments import Input, Output
from onchip.kernels.cuda.common.program import Lowering, Steps, status_words
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype
from onchip.plan.plan import Plan
from onchip.plan.step_info import StepInfo, steps_of
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.branches import Accesses, Place, Range, ends_of, in_branches, in_sequence
from onchip.runtime.cuda.gpu import Buffer, Gpu
from onchip.runtime.cuda.launches import Call, GraphBuilder
from onchip.runtime.cuda.plan_graph import PlanGraph
from onchip.runtime.cuda.staging import staging_of
from onchip.runtime.cuda.status import StatusWords, Ticket
from onchip.runtime.cuda.timed_copies import HostCopies

MAX_CALLS = 64  # batch sizes whose launches a thread caches
MAX_GRAPHS = 32  # cached
BRANCH_GROUPS = 8  # of a step: groups between the last use of memory and the next
GRAPH_RUNS, GRAPH_LAUNCHES = 16, 1024  # most runs of one graph, and most launches if it has several
PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD
ALIGN_BYTES = 256  # of an allocation in an arena
ARENA_PART = 8  # an arena is at most this fraction of the GPU's memory; larger batches run in chunks
CHUNK_UNIT = 16  # rows: chunks of any dtype then begin at multiples of 16 bytes, the alignment that kernels assume


@dataclass(frozen=True, eq=False)
class BoundGroup:
    """One group, with its weights on the GPU."""

    index: int  # in the plan's groups
    lowering: Lowering
    inputs: tuple[str, ...]
    weights: Mapping[str, Buffer]
    outputs: tuple[str, ...]
    rows: int = 0  # of each launch; 0: as many as the batch has
    waits: bool = False  # no launch begins before the previous group ends

    def at(self, B: int) -> Steps:
        steps = self.lowering.at(self.rows or B)
        if not self.waits:
            return steps
        launches = (replace(each, config=replace(each.config, overlaps=False)) for each in steps.launches)
        return replace(steps, launches=tuple(launches))


@dataclass(frozen=True, eq=False)
class BoundRows:
    """A plan for one batch size: the launches of every group, and arena offsets of the values between them."""

    steps: list[tuple[BoundGroup, BoundSteps]]
    offsets: Mapping[str, int]  # arena offsets of values between groups, in bytes
    scratches: Sequence[int]  # arena offset of each group's scratch memory
    arena_bytes: int


class _ThreadCache(threading.local):
    """Launches per thread, by batch size: their arguments are written in place."""

    def __init__(self) -> None:
        self.by_rows: dict[int, BoundRows] = {}


StreamKey = tuple[int, int]


def stream_key(stream: int) -> StreamKey:
    """What tells streams apart: the handle of the per-thread default stream is the same in every thread."""
    return stream, threading.get_ident() if stream == PER_THREAD_STREAM else 0


class BoundPlan:
    """A plan on a GPU. `enqueue` puts the network on a stream and returns at once; `run` takes NumPy arrays."""

    def __init__(
        self, gpu: Gpu, plan: Plan, groups: Sequence[BoundGroup], memory: Mapping[str, Buffer] | None = None
    ) -> None:
        """memory  of a step: the arrays that are not in the arena, by name; kept alive. Its graphs have branches."""
        self.gpu, self.plan, self.groups, self._memory = gpu, plan, tuple(groups), memory or {}
        self._has_branches = memory is not None
        self._pointers = {name: buffer.pointer for name, buffer in self._memory.items()}
        net = plan.network
        self._between = {name: plan.types[name].row_bytes for name in plan.between if name not in self._memory}
        ends = (*net.inputs, *dict.fromkeys(net.outputs))
        self.row_bytes = sum(net.types[name].row_bytes for name in ends) + sum(self._between.values())
        self.max_arena_bytes = gpu.device.memory_bytes // ARENA_PART
        self._is_read_often = plan.is_read_often
        self._cached = _ThreadCache()
        self._arenas: dict[StreamKey, Buffer] = {}  # for the graphs of a stream, which run one at a time
        self._graphs: OrderedDict[tuple[int, ...], PlanGraph | None] = OrderedDict()
        self._lock = threading.Lock()
        words = [word for group in groups for word in status_words(group.at(1))]
        # Errors in GPU arrays are raised by a later call; errors in host rows by the same call.
        self.found = StatusWords(gpu, words) if words else None
        self._host_status = StatusWords(gpu, words) if words else None

    @property
    def memory_bytes(self) -> int:
        """Of the arrays that are not in the arena, of weights, and of the arenas of graphs, each once."""
        weights = (buffer for group in self.groups for buffer in group.weights.values())
        held = {buffer.pointer: buffer.nbytes for buffer in (*self._memory.values(), *weights, *self._arenas.values())}
        return sum(held.values())

    def enqueue(self, pointers: Mapping[str, int], B: int, stream: int) -> Ticket:
        """Run the network on B > 0 rows: a single launch directly; several as a graph, from the second call with B on.

        pointers  of the network's inputs and outputs, 16-byte aligned, in the network's order

        Errors that its kernels find are raised by the ticket's `wait`, or by the next call.
        """
        if self.found is not None:
            self.found.raise_found(stream)
        return Ticket(self.gpu, stream, self.found, self._enqueue(pointers, B, stream, self.found))

    def repeat(self, pointers: Mapping[str, int], B: int, stream: int, count: int) -> Ticket:
        """Run a network with state `count` times on the same B > 0 rows, several runs per graph; as of `enqueue`.

        Each run begins with the state that the one before left. The outputs are the last one's.
        """
        if self.found is not None:
            self.found.raise_found(stream)
        status = self.found.pointer(stream, 0) if self.found is not None else 0
        bound = self.at(B)
        launches = max(1, sum(steps.node_count for _, steps in bound.steps))
        runs = max(1, min(GRAPH_RUNS, GRAPH_LAUNCHES // launches))
        for first in range(0, count, runs):
            size = min(runs, count - first)
            if self.gpu.is_capturing(stream):
                self.launch(bound, pointers, stream, status, size)
            else:
                self._launch_repeated(bound, pointers, B, stream, status, size)
        return Ticket(self.gpu, stream, self.found, (0,))

    def _enqueue(
        self, pointers: Mapping[str, int], B: int, stream: int, found: StatusWords | None, first: int = 0
    ) -> Sequence[int]:
        """Enqueue the rows and return the first row of each chunk, counted from `first`; chunks run in order."""
        bound = self.at(B)
        if bound.arena_bytes > self.max_arena_bytes and B > CHUNK_UNIT:  # the arena holds the values between groups
            return self._enqueue_chunks(pointers, B, stream, found, first)
        status = found.pointer(stream, first) if found is not None else 0
        self._enqueue_chunk(bound, pointers, B, stream, status)
        return (first,)

    def _enqueue_chunk(self, bound: BoundRows, pointers: Mapping[str, int], B: int, stream: int, status: int) -> None:
        if bound.arena_bytes == 0 and len(bound.steps) == 1:
            self._launch(bound, pointers, 0, stream, status)
        elif self.gpu.is_capturing(stream):
            self.launch(bound, pointers, stream, status)
        else:
            self._launch_repeated(bound, pointers, B, stream, status)

    def _enqueue_chunks(
        self, pointers: Mapping[str, int], B: int, stream: int, found: StatusWords | None, first: int
    ) -> Sequence[int]:
        fitting = B * self.max_arena_bytes // self.at(B).arena_bytes
        rows = max(1, fitting // CHUNK_UNIT) * CHUNK_UNIT
        types, first_rows = self.plan.network.types, list[int]()
        for row in range(0, B, rows):
            addresses = {name: pointer + row * types[name].row_bytes for name, pointer in pointers.items()}
            first_rows += self._enqueue(addresses, min(rows, B - row), stream, found, first + row)
        return first_rows

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None:
        """Run the network on B host rows; returns when the outputs are complete.

        inputs   name -> (B, ...) of the network's input types, row-major
        outputs  name -> (B, ...) of the network's output types, row-major, overwritten
        """
        for name, array in (*inputs.items(), *outputs.items()):
            tensor_type = self.plan.network.types[name]
            fits = array.dtype == numpy_dtype(tensor_type.dtype) and array.shape == (B, *tensor_type.row_shape)
            if not (fits and array.flags.c_contiguous):
                got, expected = f"{array.dtype}{list(array.shape)}", f"{tensor_type} with B = {B}, row-major"
                raise ShapeError(f"'{name}' has the wrong shape, dtype or layout", got=got, expected=expected)
        if B == 0:
            return
        names = (*inputs, *outputs)

        found = self._host_status

        def enqueue(x_pointers: Sequence[int], y_pointers: Sequence[int], rows: int, stream: int) -> Ticket | None:
            if found is not None:
                found.clear(stream)  # left by a batch that failed
            first_rows = self._enqueue(dict(zip(names, (*x_pointers, *y_pointers), strict=True)), rows, stream, found)
            return Ticket(self.gpu, stream, found, first_rows) if found is not None else None

        staged = list(inputs.values()), list(outputs.values())
        staging_of(self.gpu).run(*staged, B, enqueue, self._is_read_often, self._copies())

    def _copies(self) -> HostCopies | None:
        """What records the copies of a call of `run`."""
        return None

    def wait(self) -> None:
        """Return when all work on the GPU is done; raise the errors that this plan's kernels found."""
        self.gpu.wait_for_all()
        if self.found is not None:
            self.found.raise_found(self.gpu.stream)

    def steps(self, B: int) -> tuple[StepInfo, ...]:
        return steps_of(self.plan, B)

    def at(self, B: int) -> BoundRows:
        """This thread's launches for B rows."""
        cached = self._cached.by_rows
        if B not in cached:
            if len(cached) >= MAX_CALLS:
                cached.clear()
            cached[B] = self.bind(B)
        return cached[B]

    def bind(self, B: int) -> BoundRows:
        steps = [(step, BoundSteps(self.gpu, step.at(B), step.weights)) for step in self.groups]
        arena = Arena(BRANCH_GROUPS if self._has_branches else 0)
        last_read = {name: i for i, (step, _) in enumerate(steps) for name in (*step.outputs, *step.inputs)}
        offsets: dict[str, int] = {}
        scratches = []
        for i, (step, launches) in enumerate(steps):
            arena.begin(i)
            scratches.append(arena.take(launches.scratch_bytes) if launches.scratch_bytes else 0)
            for name in step.outputs:
                if name in self._between:
                    offsets[name] = arena.take(self._between[name] * B)
            if launches.scratch_bytes:
                arena.give_back(scratches[-1])  # unused after the group
            for name in {*step.inputs, *step.outputs} & offsets.keys():
                if last_read[name] == i:
                    arena.give_back(offsets[name])
        return BoundRows(steps, offsets, scratches, arena.nbytes)

    def _launch(self, bound: BoundRows, pointers: Mapping[str, int], arena: int, stream: int, status: int) -> None:
        values = self._values(bound, pointers, arena)
        for (group, launches), scratch in zip(bound.steps, bound.scratches, strict=True):
            inputs, outputs = [values[name] for name in group.inputs], [values[name] for name in group.outputs]
            launches.enqueue(inputs, outputs, arena + scratch, stream, status=status)
            status += launches.status_bytes

    def _values(self, bound: BoundRows, pointers: Mapping[str, int], arena: int) -> Mapping[str, int]:
        """The address of every array: the caller's, the plan's own, and those in the arena."""
        if not (bound.offsets or self._pointers):
            return pointers
        return {**pointers, **self._pointers, **{name: arena + offset for name, offset in bound.offsets.items()}}

    def launch(
        self, bound: BoundRows, pointers: Mapping[str, int], stream: int, status: int = 0, runs: int = 1
    ) -> None:
        """Put the launches on a stream one by one, with an arena from the pool."""
        arena = self.gpu.allocate(bound.arena_bytes, stream, self.row_bytes) if bound.arena_bytes else None
        for _ in range(runs):
            self._launch(bound, pointers, arena.pointer if arena else 0, stream, status)

    def graph(
        self, B: int, pointers: Mapping[str, int], stream: int, status: int = 0, builder: GraphBuilder | None = None,
        runs: int = 1,
    ) -> PlanGraph:  # fmt: skip
        """The launches for B rows as a graph, for one stream.

        builder  of the graph, if it is to have other nodes too
        runs     of the network, one after the other
        """
        bound = self.bind(B)
        arena = self._arena_of(stream, bound.arena_bytes)
        begin = arena.pointer if arena else 0
        values = self._values(bound, pointers, begin)
        nodes: list[tuple[int, Call, list[tuple[Any, str]]]] = []  # with the pointer arguments of the launch, by name
        places = self._places(bound, pointers, begin, B)
        ends: list[int] = []
        with self.gpu, self.gpu.relaxed():
            graph = builder or self.gpu.graph_builder()
            for _ in range(runs):
                word, of_groups = status, list[list[int]]()  # the final nodes of each group
                for (group, steps), scratch, place in zip(bound.steps, bound.scratches, places, strict=True):
                    inputs, outputs = [values[name] for name in group.inputs], [values[name] for name in group.outputs]
                    waits = [node for i in place.after for node in of_groups[i]] or ends
                    graph_nodes, last = steps.add_to(
                        graph, inputs, outputs, begin + scratch, waits, word, place.overlaps
                    )
                    of_groups.append(last)
                    word += steps.status_bytes
                    for node, call, uses in zip(graph_nodes, steps.calls, steps.uses, strict=True):
                        nodes.append((node, call, [(argument, _name_of(group, value)) for argument, value in uses]))
                ends = [node for i in ends_of(places) for node in of_groups[i]]
            return PlanGraph(graph.finish(arena), pointers, nodes)

    def _places(self, bound: BoundRows, pointers: Mapping[str, int], arena: int, B: int) -> list[Place]:
        """Where each group is in a graph."""
        if not self._has_branches:
            return in_sequence(len(bound.steps))
        memory = {name: _range_of(buffer) for name, buffer in self._memory.items()}
        memory |= {name: (name, 0, 1) for name in pointers}
        for name, offset in bound.offsets.items():
            memory[name] = ("", arena + offset, arena + offset + self._between[name] * B)
        accesses = []
        for (group, steps), scratch in zip(bound.steps, bound.scratches, strict=True):
            written = [("", arena + scratch, arena + scratch + steps.scratch_bytes)] if steps.scratch_bytes else []
            written += [memory[name] for name in group.outputs]
            weights = tuple(_range_of(buffer) for buffer in group.weights.values())
            accesses.append(Accesses(tuple(memory[name] for name in group.inputs), tuple(written), weights))
        return in_branches(accesses)

    def _arena_of(self, stream: int, nbytes: int) -> Buffer | None:
        """Memory for the graphs of a stream, which run one at a time."""
        if not nbytes:
            return None
        key = stream_key(stream)
        found = self._arenas.get(key)
        if found is None or found.nbytes < nbytes:
            if len(self._arenas) >= MAX_CALLS:
                self._arenas.clear()  # graphs keep their arenas alive
            # Graphs of smaller batches keep the arena that they were built with, so it grows in few steps.
            grown = 2 * found.nbytes if found is not None else 0
            with self.gpu.relaxed():
                found = self.gpu.reserve(max(nbytes, min(grown, self.max_arena_bytes)), self.row_bytes)
            self._arenas[key] = found
        return found

    def _launch_repeated(
        self, bound: BoundRows, pointers: Mapping[str, int], B: int, stream: int, status: int, runs: int = 1
    ) -> None:
        """From the second call with this batch size on a stream, launch one graph."""
        key = (B, status, runs, *stream_key(stream))
        with self._lock:  # a graph is updated and launched by one thread at a time
            if key not in self._graphs:
                self._graphs[key] = None
                self.launch(bound, pointers, stream, status, runs)
            else:
                graph = self._graphs[key] or self.graph(B, pointers, stream, status, runs=runs)
                self._graphs[key] = graph
                self._graphs.move_to_end(key)
                graph.point(pointers)
                graph.launch(stream)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)


def _range_of(buffer: Buffer) -> Range:
    return "", buffer.pointer, buffer.pointer + buffer.nbytes


def _name_of(group: BoundGroup, value: Input | Output) -> str:
    return (group.inputs if isinstance(value, Input) else group.outputs)[value.index]


class Arena:
    """First-fit allocation of offsets in one buffer; freed ranges are reused."""

    def __init__(self, delay: int = 0) -> None:
        """delay  groups after which a freed range is reused: until then they need not wait for each other"""
        self.nbytes = 0
        self._delay, self._group, self._freed = delay, 0, list[tuple[int, int]]()  # groups and offsets
        self._taken: list[tuple[int, int]] = []  # begin and end, sorted

    def take(self, nbytes: int) -> int:
        """Allocate the first gap that is large enough; returns its offset."""
        size, offset = max(1, -(-nbytes // ALIGN_BYTES)) * ALIGN_BYTES, 0
        for begin, end in self._taken:
            if begin - offset >= size:
                break
            offset = end
        bisect.insort(self._taken, (offset, offset + size))
        self.nbytes = max(self.nbytes, offset + size)
        return offset

    def begin(self, group: int) -> None:
        """The next ranges are of this group."""
        self._group = group
        free = {offset for freed, offset in self._freed if freed + self._delay < group}
        self._freed = [(freed, offset) for freed, offset in self._freed if freed + self._delay >= group]
        self._taken = [(begin, end) for begin, end in self._taken if begin not in free]

    def give_back(self, offset: int) -> None:
        """It is free from the next group on, or later."""
        self._freed.append((self._group, offset))
