"""A tile of a product with few columns: lanes run along the sum, not along the columns.

    out[r, n] = bias[n] + sum over h, k of a[r, h, k] * w[n, h, k]        r < ROWS, n < OUTS

Idea      multiply_tile keeps columns in the lanes of a vector, so three columns use three lanes of sixteen. Here a
          vector holds LANES consecutive terms of one sum; the lanes are added up once at the end, all sums together.
Floor     ROWS x OUTS multiply-adds for ROWS + OUTS loads: 4 x 3 is compute-bound. Adding up lanes: 3 operations a sum.
Same bits A sum's order is fixed by its terms' places, whatever ROWS.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from onchip.kernels.cpu import emit
from onchip.kernels.cpu.emit import LANES

ROWS = 4


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dot_tile(
    typing_context: Any, a: Any, a_row: Any, a_h: Any, w: Any, w_out: Any, H: Any, K: Any, bias: Any, out: Any,
    out_row: Any, rows: Any, outs: Any,
) -> Any:  # fmt: skip
    """One tile. Addresses and strides are in bytes; rows and outs are literals; K is whole vectors.

    a_h    from line h of the window to the next; w has its H * K terms of an output side by side, w_out apart
    """
    if not (isinstance(rows, types.IntegerLiteral) and isinstance(outs, types.IntegerLiteral)):
        return None  # asks Numba to come again with literals
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
            along = b.mul(k, emit.INT(4))
            x = [emit.load(b, b.add(at, along), emit.VECTOR) for at in a_at]
            y = [emit.load(b, b.add(at, along), emit.VECTOR) for at in w_at]
            return [emit.multiply_add(b, x[i // outs], y[i % outs], sums[i]) for i in range(count)]

        return emit.loop(b, emit.INT(0), K, LANES, sums, step)

    sums = emit.loop(b, emit.INT(0), H, 1, [emit.zeros()] * count, line)
    for first in range(0, count, LANES):
        some = sums[first : first + LANES]
        totals = _add_lanes(b, some + [emit.zeros()] * (LANES - len(some)))
        for i in range(first, first + len(some)):
            total = b.extract_element(totals, emit.INT32(i - first))
            total = b.fadd(emit.load(b, b.add(bias, emit.INT(4 * (i % outs))), emit.FLOAT), total)
            emit.store(b, total, b.add(out, b.add(b.mul(out_row, emit.INT(i // outs)), emit.INT(4 * (i % outs)))))


def _add_lanes(b: Any, vectors: list[Any]) -> Any:
    """The sums of LANES vectors' lanes as one vector, halves onto halves: two vectors become one at every level."""
    width = LANES
    while len(vectors) > 1:
        width //= 2
        groups = range(0, 2 * LANES, 2 * width)  # where a sum's lanes begin, in both vectors
        low = ir.Constant(emit.LANE_NUMBERS, [g + lane for g in groups for lane in range(width)])
        high = ir.Constant(emit.LANE_NUMBERS, [g + width + lane for g in groups for lane in range(width)])
        vectors = [
            b.fadd(b.shuffle_vector(u, v, low), b.shuffle_vector(u, v, high))
            for u, v in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]
