"""Transposes in registers: LANES vectors exchange halves of their lanes in pairs, then quarters, and so on."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import compiled
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types


@intrinsic
def _transpose_tile(
    typing_context: Any, dst: Any, dst_row: Any, src: Any, src_row: Any, rows: Any, columns: Any
) -> Any:
    """`transpose` of at most LANES rows and columns."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        dst, dst_row, src, src_row, rows, columns = args
        vectors = []
        for r in range(LANES):
            count = b.select(b.icmp_signed("<", emit.INT(r), rows), columns, emit.INT(0))
            vectors.append(emit.masked_load(b, b.add(src, b.mul(src_row, emit.INT(r))), count))
        step = LANES // 2
        while step:
            first = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
            second = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
            for i in (i for i in range(LANES) if not i & step):
                pair = vectors[i], vectors[i + step]
                vectors[i], vectors[i + step] = (
                    b.shuffle_vector(*pair, ir.Constant(emit.LANE_INDICES, lanes)) for lanes in (first, second)
                )
            step //= 2
        for c, vector in enumerate(vectors):
            with b.if_then(b.icmp_signed("<", emit.INT(c), columns)):
                emit.store(b, vector, b.add(dst, b.mul(dst_row, emit.INT(c))))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6), codegen


@compiled()
def transpose(dst: int, dst_row: int, src: int, src_row: int, rows: int, columns: int) -> None:
    """dst[c, r] = src[r, c], and zeros up to a multiple of LANES in each row of dst. Rows are strides in bytes."""
    for r in range(0, rows, LANES):
        for c in range(0, columns, LANES):
            _transpose_tile(
                dst + c * dst_row + r * 4, dst_row, src + r * src_row + c * 4, src_row, min(LANES, rows - r),
                min(LANES, columns - c),
            )  # fmt: skip
