"""Inner loop of token_max: sums of table rows and their running maximum, in registers.

    out[v] = max(out[v], bias[v] + sum_k rows[k][v])        v < VECS * LANES

Idea      A position reads K rows at random addresses. A block of VECS vectors of each row is summed in registers and
          compared with the running maximum; only the maximum is written.
Order     Each sum runs over k in order.
Layout    Rows are byte addresses. Tables are float32; bfloat16, the upper half of a float32; float16, widened by shifts
          and a multiplication by 2^112, exact also for subnormals; or float8 e4m3, likewise by 2^120. (Infinity and NaN
          of float16, and NaN of e4m3, would become finite: tables with them are rejected.)
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.kernels.vectors import VECTOR_BYTES

VECS = 8  # per block: 8 sums and 8 loads in flight
BLOCK = VECS * LANES
FLOAT32, FLOAT16, BFLOAT16, FLOAT8 = 0, 1, 2, 3

_BITS = {dtype: ir.VectorType(ir.IntType(16 if dtype != FLOAT8 else 8), LANES) for dtype in (FLOAT16, BFLOAT16, FLOAT8)}


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def gather_max(typing_context: Any, rows: Any, K: Any, offset: Any, bias: Any, out: Any, vecs: Any, dtype: Any) -> Any:
    """One block of one position. vecs and dtype are literals.

    rows    address of K row addresses (int64)
    offset  bytes from the start of a row to the block
    bias    address of the block's bias; out: of its running maximum
    """
    if not (isinstance(vecs, types.IntegerLiteral) and isinstance(dtype, types.IntegerLiteral)):
        return None  # makes Numba retry with literals
    signature = types.void(*(types.int64,) * 5, vecs, dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit(builder, args[:5], vecs.literal_value, dtype.literal_value)
        return context.get_dummy_value()

    return signature, codegen


def _emit(b: Any, args: Any, vecs: int, dtype: int) -> None:
    rows, K, offset, bias, out = args
    step = VECTOR_BYTES // {FLOAT32: 1, FLOAT8: 4}.get(dtype, 2)

    def load_vector(address: Any) -> Any:
        if dtype == FLOAT32:
            return emit.load(b, address, emit.VECTOR)
        bits = b.zext(emit.load(b, address, _BITS[dtype], align=1 if dtype == FLOAT8 else 2), emit.LANE_INDICES)
        if dtype == BFLOAT16:
            return b.bitcast(b.shl(bits, _splat(16)), emit.VECTOR)
        # Sign bit, left shift of exponent and fraction, and scale that corrects the exponent bias.
        sign, shift, scale = (0x8000, 13, 2.0**112) if dtype == FLOAT16 else (0x80, 20, 2.0**120)
        size = b.bitcast(b.shl(b.and_(bits, _splat(sign - 1)), _splat(shift)), emit.VECTOR)
        size = b.bitcast(b.fmul(size, ir.Constant(emit.VECTOR, [scale] * LANES)), emit.LANE_INDICES)
        return b.bitcast(b.or_(size, b.shl(b.and_(bits, _splat(sign)), _splat(32 - sign.bit_length()))), emit.VECTOR)

    def add_row(k: Any, sums: list[Any]) -> list[Any]:
        row = emit.load(b, b.add(rows, b.mul(k, emit.INT(8))), emit.INT)
        address = b.add(row, offset)
        return [b.fadd(total, load_vector(b.add(address, emit.INT(v * step)))) for v, total in enumerate(sums)]

    start = [emit.load(b, b.add(bias, emit.INT(v * VECTOR_BYTES)), emit.VECTOR) for v in range(vecs)]
    for v, total in enumerate(emit.loop(b, emit.INT(0), K, 1, start, add_row)):
        dst = b.add(out, emit.INT(v * VECTOR_BYTES))
        highest = emit.load(b, dst, emit.VECTOR)
        # A NaN in either operand propagates.
        is_new = b.and_(b.fcmp_unordered(">", total, highest), b.fcmp_ordered("ord", highest, highest))
        emit.store(b, b.select(is_new, total, highest), dst)


def _splat(value: int) -> Any:
    return ir.Constant(emit.LANE_INDICES, [value] * LANES)
