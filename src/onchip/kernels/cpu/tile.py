"""The one inner loop of the CPU engine: a tile of a matrix product that lives in registers.

    out[r, v] = max(floor, init[r, v] + sum over h, k of a[r, h, k] * w[h, k, v])        r < ROWS, v < VECS * LANES

Idea     ROWS x VECS vector accumulators stay in registers for the whole sum; each step of k loads VECS
         vectors of w, broadcasts ROWS numbers of a and does ROWS * VECS fused multiply-adds.
Floor    AVX-512, 4 x 4: 16 multiply-adds on two ports, 8 cycles a step; its 8 loads need 4. Compute-bound.
Same bits Every output is one sum in the order of k, whatever ROWS or VECS: a row's bits do not depend on
         how rows were grouped into tiles.
Layout   Everything is a byte address and a byte stride, so one loop serves x W, x^T dz and dz W^T, and, with h over the
         rows of a window, a convolution: neighbouring windows of an image with channels last are rows of a.

It is written as LLVM vector code through a Numba intrinsic because the accumulators of a Numba loop live in an
array, that is in memory; here they are values, and LLVM keeps them in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onchip.kernels.cpu.jit import HAS_FMA, VECTOR_BYTES, VECTOR_REGISTERS
from onchip.spec.recipe import Array

LANES = VECTOR_BYTES // 4  # float32 numbers in a vector
# A tile is ROWS_WIDE rows by VECS_WIDE vectors, a panel, where that many columns are left; else ROWS_NARROW rows by
# two vectors or one. With 32 registers 4 x 4 beats 8 x 2 by 15 % on cores shared with others, as it has fewer
# broadcasts for as many sums, and is its equal on idle ones.
VECS_WIDE = 4 if VECTOR_REGISTERS >= 32 else 2
PANEL = VECS_WIDE * LANES
ROWS_WIDE, ROWS_NARROW = 4, 8
TILE_FLOATS = ROWS_WIDE * PANEL  # of the largest tile, whichever shape it has
UNROLL = 4  # steps of k a loop turn: amortises the loop's own instructions

_INT = ir.IntType(64)
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_tile(
    typing_context: Any, a: Any, a_row: Any, a_k: Any, w: Any, w_k: Any, init: Any, init_row: Any,
    out: Any, out_row: Any, H: Any, a_h: Any, K: Any, floor: Any, rows: Any, vecs: Any,
) -> Any:  # fmt: skip
    """One tile. Addresses and strides are in bytes; a_row or a_k may be the literal 4; rows and vecs are literals.

    a      of a[0, 0, 0]; a_row from row to row, a_h from h to h, a_k from k to k
    w      of w[0, 0, 0]; w_k from k to k and on to the next h, vectors side by side
    H      at least 1; may be the literal 1
    init   what the sums are added to; init_row 0 gives every row the same (a bias)
    out    where the sums go; may be init
    floor  float32: 0 for ReLU, -inf for nothing; a NaN passes through either
    """
    if not (isinstance(rows, types.IntegerLiteral) and isinstance(vecs, types.IntegerLiteral)):
        return None  # asks Numba to come again with literals
    addresses = [p if isinstance(p, types.IntegerLiteral) else types.int64 for p in (a, a_row, a_k, w, w_k)]
    lines = [p if isinstance(p, types.IntegerLiteral) else types.int64 for p in (H, a_h)]
    signature = types.void(*addresses, *(types.int64,) * 4, *lines, types.int64, types.float32, rows, vecs)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        constants = [
            _INT(t.literal_value) if isinstance(t, types.IntegerLiteral) else v
            for t, v in zip(signature.args, args, strict=True)
        ]
        _emit_tile(builder, constants, rows.literal_value, vecs.literal_value)
        return context.get_dummy_value()

    return signature, codegen


def _emit_tile(b: Any, args: Any, rows: int, vecs: int) -> None:
    a, a_row, a_k, w, w_k, init, init_row, out, out_row, H, a_h, K, floor = args[:13]

    def at(address: Any, offset: Any) -> Any:
        return b.add(address, offset)

    def load(address: Any, kind: Any) -> Any:
        return b.load(b.inttoptr(address, kind.as_pointer()), align=4)

    def splat(number: Any) -> Any:
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        one = b.insert_element(undefined, number, ir.IntType(32)(0))
        return b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))

    def multiply_add(x: Any, y: Any, z: Any) -> Any:
        if not HAS_FMA:
            return b.fadd(b.fmul(x, y), z)
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32"), [x, y, z])

    def vector_offset(stride: Any, r: int, v: int) -> Any:
        return b.add(b.mul(stride, _INT(r)), _INT(v * VECTOR_BYTES))

    def sum_over(a_rows: list[Any], w: Any, start: Any, stop: Any, unroll: int, sums: list[Any]) -> list[Any]:
        """The k loop from start to stop, a multiple of unroll apart; the sums after it."""
        before = b.block
        body = b.function.append_basic_block("k_body")
        after = b.function.append_basic_block("k_after")
        b.cbranch(b.icmp_signed("<", start, stop), body, after)
        b.position_at_end(body)
        k = b.phi(_INT)
        k.add_incoming(start, before)
        entering = [b.phi(_VECTOR) for _ in sums]
        for phi, value in zip(entering, sums, strict=True):
            phi.add_incoming(value, before)
        current = list(entering)
        for u in range(unroll):
            step = b.add(k, _INT(u))
            w_at = at(w, b.mul(step, w_k))
            along = b.mul(step, a_k)
            columns = [load(at(w_at, _INT(v * VECTOR_BYTES)), _VECTOR) for v in range(vecs)]
            for r in range(rows):
                number = splat(load(at(a_rows[r], along), _FLOAT))
                for v in range(vecs):
                    i = r * vecs + v
                    current[i] = multiply_add(number, columns[v], current[i])
        next_k = b.add(k, _INT(unroll))
        k.add_incoming(next_k, body)
        for phi, value in zip(entering, current, strict=True):
            phi.add_incoming(value, body)
        b.cbranch(b.icmp_signed("<", next_k, stop), body, after)
        b.position_at_end(after)
        leaving = []
        for value, done in zip(sums, current, strict=True):
            phi = b.phi(_VECTOR)
            phi.add_incoming(value, before)
            phi.add_incoming(done, body)
            leaving.append(phi)
        return leaving

    tile = [(r, v) for r in range(rows) for v in range(vecs)]
    whole = b.and_(K, _INT(-UNROLL))

    def line(h: Any, sums: list[Any]) -> list[Any]:
        a_rows = [at(at(a, b.mul(a_row, _INT(r))), b.mul(h, a_h)) for r in range(rows)]
        w_line = at(w, b.mul(b.mul(h, K), w_k))
        sums = sum_over(a_rows, w_line, _INT(0), whole, UNROLL, sums)
        return sum_over(a_rows, w_line, whole, K, 1, sums)

    sums = [ir.Constant(_VECTOR, [0.0] * LANES) for _ in tile]
    if isinstance(H, ir.Constant) and H.constant == 1:
        sums = line(_INT(0), sums)
    else:
        before = b.block
        body, after = b.function.append_basic_block("h_body"), b.function.append_basic_block("h_after")
        b.branch(body)
        b.position_at_end(body)
        h = b.phi(_INT)
        h.add_incoming(_INT(0), before)
        entering = [b.phi(_VECTOR) for _ in sums]
        for phi, value in zip(entering, sums, strict=True):
            phi.add_incoming(value, before)
        sums = line(h, entering)
        following, last = b.add(h, _INT(1)), b.block
        h.add_incoming(following, last)
        for phi, value in zip(entering, sums, strict=True):
            phi.add_incoming(value, last)
        b.cbranch(b.icmp_signed("<", following, H), body, after)
        b.position_at_end(after)
    lowest = splat(floor)
    for (r, v), total in zip(tile, sums, strict=True):
        # The start is added last: chunks of a long sum then add up like a tree, which halves the rounding error.
        total = b.fadd(load(at(init, vector_offset(init_row, r, v)), _VECTOR), total)
        kept = b.select(b.fcmp_ordered("<", total, lowest), lowest, total)
        b.store(kept, b.inttoptr(at(out, vector_offset(out_row, r, v)), _VECTOR.as_pointer()), align=4)


# -- weights in the order in which the tile reads them -----------------------------------------------------


def padded(n: int) -> int:
    """Columns rounded up to whole vectors."""
    return -(-n // LANES) * LANES


def packed_size(K: int, N: int) -> int:
    return K * padded(N)


def panel_width(left: int) -> int:
    """Columns of the next panel where `left` of them, whole vectors, are left."""
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
    """(K, N) -> flat panels, k by k; the panel of columns n.. begins at n * K. Missing columns are zero."""
    K, N = w_kn.shape
    flat = np.zeros(packed_size(K, N), np.float32) if out is None else out
    for start, width in panels(N):
        columns = w_kn[:, start : start + width]
        flat[start * K : (start + width) * K].reshape(K, width)[:, : columns.shape[1]] = columns
    return flat


def unpack(flat: Array, K: int, N: int) -> Array:
    """The inverse of pack: (K, N)."""
    parts = [flat[start * K : (start + width) * K].reshape(K, width) for start, width in panels(N)]
    return np.ascontiguousarray(np.concatenate(parts, axis=1)[:, :N])


def aligned_zeros(size: int, dtype: type = np.float32) -> Array:
    """A flat array that begins on a cache line, so that no vector straddles two."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.zeros(size * itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * itemsize].view(dtype)
