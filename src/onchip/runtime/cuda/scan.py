"""Scans on a GPU: of arrays stored there, and of host rows, long ones in parts."""

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
    """One scan with prepared launches, of whole rows or of one part of a long row."""

    def __init__(self, gpu: Gpu, scan: Scan) -> None:
        self._launches, self._lock = BoundSteps(gpu, scan.steps(gpu.device)), threading.Lock()
        self.scratch_bytes = self._launches.scratch_bytes

    def enqueue(self, x: int, y: int, stream: int, scratch: int, before: int = 0, after: int = 0) -> None:
        """Put the work on a stream. All other arguments are pointers; x and y may be equal.

        scratch        `scratch_bytes` that only this call uses
        before, after  for a part of a long row: the total of the parts before it, and the total including it
        """
        with self._lock:
            self._launches.enqueue((x, before), (y, after), scratch, stream)


@functools.lru_cache(maxsize=256)
def bound_scan(
    gpu: Gpu, how: ScanOp, dtype: str, shape: tuple[int, int, int], whole: int = 0, is_aligned: bool = True
) -> BoundScan:
    """shape       (outer, N, inner), scanned along the middle axis
    whole       elements of the long row that this is a part of; 0: not a part
    is_aligned  x and y begin at multiples of 16 bytes
    """
    outer, N, inner = shape
    return BoundScan(gpu, Scan(how, dtype, outer, N, inner, whole, is_aligned))


# -- arrays on the GPU ---------------------------------------------------------------------------------------


def scan_on_gpu(x: Any, kind: ArrayAdapter, gpu: Gpu, how: ScanOp, axis: int, out: Any) -> Any:
    """Scan an array on a GPU, on its owner's stream; the result is of the same kind."""
    stream = kind.stream(x)
    x_view = _check(kind.describe(x, stream), gpu, "x")
    dtype, shape = check_dtype(x_view.dtype), x_view.shape
    axis = check_axis(axis, shape)
    if out is not None and not kind.owns(out):
        got = f"{type(out).__module__}.{type(out).__name__}"
        raise InputError("out is of another kind than x", got=got, expected=kind.name)
    y = kind.empty(TensorType((BATCH, *shape[1:]), dtype), shape[0], stream) if out is None else out
    y_view = _check(kind.describe(y, stream), gpu, "out")
    check_out(y_view.shape, y_view.dtype, shape, dtype)
    if not y_view.is_writable:
        raise InputError("out cannot be written to", got=kind.name, hint="y = onchip.scan(x), without out")
    if y_view.pointer != x_view.pointer and y_view.overlaps(x_view):
        raise ShapeError("out overlaps x", expected="x itself, or separate memory")
    sizes = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    bound = bound_scan(gpu, how, dtype, sizes, is_aligned=(x_view.pointer | y_view.pointer) % 16 == 0)
    with gpu:
        scratch = kind.scratch(bound.scratch_bytes, stream)
        bound.enqueue(x_view.pointer, y_view.pointer, stream, scratch.pointer if scratch else 0)
        kind.launched([x_view.owner], out is not None)  # freeing y waits for the work; scratch is freed in stream order
    return y if out is not None else kind.export(y)


def _check(view: ArrayView, gpu: Gpu, what: str) -> ArrayView:
    if view.device_index != gpu.index:
        raise InputError(f"{what} is on another device", got=f"cuda:{view.device_index}", expected=f"cuda:{gpu.index}")
    if not view.is_row_major:
        raise ShapeError(f"{what} is not row-major", got=f"a view of {view}", hint="copy it: x.contiguous(), x.copy()")
    return view


# -- host rows -----------------------------------------------------------------------------------------------


class _LongRow:
    """One long row of N host elements, scanned in parts: multiples of `part` elements, except the last one."""

    def __init__(self, gpu: Gpu, how: ScanOp, dtype: str, N: int) -> None:
        scan = Scan(how, dtype, 1, N)
        assert scan.is_long, "only a long scan continues from a total"
        self._gpu, self._how, self._dtype, self._N = gpu, how, dtype, N
        self.part = scan.group
        start = np.array([how.identity(how.total_dtype(dtype))] * 2)
        self._totals = gpu.upload(start)  # double-buffered: the total so far, and the one after the next part
        self._count, self._event = 0, gpu.event()

    def run(self, x: Array, y: Array) -> None:
        """Scan the next elements of the row, x to y, flat: first the whole parts as one batch, then the remainder."""
        whole = len(x) // self.part * self.part
        for chunk in (slice(0, whole), slice(whole, len(x))):
            if x[chunk].size:
                parts = max(1, x[chunk].size // self.part)
                shape = (parts, x[chunk].size // parts)
                arrays = [x[chunk].reshape(shape)], [y[chunk].reshape(shape)]
                staging_of(self._gpu).run(*arrays, parts, functools.partial(self._enqueue, shape[1]))

    def _enqueue(self, size: int, x_pointers: Sequence[int], y_pointers: Sequence[int], rows: int, stream: int) -> None:
        bound = bound_scan(self._gpu, self._how, self._dtype, (1, rows * size, 1), self._N)
        scratch = self._gpu.allocate(bound.scratch_bytes, stream)
        total_bytes = DTYPE_BYTES[self._how.total_dtype(self._dtype)]
        slots = [self._totals.pointer + (self._count + i) % 2 * total_bytes for i in range(2)]
        self._event.block_stream(stream)  # chunks have their own streams, and each needs the total of the previous one
        bound.enqueue(x_pointers[0], y_pointers[0], stream, scratch.pointer, *slots)
        self._event.record(stream)
        self._count += 1


def scan_rows_through(gpu: Gpu, x: Array, y: Array, how: ScanOp) -> None:
    """Stream host rows (R, N), row-major, through the GPU: in chunks of many rows, or each long row in parts."""
    (R, N), dtype = x.shape, x.dtype.name
    if _is_in_parts(dtype, N):
        for row in range(R):
            _LongRow(gpu, how, dtype, N).run(x[row], y[row])
        return

    def enqueue(x_pointers: Sequence[int], y_pointers: Sequence[int], rows: int, stream: int) -> None:
        bound = bound_scan(gpu, how, dtype, (rows, N, 1))
        scratch = gpu.allocate(bound.scratch_bytes, stream) if bound.scratch_bytes else None
        bound.enqueue(x_pointers[0], y_pointers[0], stream, scratch.pointer if scratch else 0)

    if x.size:
        staging_of(gpu).run([x], [y], R, enqueue)


def _is_in_parts(dtype: str, N: int) -> bool:
    """Whether a row is too long for a staging slot."""
    return 2 * N * DTYPE_BYTES[dtype] > SLOT_BYTES


def row_scanner(gpu: Gpu, how: ScanOp, dtype: str, N: int, most: int) -> tuple[Callable[[Array, Array], None], int]:
    """A function that scans a host row of N elements step by step, and the elements per step: at most `most`, or N."""
    if not _is_in_parts(dtype, N):
        return lambda x, y: scan_rows_through(gpu, x.reshape(1, -1), y.reshape(1, -1), how), max(1, N)
    row = _LongRow(gpu, how, dtype, N)
    return row.run, most // row.part * row.part
