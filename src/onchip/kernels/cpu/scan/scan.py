"""scan: prefix sums, products, maxima and minima along rows or columns, on all threads, in a fixed order.

Idea      Two levels. A row is cut into segments. A thread claims the next one, publishes its total, joins the totals
          before it, and scans it while it is in cache: x is read from memory once and y written once.
No waits  A thread recomputes any total that is not published yet, so it never waits for a thread that lost its core.
          (With barriers instead, a busy machine took 0.5 s for 2^24 elements, not 5 ms.)
Same bits The segments, and the order in which their totals are joined, depend on N only; for columns on N and I.
Errors    float32 sums and products are computed in float64 and rounded once: half an ulp, less than pairwise
          summation. Ints wrap. NaN propagates.
Products  A part's product may overflow where the row's does not, or meet a zero: [0, 1e200, 1e200] must not give NaN.
          Rows where that may have happened are scanned again, left to right where necessary.
Floor     Memory: x in, y out. Two cores, 2^24 float32: the time of a copy, 1 / 2.7 of torch.cumsum's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from onchip.kernels.cpu.compiler.emit import INT
from onchip.kernels.cpu.compiler.jit import compiled, entry, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import cgutils, intrinsic, types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.scan.blocks import STREAM_ALIGNMENT
from onchip.kernels.cpu.scan.segments import COPY, JOIN, RESCAN, SCAN, SEGMENT, TOTAL, Job, column_part, row_part
from onchip.kernels.cpu.threading.threads import run_tasks, start_helpers
from onchip.network.graph import Network, Node
from onchip.network.layers import CumSum, Layer
from onchip.network.recipe import Array
from onchip.network.scan_op import DTYPES, ScanOp
from onchip.network.types import TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim

CHUNK = 1 << 20  # elements; rows may be scanned in chunks that begin at multiples of it, with the same bits
_MAX_COLUMNS = 1024  # per lane: contiguous 4 KiB
_COLUMN_SEGMENT = 1 << 15  # elements per part of columns: larger ones evict each other from L2
_STREAM_BYTES = 8 << 20  # of y: from this size it is written with non-temporal stores
_PADDING_BYTES = 128  # between two threads' scratch: no shared cache line
_INDEX_BYTES = 8  # of a part's index


# -- flags between threads ---------------------------------------------------------------------------------


@intrinsic
def _set_flag(typing_context: Any, where: Any) -> Any:
    """Set the flag at an address, with release order."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(INT(1), b.inttoptr(args[0], INT.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _is_set(typing_context: Any, where: Any) -> Any:
    """Whether the flag at an address is set; ordered after all earlier reads."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.fence("acquire")
        flag = b.load_atomic(b.inttoptr(args[0], INT.as_pointer()), "acquire", 8)
        return b.icmp_signed("!=", flag, INT(0))

    return types.boolean(types.int64), codegen


@intrinsic
def _call(
    typing_context: Any, part: Any, x: Any, y: Any, state: Any, other: Any, job: Any, task: Any, lane: Any, index: Any
) -> Any:
    """Call the part function at an address (scan/segments.py); x, y, state, other and job are addresses too."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [*[cgutils.voidptr_t] * 5, *[INT] * 3])
        pointers = [b.inttoptr(where, cgutils.voidptr_t) for where in args[1:6]]
        b.call(b.inttoptr(args[0], kind.as_pointer()), [*pointers, *args[6:]])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 9), codegen


# -- two levels --------------------------------------------------------------------------------------------


