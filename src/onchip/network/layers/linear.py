"""Linear: y = x W^T + b over the last axis."""

from __future__ import annotations

from typing import ClassVar

from onchip.errors import ShapeError
from onchip.network.layers.base import Layer, Types, WeightTypes, need_bias, need_float
from onchip.network.types import TensorType


class Linear(Layer):
    """weight (D_out, D_in), bias (D_out); x (B, ..., D_in) -> y (B, ..., D_out)."""

    required: ClassVar[tuple[str, ...]] = ("weight",)
    optional: ClassVar[tuple[str, ...]] = ("bias",)

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,), weight = inputs, weights["weight"]
        need_float(x, weights)
        if len(weight.shape) != 2 or 0 in weight.shape:
            raise ShapeError("weight must be a matrix", got=str(weight), expected="(D_out, D_in)")
        D_out, D_in = (int(d) for d in weight.shape)
        if len(x.shape) < 2 or x.shape[-1] != D_in:
            expected = f"last axis {D_in}, as weight {weight}"
            raise ShapeError("input width and weight do not fit", got=str(x), expected=expected)
        need_bias(weights, D_out)
        return TensorType((*x.shape[:-1], D_out), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        D_out, D_in = (int(d) for d in weights["weight"].shape)
        vectors = inputs[0].row_size // D_in
        return vectors * (2 * D_in * D_out + (D_out if "bias" in weights else 0))
