"""GEMM microkernel of the CPU backend: one register tile of a matrix product.

    out[r, v] = max(floor, init[r, v] + sum over h, k of a[r, h, k] * w[h, k, v])        r < ROWS, v < VECS * LANES

Idea     ROWS x VECS vector accumulators stay in registers for the whole reduction. Each k step loads VECS vectors
         of w, broadcasts ROWS elements of a and issues ROWS * VECS FMAs.
Floor    AVX-512, 6 x 4: 24 FMAs on two ports, 12 cycles per step; its 10 loads take 5. Compute-bound.
Order    Every output is one sum over k in order, for any ROWS and VECS: a row's bits do not depend on the tiling.
Layout   Operands are byte addresses and byte strides, so one loop computes x W, x^T dz and dz W^T. With h over the
         rows of a window it computes an NHWC convolution as an implicit GEMM: neighbouring windows are rows of a.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llvmlite import ir

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.vectors import HAS_FMA, VECTOR_BYTES, VECTOR_REGISTERS
from onchip.network.recipe import Array, Recipe, recipe_op

# A full panel uses ROWS_WIDE x VECS_WIDE register tiles; the remaining columns use ROWS_NARROW rows by two vectors or
# one. With the 32 registers of AVX-512, 6 x 4 beats 4 x 4 by 1 to 11 %, 5 x 4 and 7 x 4 by 5 %: fewer loads per FMA and
# no spills. With 4-lane vectors, a is loaded as vectors too, and 4 x 4 fits into 32 registers.
# multiply_rows supports up to MAX_ROWS: 10 rows by one vector take 5.5 cycles per step, two tiles of 5 rows take 8,
# because so few accumulators do not hide the FMA latency.
UNROLL = 4  # k steps per loop iteration: amortises the loop overhead
VECS_WIDE = 4 if VECTOR_REGISTERS >= 32 else 2
PANEL = VECS_WIDE * LANES
ROWS_WIDE, ROWS_NARROW = 4 if LANES == UNROLL else 6, 8
LINE_PANELS = 2  # panels multiplied at once for a single row
MAX_ROWS = {1: 10, 2: ROWS_NARROW} | {VECS_WIDE: ROWS_WIDE}  # by number of vectors
ORDER = "k in order, " + ("one rounding per multiply-add" if HAS_FMA else "two roundings per multiply-add")


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_tile(
    typing_context: Any, a: Any, a_row: Any, a_k: Any, w: Any, w_k: Any, init: Any, init_row: Any,
    out: Any, out_row: Any, H: Any, a_h: Any, K: Any, floor: Any, rows: Any, vecs: Any,
) -> Any:  # fmt: skip
    """Compute one tile. Addresses and strides are in bytes; a_row or a_k may be the literal 4; rows, vecs are literals.

    a      address of a[0, 0, 0]; strides a_row, a_h and a_k
    w      address of w[0, 0, 0]; stride w_k; h + 1 follows h without a gap; vectors are contiguous
    H      at least 1; may be the literal 1
    init   address of the values to add; init_row 0 broadcasts one row (a bias)
    out    address of the result; may equal init
    floor  float32: 0 for ReLU, -inf for none; NaN passes through
    """
    if not (isinstance(rows, types.IntegerLiteral) and isinstance(vecs, types.IntegerLiteral)):
        return None  # makes Numba retry with literals
    address_types = [p if isinstance(p, types.IntegerLiteral) else types.int64 for p in (a, a_row, a_k, w, w_k)]
    h_types = [p if isinstance(p, types.IntegerLiteral) else types.int64 for p in (H, a_h)]
    signature = types.void(*address_types, *(types.int64,) * 4, *h_types, types.int64, types.float32, rows, vecs)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_tile(builder, _with_constants(signature, args), rows.literal_value, vecs.literal_value)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_rows(
    typing_context: Any, a: Any, a_row: Any, w: Any, init: Any, init_row: Any, out: Any, out_row: Any, H: Any, a_h: Any,
    K: Any, floor: Any, rows: Any, vecs: Any,
) -> Any:  # fmt: skip
    """multiply_tile for 1 <= rows <= MAX_ROWS[vecs], where rows is a runtime value; a_k is 4.

    w is one packed panel: its vectors are contiguous, with no gap between k steps.
    """
    if not isinstance(vecs, types.IntegerLiteral):
        return None
    signature = types.void(*(types.int64,) * 10, types.float32, types.int64, vecs)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, a_row, w, *rest, floor, rows, _ = args
        vec_count = vecs.literal_value
        operands = (a, a_row, emit.INT(4), w, emit.INT(vec_count * VECTOR_BYTES), *rest, floor)

        def tile(row_count: int) -> Callable[[], None]:
            return lambda: _emit_tile(builder, operands, row_count, vec_count)

        emit.switch(builder, rows, {count: tile(count) for count in range(1, MAX_ROWS[vec_count] + 1)})
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def multiply_line(typing_context: Any, a: Any, w: Any, panel: Any, init: Any, out: Any, K: Any, floor: Any) -> Any:
    """multiply_tile for one row and LINE_PANELS panels, `panel` bytes apart: the accumulators of a single panel do not
    hide the FMA latency."""
    signature = types.void(*(types.int64,) * 6, types.float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, w, panel, init, out, K, floor = args
        zero, step = emit.INT(0), emit.INT(PANEL * 4)
        operands = (a, zero, emit.INT(4), w, step, init, zero, out, zero, emit.INT(1), zero, K, floor)
        _emit_tile(builder, operands, 1, LINE_PANELS * VECS_WIDE, panel)
        return context.get_dummy_value()

    return signature, codegen


def _with_constants(signature: Any, args: Any) -> list[Any]:
    return [
        emit.INT(t.literal_value) if isinstance(t, types.IntegerLiteral) else v
        for t, v in zip(signature.args, args, strict=True)
    ]


def _emit_tile(b: Any, args: Any, rows: int, vecs: int, panel: Any = None) -> None:
    """Emit the code of one tile; `panel`: bytes between panels, if the vectors span several."""
    a, a_row, a_k, w, w_k, init, init_row, out, out_row, H, a_h, K, floor = args[:13]
    tile = [(r, v) for r in range(rows) for v in range(vecs)]
    unrolled_K = b.and_(K, emit.INT(-UNROLL))
    # 4-lane vectors: one load fetches UNROLL elements of a row, and ARM's FMA multiplies by a lane. A broadcast would
    # cost one more instruction and its address. Wider vectors: the FMA itself broadcasts from memory.
    offsets = [emit.INT(v * VECTOR_BYTES) for v in range(vecs)]
    if panel is not None:
        positions = [divmod(v, VECS_WIDE) for v in range(vecs)]
        offsets = [b.add(b.mul(panel, emit.INT(p)), emit.INT(v * VECTOR_BYTES)) for p, v in positions]
    loads_vector = LANES == UNROLL and isinstance(a_k, ir.Constant) and a_k.constant == 4

    def reduce_k(h: Any, sums: list[Any]) -> list[Any]:
        """Accumulate over k for one h: UNROLL steps per iteration, then one by one."""
        first = b.add(a, b.mul(h, a_h))
        a_rows = [b.add(first, b.mul(a_row, emit.INT(r))) for r in range(rows)]
        w_line = b.add(w, b.mul(b.mul(h, K), w_k))
        # LLVM would derive each row's address from the previous row's: one instruction per FMA, on the same ports.
        # Instead every third row has a pointer, and the two rows after it add strides that are opaque to LLVM.
        shares_pointers = not loads_vector and isinstance(a_k, ir.Constant) and a_k.constant == 4 and rows > 2
        pointers = [emit.opaque(b, at) for at in a_rows[::3]] if shares_pointers else []
        strides = [emit.opaque(b, b.mul(a_row, emit.INT(r))) for r in range(1, 3)] if shares_pointers else []

        def steps(count: int) -> Callable[[Any, list[Any]], list[Any]]:
            def body(k: Any, values: list[Any]) -> list[Any]:
                sums, pointers, vectors = values[: len(tile)], values[len(tile) :], []
                if loads_vector and count == UNROLL:
                    vectors = [emit.load(b, b.add(at, b.mul(k, a_k)), emit.VECTOR) for at in a_rows]
                for u in range(count):
                    step = b.add(k, emit.INT(u))
                    w_at, a_offset = b.add(w_line, b.mul(step, w_k)), b.mul(step, a_k)
                    columns = [emit.load(b, b.add(w_at, offset), emit.VECTOR) for offset in offsets]
                    for r in range(rows):
                        if vectors:
                            element = emit.splat_lane(b, vectors[r], u)
                        else:
                            address = b.add(a_rows[r], a_offset)
                            if shares_pointers:
                                address = b.add(pointers[r // 3], emit.INT(4 * u))
                                address = b.add(address, strides[r % 3 - 1]) if r % 3 else address
                            element = emit.splat(b, emit.load(b, address, emit.FLOAT))
                        for v in range(vecs):
                            sums[r * vecs + v] = emit.multiply_add(b, element, columns[v], sums[r * vecs + v])
                return sums + [b.add(at, emit.INT(4 * count)) for at in pointers]

            return body

        values = emit.loop(b, emit.INT(0), unrolled_K, UNROLL, sums + pointers, steps(UNROLL))
        return emit.loop(b, unrolled_K, K, 1, values, steps(1))[: len(tile)]

    def offset(stride: Any, r: int, v: int) -> Any:
        return b.add(b.mul(stride, emit.INT(r)), emit.INT(v * VECTOR_BYTES))

    sums = emit.loop(b, emit.INT(0), H, 1, [emit.zeros() for _ in tile], reduce_k)
    floors = emit.splat(b, floor)
    for (r, v), total in zip(tile, sums, strict=True):
        # init is added last: long sums then add up chunk by chunk, which halves the rounding error.
        total = b.fadd(emit.load(b, b.add(init, offset(init_row, r, v)), emit.VECTOR), total)
        clamped = b.select(b.fcmp_ordered("<", total, floors), floors, total)
        emit.store(b, clamped, b.add(out, offset(out_row, r, v)))


# -- packed weight panels ----------------------------------------------------------------------------------


def padded(n: int) -> int:
    """Columns rounded up to whole vectors."""
    return -(-n // LANES) * LANES


def packed_size(K: int, N: int) -> int:
    return K * padded(N)


def panel_width(left: int) -> int:
    """Width of the next panel where `left` columns (whole vectors) remain."""
    if left >= PANEL:
        return PANEL
    return 2 * LANES if left >= 2 * LANES else LANES


def panels(N: int) -> Iterator[tuple[int, int]]:
    """First column and width of every panel of N columns."""
    start = 0
    while start < padded(N):
        width = panel_width(padded(N) - start)
        yield start, width
        start += width


def pack(w_kn: Array, out: Array | None = None) -> Array:
    """(K, N) -> flat panels, k-major; the panel at column n starts at n * K. Padding columns are zero."""
    K, N = w_kn.shape
    flat = np.zeros(packed_size(K, N), np.float32) if out is None else out
    for start, width in panels(N):
        columns = w_kn[:, start : start + width]
        flat[start * K : (start + width) * K].reshape(K, width)[:, : columns.shape[1]] = columns
    return flat


def unpack(flat: Array, K: int, N: int) -> Array:
    """Inverse of pack: (K, N)."""
    parts = [flat[start * K : (start + width) * K].reshape(K, width) for start, width in panels(N)]
    return np.ascontiguousarray(np.concatenate(parts, axis=1)[:, :N])


def padded_bias(name: str | None, width: int) -> Recipe:
    """A bias of `width` values, padded with zeros to whole vectors; all zero if name is None."""
    return Recipe.of(pad_bias, (name,) if name else (), (padded(width),), size=padded(width))


@recipe_op
def pad_bias(*bias: Array, size: int) -> Array:
    flat = aligned_zeros(size)
    if bias:
        flat[: len(bias[0])] = bias[0]
    return flat
