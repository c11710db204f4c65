"""The inner loop of folded text networks: rows of tables summed and compared while they pass through registers.

    out[v] = max(out[v], bias[v] + sum_k rows[k][v])        v < VECS * LANES

Idea      A position's K rows lie all over the tables. A block of VECS vectors of each is added up in registers and
          meets the running maximum there; nothing is written but the maximum.
Same bits A sum runs over k in order, whatever else is done.
Layout    Rows are byte addresses. Tables are float32, or 16-bit: bfloat16 is a float32 without its lower half;
          float16 is put in place by shifts and scaled by 2^112, which is exact and also right for its subnormals.
          (Infinity and NaN of a float16 would come out finite: tables that hold them are refused.)
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onchip.kernels.cpu.jit import VECTOR_BYTES

LANES = VECTOR_BYTES // 4
VECS = 8  # of a block: 8 sums and 8 loads in flight
BLOCK = VECS * LANES
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2

_INT, _I32 = ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(_I32, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def gather_max(
    typing_context: Any, rows: Any, K: Any, offset: Any, ahead: Any, bias: Any, out: Any, vecs: Any, dtype: Any
) -> Any:
    """One block of one position. vecs and dtype are literals.

    rows    address of K row addresses (int64)
    offset  bytes from a row's begin to the block; `ahead` the same of the block that is fetched meanwhile
    bias    address of the block's bias; out of its maximum so far
    """
    if not (isinstance(vecs, types.IntegerLiteral) and isinstance(dtype, types.IntegerLiteral)):
        return None  # asks Numba to come again with literals
    signature = types.void(*(types.int64,) * 6, vecs, dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit(builder, args[:6], vecs.literal_value, dtype.literal_value)
        return context.get_dummy_value()

    return signature, codegen


def _emit(b: Any, args: Any, vecs: int, dtype: int) -> None:
    rows, K, offset, ahead, bias, out = args
    step = VECTOR_BYTES if dtype == FLOAT32 else VECTOR_BYTES // 2

    def load(address: Any, kind: Any) -> Any:
        return b.load(b.inttoptr(address, kind.as_pointer()), align=2 if kind is _SHORTS else 4)

    def row_part(address: Any) -> Any:
        if dtype == FLOAT32:
            return load(address, _VECTOR)
        bits = b.zext(load(address, _SHORTS), _INTS)
        if dtype == BFLOAT16:
            return b.bitcast(b.shl(bits, _all(16)), _VECTOR)
        size = b.bitcast(b.shl(b.and_(bits, _all(0x7FFF)), _all(13)), _VECTOR)
        size = b.bitcast(b.fmul(size, ir.Constant(_VECTOR, [2.0**112] * LANES)), _INTS)
        return b.bitcast(b.or_(size, b.shl(b.and_(bits, _all(0x8000)), _all(16))), _VECTOR)

    def fetch(address: Any) -> None:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        b.call(function, [b.inttoptr(address, pointer), _I32(0), _I32(2), _I32(1)])  # read, into L2, data

    before = b.block
    body, after = b.function.append_basic_block("k_body"), b.function.append_basic_block("k_after")
    start = [load(b.add(bias, _INT(v * VECTOR_BYTES)), _VECTOR) for v in range(vecs)]
    b.cbranch(b.icmp_signed(">", K, _INT(0)), body, after)
    b.position_at_end(body)
    k = b.phi(_INT)
    k.add_incoming(_INT(0), before)
    sums = [b.phi(_VECTOR) for _ in range(vecs)]
    row = load(b.add(rows, b.mul(k, _INT(8))), _INT)
    added = []
    for v in range(vecs):
        sums[v].add_incoming(start[v], before)
        added.append(b.fadd(sums[v], row_part(b.add(b.add(row, offset), _INT(v * step)))))
    for line in range(0, vecs * step, 64):
        fetch(b.add(b.add(row, ahead), _INT(line)))
    following = b.add(k, _INT(1))
    k.add_incoming(following, body)
    for v in range(vecs):
        sums[v].add_incoming(added[v], body)
    b.cbranch(b.icmp_signed("<", following, K), body, after)
    b.position_at_end(after)
    totals = [b.phi(_VECTOR) for _ in range(vecs)]
    for v, total in enumerate(totals):
        total.add_incoming(start[v], before)
        total.add_incoming(added[v], body)
    for v, total in enumerate(totals):
        at = b.add(out, _INT(v * VECTOR_BYTES))
        highest = load(at, _VECTOR)
        # Greater or a NaN wins, and a NaN that is there already stays.
        wins = b.and_(b.fcmp_unordered(">", total, highest), b.fcmp_ordered("ord", highest, highest))
        b.store(b.select(wins, total, highest), b.inttoptr(at, _VECTOR.as_pointer()), align=4)


def _all(number: int) -> Any:
    return ir.Constant(_INTS, [number] * LANES)
