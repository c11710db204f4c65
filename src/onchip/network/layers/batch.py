"""What layers compute in training and not at inference: statistics of a batch, and what dropout keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import Arrays, StepLayer, Types, Weights, WeightTypes, need_float
from onchip.network.recipe import Array
from onchip.network.types import TensorType


class _Statistics(StepLayer, abstract=True):
    """(B, C, ...) -> (1, C), over the batch and all axes after the channels."""

    crosses_rows: ClassVar[bool] = True

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        need_float(x, weights)
        if len(x.shape) < 2:
            raise ShapeError("needs channels", got=str(x), expected="[B, C, ...]")
        for role, kind in weights.items():
            if kind.shape != (x.shape[1],):
                raise ShapeError(f"{role} and input do not fit", got=str(kind), expected=f"[{x.shape[1]}]")
        return TensorType((1, x.shape[1]), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return inputs[0].row_size


class BatchMean(_Statistics):
    """The mean of each channel; 0 for no rows."""

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (x,) = xs
        mean: Array = x.sum(axis=_all_but_channels(x)) / x.dtype.type(max(1, _count(x)))
        return mean[np.newaxis]


@dataclass(frozen=True, eq=False, repr=False)
class BatchVariance(_Statistics):
    """The variance of each channel, around `mean`: the sum of squares divided by n, or by n - 1 if it is unbiased."""

    is_unbiased: bool = False
    required: ClassVar[tuple[str, ...]] = ("mean",)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 3 * inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (x,) = xs
        squares = np.square(x - _per_channel(w["mean"], x)).sum(axis=_all_but_channels(x))
        variance: Array = squares / x.dtype.type(max(1, _count(x) - self.is_unbiased))
        return variance[np.newaxis]


@dataclass(frozen=True, eq=False, repr=False)
class BatchNormGrad(StepLayer):
    """dx of a batch norm by the batch's own mean and variance: x, dy -> dx.

    d_weight, d_bias  the gradients of the weight and the bias: sums over the batch
    """

    eps: float = 1e-5
    arity: ClassVar[int | None] = 2
    crosses_rows: ClassVar[bool] = True
    required: ClassVar[tuple[str, ...]] = ("weight", "mean", "var", "d_weight", "d_bias")

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        x, dy = inputs
        need_float(x, weights)
        if dy.row_shape != x.row_shape or len(x.shape) < 2:
            raise ShapeError("x and dy do not fit", got=f"{x} and {dy}", expected="equal shapes with channels")
        for role, kind in weights.items():
            if kind.shape != (x.shape[1],):
                raise ShapeError(f"{role} and input do not fit", got=str(kind), expected=f"[{x.shape[1]}]")
        return x

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 6 * inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        x, dy = xs
        deviation = 1 / np.sqrt(w["var"] + x.dtype.type(self.eps))
        count = x.dtype.type(max(1, _count(x)))
        normalised = (x - _per_channel(w["mean"], x)) * _per_channel(deviation, x)
        common = _per_channel(w["d_bias"] / count, x) + normalised * _per_channel(w["d_weight"] / count, x)
        dx: Array = (dy - common) * _per_channel(w["weight"] * deviation, x)
        return dx


@dataclass(frozen=True, eq=False, repr=False)
class DropoutMask(StepLayer):
    """The factors of a dropout, shaped like x: 0 with probability p, else 1 / (1 - p).

    Element i of the batch is dropped if word i of Philox4x32-10 is below p 2^32: key and counter are the seed, the step
    and the number of the dropout, so the bits are the same on every device.

    draw    (2,): seed and step
    number  which dropout of the network it is
    """

    p: float = 0.5
    number: int = 0
    crosses_rows: ClassVar[bool] = True  # by the place of a row in the batch
    required: ClassVar[tuple[str, ...]] = ("draw",)

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise ShapeError("bad probability of a dropout", got=str(self.p), expected="at least 0, below 1")

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        need_float(inputs[0])
        if weights["draw"].shape != (2,) or weights["draw"].dtype != "int64":
            raise ShapeError("draw is seed and step", got=str(weights["draw"]), expected="int64[2]")
        return inputs[0]

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 25 * inputs[0].row_size  # ten rounds of about ten operations give four words

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (x,), (seed, step) = xs, w["draw"]
        words = philox(int(seed), int(step), self.number, x.size).reshape(x.shape)
        kept = x.dtype.type(1 / (1 - self.p))
        mask: Array = np.where(words < np.uint64(self.p * 2**32), x.dtype.type(0), kept)
        return mask


def philox(seed: int, step: int, number: int, count: int) -> Array:
    """The first `count` 32-bit words of Philox4x32-10, as uint64: four per counter (i, i >> 32, step, number)."""
    low, key_steps = np.uint64(0xFFFFFFFF), (0x9E3779B9, 0xBB67AE85)
    multipliers = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    a, b = blocks & low, blocks >> np.uint64(32)
    c, d = np.full_like(blocks, step & 0xFFFFFFFF), np.full_like(blocks, number & 0xFFFFFFFF)
    keys = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = a * multipliers[0], c * multipliers[1]
        a, b, c, d = (
            second >> np.uint64(32) ^ b ^ np.uint64(keys[0]), second & low,
            first >> np.uint64(32) ^ d ^ np.uint64(keys[1]), first & low,
        )  # fmt: skip
        keys = [(key + more) & 0xFFFFFFFF for key, more in zip(keys, key_steps, strict=True)]
    return np.stack([a, b, c, d], axis=1).reshape(-1)[:count]


def _all_but_channels(x: Array) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis != 1)


def _count(x: Array) -> int:
    """Elements per channel, over the batch."""
    return int(len(x) * math.prod(x.shape[2:]))


def _per_channel(values: Array, x: Array) -> Array:
    return values.reshape(-1, *[1] * (x.ndim - 2))
