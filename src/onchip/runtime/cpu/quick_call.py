"""The fast path for arrays that need no conversion: one check per array, one call into compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onchip.kernels.cpu.threading.launches import run_launches
from onchip.kernels.cpu.threading.threads import HELPERS, FreeList
from onchip.network.types import numpy_dtype
from onchip.plan.plan import Plan
from onchip.runtime.cpu.chunks import Chunks, Memory

# B, rows per chunk, the free list of memory for such calls; shape and dtype of each output
Known = tuple[int, int, FreeList[Memory], tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]]

MAX_SHAPES = 256  # shapes of inputs that are cached


def quick_call(plan: Plan, chunks: Chunks) -> Callable[[tuple[Any, ...], Any], Any]:
    """A function of an engine's inputs and `out`, for a plan whose launches all run from compiled code.

    It returns the outputs, or None if the arrays need the full checks, which report errors.
    """
    net = plan.network
    inputs, outputs = ([net.types[name] for name in names] for names in (net.inputs, net.outputs))
    dtypes, out_dtypes = ([numpy_dtype(t.dtype) for t in some] for some in (inputs, outputs))
    is_single = len(inputs) == len(outputs) == 1
    dtype = dtypes[0]
    known_shapes: dict[Any, Known] = {}
    threads, helpers, empty, ndarray, run = chunks.threads, chunks.threads - 1, np.empty, np.ndarray, run_launches.load

    def learn(rows: tuple[Any, ...], shapes: Any) -> Known | None:
        """The cache entry for new shapes; None if they are wrong."""
        if any(x.shape[1:] != t.row_shape or not x.ndim for x, t in zip(rows, inputs, strict=True)):
            return None
        B = len(rows[0])
        if B == 0 or any(len(x) != B for x in rows):
            return None
        outs = tuple(((B, *t.row_shape), out_dtype) for t, out_dtype in zip(outputs, out_dtypes, strict=True))
        chunk = chunks.rows_of_chunk(B)
        known = B, chunk, chunks.memories(B, chunk), outs
        if len(known_shapes) < MAX_SHAPES:
            known_shapes[shapes] = known
        return known

    def call_many(rows: tuple[Any, ...], out: Any) -> Any:
        if len(rows) != len(inputs) or out is not None:
            return None
        for x, input_dtype in zip(rows, dtypes, strict=True):
            if type(x) is not np.ndarray or x.dtype is not input_dtype or not x.flags.c_contiguous:
                return None
        shapes = tuple([x.shape for x in rows])
        known = known_shapes.get(shapes) or learn(rows, shapes)
        if known is None:
            return None
        B, chunk, _, wanted_out = known
        outs = tuple([np.empty(shape, out_dtype) for shape, out_dtype in wanted_out])
        if not chunks.run((*rows, *outs), B, chunk):
            return None
        return outs if len(outs) > 1 else outs[0]

    def call_one(rows: tuple[Any, ...], out: Any) -> Any:
        """call_many for one input and one output, without its loops."""
        try:
            (x,) = rows
        except ValueError:
            return None
        if type(x) is not ndarray or x.dtype is not dtype or not x.flags.c_contiguous:
            return None
        known = known_shapes.get(x.shape) or learn(rows, x.shape)
        if known is None:
            return None
        B, chunk, free_list, ((shape, out_dtype),) = known
        if out is None:
            y = empty(shape, out_dtype)
        elif _fits(out, shape, out_dtype) and not np.may_share_memory(x, out):
            y = out
        else:
            return None
        if len(HELPERS) < helpers:
            chunks.start()
        free = free_list.free
        try:
            memory = free.pop()
        except IndexError:
            memory = free_list.make(threads)
        is_good = run(memory[0], B, chunk, threads, id(x), id(y))
        free.append(memory)
        return y if is_good else None

    return call_one if is_single else call_many


def _fits(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    if type(out) is not np.ndarray or out.dtype is not dtype or out.shape != shape:
        return False
    return out.flags.c_contiguous and out.flags.writeable
