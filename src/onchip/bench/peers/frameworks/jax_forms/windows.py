"""Convolution and pooling layers as functions of JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onchip.bench.peers.frameworks.jax_forms.context import Context, Value, Weights
from onchip.bench.peers.frameworks.pool_divisors import elements_per_window
from onchip.network.graph import Node
from onchip.network.layers import AvgPool1d, AvgPool2d, Layer
from onchip.network.layers.conv import conv_groups, geometry
from onchip.network.recipe import Array


def conv(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    stride, pads, dilation = geometry(node.layer)
    rank = len(stride)
    padding = tuple(zip(pads[:rank], pads[rank:], strict=True))
    return _conv(ctx, node, w, x, window_strides=stride, padding=padding, rhs_dilation=dilation)


def conv_transpose(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    """A stride-1 convolution over x with inserted zeros; `mirrored` prepares its weights."""
    stride, pads, dilation = geometry(node.layer)
    rank, extra = len(stride), node.layer.attributes()["output_padding"]
    span = [d * (K - 1) for d, K in zip(dilation, w["weight"].shape[2:], strict=True)]
    padding = tuple((span[a] - pads[a], span[a] - pads[rank + a] + extra[a]) for a in range(rank))
    ones = (1,) * rank
    return _conv(ctx, node, w, x, window_strides=ones, padding=padding, lhs_dilation=stride, rhs_dilation=dilation)


def mirrored(layer: Layer, w: Mapping[str, Array]) -> dict[str, Array]:
    """weight (C_in, C_out / G, kernel...) -> (C_out, C_in / G, kernel...), with its taps reversed."""
    weight, groups = w["weight"], conv_groups(layer)
    C_in, C_group, *kernel = weight.shape
    grouped = weight.reshape(groups, C_in // groups, C_group, *kernel).swapaxes(1, 2)
    taps = tuple(range(2, weight.ndim))
    return {**w, "weight": np.flip(grouped.reshape(groups * C_group, C_in // groups, *kernel), taps)}


def _conv(ctx: Context, node: Node, w: Weights, x: Value, **geometry: Any) -> Value:
    axes = "HW"[: x.ndim - 2]
    y = ctx.jax.lax.conv_general_dilated(
        x, w["weight"], dimension_numbers=(f"NC{axes}", f"OI{axes}", f"NC{axes}"),
        feature_group_count=conv_groups(node.layer), precision=ctx.precision, **geometry,
    )  # fmt: skip
    return y + by_channel(w["bias"], y) if "bias" in w else y


def by_channel(weight: Value, y: Value) -> Value:
    return weight.reshape(1, -1, *(1,) * (y.ndim - 2))


def max_pool(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    return _reduce_windows(ctx, node, x, -np.inf, ctx.jax.lax.max)


def avg_pool(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    assert isinstance(node.layer, AvgPool1d | AvgPool2d)
    total = _reduce_windows(ctx, node, x, 0.0, ctx.jax.lax.add)
    counts = elements_per_window(node.layer, x.shape[2:], ctx.net.types[node.name].row_shape[1:])
    return total / counts.astype(x.dtype)


def _reduce_windows(ctx: Context, node: Node, x: Value, start: float, function: Any) -> Value:
    stride, pads, dilation = geometry(node.layer)
    kernel, rank = node.layer.attributes()["kernel"], len(stride)
    padding = []
    for a, count in enumerate(ctx.net.types[node.name].row_shape[1:]):
        end = (int(count) - 1) * stride[a] + dilation[a] * (kernel[a] - 1) + 1  # of the last window: past x if `ceil`
        padding.append((pads[a], max(pads[rank + a], end - pads[a] - x.shape[2 + a])))
    return ctx.jax.lax.reduce_window(
        x, start, function, (1, 1, *kernel), (1, 1, *stride), ((0, 0), (0, 0), *padding),
        window_dilation=(1, 1, *dilation),
    )  # fmt: skip
