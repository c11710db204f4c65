"""Calls on few rows, where Python takes longer than kernels: one look at each array, one call into compiled code."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onchip.kernels.cpu.jit import address
from onchip.kernels.cpu.launches import CompiledLaunch, run_launches
from onchip.kernels.cpu.threads import HELPERS, Spare, start_helpers
from onchip.plan.plan import Plan
from onchip.spec.types import numpy_dtype

Launches = Sequence[tuple[CompiledLaunch, Sequence[str]]]  # each with its inputs and outputs
Known = tuple[int, tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]]  # B; shape and dtype of each output
Memory = tuple[int, "array[int]", object]  # for run_launches; ids of arrays and places of values; what is kept for it

_ARENA_BYTES = 1 << 20  # of values in between that an engine keeps; a call that needs more is long enough anyway
_MOST_SHAPES = 256  # that are remembered
_LINE = 64  # bytes: every value begins on a cache line


def quick_call(plan: Plan, launches: Launches, threads: int) -> Callable[[tuple[Any, ...], Any], Any]:
    """A function of an engine's inputs and `out`, for a plan whose launches can all be made by compiled code.

    It gives the outputs; or None if the arrays want a closer look, by who says what is wrong with them.

    launches  name values as those in whose memory they lie
    """
    net = plan.network
    inputs, outputs = ([net.types[name] for name in names] for names in (net.inputs, net.outputs))
    dtypes, made_types = ([numpy_dtype(given.dtype) for given in some] for some in (inputs, outputs))
    is_single = len(inputs) == len(outputs) == 1
    dtype = dtypes[0]
    memory_of = _Memories(plan, launches)
    spare = Spare(memory_of.make)
    known_shapes: dict[Any, Known] = {}

    def look(rows: tuple[Any, ...], shapes: Any) -> Known | None:
        """What is to be known of new shapes; None if they do not fit, or it is not few rows."""
        if any(x.shape[1:] != given.row_shape or not x.ndim for x, given in zip(rows, inputs, strict=True)):
            return None
        B = len(rows[0])
        if B == 0 or any(len(x) != B for x in rows) or B * memory_of.row_bytes > _ARENA_BYTES:
            return None
        known = B, tuple(((B, *given.row_shape), kind) for given, kind in zip(outputs, made_types, strict=True))
        if len(known_shapes) < _MOST_SHAPES:
            known_shapes[shapes] = known
        return known

    def call_many(rows: tuple[Any, ...], out: Any) -> Any:
        if len(rows) != len(inputs) or out is not None:
            return None
        for x, wanted in zip(rows, dtypes, strict=True):
            if type(x) is not np.ndarray or x.dtype is not wanted or not x.flags.c_contiguous:
                return None
        shapes = tuple([x.shape for x in rows])
        known = known_shapes.get(shapes) or look(rows, shapes)
        if known is None:
            return None
        if len(HELPERS) < threads - 1:
            start_helpers(threads)
        made = tuple([np.empty(shape, kind) for shape, kind in known[1]])
        memory = spare.take(threads)
        for i, given in enumerate((*rows, *made)):
            memory[1][i] = id(given)
        run_launches(memory[0], known[0], threads)
        spare.give_back(memory)
        return made if len(made) > 1 else made[0]

    def call_one(rows: tuple[Any, ...], out: Any) -> Any:
        """call_many for one input and one output, without its loops."""
        if len(rows) != 1:
            return None
        x = rows[0]
        if type(x) is not np.ndarray or x.dtype is not dtype or not x.flags.c_contiguous:
            return None
        known = known_shapes.get(x.shape) or look(rows, x.shape)
        if known is None:
            return None
        if len(HELPERS) < threads - 1:
            start_helpers(threads)
        if out is None:
            y = np.empty(*known[1][0])
        elif _fits(out, *known[1][0]) and not np.may_share_memory(x, out):
            y = out
        else:
            return None
        memory = spare.take(threads)
        values = memory[1]
        values[0] = id(x)
        values[1] = id(y)
        run_launches(memory[0], known[0], threads)
        spare.give_back(memory)
        return y

    return call_one if is_single else call_many


def _fits(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    if type(out) is not np.ndarray or out.dtype is not dtype or out.shape != shape:
        return False
    return out.flags.c_contiguous and out.flags.writeable


class _Memories:
    """What one call at a time has."""

    def __init__(self, plan: Plan, launches: Launches) -> None:
        net = plan.network
        arrays = dict.fromkeys((*net.inputs, *net.outputs))
        between = dict.fromkeys(name for _, names in launches for name in names if name not in arrays)
        self.launches, self.arrays, self.names = launches, len(arrays), (*arrays, *between)
        self.places: list[int] = []  # of values in between, in bytes a row
        self.row_bytes = 0
        for name in between:
            self.places.append(self.row_bytes)
            self.row_bytes += -(-plan.types[name].row_bytes // _LINE) * _LINE

    def make(self, threads: int) -> Memory:
        number = {name: i for i, name in enumerate(self.names)}
        operands = np.array([number[name] for _, names in self.launches for name in names], np.int64)
        addresses, values = np.empty_like(operands), array("q", [0] * self.arrays + self.places)
        arena = np.empty(_ARENA_BYTES + _LINE if self.places else 0, np.uint8)
        table, facts, first = [], [], 0
        for launch, names in self.launches:
            facts.append(launch.facts(threads))
            table.append((launch.code, facts[-1][0], first))
            first += len(names)
        launches = np.array(table, np.int64)
        begin = address(arena) + -address(arena) % _LINE
        counts = len(launches), len(operands), self.arrays
        places = address(launches), address(operands), values.buffer_info()[0], address(addresses), begin
        words = np.array((*counts, *places), np.int64)
        return address(words), values, (words, launches, operands, addresses, arena, facts)
