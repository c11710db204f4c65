"""Linear: y = x W^T + b over the last axis."""

from __future__ import annotations

from typing import ClassVar

from onchip.errors import ShapeError
from onchip.network.layers.base import Arrays, Gradients, Layer, Types, Weights, WeightTypes, need_bias, need_float
from onchip.network.recipe import Array
from onchip.network.types import TensorType


class Linear(Layer):
    """weight (D_out, D_in), bias (D_out); x (B, ..., D_in) -> y (B, ..., D_out)."""

    required: ClassVar[tuple[str, ...]] = ("weight",)
    optional: ClassVar[tuple[str, ...]] = ("bias",)
    needs_y: ClassVar[bool] = False

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

    def forward(self, xs: Arrays, w: Weights) -> Array:
        y: Array = xs[0] @ w["weight"].T
        return y + w["bias"] if "bias" in w else y

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        D_out, D_in = w["weight"].shape
        rows, drows = xs[0].reshape(xs[0].size // D_in, D_in), dy.reshape(dy.size // D_out, D_out)
        dw = {"weight": drows.T @ rows}
        if "bias" in w:
            dw["bias"] = drows.sum(axis=0)
        return (dy @ w["weight"],), dw
