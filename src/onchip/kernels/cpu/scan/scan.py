"""scan: running totals along rows or columns, on all threads, in a fixed order.

Idea      Two levels. A row is cut into segments. A thread takes the next one, totals it, tells the others, joins the
          totals before it, and scans it while it lies in its cache: x is read from memory once and y written once.
No waits  A thread that needs a total which has not been told yet makes it itself: a neighbour that lost its core to
          other work holds nobody up. (With barriers instead, a busy machine took 0.5 s for 2^24 numbers, not 5 ms.)
Same bits The segments, and the order in which their totals are joined, depend on N alone; of columns on N and I.
Errors    float32 sums and products are made in float64 and rounded once, so off by half an ulp: pairwise summation is
          off by more. Ints wrap. A NaN passes on.
Products  of floats may leave their range in a part and come back to it, or meet a zero: [0, 1e200, 1e200] has no NaN
          in it. Where that can have happened the row is walked again, from left to right where need be.
Floor     Memory: x in, y out. Two cores, 2^24 float32: the time of a copy, 1 / 2.7 of torch.cumsum's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from onchip.kernels.cpu.compiler.emit import INT
from onchip.kernels.cpu.compiler.jit import compiled, entry, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import cgutils, intrinsic, types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.scan.blocks import STREAM_ALIGNMENT
from onchip.kernels.cpu.scan.segments import COPY, JOIN, SCAN, SEGMENT, TOTAL, WALK, Job, column_part, row_part
from onchip.kernels.cpu.threading.threads import run_tasks, start_helpers
from onchip.network.graph import Network
from onchip.network.layers import CumSum
from onchip.network.recipe import Array
from onchip.network.scan_op import DTYPES, ScanOp
from onchip.plan import kernel as plan
from onchip.plan.device import Device

PIECE = 1 << 20  # numbers; a part of a row that begins at a multiple of it continues the row to the bit
_MAX_COLUMNS = 1024  # of a lane: runs of 4 KiB in memory
_COLUMN_SEGMENT = 1 << 15  # numbers of a part of columns: more rows of a wide matrix crowd one another out of L2
_STREAM_BYTES = 8 << 20  # of y, from which on it is written past the caches: nobody will find it there
_APART_BYTES = 128  # between what two threads write: no cache line is both's
_KNOWN_BYTES = 8  # of the number of a part


# -- what threads say to one another -----------------------------------------------------------------------


@intrinsic
def _tell(typing_context: Any, where: Any) -> Any:
    """Set the flag at an address; whoever sees it set sees everything that was written before."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(INT(1), b.inttoptr(args[0], INT.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _is_told(typing_context: Any, where: Any) -> Any:
    """Whether the flag at an address is set, asked after everything that was read before."""

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
    told: int, scratch: int, at: int,
) -> None:  # fmt: skip
    """Scan part `at`, and tell its total.

    part           address of a part function; x, y of the numbers, job of the job's
    before, after  of `lanes` states of `size` bytes: what lanes begin and end with; `after` may be 0: nobody asks
    sums, told     of a state for every part's total, and a flag for each that is 0
    scratch        of this worker's own: the number of a part, the total before it, and a place for totals
    """
    known, running, own = ints_at(scratch, 1), scratch + _KNOWN_BYTES, scratch + _KNOWN_BYTES + size
    lane, index, total = at // parts, at % parts, sums + at * size
    is_last = index == parts - 1
    if after != 0 or not is_last:
        _call(part, x, y, total, own, job, TOTAL, lane, index)
        _tell(told + at * 8)
    if known[0] <= lane * parts:
        known[0] = lane * parts
        _call(part, x, y, running, before + lane * size, job, COPY, lane, index)
    while known[0] < at:
        joins = sums + known[0] * size
        if not _is_told(told + known[0] * 8):
            _call(part, x, y, own, own, job, TOTAL, lane, known[0] % parts)
            if not _is_told(told + known[0] * 8):  # else what was read may be y by now
                joins = own
        _call(part, x, y, running, joins, job, JOIN, lane, index)
        known[0] += 1
    if after != 0 and is_last:
        _call(part, x, y, after + lane * size, running, job, COPY, lane, index)
        _call(part, x, y, after + lane * size, total, job, JOIN, lane, index)
    _call(part, x, y, running, own, job, SCAN, lane, index)


@compiled()
def _piece(
    worker: int, at: int, part: int, x: int, y: int, job: int, lanes: int, parts: int, size: int, before: int,
    after: int, sums: int, told: int, scratch: int, scratch_size: int,
) -> None:  # fmt: skip
    own = scratch + worker * scratch_size
    _scan_part(part, x, y, job, lanes, parts, size, before, after, sums, told, own, at)


@entry
def _run(
    part: int, x: int, y: int, job: int, lanes: int, parts: int, size: int, before: int, after: int, sums: int,
    told: int, scratch: int, scratch_size: int, threads: int,
) -> int:  # fmt: skip
    arguments = (part, x, y, job, lanes, parts, size, before, after, sums, told, scratch, scratch_size)
    run_tasks(_piece, arguments, lanes * parts, threads)
    return 0


@linked(*(types.int64,) * 9)
def _walk(part: int, x: int, y: int, job: int, parts: int, size: int, states: int, doubts: int, lane: int) -> None:
    """Scan a lane that is in doubt from its first part to its last.

    states  address of `lanes` states: what lanes begin with, overwritten by what they end with
    """
    if _is_told(doubts + lane * 8):
        for index in range(parts):
            _call(part, x, y, states + lane * size, states + lane * size, job, WALK, lane, index)


