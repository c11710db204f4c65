"""Tokens: a table lookup by ids, and the sum of lookups that replaces a convolution after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onchip.errors import ShapeError
from onchip.network.layers.base import Layer, Types, WeightTypes, as_sizes, need_bias, need_float
from onchip.network.layers.conv import window_counts
from onchip.network.types import TensorType

ID_DTYPES = ("int32", "int64")


class Embedding(Layer):
    """y[..., :] = weight[x[...]]: ids (B, ...) below V, weight (V, E) -> (B, ..., E)."""

    required: ClassVar[tuple[str, ...]] = ("weight",)

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


def _need_ids(x: TensorType) -> None:
    if x.dtype not in ID_DTYPES:
        raise ShapeError("needs int ids", got=str(x), expected=" or ".join(ID_DTYPES))