@linked(*(types.int64,) * 13)
def _scan_part(
    part: int, x: int, y: int, job: int, lanes: int, parts: int, size: int, before: int, after: int, sums: int,
    published: int, scratch: int, at: int,
) -> None:  # fmt: skip
    """Scan part `at`, and publish its total. Arguments are addresses:

    part              a part function
    before, after     `lanes` states of `size` bytes, the carry-in and carry-out; `after` may be 0: not needed
    sums, published   a state per part for its total, and a flag per part, 0 at first
    scratch           this worker's: the index of a part, its exclusive prefix, and a state
    """
    joined, running, own = ints_at(scratch, 1), scratch + _INDEX_BYTES, scratch + _INDEX_BYTES + size
    lane, index, total = at // parts, at % parts, sums + at * size
    is_last = index == parts - 1
    if after != 0 or not is_last:
        _call(part, x, y, total, own, job, TOTAL, lane, index)
        _set_flag(published + at * 8)
    if joined[0] <= lane * parts:
        joined[0] = lane * parts
        _call(part, x, y, running, before + lane * size, job, COPY, lane, index)
    while joined[0] < at:
        joins = sums + joined[0] * size
        if not _is_set(published + joined[0] * 8):
            _call(part, x, y, own, own, job, TOTAL, lane, joined[0] % parts)
            if not _is_set(published + joined[0] * 8):  # else what was read may be y already
                joins = own
        _call(part, x, y, running, joins, job, JOIN, lane, index)
        joined[0] += 1
    if after != 0 and is_last:
        _call(part, x, y, after + lane * size, running, job, COPY, lane, index)
        _call(part, x, y, after + lane * size, total, job, JOIN, lane, index)
    _call(part, x, y, running, own, job, SCAN, lane, index)


@compiled()
def _scan_task(
    worker: int, at: int, part: int, x: int, y: int, job: int, lanes: int, parts: int, size: int, before: int,
    after: int, sums: int, published: int, scratch: int, scratch_size: int,
) -> None:  # fmt: skip
    own = scratch + worker * scratch_size
    _scan_part(part, x, y, job, lanes, parts, size, before, after, sums, published, own, at)


@entry
def _run(
    part: int, x: int, y: int, job: int, lanes: int, parts: int, size: int, before: int, after: int, sums: int,
    published: int, scratch: int, scratch_size: int, threads: int,
) -> int:  # fmt: skip
    arguments = (part, x, y, job, lanes, parts, size, before, after, sums, published, scratch, scratch_size)
    run_tasks(_scan_task, arguments, lanes * parts, threads)
    return 0


@linked(*(types.int64,) * 9)
def _rescan(part: int, x: int, y: int, job: int, parts: int, size: int, states: int, doubts: int, lane: int) -> None:
    """Scan a lane with its doubt flag set from its first part to its last.

    states  address of `lanes` states: the carry-in, overwritten by the carry-out
    """
    if _is_set(doubts + lane * 8):
        for index in range(parts):
            _call(part, x, y, states + lane * size, states + lane * size, job, RESCAN, lane, index)


@compiled()
def _rescan_task(
    worker: int, lane: int, part: int, x: int, y: int, job: int, parts: int, size: int, states: int, doubts: int
) -> None:
    _rescan(part, x, y, job, parts, size, states, doubts, lane)


@entry
def _run_rescan(
    part: int, x: int, y: int, job: int, lanes: int, parts: int, size: int, states: int, doubts: int, threads: int
) -> int:
    run_tasks(_rescan_task, (part, x, y, job, parts, size, states, doubts), lanes, threads)
    return 0


def _launch(part: int, x: Array, y: Array, job: Job, before: Array, after: Array | None, is_watched: bool) -> None:
    """before, after: (lanes, elements of a state), of the total's dtype; before may be overwritten"""
    if is_watched and np.may_share_memory(x, y):
        x = x.copy()  # lanes may be scanned again
    lanes, parts, threads, size = job.lanes, job.parts, job.threads, before.shape[1] * before.itemsize
    sums = np.empty((lanes * parts, before.shape[1]), before.dtype)
    flags = np.zeros(lanes + lanes * parts, np.int64)
    doubts_at, published = _ptr(flags), _ptr(flags) + 8 * lanes
    fields = np.array((*job[:-1], doubts_at), np.int64)
    scratch = np.zeros((threads, _INDEX_BYTES + 2 * size + _PADDING_BYTES), np.uint8)
    start_helpers(threads)
    _run(
        part, _ptr(x), _ptr(y), _ptr(fields), lanes, parts, size, _ptr(before),
        0 if after is None else _ptr(after), _ptr(sums), published, _ptr(scratch), scratch.shape[1], threads,
    )  # fmt: skip
    if not is_watched or (parts == 1 and after is None):
        return
    in_doubt = flags[:lanes] != 0
    if in_doubt.any():
        _run_rescan(
            part, _ptr(x), _ptr(y), _ptr(fields), lanes, parts, size, _ptr(before), doubts_at, threads
        )  # fmt: skip
        if after is not None:
            after[in_doubt] = before[in_doubt]


