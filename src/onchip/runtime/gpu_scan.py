"""Scans on a GPU: the launches of one, arrays that lie there, and rows of the host in parts."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.kernels.cuda.program import Fixed
from onchip.kernels.cuda.scan import STATE_BYTES, Scan, swap_axes
from onchip.runtime.device_arrays import Kind, Placed
from onchip.runtime.gpu import Call, Function, Gpu
from onchip.runtime.staging import SLOT_BYTES, staging_of
from onchip.spec.recipe import Array
from onchip.spec.scan_op import ScanOp, check_axis, check_dtype, check_out
from onchip.spec.types import BATCH, DTYPE_BYTES, TensorType

_ALIGN_BYTES = 256


class ScanCall:
    """One scan with everything written down: `enqueue` puts it on a stream.

    shape  (outer, N, inner): along the middle axis
    whole  the numbers of the row that these are a part of; 0: they are all of it
    """

    def __init__(self, gpu: Gpu, how: ScanOp, dtype: str, shape: tuple[int, int, int], whole: int = 0) -> None:
        self._gpu, self._lock = gpu, threading.Lock()
        outer, N, inner = shape
        self._scan = scan = Scan(how, dtype, outer, N, inner, whole)
        self._swaps: list[Call] = []
        self.functions: tuple[Function, ...] = ()
        self._moved_bytes = 0  # of the array with its axes swapped
        if math.prod(shape) == 0:
            self._scan = Scan(how, dtype, 0, 0, 1)
            return
        if scan.is_narrow:
            self._scan = scan = Scan(how, dtype, outer * inner, N)
            self._swaps = [self._swap(outer, N, inner), self._swap(outer, inner, N)]
            self._moved_bytes = -(-math.prod(shape) * DTYPE_BYTES[dtype] // _ALIGN_BYTES) * _ALIGN_BYTES
        if scan.is_long:
            states = ctypes.c_int64(scan.states)
            self._clear = self._load(scan.clearing(gpu.device.units), [0, states])
            sizes = ctypes.c_int64(N), ctypes.c_uint32(scan.tiles)
            self._call = self._load(scan.by_tiles(gpu.device.arch), [0, 0, 0, 0, 0, *sizes])
        else:
            shape_of_rows = (scan.outer, N) if scan.inner == 1 else (outer, N, inner)
            self._call = self._load(scan.by_walking(gpu.device.units), [0, 0, *map(ctypes.c_int64, shape_of_rows)])

    def _load(self, launch: Fixed, arguments: Sequence[Any]) -> Call:
        """The launch, with its pointers (0) still to be set."""
        function = self._gpu.load(launch.program)
        self.functions = (*self.functions, function)
        return Call(self._gpu, function, launch.config, arguments)

    def _swap(self, outer: int, N: int, M: int) -> Call:
        launch = swap_axes(self._scan.dtype, outer, N, M, self._gpu.device.units)
        return self._load(launch, [0, 0, *map(ctypes.c_int64, (outer, N, M))])

    @property
    def launches(self) -> int:
        return len(self.functions)

    @property
    def scratch_bytes(self) -> int:
        """Memory that `enqueue` needs; 0: none."""
        return self._moved_bytes + (STATE_BYTES * self._scan.states if self._scan.is_long else 0)

    def enqueue(self, x: int, y: int, stream: int, scratch: int, before: int = 0, after: int = 0) -> None:
        """Put the work on a stream: pointers of x and y, which may be the same.

        scratch        pointer to `scratch_bytes` for this call alone
        before, after  of a long row in parts: where the total lies that it goes on from, and where to put its own
        """
        if not self.functions:
            return
        with self._lock:
            if not self._swaps:
                self._enqueue_rows(x, y, stream, scratch, before, after)
                return
            there, back = self._swaps
            _set(there, x, scratch).launch(stream)
            self._enqueue_rows(scratch, scratch, stream, scratch + self._moved_bytes, before, after)
            _set(back, scratch, y).launch(stream)

    def _enqueue_rows(self, x: int, y: int, stream: int, states: int, before: int, after: int) -> None:
        if self._scan.is_long:
            _set(self._clear, states).launch(stream)
            _set(self._call, x, y, states, before, after).launch(stream)
        else:
            _set(self._call, x, y).launch(stream)


def _set(made: Call, *pointers: int) -> Call:
    for argument, pointer in zip(made.arguments, pointers, strict=False):
        argument.value = pointer
    return made


@functools.lru_cache(maxsize=256)
def scan_call(gpu: Gpu, how: ScanOp, dtype: str, shape: tuple[int, int, int], whole: int = 0) -> ScanCall:
    return ScanCall(gpu, how, dtype, shape, whole)


# -- arrays on the GPU ---------------------------------------------------------------------------------------


def scan_there(x: Any, kind: Kind, gpu: Gpu, how: ScanOp, axis: int, out: Any) -> Any:
    """A scan of an array that lies on a GPU, on its owner's stream; what is made is of the same kind."""
    stream = kind.stream(x)
    given = _check(kind.describe(x, stream), gpu, "x")
    dtype, shape = check_dtype(given.dtype), given.shape
    at = check_axis(axis, shape)
    if out is not None and not kind.owns(out):
        got = f"{type(out).__module__}.{type(out).__name__}"
        raise InputError("out is of another kind than x", got=got, expected=kind.name)
    y = kind.empty(TensorType((BATCH, *shape[1:]), dtype), shape[0], stream) if out is None else out
    made = _check(kind.describe(y, stream), gpu, "out")
    check_out(made.shape, made.dtype, shape, dtype)
    if not made.is_writable:
        raise InputError("out cannot be written to", got=kind.name, hint="y = onchip.scan(x), without out")
    far = made.pointer + made.nbytes <= given.pointer or given.pointer + given.nbytes <= made.pointer
    if made.pointer != given.pointer and not far:
        raise ShapeError("out overlaps x", expected="x itself, or memory of its own")
    planned = scan_call(gpu, how, dtype, (math.prod(shape[:at]), shape[at], math.prod(shape[at + 1 :])))
    with gpu:
        scratch = kind.scratch(planned.scratch_bytes, stream)
        planned.enqueue(given.pointer, made.pointer, stream, scratch.pointer if scratch else 0)
        kind.launched([given.owner], out is not None)  # y waits when it is freed, scratch goes in the stream's order
    return y if out is not None else kind.hand_out(y)


