"""Convolution and pooling layers, and the interleaving of phases, as torch functions."""

from __future__ import annotations

import numpy as np

from onchip.bench.frame import UnavailableError
from onchip.bench.peers.frameworks.pool_divisors import elements_per_window
from onchip.bench.peers.frameworks.torch_forms.builder import Builder, Value, Weights
from onchip.network.graph import Node
from onchip.network.layers import (
    AvgPool1d,
    AvgPool2d,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Interleave,
    MaxPool1d,
    MaxPool2d,
)
from onchip.network.layers.conv import geometry


def conv(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    layer = node.layer
    assert isinstance(layer, Conv1d | Conv2d)
    before, after = layer.pads[: layer.rank], layer.pads[layer.rank :]
    padding, is_cut = before, before != after and set(layer.stride) == {1}
    if is_cut:  # symmetric pads, then crop: a few more outputs cost less than a padded copy
        padding = tuple(map(max, before, after))
    elif before != after:
        x, padding = fx.pad(x, before, after), (0,) * layer.rank
    function = f"conv{layer.rank}d"
    y = fx.call(function, x, w["weight"], w.get("bias"), layer.stride, padding, layer.dilation, layer.groups)
    if not is_cut:
        return y
    sizes = fx.net.types[node.name].row_shape[1:]
    crop = [slice(p - b, p - b + n) for p, b, n in zip(padding, before, sizes, strict=True)]
    return fx.getitem(y, slice(None), slice(None), *crop)


def conv_transpose(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    """torch has equal pads: unequal ones use output_padding where torch allows it, else the result is sliced."""
    layer = node.layer
    assert isinstance(layer, ConvTranspose1d | ConvTranspose2d)
    padding, extra, crops = [], [], []
    for axis, size in enumerate(fx.net.types[node.name].row_shape[1:]):
        before, after = layer.pads[axis], layer.pads[layer.rank + axis]
        longer = layer.output_padding[axis] + before - after
        fits = 0 <= longer < max(layer.stride[axis], layer.dilation[axis])
        padding.append(before if fits else min(before, after))
        extra.append(longer if fits else layer.output_padding[axis])
        crops.append(slice(None) if fits else slice(before - padding[-1], before - padding[-1] + size))
    weights, function = (w["weight"], w.get("bias")), f"conv_transpose{layer.rank}d"
    y = fx.call(function, x, *weights, layer.stride, padding, extra, layer.groups, layer.dilation)
    if crops == [slice(None)] * layer.rank:
        return y
    return fx.getitem(y, slice(None), slice(None), *crops)


def max_pool(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    layer = node.layer
    assert isinstance(layer, MaxPool1d | MaxPool2d)
    padding, ceil = layer.pads[: layer.rank], layer.ceil
    if _is_uneven(layer):
        x, padding, ceil = _padded(fx, node, x, -np.inf), (0,) * layer.rank, False
    return fx.call(f"max_pool{layer.rank}d", x, layer.kernel, layer.stride, padding, layer.dilation, ceil)


def avg_pool(fx: Builder, node: Node, w: Weights, x: Value) -> Value:
    layer = node.layer
    assert isinstance(layer, AvgPool1d | AvgPool2d)
    if not _is_uneven(layer) and set(layer.dilation) == {1}:
        padding = layer.pads[: layer.rank]
        return fx.call(f"avg_pool{layer.rank}d", x, layer.kernel, layer.stride, padding, layer.ceil, layer.count_pads)
    x_type = fx.net.types[node.inputs[0]]
    C = x_type.row_shape[0]
    ones = fx.constant(np.ones((C, 1, *layer.kernel), np.float32))
    sums = fx.call(f"conv{layer.rank}d", _padded(fx, node, x), ones, None, layer.stride, 0, layer.dilation, C)
    counts = elements_per_window(layer, x_type.row_shape[1:], fx.net.types[node.name].row_shape[1:])
    return fx.call("div", sums, fx.constant(counts))


def _is_uneven(layer: MaxPool1d | MaxPool2d | AvgPool1d | AvgPool2d) -> bool:
    """True if torch cannot express the pads: it supports only symmetric pads of at most half the kernel."""
    before, after = layer.pads[: layer.rank], layer.pads[layer.rank :]
    return before != after or any(2 * pad > size for pad, size in zip(before, layer.kernel, strict=True))


def _padded(fx: Builder, node: Node, x: Value, fill: float = 0.0) -> Value:
    """Pad x to cover every window, so that ceil_mode is not needed."""
    sizes, counts = fx.net.types[node.inputs[0]].row_shape[1:], fx.net.types[node.name].row_shape[1:]
    stride, pads, dilation = geometry(node.layer)
    kernel = node.layer.attributes()["kernel"]
    ends = [(P - 1) * s + d * (K - 1) + 1 for P, s, d, K in zip(counts, stride, dilation, kernel, strict=True)]
    before = pads[: len(sizes)]
    return fx.pad(x, before, [end - b - n for end, b, n in zip(ends, before, sizes, strict=True)], fill)


def interleave(fx: Builder, node: Node, w: Weights, *xs: Value) -> Value:
    """Interleave phases of equal size in NHWC, where convolutions are fastest."""
    layer, sizes = node.layer, fx.net.types[node.name].row_shape
    assert isinstance(layer, Interleave)
    rank = len(layer.stride)
    if any(size % s for size, s in zip(sizes[1:], layer.stride, strict=True)):
        raise UnavailableError(f"no torch function for {layer} for phases of unequal size")
    phases = [fx.call("permute", x, (0, *range(2, rank + 2), 1)) for x in xs]
    for axis, s in reversed(list(enumerate(layer.stride))):
        phases = [fx.call("stack", phases[i : i + s], axis + 2) for i in range(0, len(phases), s)]
    y = fx.call("reshape", phases[0], (-1, *sizes[1:], sizes[0]))
    return fx.call("permute", y, (0, rank + 1, *range(1, rank + 1)))
