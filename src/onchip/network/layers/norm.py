"""Normalisations: batch norm at inference, a scale and a shift per channel; and row norms, by a row's statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.network.layers.base import Arrays, Gradients, Layer, Types, Weights, WeightTypes, need_float, row_axis
from onchip.network.recipe import Array
from onchip.network.types import BATCH, TensorType


@dataclass(frozen=True, eq=False, repr=False)
class _BatchNorm(Layer, abstract=True):
    """(x - mean) / sqrt(var + eps) * weight + bias; each (C,), channels on axis 1."""

    ranks: ClassVar[tuple[int, ...]]  # ranks that x may have, the batch included
    required: ClassVar[tuple[str, ...]] = ("mean", "var")
    constants: ClassVar[tuple[str, ...]] = ("mean", "var")
    optional: ClassVar[tuple[str, ...]] = ("weight", "bias")
    needs_y: ClassVar[bool] = False
    eps: float = 1e-5

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        need_float(x, weights)
        if len(x.shape) not in self.ranks:
            expected = " or ".join(f"{rank} axes" for rank in self.ranks)
            raise ShapeError("bad input shape", got=str(x), expected=expected)
        for role, weight in weights.items():
            if weight.shape != (x.shape[1],):
                raise ShapeError(f"{role} and input do not fit", got=str(weight), expected=f"[{x.shape[1]}]")
        return x

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 2 * inputs[0].row_size

    def check_weights(self, arrays: Mapping[str, Array]) -> None:
        if "var" in arrays:
            _checked(arrays["var"], self.eps)

    def forward(self, xs: Arrays, w: Weights) -> Array:
        y = _batch_normalised(self, xs[0], w)
        if "weight" in w:
            y = y * _per_channel(w["weight"], y)
        return y + _per_channel(w["bias"], y) if "bias" in w else y

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        """As in inference: mean and var are constants without gradients."""
        (x,) = xs
        others = tuple(axis for axis in range(x.ndim) if axis != 1)
        dw = {"bias": dy.sum(axis=others)} if "bias" in w else {}
        if "weight" in w:
            dw["weight"] = (dy * _batch_normalised(self, x, w)).sum(axis=others)
            dy = dy * _per_channel(w["weight"], x)
        return (dy / np.sqrt(_per_channel(w["var"], x) + self.eps),), dw


class BatchNorm1d(_BatchNorm):
    """Over (B, C) or (B, C, L)."""

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Over (B, C, H, W)."""

    ranks: ClassVar[tuple[int, ...]] = (4,)


def factor_and_shift(weights: Mapping[str, Array], eps: float) -> tuple[Array, Array]:
    """s = weight / sqrt(var + eps) and t = bias - mean s per channel, in float64: a batch norm is x s + t."""
    exact = {role: array.astype(np.float64) for role, array in weights.items()}
    s = exact.get("weight", 1.0) / np.sqrt(_checked(exact["var"], eps))
    return s, exact.get("bias", 0.0) - exact["mean"] * s


def _checked(var: Array, eps: float) -> Array:
    """var + eps, which must be above 0. NaN passes."""
    under_root: Array = var.astype(np.float64) + eps
    if (bad := np.flatnonzero(under_root <= 0)).size:
        raise InputError(
            "bad variance", got=f"{float(var[bad[0]]):.6g} in channel {bad[0]}, eps {eps:g}",
            expected="var + eps above 0", hint="the running variance of the trained layer",
        )  # fmt: skip
    return under_root


@dataclass(frozen=True, eq=False, repr=False)
class NormSegments:
    """How a row divides into segments that are normalised separately, and which weight applies to each element.

    Segments are contiguous. Each weight applies to `run` consecutive elements; then the first weight follows again.
    """

    count: int  # segments per row
    size: int  # elements per segment
    run: int