def _check(placed: Placed, gpu: Gpu, what: str) -> Placed:
    if placed.device_index != gpu.index:
        raise InputError(
            f"{what} is on another device", got=f"cuda:{placed.device_index}", expected=f"cuda:{gpu.index}"
        )
    if not placed.is_row_major:
        raise ShapeError(
            f"{what} is not row-major", got=f"a view of {placed}", hint="a copy of it: x.contiguous(), x.copy()"
        )
    return placed


# -- rows of the host ----------------------------------------------------------------------------------------


class RowOnGpu:
    """One long row of N numbers, scanned part by part: each a multiple of `part` but the last."""

    def __init__(self, gpu: Gpu, how: ScanOp, dtype: str, N: int) -> None:
        scan = Scan(how, dtype, 1, N)
        assert scan.is_long, "only tiles go on from a total"
        self._gpu, self._how, self._dtype, self._N = gpu, how, dtype, N
        self.part = scan.part
        start = np.array([how.identity(how.total_dtype(dtype))] * 2)
        self._totals = gpu.upload(start)  # read in turns: the total so far, and the one after the next part
        self._number, self._event = 0, gpu.event()

    def run(self, x: Array, y: Array) -> None:
        """Scan what comes next: x to y, flat. It goes through the GPU in chunks: a batch of parts, and what is left."""
        whole = len(x) // self.part * self.part
        for piece in (slice(0, whole), slice(whole, len(x))):
            if x[piece].size:
                parts = max(1, x[piece].size // self.part)
                shape = (parts, x[piece].size // parts)
                arrays = [x[piece].reshape(shape)], [y[piece].reshape(shape)]
                staging_of(self._gpu).run(*arrays, parts, functools.partial(self._enqueue, shape[1]))

    def _enqueue(self, size: int, given: Sequence[int], made: Sequence[int], rows: int, stream: int) -> None:
        planned = scan_call(self._gpu, self._how, self._dtype, (1, rows * size, 1), self._N)
        scratch = self._gpu.allocate(planned.scratch_bytes, stream)
        each = DTYPE_BYTES[self._how.total_dtype(self._dtype)]
        slots = [self._totals.pointer + (self._number + i) % 2 * each for i in range(2)]
        self._event.hold(stream)  # chunks have streams of their own, and each needs the total of the one before
        planned.enqueue(given[0], made[0], stream, scratch.pointer, *slots)
        self._event.record(stream)
        self._number += 1


def scan_rows_through(gpu: Gpu, x: Array, y: Array, how: ScanOp) -> None:
    """Rows of the host (R, N), row-major, through the GPU: many at a time, or a long one in parts."""
    (R, N), dtype = x.shape, x.dtype.name
    if _is_in_parts(dtype, N):
        for row in range(R):
            RowOnGpu(gpu, how, dtype, N).run(x[row], y[row])
        return

    def enqueue(given: Sequence[int], made: Sequence[int], rows: int, stream: int) -> None:
        planned = scan_call(gpu, how, dtype, (rows, N, 1))
        scratch = gpu.allocate(planned.scratch_bytes, stream) if planned.scratch_bytes else None
        planned.enqueue(given[0], made[0], stream, scratch.pointer if scratch else 0)

    if x.size:
        staging_of(gpu).run([x], [y], R, enqueue)


def _is_in_parts(dtype: str, N: int) -> bool:
    """Whether a row is too long for a slot of the staging."""
    return 2 * N * DTYPE_BYTES[dtype] > SLOT_BYTES


def row_on_gpu(gpu: Gpu, how: ScanOp, dtype: str, N: int, most: int) -> tuple[Callable[[Array, Array], None], int]:
    """How to scan a row of N numbers of the host, and how many at a time: at most `most`, if it is long."""
    if not _is_in_parts(dtype, N):
        return lambda x, y: scan_rows_through(gpu, x.reshape(1, -1), y.reshape(1, -1), how), max(1, N)
    row = RowOnGpu(gpu, how, dtype, N)
    return row.run, most // row.part * row.part
