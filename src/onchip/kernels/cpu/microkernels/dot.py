"""GEMM with few columns: vector lanes run along K instead of along the columns.

    out[r, n] = bias[n] + sum over h, k of a[r, h, k] * w[n, h, k]        r < ROWS, n < OUTS

Idea      multiply_tile maps columns to lanes, so three columns use three lanes of sixteen. Here a vector holds LANES
          consecutive products of one sum; a horizontal reduction adds up the lanes of all sums once at the end.
Floor     ROWS x OUTS FMAs for ROWS + OUTS loads: 4 x 3 is compute-bound. Reducing the lanes costs 3 operations per sum.
Order     The position of an element along K fixes when it is added, for any ROWS.
Accuracy  Where terms cancel, shorter chains of additions lose fewer digits. BLAS libraries split dot products into many
          chains, so dense_narrow keeps CHAINS vectors of partial sums per output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import linked
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types

ROWS = 4
NARROW = max(2, LANES // 4)  # columns up to which lanes along K are as fast as lanes along the columns
CHAINS = 4  # vectors of partial sums per output of dense_narrow: as many as fit in registers with ROWS rows
ORDER = f"k in {CHAINS} x {LANES} lanes, reduced in pairs"  # of dense_narrow


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dot_tile(
    typing_context: Any, a: Any, a_row: Any, a_h: Any, w: Any, w_out: Any, H: Any, K: Any, bias: Any, out: Any,
    out_row: Any, rows: Any, outs: Any,
) -> Any:  # fmt: skip
    """Compute one tile. Addresses and strides are in bytes; rows and outs are literals; K is a multiple of LANES.

    a_h    stride from line h of the window to the next; w stores the H * K elements of an output contiguously,
           w_out apart
    """
    if not (isinstance(rows, types.IntegerLiteral) and isinstance(outs, types.IntegerLiteral)):
        return None  # makes Numba retry with literals
    signature = types.void(*(types.int64,) * 10, rows, outs)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit(builder, args[:10], rows.literal_value, outs.literal_value)
        return context.get_dummy_value()

    return signature, codegen


def _emit(b: Any, args: Any, rows: int, outs: int) -> None:
    a, a_row, a_h, w, w_out, H, K, bias, out, out_row = args
    count = rows * outs

    def line(h: Any, sums: list[Any]) -> list[Any]:
        a_at = [b.add(b.add(a, b.mul(a_row, emit.INT(r))), b.mul(h, a_h)) for r in range(rows)]
        w_line = b.mul(h, b.mul(K, emit.INT(4)))
        w_at = [b.add(b.add(w, b.mul(w_out, emit.INT(n))), w_line) for n in range(outs)]

        def step(k: Any, sums: list[Any]) -> list[Any]:
            offset = b.mul(k, emit.INT(4))
            x = [emit.load(b, b.add(at, offset), emit.VECTOR) for at in a_at]
            y = [emit.load(b, b.add(at, offset), emit.VECTOR) for at in w_at]
            return [emit.multiply_add(b, x[i // outs], y[i % outs], sums[i]) for i in range(count)]

        return emit.loop(b, emit.INT(0), K, LANES, sums, step)

    sums = emit.loop(b, emit.INT(0), H, 1, [emit.zeros()] * count, line)
    for first in range(0, count, LANES):
        group = sums[first : first + LANES]
        totals = _add_lanes(b, group + [emit.zeros()] * (LANES - len(group)))
        for i in range(first, first + len(group)):
            total = b.extract_element(totals, emit.INT32(i - first))
            total = b.fadd(emit.load(b, b.add(bias, emit.INT(4 * (i % outs))), emit.FLOAT), total)
            emit.store(b, total, b.add(out, b.add(b.mul(out_row, emit.INT(i // outs)), emit.INT(4 * (i % outs)))))


def _add_lanes(b: Any, vectors: list[Any]) -> Any:
    """Reduce the lanes of LANES vectors to one vector of sums; each level adds halves and merges pairs of vectors."""
    width = LANES
    while len(vectors) > 1:
        width //= 2
        groups = range(0, 2 * LANES, 2 * width)  # first lane of each sum, over both vectors
        low = ir.Constant(emit.LANE_INDICES, [g + lane for g in groups for lane in range(width)])
        high = ir.Constant(emit.LANE_INDICES, [g + width + lane for g in groups for lane in range(width)])
        vectors = [
            b.fadd(b.shuffle_vector(u, v, low), b.shuffle_vector(u, v, high))
            for u, v in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _narrow_tile(
    typing_context: Any, a: Any, a_row: Any, w: Any, K: Any, bias: Any, out: Any, out_row: Any, floor: Any, rows: Any
) -> Any:
    """One column of dense_narrow for `rows` rows, a literal.

    Element k is in lane k % LANES of chain k // LANES % CHAINS: its position fixes the reduction order.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    signature = types.void(*(types.int64,) * 7, types.float32, rows)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_narrow(builder, args[:8], rows.literal_value)
        return context.get_dummy_value()

    return signature, codegen


