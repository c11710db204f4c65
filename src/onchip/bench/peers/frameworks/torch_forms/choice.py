"""Selection, resize and arg/top-k layers as torch functions."""

from __future__ import annotations

import numpy as np

from onchip.bench.peers.frameworks.torch_forms.builder import Builder, Value, Weights
from onchip.network.graph import Node
from onchip.network.layers import (
    ArgMax,
    ArgMin,
    ArgTopK,
    CumSum,
    LinearResize,
    NearestResize,
    Pad,
    Selection,
    SequenceMax,
    Tile,
    TopK,
)
from onchip.network.layers.base import row_axis
from onchip.network.recipe import Array

_LINEAR = {2: "linear", 3: "bilinear", 4: "trilinear"}  # by the rank of a row


def select(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    """By a torch function if there is one, else axis by axis."""
    layer, x_type = node.layer, fx.net.types[node.inputs[0]]
    assert isinstance(layer, Selection)
    row, is_float = x_type.row_shape, "float" in x_type.dtype
    if isinstance(layer, Pad) and layer.mode == "constant":
        return fx.pad(x, layer.pads[: len(row)], layer.pads[len(row) :], layer.value if is_float else int(layer.value))
    if isinstance(layer, Tile):
        return fx.call("tile", x, (1, *layer.repeats))
    if isinstance(layer, NearestResize) and is_float and (mode := _nearest_mode(layer, row)):
        return fx.call("interpolate", x, layer.sizes[1:], mode=mode)
    for axis, index in enumerate(layer.source_indices(row), start=1):
        if index is not None:
            x = _take(fx, x, axis, index)
    return x


def _nearest_mode(layer: NearestResize, row: tuple[int, ...]) -> str:
    """torch's interpolation mode, if it has one: only integer factors, as torch computes positions in float32."""
    mode = layer.coordinates, layer.rounding
    modes = {("asymmetric", "floor"): "nearest", ("half_pixel", "round_prefer_ceil"): "nearest-exact"}
    return modes.get(mode, "") if _is_image(layer, row) and not any(np.mod(layer.sizes, row)) else ""


def _is_image(layer: NearestResize | LinearResize, row: tuple[int, ...]) -> bool:
    """Whether all axes but the channels are resized, to exactly scale times the old size."""
    is_exact = all(size == scale * n for n, size, scale in zip(row, layer.sizes, layer.scales, strict=True))
    return is_exact and 2 <= len(row) <= 4 and layer.sizes[0] == row[0]


def _take(fx: Builder, x: Value, axis: int, index: Array) -> Value:
    """Values of x at these indices of an axis: a view if they are equally spaced."""
    step = int(index[1] - index[0]) if len(index) > 1 else 1
    leading = [slice(None)] * axis
    if len(index) and step and np.array_equal(index, index[0] + step * np.arange(len(index))):
        low, high = int(index.min()), int(index.max())
        y = fx.getitem(x, *leading, slice(low, high + 1, abs(step)))
        return y if step > 0 else fx.call("flip", y, (axis,))
    return fx.call("index_select", x, axis, fx.constant(index))


def linear_resize(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    layer, row = node.layer, fx.net.types[node.inputs[0]].row_shape
    assert isinstance(layer, LinearResize)
    at_corners = layer.coordinates == "align_corners"
    if _is_image(layer, row) and (at_corners or layer.coordinates == "half_pixel"):
        return fx.call("interpolate", x, layer.sizes[1:], mode=_LINEAR[len(row)], align_corners=at_corners)
    for axis, taps in enumerate(layer.taps(row), start=1):
        if taps is not None:
            low, high = (fx.call("index_select", x, axis, fx.constant(end)) for end in (taps.low, taps.high))
            share = taps.share.astype(np.float32).reshape(-1, *(1,) * (len(row) - axis))
            x = fx.call("lerp", low, high, fx.constant(share))
    return x


def argument(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    """torch's function returns the first of equal values."""
    layer, x_type = node.layer, fx.net.types[node.inputs[0]]
    assert isinstance(layer, ArgMax | ArgMin)
    function, axis = layer.kind.lower(), row_axis(layer.axis, x_type)
    if not layer.last:
        return fx.call(function, x, axis, layer.keep)
    return fx.call(
        "rsub", fx.call(function, fx.call("flip", x, (axis,)), axis, layer.keep), int(x_type.shape[axis]) - 1
    )


def top_k(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    """torch's function may order equal values differently."""
    layer, x_type = node.layer, fx.net.types[node.inputs[0]]
    assert isinstance(layer, TopK | ArgTopK)
    found = fx.call("topk", x, layer.k, row_axis(layer.axis, x_type), layer.largest)
    return fx.getitem(found, int(isinstance(layer, ArgTopK)))


def cum_sum(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    layer, x_type = node.layer, fx.net.types[node.inputs[0]]
    assert isinstance(layer, CumSum)
    axis = row_axis(layer.axis, x_type)
    x = fx.call("flip", x, (axis,)) if layer.reverse else x
    if layer.exclusive:  # shifted by one, with a leading 0
        later_axes = len(x_type.shape) - 1 - axis
        x = fx.pad(x, (1, *(0,) * later_axes), (-1, *(0,) * later_axes), 0)
    y = fx.call("cumsum", x, axis, dtype=getattr(fx.torch, x_type.dtype) if "float" not in x_type.dtype else None)
    return fx.call("flip", y, (axis,)) if layer.reverse else y


def sequence_max(fx: Builder, node: Node, w: Weights, x: Value, lengths: Value) -> Value:
    layer, P = node.layer, fx.net.types[node.inputs[0]].row_shape[1]
    assert isinstance(layer, SequenceMax)
    ends = fx.constant(np.arange(P) * layer.stride + layer.window)
    inside = fx.call("ge", fx.call("reshape", lengths, (-1, 1, 1)), ends)
    largest = fx.call("amax", fx.call("where", inside, x, -np.inf), -1)
    return fx.call("where", fx.getitem(inside, slice(None), slice(None), 0), largest, 0.0)  # 0: no window fits