@compiled()
def _walk_piece(
    worker: int, lane: int, part: int, x: int, y: int, job: int, parts: int, size: int, states: int, doubts: int
) -> None:
    _walk(part, x, y, job, parts, size, states, doubts, lane)


@entry
def _run_walk(
    part: int, x: int, y: int, job: int, lanes: int, parts: int, size: int, states: int, doubts: int, threads: int
) -> int:
    run_tasks(_walk_piece, (part, x, y, job, parts, size, states, doubts), lanes, threads)
    return 0


def _launch(part: int, x: Array, y: Array, job: Job, before: Array, after: Array | None, is_watched: bool) -> None:
    """before, after: (lanes, numbers of a state), of the total's dtype; before may be overwritten"""
    if is_watched and np.may_share_memory(x, y):
        x = x.copy()  # lanes may have to be walked again
    lanes, parts, threads, size = job.lanes, job.parts, job.threads, before.shape[1] * before.itemsize
    sums = np.empty((lanes * parts, before.shape[1]), before.dtype)
    flags = np.zeros(lanes + lanes * parts, np.int64)
    doubts_at, told = _where(flags), _where(flags) + 8 * lanes
    numbers = np.array((*job[:-1], doubts_at), np.int64)
    scratch = np.zeros((threads, _KNOWN_BYTES + 2 * size + _APART_BYTES), np.uint8)
    start_helpers(threads)
    _run(
        part, _where(x), _where(y), _where(numbers), lanes, parts, size, _where(before),
        0 if after is None else _where(after), _where(sums), told, _where(scratch), scratch.shape[1], threads,
    )  # fmt: skip
    if not is_watched or (parts == 1 and after is None):
        return
    in_doubt = flags[:lanes] != 0
    if in_doubt.any():
        _run_walk(
            part, _where(x), _where(y), _where(numbers), lanes, parts, size, _where(before), doubts_at, threads
        )  # fmt: skip
        if after is not None:
            after[in_doubt] = before[in_doubt]


def _where(array: Array) -> int:
    """Where an array begins. Numba would compile its own way to it for memory maps and read-only arrays anew."""
    return int(array.__array_interface__["data"][0])


@functools.cache
def _kinds(how: ScanOp, dtype: np.dtype[Any]) -> tuple[str, Any, bool]:
    """A dtype's name, how.identity as a total, and whether results may be in doubt."""
    return dtype.name, how.identity(how.total_dtype(dtype.name)), how.op == "product" and dtype.kind == "f"


def scan_rows(x: Array, y: Array, how: ScanOp, threads: int, totals: Array | None = None) -> None:
    """Running totals along the last axis.

    x, y    (R, N) of one dtype of DTYPES, row-major; y is overwritten and may be x
    totals  (R,) of how.total_dtype: what came before each row, overwritten by what the row ends with. A row may be
            scanned in parts that begin at multiples of PIECE (in reverse: counted from its end): same bits as in one go
    """
    R, N = x.shape
    if not x.size:
        return
    dtype, identity, is_watched = _kinds(how, x.dtype)
    # Short rows together, unless each has a total of its own to keep.
    rows_per_lane = max(1, SEGMENT // N) if totals is None else 1
    lanes, parts = -(-R // rows_per_lane), -(-N // SEGMENT)
    stream = y.nbytes >= _STREAM_BYTES and _where(y) % STREAM_ALIGNMENT == 0 and not np.may_share_memory(x, y)
    workers = min(threads, lanes * parts)
    job = Job(lanes, parts, workers, N, how.exclusive, how.reverse, R, rows_per_lane, stream)
    if totals is None:
        before, after = np.full((lanes, 1), identity), None
    else:
        before, after = totals.reshape(R, 1).copy(), totals.reshape(R, 1)
    _launch(row_part(how.op, dtype), x, y, job, before, after, is_watched)


def scan_columns(x: Array, y: Array, how: ScanOp, threads: int) -> None:
    """Running totals along the middle axis of x, y: (O, N, I) of one dtype of DTYPES, row-major; y may be x."""
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


class ScanKernel:
    name = "scan"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: plan.Job) -> Iterator[plan.Claim | plan.Refusal]:
        node = net.nodes[start]
        if job.is_training or not isinstance(node.layer, CumSum):
            return
        x = net.types[node.name]
        if x.dtype not in DTYPES:
            yield plan.Refusal(self.name, node.name, f"computes on {', '.join(DTYPES)}, got {x.dtype}")
            return
        # A segment is totalled as it comes from memory, then scanned in cache.
        cost = CoreCost(net.row_flop(node), 2 * x.row_bytes, row_cache_bytes=2 * x.row_bytes)
        order = f"parts of {SEGMENT} along rows, of {_COLUMN_SEGMENT} numbers down columns; their totals in order"
        yield plan.Claim(
            self.name, "scan<sum>", (node.name,), cost, "one layer by itself", order=order, facts=node.layer
        )

    def bind(
        self, claim: plan.Claim, weights: dict[str, Array]
    ) -> Callable[[Sequence[Array], Sequence[Array], int], None]:
        layer = claim.facts
        assert isinstance(layer, CumSum)
        how = ScanOp("sum", layer.exclusive, layer.reverse)

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            x, y = inputs[0], outputs[0]
            axis = layer.axis % x.ndim
            shape = (math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))
            scan_columns(x.reshape(shape), y.reshape(shape), how, threads)

        return run