def _ptr(array: Array) -> int:
    """An array's address. Numba's own access is compiled again for memory maps and for read-only arrays."""
    return int(array.__array_interface__["data"][0])


@functools.cache
def _kinds(how: ScanOp, dtype: np.dtype[Any]) -> tuple[str, Any, bool]:
    """A dtype's name, how.identity as a total, and whether results may be unsafe."""
    return dtype.name, how.identity(how.total_dtype(dtype.name)), how.op == "product" and dtype.kind == "f"


def scan_rows(x: Array, y: Array, how: ScanOp, threads: int, totals: Array | None = None) -> None:
    """Scan along the last axis.

    x, y    (R, N) of one dtype of DTYPES, row-major; y is overwritten and may be x
    totals  (R,) of how.total_dtype: the carry-in per row, overwritten by the carry-out. A row may be scanned in chunks
            that begin at multiples of CHUNK (in reverse: counted from its end), with the same bits as at once
    """
    R, N = x.shape
    if not x.size:
        return
    dtype, identity, is_watched = _kinds(how, x.dtype)
    # Short rows share a lane, unless each has a carry-out.
    rows_per_lane = max(1, SEGMENT // N) if totals is None else 1
    lanes, parts = -(-R // rows_per_lane), -(-N // SEGMENT)
    stream = y.nbytes >= _STREAM_BYTES and _ptr(y) % STREAM_ALIGNMENT == 0 and not np.may_share_memory(x, y)
    workers = min(threads, lanes * parts)
    job = Job(lanes, parts, workers, N, how.exclusive, how.reverse, R, rows_per_lane, stream)
    if totals is None:
        before, after = np.full((lanes, 1), identity), None
    else:
        before, after = totals.reshape(R, 1).copy(), totals.reshape(R, 1)
    _launch(row_part(how.op, dtype), x, y, job, before, after, is_watched)


def scan_columns(x: Array, y: Array, how: ScanOp, threads: int) -> None:
    """Scan along the middle axis of x, y: (O, N, I) of one dtype of DTYPES, row-major; y may be x."""
    O, N, I = x.shape  # noqa: E741
    if I == 1:
        scan_rows(x.reshape(O, N), y.reshape(O, N), how, threads)
        return
    if not x.size:
        return
    dtype, identity, is_watched = _kinds(how, x.dtype)
    width = -(-I // -(-I // _MAX_COLUMNS))
    length = _COLUMN_SEGMENT // width
    lanes, parts = O * -(-I // width), -(-N // length)
    workers = min(threads, lanes * parts)
    job = Job(
        lanes, parts, workers, N, how.exclusive, how.reverse, columns=I, columns_per_lane=width, part_length=length
    )
    _launch(column_part(how.op, dtype), x, y, job, np.full((lanes, width), identity), None, is_watched)


# -- CumSum layers -----------------------------------------------------------------------------------------


class ScanKernel(CpuKernel):
    name = "scan"
    layers = (CumSum,)
    dtypes = DTYPES
    order = f"parts of {SEGMENT} elements in rows, {_COLUMN_SEGMENT} in columns; their totals in order"

    def label(self, net: Network, node: Node) -> str:
        return f"{self.name}<sum>"

    def cost(self, net: Network, node: Node) -> CoreCost:
        # A segment is summed as it comes from memory, then scanned in cache.
        nbytes = 2 * net.types[node.name].row_bytes
        return CoreCost(net.row_flop(node), nbytes, row_cache_bytes=nbytes)

    def lower(self, node: Node, types: Mapping[str, TensorType], device: Device) -> Layer:
        return node.layer

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Callable[[Sequence[Array], Sequence[Array], int], None]:
        layer = claim.facts
        assert isinstance(layer, CumSum)
        how = ScanOp("sum", layer.exclusive, layer.reverse)

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            x, y = inputs[0], outputs[0]
            axis = layer.axis % x.ndim
            shape = (math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))
            scan_columns(x.reshape(shape), y.reshape(shape), how, threads)

        return run
