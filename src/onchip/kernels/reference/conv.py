"""Convolutions and their transposes over one or two axes: im2col, then one gemm per row.

Shapes: G groups, C channels, T kernel taps, P positions (windows of a convolution, inputs of a transposed one).
"""

from __future__ import annotations

import math

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.kernels.reference.windows import fold, unfold
from onchip.network.layers import (
    Conv1d,
    Conv2d,
    Convolution,
    ConvTranspose1d,
    ConvTranspose2d,
    Layer,
    TransposedConvolution,
)
from onchip.network.layers.conv import conv_groups, geometry, window_counts
from onchip.network.recipe import Array
from onchip.network.types import TensorType


@forward_of(Conv1d, Conv2d)
def conv(layer: Convolution, xs: Arrays, w: Weights) -> Array:
    (x,), weight = xs, w["weight"]
    counts = window_counts(TensorType(x.shape), weight.shape[2:], *geometry(layer))
    columns = unfold(x, weight.shape[2:], counts, *geometry(layer))
    y = _matrices(weight, layer) @ _by_group(columns, layer, counts)  # (B, G, C_out / G, P)
    return _with_bias(y.reshape(len(x), len(weight), *counts), w)


@backward_of(Conv1d, Conv2d)
def conv_back(layer: Convolution, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    (x,), weight, counts = xs, w["weight"], dy.shape[2:]
    kernel = weight.shape[2:]
    columns = _by_group(unfold(x, kernel, counts, *geometry(layer)), layer, counts)
    dy_grouped = _by_group(dy, layer, counts)
    dweight = _all_rows(dy_grouped) @ _all_rows(columns).swapaxes(1, 2)
    dcolumns = _matrices(weight, layer).swapaxes(1, 2) @ dy_grouped
    dcolumns = dcolumns.reshape(*x.shape[:2], math.prod(kernel), *counts)
    dx = fold(dcolumns, kernel, x.shape[2:], *geometry(layer))
    return (dx,), {"weight": dweight.reshape(weight.shape)} | _bias_gradient(w, dy)


@forward_of(ConvTranspose1d, ConvTranspose2d)
def conv_transpose(layer: TransposedConvolution, xs: Arrays, w: Weights) -> Array:
    (x,), weight = xs, w["weight"]
    kernel, sizes = weight.shape[2:], x.shape[2:]
    stride, pads, dilation = geometry(layer)
    extra = layer.attributes()["output_padding"]
    y_sizes = [
        (sizes[a] - 1) * stride[a] + dilation[a] * (kernel[a] - 1) + 1 - pads[a] - pads[layer.rank + a] + extra[a]
        for a in range(layer.rank)
    ]
    columns = _matrices(weight, layer).swapaxes(1, 2) @ _by_group(x, layer, sizes)  # (B, G, C_out / G * T, P)
    C_out = weight.shape[1] * conv_groups(layer)
    columns = columns.reshape(len(x), C_out, math.prod(kernel), *sizes)
    return _with_bias(fold(columns, kernel, y_sizes, stride, pads, dilation), w)


@backward_of(ConvTranspose1d, ConvTranspose2d)
def conv_transpose_back(layer: TransposedConvolution, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    (x,), weight = xs, w["weight"]
    sizes = x.shape[2:]
    dcolumns = _by_group(unfold(dy, weight.shape[2:], sizes, *geometry(layer)), layer, sizes)
    dx = _matrices(weight, layer) @ dcolumns
    dweight = _all_rows(_by_group(x, layer, sizes)) @ _all_rows(dcolumns).swapaxes(1, 2)
    return (dx.reshape(x.shape),), {"weight": dweight.reshape(weight.shape)} | _bias_gradient(w, dy)


def _matrices(weight: Array, layer: Layer) -> Array:
    """(N, M, kernel...) -> (G, N / G, M * T)."""
    groups = conv_groups(layer)
    return weight.reshape(groups, len(weight) // groups, math.prod(weight.shape[1:]))


def _by_group(values: Array, layer: Layer, counts: tuple[int, ...] | list[int]) -> Array:
    """(B, C, [T,] counts...) -> (B, G, C / G [* T], P)."""
    groups = conv_groups(layer)
    rest = math.prod(values.shape[1 : values.ndim - len(counts)])
    return values.reshape(len(values), groups, rest // groups, math.prod(counts))


def _all_rows(grouped: Array) -> Array:
    """(B, G, N, P) -> (G, N, B * P): weight gradients sum over both."""
    B, groups, N, P = grouped.shape
    return np.moveaxis(grouped, 0, 2).reshape(groups, N, B * P)


def _with_bias(y: Array, w: Weights) -> Array:
    return y + w["bias"].reshape(-1, *(1,) * (y.ndim - 2)) if "bias" in w else y


def _bias_gradient(w: Weights, dy: Array) -> dict[str, Array]:
    return {"bias": dy.sum(axis=(0, *range(2, dy.ndim)))} if "bias" in w else {}
