"""Scans on a GPU: of arrays stored there, and of host rows in parts."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.kernels.cuda.scan.scan import Scan
from onchip.network.recipe import Array
from onchip.network.scan_op import ScanOp, check_axis, check_dtype, check_out
from onchip.network.types import BATCH, DTYPE_BYTES, TensorType
from onchip.plan.host_call import SLOT_BYTES
from onchip.runtime.arrays.adapters import ArrayAdapter, ArrayView
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.staging import staging_of


class BoundScan:
    """One scan with prepared launches: `enqueue` puts it on a stream. A part of a row also uses totals."""

    def __init__(self, gpu: Gpu, scan: Scan) -> None:
        self._launches, self._lock = BoundSteps(gpu, scan.steps(gpu.device)), threading.Lock()
        self.scratch_bytes = self._launches.scratch_bytes

    def enqueue(self, x: int, y: int, stream: int, scratch: int, before: int = 0, after: int = 0) -> None:
        """Put the work on a stream: pointers of x and y, which may be equal.

        scratch        pointer to `scratch_bytes` for this call alone
        before, after  for a long row in parts: pointers to the total to continue from and to the part's new total
        """
        with self._lock:
            self._launches.enqueue((x, before), (y, after), scratch, stream)


@functools.lru_cache(maxsize=256)
def bound_scan(
    gpu: Gpu, how: ScanOp, dtype: str, shape: tuple[int, int, int], whole: int = 0, is_aligned: bool = True
) -> BoundScan:
    """shape       (outer, N, inner): along the middle axis
    whole       elements of the row that this is a part of; 0: it is the whole row
    is_aligned  x and y begin at multiples of 16 bytes
    """
    outer, N, inner = shape
    return BoundScan(gpu, Scan(how, dtype, outer, N, inner, whole, is_aligned))


# -- arrays on the GPU ---------------------------------------------------------------------------------------


def scan_there(x: Any, kind: ArrayAdapter, gpu: Gpu, how: ScanOp, axis: int, out: Any) -> Any:
    """Scan an array on a GPU, on its owner's stream; the result is of the same kind."""
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
    if made.pointer != given.pointer and made.overlaps(given):
        raise ShapeError("out overlaps x", expected="x itself, or memory of its own")
    parts = math.prod(shape[:at]), shape[at], math.prod(shape[at + 1 :])
    planned = bound_scan(gpu, how, dtype, parts, is_aligned=(given.pointer | made.pointer) % 16 == 0)
    with gpu:
        scratch = kind.scratch(planned.scratch_bytes, stream)
        planned.enqueue(given.pointer, made.pointer, stream, scratch.pointer if scratch else 0)
        kind.launched([given.owner], out is not None)  # freeing y waits for the work; scratch is freed in stream order
    return y if out is not None else kind.hand_out(y)


def _check(placed: ArrayView, gpu: Gpu, what: str) -> ArrayView:
    if placed.device_index != gpu.index:
        raise InputError(
            f"{what} is on another device", got=f"cuda:{placed.device_index}", expected=f"cuda:{gpu.index}"
        )
    if not placed.is_row_major:
        raise ShapeError(
            f"{what} is not row-major", got=f"a view of {placed}", hint="a copy of it: x.contiguous(), x.copy()"
        )
    return placed


# -- host rows -----------------------------------------------------------------------------------------------


class RowOnGpu:
    """One long row of N elements, scanned in parts: each a multiple of `part` but the last."""

    def __init__(self, gpu: Gpu, how: ScanOp, dtype: str, N: int) -> None:
        scan = Scan(how, dtype, 1, N)
        assert scan.is_long, "only tiles go on from a total"
        self._gpu, self._how, self._dtype, self._N = gpu, how, dtype, N
        self.part = scan.part
        start = np.array([how.identity(how.total_dtype(dtype))] * 2)
        self._totals = gpu.upload(start)  # double-buffered: the total so far, and the one after the next part
        self._number, self._event = 0, gpu.event()

    def run(self, x: Array, y: Array) -> None:
        """Scan the next part, x to y, flat. It is staged in chunks: a batch of parts, then the remainder."""
        whole = len(x) // self.part * self.part
        for piece in (slice(0, whole), slice(whole, len(x))):
            if x[piece].size:
                parts = max(1, x[piece].size // self.part)
                shape = (parts, x[piece].size // parts)
                arrays = [x[piece].reshape(shape)], [y[piece].reshape(shape)]
                staging_of(self._gpu).run(*arrays, parts, functools.partial(self._enqueue, shape[1]))

    def _enqueue(self, size: int, given: Sequence[int], made: Sequence[int], rows: int, stream: int) -> None:
        planned = bound_scan(self._gpu, self._how, self._dtype, (1, rows * size, 1), self._N)
        scratch = self._gpu.allocate(planned.scratch_bytes, stream)
        each = DTYPE_BYTES[self._how.total_dtype(self._dtype)]
        slots = [self._totals.pointer + (self._number + i) % 2 * each for i in range(2)]
        self._event.hold(stream)  # chunks have their own streams, and each needs the total of the previous one
        planned.enqueue(given[0], made[0], stream, scratch.pointer, *slots)
        self._event.record(stream)
        self._number += 1


def scan_rows_through(gpu: Gpu, x: Array, y: Array, how: ScanOp) -> None:
    """Stream host rows (R, N), row-major, through the GPU: many at a time, or a long one in parts."""
    (R, N), dtype = x.shape, x.dtype.name
    if _is_in_parts(dtype, N):
        for row in range(R):
            RowOnGpu(gpu, how, dtype, N).run(x[row], y[row])
        return

    def enqueue(given: Sequence[int], made: Sequence[int], rows: int, stream: int) -> None:
        planned = bound_scan(gpu, how, dtype, (rows, N, 1))
        scratch = gpu.allocate(planned.scratch_bytes, stream) if planned.scratch_bytes else None
        planned.enqueue(given[0], made[0], stream, scratch.pointer if scratch else 0)

    if x.size:
        staging_of(gpu).run([x], [y], R, enqueue)


def _is_in_parts(dtype: str, N: int) -> bool:
    """Whether a row is too long for a staging slot."""
    return 2 * N * DTYPE_BYTES[dtype] > SLOT_BYTES


def row_on_gpu(gpu: Gpu, how: ScanOp, dtype: str, N: int, most: int) -> tuple[Callable[[Array, Array], None], int]:
    """A function that scans a host row of N elements, and its step: at most `most` elements, if the row is long."""
    if not _is_in_parts(dtype, N):
        return lambda x, y: scan_rows_through(gpu, x.reshape(1, -1), y.reshape(1, -1), how), max(1, N)
    row = RowOnGpu(gpu, how, dtype, N)
    return row.run, most // row.part * row.part
