"""Run all launches of a plan in one call of compiled code, on chunks of rows that fit a core's cache.

With many rows, each thread runs all launches on one chunk: intermediate values never leave its cache, and there is no
barrier between launches. With few rows, all threads share each launch. A row's bits are the same either way, as no
kernel's results depend on the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from onchip.kernels.cpu.compiler.jit import address
from onchip.kernels.cpu.memory import first_fit_offsets
from onchip.kernels.cpu.threading.launches import CompiledLaunch, run_launches, words
from onchip.kernels.cpu.threading.threads import HELPERS, FreeList, start_helpers
from onchip.network.recipe import Array
from onchip.plan.plan import Plan

Launches = Sequence[tuple[CompiledLaunch, Sequence[str]]]  # each with the names of its inputs and outputs
Memory = tuple[int, "array[int]", object]  # address for run_launches; ids of arrays, offsets of values; its references

MIN_BYTES, MAX_BYTES = 512 << 10, 4 << 20  # of intermediate values per thread; the least is half of a common L2 cache
_LARGE_WEIGHTS, _FEW_ROWS = 256 << 10, 32  # bytes; rows per thread: with more weights and fewer rows, share launches
_THREAD_WORK = 250_000  # flop and bytes: below this, waking another thread takes longer than the work
_LINE = 64  # bytes of a cache line: every value begins on one


class Chunks:
    """The launches of a plan, for calls on any number of rows, several at a time."""

    def __init__(self, plan: Plan, launches: Launches, threads: int, quotas: array[int] | None = None) -> None:
        """launches  with the name of the array that stores each value
        quotas    within which calls run, for run_launches
        """
        net = plan.network
        self._quotas = quotas
        self.threads, self.launches = threads, launches
        self.arrays = tuple(dict.fromkeys((*net.inputs, *net.outputs)))
        self.row_bytes = [net.types[name].row_bytes for name in self.arrays]  # per array
        uses: dict[str, tuple[int, int]] = {}  # of intermediate values: first and last launch
        for i, (_, names) in enumerate(launches):
            uses |= {name: (uses.get(name, (i, i))[0], i) for name in names if name not in self.arrays}
        self.names = (*self.arrays, *uses)
        sizes = {name: -(-plan.types[name].row_bytes // _LINE) * _LINE for name in uses}
        self.offsets = list(first_fit_offsets(uses, sizes).values())
        ends = (offset + sizes[name] for name, offset in zip(uses, self.offsets, strict=True))
        self.between_bytes = max(ends, default=0)  # per row
        self.weight_bytes = plan.weight_bytes
        self.row_work = sum(group.claim.cost.row_flop + group.claim.cost.row_bytes for group in plan.groups)
        budget = min(MAX_BYTES, max(MIN_BYTES, self.weight_bytes))
        self.max_rows = max(1, budget // self.between_bytes) if self.between_bytes else 1 << 62
        self.arena_bytes = self.between_bytes * self.max_rows if self.between_bytes else 0
        self._for_all_threads = FreeList(lambda threads: self._make(1, threads))
        self._per_thread = FreeList(lambda threads: self._make(threads, 1))

    def rows_of_chunk(self, B: int) -> int:
        """Rows per chunk, on which one thread runs all launches; B means that all threads share every launch."""
        fits = self.max_rows >= B
        if len(self.launches) == 1 and fits:
            return B
        threads = max(1, min(self.threads, B, B * self.row_work // _THREAD_WORK))
        share = -(-B // threads)
        is_shared = self.weight_bytes > _LARGE_WEIGHTS and share < _FEW_ROWS
        if fits and (threads == 1 or is_shared):
            return B
        rounds = -(-share // self.max_rows)
        return -(-B // (rounds * threads))

    def memories(self, B: int, chunk: int) -> FreeList[Memory]:
        """The free list of memory for calls with this chunk size."""
        return self._for_all_threads if chunk >= B else self._per_thread

    def start(self) -> None:
        """Start the helper threads: called before every run, as a forked process has none."""
        if len(HELPERS) < self.threads - 1:
            start_helpers(self.threads)

    def run(self, arrays: Sequence[Array], B: int, chunk: int) -> bool:
        """Run the launches; False if a launch rejected a value: results are invalid, and a rerun reports it.

        Also False, and nothing has run, if the quota is used up."""
        self.start()
        free_list = self.memories(B, chunk)
        memory = free_list.take(self.threads)
        for i, x in enumerate(arrays):
            memory[1][i] = id(x)
        is_good = run_launches.load(memory[0], B, chunk, self.threads, 0, 0)
        free_list.give_back(memory)
        return bool(is_good)

    def _make(self, workers: int, threads: int) -> Memory:
        """Memory for `workers` workers, each of which runs launches with `threads` threads."""
        index_of = {name: i for i, name in enumerate(self.names)}
        operands = np.array([index_of[name] for _, names in self.launches for name in names], np.int64)
        values, row_bytes = array("q", [0] * len(self.arrays) + self.offsets), words(*self.row_bytes)
        references: list[object] = [operands, row_bytes]
        tasks = []
        for _ in range(workers):
            arena, addresses = np.empty(self.arena_bytes + _LINE, np.uint8), np.empty_like(operands)
            launch_rows, first = [], 0
            for launch, names in self.launches:
                facts = launch.facts(threads)
                references.append(facts)
                launch_rows.append((launch.code, facts[0], first, launch.check is not None))
                first += len(names)
            launches = np.array(launch_rows, np.int64)
            begin = address(arena) + -address(arena) % _LINE
            counts = len(launches), len(operands), len(self.arrays)
            tasks.append(words(*counts, launches, operands, values.buffer_info()[0], addresses, begin, row_bytes))
            references += [arena, addresses, launches]
        table = words(0 if self._quotas is None else self._quotas.buffer_info()[0], *tasks)
        return address(table) + table.itemsize, values, (table, tasks, references)
