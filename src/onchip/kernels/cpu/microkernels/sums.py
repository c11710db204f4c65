"""Sums over contiguous elements: of x, of squares around a value, of products.

Order     Chunks of 1,024 elements in float32: four vectors at a time, then single ones; lanes in pairs, then the rest
          in order. Chunks are added in order in float64. The order depends on the number of elements only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import compiled, floats_at
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.kernels.vectors import VECTOR_BYTES

_UNROLL = 4  # vectors
_CHUNK = 1024  # elements that are summed in float32
SUM, SQUARES, PRODUCTS = range(3)
ORDER = "in vectors, their lanes in pairs, the rest in order"


@intrinsic
def _vector_sum(typing_context: Any, x: Any, other: Any, count: Any, shift: Any, terms: Any) -> Any:
    """sum_terms over whole vectors, in float32; `terms` is a literal."""
    if not isinstance(terms, types.IntegerLiteral):
        return None  # Numba retries with literals

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, other, count, shift, _ = args
        shifts = emit.splat(b, shift)

        def add(i: Any, sums: list[Any]) -> list[Any]:
            new_sums = []
            for v, total in enumerate(sums):
                offset = b.add(b.mul(i, emit.INT(4)), emit.INT(v * VECTOR_BYTES))
                element = emit.load(b, b.add(x, offset), emit.VECTOR)
                if terms.literal_value == SUM:
                    new_sums.append(b.fadd(total, element))
                    continue
                d = b.fsub(element, shifts)
                factor = d if terms.literal_value == SQUARES else emit.load(b, b.add(other, offset), emit.VECTOR)
                new_sums.append(emit.multiply_add(b, d, factor, total))
            return new_sums

        whole = b.sub(count, b.srem(count, emit.INT(_UNROLL * LANES)))
        sums = emit.loop(b, emit.INT(0), whole, _UNROLL * LANES, [emit.zeros()] * _UNROLL, add)
        total = b.fadd(b.fadd(sums[0], sums[1]), b.fadd(sums[2], sums[3]))
        (total,) = emit.loop(b, whole, count, LANES, [total], add)
        lanes = [b.extract_element(total, ir.IntType(32)(lane)) for lane in range(LANES)]
        while len(lanes) > 1:
            lanes = [b.fadd(first, second) for first, second in zip(lanes[::2], lanes[1::2], strict=True)]
        return lanes[0]

    return types.float32(types.int64, types.int64, types.int64, types.float32, terms), codegen


@compiled(inline=True)
def sum_terms(x: int, other: int, count: int, shift: np.float32, terms: int) -> np.float64:
    """The sum over `count` elements of x, of (x - shift)^2 or of (x - shift) * other, as `terms` says."""
    total = 0.0
    for begin in range(0, count, _CHUNK):
        size = min(_CHUNK, count - begin)
        vectors = size - size % LANES
        at, with_ = x + begin * 4, other + begin * 4
        rest, factors = floats_at(at + vectors * 4, size - vectors), floats_at(with_ + vectors * 4, size - vectors)
        if terms == SUM:
            part = _vector_sum(at, 0, vectors, shift, SUM)
            for n in range(size - vectors):
                part += rest[n]
        elif terms == SQUARES:
            part = _vector_sum(at, 0, vectors, shift, SQUARES)
            for n in range(size - vectors):
                part += (rest[n] - shift) * (rest[n] - shift)
        else:
            part = _vector_sum(at, with_, vectors, shift, PRODUCTS)
            for n in range(size - vectors):
                part += (rest[n] - shift) * factors[n]
        total += np.float64(part)
    return total  # type: ignore[return-value]