def _emit_narrow(b: Any, args: Any, rows: int) -> None:
    a, a_row, w, K, bias, out, out_row, floor = args
    step = CHAINS * LANES
    whole = b.and_(K, emit.INT(-step))
    a_at = [b.add(a, b.mul(a_row, emit.INT(r))) for r in range(rows)]

    def add(c: int, load: Callable[[Any, Any], Any]) -> Callable[[Any, list[Any]], list[Any]]:
        """Accumulate the elements from k on into chain c of every row; `load` receives an address and its first k."""

        def accumulate(k: Any, sums: list[Any]) -> list[Any]:
            offset = b.mul(k, emit.INT(4))
            y = load(b.add(w, offset), k)
            for r in range(rows):
                x = load(b.add(a_at[r], offset), k)
                sums[r * CHAINS + c] = emit.multiply_add(b, x, y, sums[r * CHAINS + c])
            return sums

        return accumulate

    def vector(at: Any, first: Any) -> Any:
        return emit.load(b, at, emit.VECTOR)

    def remainder(at: Any, first: Any) -> Any:
        # Masked: what follows the last element may be another row's infinity, or unmapped memory.
        return emit.masked_load(b, at, b.sub(K, first))

    def body(k: Any, sums: list[Any]) -> list[Any]:
        for c in range(CHAINS):
            sums = add(c, vector)(b.add(k, emit.INT(c * LANES)), sums)
        return sums

    sums = emit.loop(b, emit.INT(0), whole, step, [emit.zeros()] * (rows * CHAINS), body)
    last_vector = b.sub(K, emit.INT(LANES))
    for c in range(CHAINS):  # remainder: each chain has a whole vector, a partial one, or none
        first = b.add(whole, emit.INT(c * LANES))
        is_partial = b.icmp_signed(">", first, last_vector)
        sums = emit.loop(b, first, b.select(is_partial, first, K), step, sums, add(c, vector))
        sums = emit.loop(b, first, b.select(is_partial, K, first), step, sums, add(c, remainder))
    while len(sums) > rows:
        sums = [b.fadd(u, v) for u, v in zip(sums[::2], sums[1::2], strict=True)]
    totals = _add_lanes(b, sums + [emit.zeros()] * (LANES - rows))
    for r in range(rows):
        total = b.fadd(emit.load(b, bias, emit.FLOAT), b.extract_element(totals, emit.INT32(r)))
        clamped = b.select(b.fcmp_ordered("<", total, floor), floor, total)
        emit.store(b, clamped, b.add(out, b.mul(out_row, emit.INT(r))))


@linked(*(types.int64,) * 9, types.float32)
def dense_narrow(
    src: int, src_row: int, rows: int, w: int, K: int, N: int, bias: int, dst: int, dst_row: int, floor: np.float32
) -> None:
    """dst[r, n] = max(floor, bias[n] + sum_k src[r, k] w[n, k]) for r < rows, n < N: dense for few columns.

    src, w, bias and dst are addresses, src_row and dst_row byte strides; w is (N, K), contiguous.
    """
    whole = rows // ROWS * ROWS
    for n in range(N):
        column, start = w + n * K * 4, bias + n * 4
        for r in range(0, whole, ROWS):
            _narrow_tile(src + r * src_row, src_row, column, K, start, dst + r * dst_row + n * 4, dst_row, floor, ROWS)
        for r in range(whole, rows):
            _narrow_tile(src + r * src_row, src_row, column, K, start, dst + r * dst_row + n * 4, dst_row, floor, 1)
