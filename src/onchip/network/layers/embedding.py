"""Tokens: a table lookup by ids, and the sum of lookups that replaces a convolution after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import (
    Arrays,
    Gradients,
    Layer,
    Types,
    Weights,
    WeightTypes,
    as_sizes,
    need_bias,
    need_float,
)
from onchip.network.layers.conv import window_counts
from onchip.network.recipe import Array
from onchip.network.tokens import check_token_ids
from onchip.network.types import TensorType

ID_DTYPES = ("int32", "int64")


class Embedding(Layer):
    """y[..., :] = weight[x[...]]: ids (B, ...) below V, weight (V, E) -> (B, ..., E)."""

    required: ClassVar[tuple[str, ...]] = ("weight",)
    needs_y: ClassVar[bool] = False

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,), weight = inputs, weights["weight"]
        _need_ids(x)
        if len(weight.shape) != 2 or 0 in weight.shape:
            raise ShapeError("weight must be a table", got=str(weight), expected="(V, E)")
        return TensorType((*x.shape, weight.shape[1]), weight.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def row_lookup_elements(self, inputs: Types, weights: WeightTypes) -> int:
        return self.infer(inputs, weights).row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        check_token_ids(xs[0], len(w["weight"]))  # NumPy would count a negative id from the end
        return w["weight"][xs[0]]

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        dweight = np.zeros(w["weight"].shape, dy.dtype)
        np.add.at(dweight, xs[0], dy)
        return (None,), {"weight": dweight}


@dataclass(frozen=True, eq=False, repr=False)
class TokenConv(Layer):
    """A Conv1d over embedded tokens, as a sum of looked-up rows: a rewrite replaces Embedding and Conv1d by it.

    y[:, p] = bias + sum over k of weight[x[p * stride - before + k], k]; positions outside add nothing.
    ids (B, S), weight (V, K, C_out), bias (C_out) -> (B, C_out, P).
    """

    stride: int = 1
    pads: tuple[int, ...] = (0, 0)
    required: ClassVar[tuple[str, ...]] = ("weight",)
    optional: ClassVar[tuple[str, ...]] = ("bias",)
    has_tables: ClassVar[bool] = True
    needs_y: ClassVar[bool] = False

    def __post_init__(self) -> None:
        as_sizes(self, pads=0)
        if self.stride < 1 or len(self.pads) != 2:
            raise ShapeError("bad stride or pads", got=f"{self.stride}, {self.pads}", expected="1, (before, after)")

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,), weight = inputs, weights["weight"]
        _need_ids(x)
        need_float(weight, weights)
        if len(weight.shape) != 3 or 0 in weight.shape:
            raise ShapeError("weight must be a stack of tables", got=str(weight), expected="(V, K, C_out)")
        if len(x.shape) != 2:
            raise ShapeError("bad input shape", got=str(x), expected="ids (B, S)")
        _, K, C_out = (int(d) for d in weight.shape)
        need_bias(weights, C_out)
        row = TensorType((x.shape[0], 1, x.shape[1]), x.dtype)
        return TensorType((x.shape[0], C_out, *window_counts(row, (K,), (self.stride,), self.pads, (1,))), weight.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return self.row_lookup_elements(inputs, weights)  # each is added

    def row_lookup_elements(self, inputs: Types, weights: WeightTypes) -> int:
        return self.infer(inputs, weights).row_size * int(weights["weight"].shape[1])

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (ids,), weight = xs, w["weight"]
        check_token_ids(ids, len(weight))
        y = np.zeros((1, 1, 1), weight.dtype)
        # Tap by tap, not one sum over them: the reduction order is then the same for every shape.
        for k, read in enumerate(_read_by_taps(self, ids, weight)):
            y = y + np.where((read != _NO_TOKEN)[..., None], weight[read, k], 0)
        return np.swapaxes(y + w["bias"] if "bias" in w else y, 1, 2)

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        (ids,), weight = xs, w["weight"]
        dweight = np.zeros(weight.shape, dy.dtype)
        for k, read in enumerate(_read_by_taps(self, ids, weight)):
            inside = read != _NO_TOKEN
            np.add.at(dweight[:, k], read[inside], dy.swapaxes(1, 2)[inside])
        dw = {"weight": dweight}
        if "bias" in w:
            dw["bias"] = dy.sum(axis=(0, 2))
        return (None,), dw


def _need_ids(x: TensorType) -> None:
    if x.dtype not in ID_DTYPES:
        raise ShapeError("needs int ids", got=str(x), expected=" or ".join(ID_DTYPES))


_NO_TOKEN = -1


def _read_by_taps(layer: TokenConv, ids: Array, weight: Array) -> list[Array]:
    """For each tap k the ids (B, P) that it reads at every position; _NO_TOKEN outside the sequence."""
    padded = np.pad(ids, ((0, 0), layer.pads), constant_values=_NO_TOKEN)
    K = weight.shape[1]
    last = padded.shape[1] - K  # the last start of a window
    return [padded[:, k : k + last + 1 : layer.stride] for k in range(K)]
