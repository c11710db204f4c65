"""Weights in the types and layouts that several kernels multiply: recipes that NumPy or recipes/recipes.cu evaluate."""

from __future__ import annotations

import numpy as np

from onchip.kernels.cuda.common.precision import PRECISIONS, narrowed, round_tf32
from onchip.network.recipe import Array, Recipe, as_is, rearranging_op, recipe_op

# Corrects the mean truncation error of an fp32 partial sum: the tensor cores truncate each of its 12 additions to
# float32 instead of rounding (mlp/packing.py). In a simulation, sums come out smaller by a relative 2.3e-7.
UNBIASED = 1 + 2.3e-7


def multiplied_weight(weight: str | Recipe, shape: tuple[int, int], precision: str) -> Recipe:
    """A weight (N, K) in the multiplied type; in fp32 (2, N, K)."""
    computed = PRECISIONS[precision]
    op = {"fp32": split_weight, "tf32": tf32_weight, "fp16": narrow_weight, "bf16": as_is}[precision]
    return Recipe.of(op, (weight,), (2, *shape) if computed.splits == 2 else shape, computed.dtype)


@recipe_op
def split_weight(weight: Array) -> Array:
    """3xTF32 split (2, N, K): two tf32 whose sum is the weight times UNBIASED, which offsets the truncation of sums."""
    full = np.ascontiguousarray(weight, np.float32)
    upper = round_tf32(full)
    with np.errstate(invalid="ignore"):
        lower = full * np.float32(UNBIASED) - upper.astype(np.float64)
        return np.stack([upper, round_tf32(lower.astype(np.float32))])


@recipe_op
def tf32_weight(weight: Array) -> Array:
    """Rounded to tf32; the tensor cores would truncate."""
    return round_tf32(np.ascontiguousarray(weight, np.float32))


@recipe_op
def narrow_weight(weight: Array) -> Array:
    """The weight in float16; InputError where a value overflows."""
    return narrowed(weight, "float16")


@rearranging_op
def spread_taps(weight: Array, channels: int) -> Array:
    """(N, C, taps...) -> (N, taps * channels), each tap's channels zero-padded."""
    N, C = weight.shape[:2]
    moved = np.moveaxis(weight.reshape(N, C, -1), 1, 2)
    spread = np.zeros((N, moved.shape[1], channels), weight.dtype)
    spread[..., :C] = moved
    return spread.reshape(N, -1)


@rearranging_op
def stretched(constant: Array, to: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(np.broadcast_to(constant, to))
