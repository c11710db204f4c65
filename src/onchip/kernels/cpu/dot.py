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
from numba.core import cgutils
from numba.extending import intrinsic

from onchip.kernels.cpu.jit import HAS_FMA, VECTOR_BYTES

LANES = VECTOR_BYTES // 4
ROWS = 4

_INT, _FLOAT, _I32 = ir.IntType(64), ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_LANE_NUMBERS = ir.VectorType(_I32, LANES)


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

    def load(address: Any, kind: Any) -> Any:
        return b.load(b.inttoptr(address, kind.as_pointer()), align=4)

    def multiply_add(x: Any, y: Any, z: Any) -> Any:
        if not HAS_FMA:
            return b.fadd(b.fmul(x, y), z)
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32"), [x, y, z])

    def loop(count: Any, start: list[Any], body: Any) -> list[Any]:
        """body(i, values) -> values, `count` times (at least once); the values after it."""
        before = b.block
        inside, after = b.function.append_basic_block("dot_body"), b.function.append_basic_block("dot_after")
        b.branch(inside)
        b.position_at_end(inside)
        i = b.phi(_INT)
        i.add_incoming(_INT(0), before)
        entering = [b.phi(_VECTOR) for _ in start]
        for phi, value in zip(entering, start, strict=True):
            phi.add_incoming(value, before)
        leaving = body(i, entering)
        following = b.add(i, _INT(1))
        last = b.block  # the body may have made blocks of its own
        i.add_incoming(following, last)
        for phi, value in zip(entering, leaving, strict=True):
            phi.add_incoming(value, last)
        b.cbranch(b.icmp_signed("<", following, count), inside, after)
        b.position_at_end(after)
        return list(leaving)

    def line(h: Any, sums: list[Any]) -> list[Any]:
        a_at = [b.add(b.add(a, b.mul(a_row, _INT(r))), b.mul(h, a_h)) for r in range(rows)]
        w_line = b.mul(h, b.mul(K, _INT(4)))
        w_at = [b.add(b.add(w, b.mul(w_out, _INT(n))), w_line) for n in range(outs)]

        def step(i: Any, sums: list[Any]) -> list[Any]:
            along = b.mul(i, _INT(VECTOR_BYTES))
            x = [load(b.add(at, along), _VECTOR) for at in a_at]
            y = [load(b.add(at, along), _VECTOR) for at in w_at]
            return [multiply_add(x[r], y[n], sums[r * outs + n]) for r in range(rows) for n in range(outs)]

        return loop(b.sdiv(K, _INT(LANES)), sums, step)

    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    count = rows * outs
    sums = loop(H, [zero] * count, line)
    for first in range(0, count, LANES):
        some = sums[first : first + LANES]
        totals = _add_lanes(b, some + [zero] * (LANES - len(some)))
        for i in range(first, first + len(some)):
            total = b.extract_element(totals, _I32(i - first))
            total = b.fadd(load(b.add(bias, _INT(4 * (i % outs))), _FLOAT), total)
            at = b.add(out, b.add(b.mul(out_row, _INT(i // outs)), _INT(4 * (i % outs))))
            b.store(total, b.inttoptr(at, _FLOAT.as_pointer()), align=4)


def _add_lanes(b: Any, vectors: list[Any]) -> Any:
    """The sums of LANES vectors' lanes as one vector, halves onto halves: two vectors become one at every level."""
    width = LANES
    while len(vectors) > 1:
        width //= 2
        groups = range(0, 2 * LANES, 2 * width)  # where a sum's lanes begin, in both vectors
        low = ir.Constant(_LANE_NUMBERS, [g + lane for g in groups for lane in range(width)])
        high = ir.Constant(_LANE_NUMBERS, [g + width + lane for g in groups for lane in range(width)])
        vectors = [
            b.fadd(b.shuffle_vector(u, v, low), b.shuffle_vector(u, v, high))
            for u, v in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]