class RowNorm(Layer, abstract=True):
    """(x - mean) / sqrt(var + eps) * weight + bias, with the mean and variance of the elements themselves."""

    is_centred: ClassVar[bool] = True  # else no mean is subtracted, and the variance is the mean of squares
    optional: ClassVar[tuple[str, ...]] = ("weight", "bias")
    needs_y: ClassVar[bool] = False

    def parts(self, x: TensorType) -> NormSegments:
        """ShapeError if rows like x do not divide into such segments."""
        raise NotImplementedError

    def weight_shape(self, x: TensorType) -> tuple[int, ...]:
        raise NotImplementedError

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        need_float(x, weights)
        if self.parts(x).size == 0:
            raise ShapeError("nothing to normalise", got=str(x), expected="non-empty rows")
        expected = self.weight_shape(x)
        for role, weight in weights.items():
            if weight.shape != expected:
                raise ShapeError(f"{role} and input do not fit", got=str(weight), expected=str(list(expected)))
        return x

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return (6 if self.is_centred else 4) * inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        y = _normalised(self, xs[0])[0].reshape(xs[0].shape)
        if "weight" in w:
            y = y * _broadcastable(self, w["weight"], y)
        return y + _broadcastable(self, w["bias"], y) if "bias" in w else y

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        """With n = (x - mean) / s:  dx = (dn - mean(dn) - n mean(dn n)) / s; RMSNorm lacks the second term."""
        (x,) = xs
        n, s = _normalised(self, x)
        dn, dw = dy, {}
        if "weight" in w:
            dw["weight"] = _weight_gradient(self, dy * n.reshape(x.shape))
            dn = dy * _broadcastable(self, w["weight"], x)
        if "bias" in w:
            dw["bias"] = _weight_gradient(self, dy)
        dn = dn.reshape(n.shape)
        dx = dn - n * (dn * n).mean(axis=-1, keepdims=True)
        if self.is_centred:
            dx = dx - dn.mean(axis=-1, keepdims=True)
        return ((dx / s).reshape(x.shape),), dw


@dataclass(frozen=True, eq=False, repr=False)
class _LastAxesNorm(RowNorm, abstract=True):
    """Over the axes from `axis` on, jointly; weights have their sizes."""

    axis: int = -1
    eps: float = 1e-5

    def weight_shape(self, x: TensorType) -> tuple[int, ...]:
        return x.row_shape[row_axis(self.axis, x) - 1 :]

    def parts(self, x: TensorType) -> NormSegments:
        axis = row_axis(self.axis, x) - 1
        return NormSegments(math.prod(x.row_shape[:axis]), math.prod(x.row_shape[axis:]), 1)


class LayerNorm(_LastAxesNorm):
    """Over the axes from `axis` on, jointly; weight and bias have their sizes."""


class RMSNorm(_LastAxesNorm):
    """x / sqrt(mean of squares + eps) * weight, over the axes from `axis` on."""

    is_centred: ClassVar[bool] = False
    optional: ClassVar[tuple[str, ...]] = ("weight",)


@dataclass(frozen=True, eq=False, repr=False)
class GroupNorm(RowNorm):
    """Over all pixels of C / groups consecutive channels; (B, C, ...), weight and bias (C,).

    With one group per channel it is an instance norm.
    """

    groups: int
    eps: float = 1e-5

    def weight_shape(self, x: TensorType) -> tuple[int, ...]:
        return x.row_shape[:1]

    def parts(self, x: TensorType) -> NormSegments:
        if len(x.shape) < 3 or self.groups < 1 or x.row_shape[0] % self.groups:
            expected = f"(B, C and at least one more axis), C a multiple of {self.groups} groups"
            raise ShapeError("channels do not divide into groups", got=f"{x}, {self.groups} groups", expected=expected)
        return NormSegments(self.groups, x.row_size // self.groups, math.prod(x.row_shape[1:]))


def _normalised(layer: RowNorm, x: Array) -> tuple[Array, Array]:
    """The segments of x (B, segments, elements), normalised, and their divisors (B, segments, 1)."""
    segments = layer.parts(TensorType((BATCH, *x.shape[1:])))
    n: Array = x.reshape(len(x), segments.count, segments.size)
    if layer.is_centred:
        n = n - n.mean(axis=-1, keepdims=True)
    s = np.sqrt((n * n).mean(axis=-1, keepdims=True) + layer.attributes()["eps"])
    return n / s, s


def _broadcastable(layer: RowNorm, values: Array, x: Array) -> Array:
    """Weights shaped to broadcast to x: along axis 1 for channels, else along the last axes."""
    return values.reshape(-1, *(1,) * (x.ndim - 2)) if isinstance(layer, GroupNorm) else values


def _weight_gradient(layer: RowNorm, gradient: Array) -> Array:
    """The gradient summed over all elements that use the same weight."""
    axis = 1 if isinstance(layer, GroupNorm) else layer.attributes()["axis"] % gradient.ndim
    others = [a for a in range(gradient.ndim) if (a != axis if isinstance(layer, GroupNorm) else a < axis)]
    return np.asarray(gradient.sum(axis=tuple(others)))


def _batch_normalised(layer: _BatchNorm, x: Array, w: Weights) -> Array:
    y: Array = (x - _per_channel(w["mean"], x)) / np.sqrt(_per_channel(w["var"], x) + layer.eps)
    return y


def _per_channel(values: Array, x: Array) -> Array:
    """(C,) as (C, 1, ...), to broadcast along axis 1 of x."""
    return values.reshape(-1, *(1,) * (x.ndim - 2))
