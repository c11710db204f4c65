"""The inner loop of folded text networks: rows of tables summed and compared while they pass through registers.

    out[v] = max(out[v], bias[v] + sum_k rows[k][v])        v < VECS * LANES

Idea      A position's K rows lie all over the tables. A block of VECS vectors of each is added up in registers and
          meets the running maximum there; nothing is written but the maximum.
Same bits A sum runs over k in order, whatever else is done.
Layout    Rows are byte addresses. Tables are float32, or 16-bit: bfloat16 is a float32 without its lower half;
          float16 is put in place by shifts and scaled by 2^112, which is exact and also right for its subnormals;
          or 8-bit: e4m3 in the same way, by 2^120. (Infinity and NaN of a float16, and the NaN of an e4m3, would come
          out finite: tables that hold them are refused.)
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.kernels.vectors import VECTOR_BYTES

VECS = 8  # of a block: 8 sums and 8 loads in flight
BLOCK = VECS * LANES
FLOAT32, FLOAT16, BFLOAT16, FLOAT8 = 0, 1, 2, 3

_BITS = {dtype: ir.VectorType(ir.IntType(16 if dtype != FLOAT8 else 8), LANES) for dtype in (FLOAT16, BFLOAT16, FLOAT8)}


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def gather_max(typing_context: Any, rows: Any, K: Any, offset: Any, bias: Any, out: Any, vecs: Any, dtype: Any) -> Any:
    """One block of one position. vecs and dtype are literals.

    rows    address of K row addresses (int64)
    offset  bytes from the start of a row to the block
    bias    address of the block's bias; out of its maximum so far
    """
    if not (isinstance(vecs, types.IntegerLiteral) and isinstance(dtype, types.IntegerLiteral)):
        return None  # asks Numba to come again with literals
    signature = types.void(*(types.int64,) * 5, vecs, dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit(builder, args[:5], vecs.literal_value, dtype.literal_value)
        return context.get_dummy_value()

    return signature, codegen


def _emit(b: Any, args: Any, vecs: int, dtype: int) -> None:
    rows, K, offset, bias, out = args
    step = VECTOR_BYTES // {FLOAT32: 1, FLOAT8: 4}.get(dtype, 2)

    def row_part(address: Any) -> Any:
        if dtype == FLOAT32:
            return emit.load(b, address, emit.VECTOR)
        bits = b.zext(emit.load(b, address, _BITS[dtype], align=1 if dtype == FLOAT8 else 2), emit.LANE_NUMBERS)
        if dtype == BFLOAT16:
            return b.bitcast(b.shl(bits, _all(16)), emit.VECTOR)
        # Where the sign stands, by how much exponent and fraction move up, and what they are scaled by there.
        sign, up, scale = (0x8000, 13, 2.0**112) if dtype == FLOAT16 else (0x80, 20, 2.0**120)
        size = b.bitcast(b.shl(b.and_(bits, _all(sign - 1)), _all(up)), emit.VECTOR)
        size = b.bitcast(b.fmul(size, ir.Constant(emit.VECTOR, [scale] * LANES)), emit.LANE_NUMBERS)
        return b.bitcast(b.or_(size, b.shl(b.and_(bits, _all(sign)), _all(32 - sign.bit_length()))), emit.VECTOR)

    def add_row(k: Any, sums: list[Any]) -> list[Any]:
        row = emit.load(b, b.add(rows, b.mul(k, emit.INT(8))), emit.INT)
        here = b.add(row, offset)
        return [b.fadd(total, row_part(b.add(here, emit.INT(v * step)))) for v, total in enumerate(sums)]

    start = [emit.load(b, b.add(bias, emit.INT(v * VECTOR_BYTES)), emit.VECTOR) for v in range(vecs)]
    for v, total in enumerate(emit.loop(b, emit.INT(0), K, 1, start, add_row)):
        at = b.add(out, emit.INT(v * VECTOR_BYTES))
        highest = emit.load(b, at, emit.VECTOR)
        # Greater or a NaN wins, and a NaN that is there already stays.
        wins = b.and_(b.fcmp_unordered(">", total, highest), b.fcmp_ordered("ord", highest, highest))
        emit.store(b, b.select(wins, total, highest), at)


def _all(number: int) -> Any:
    return ir.Constant(emit.LANE_NUMBERS, [number] * LANES)
