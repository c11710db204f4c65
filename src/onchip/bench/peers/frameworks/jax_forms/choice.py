"""Selection, resize and arg/top-k layers as functions of JAX."""

from __future__ import annotations

import numpy as np

from onchip.bench.peers.frameworks.jax_forms.context import Context, Value, Weights
from onchip.network.graph import Node
from onchip.network.layers import ArgMax, ArgMin, ArgTopK, CumSum, LinearResize, Selection, SequenceMax, TopK
from onchip.network.layers.base import row_axis
from onchip.network.recipe import Array


def select(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    layer = node.layer
    assert isinstance(layer, Selection)
    for axis, indices in enumerate(layer.source_indices(x.shape[1:]), start=1):
        if indices is None:
            continue
        x = _take(ctx, x, axis, indices)
        if (indices < 0).any():
            is_inside = (indices >= 0).reshape(-1, *(1,) * (x.ndim - 1 - axis))
            x = ctx.jax.numpy.where(is_inside, x, np.asarray(layer.fill, x.dtype))
    return x


def _take(ctx: Context, x: Value, axis: int, index: Array) -> Value:
    """Values of x at these indices of an axis, any value for index -1: a slice if they are equally spaced."""
    step = int(index[1] - index[0]) if len(index) > 1 else 1
    leading = [slice(None)] * axis
    if len(index) and step and index.min() >= 0 and np.array_equal(index, index[0] + step * np.arange(len(index))):
        low, high = int(index.min()), int(index.max())
        y = x[(*leading, slice(low, high + 1, abs(step)))]
        return y if step > 0 else ctx.jax.numpy.flip(y, axis)
    return ctx.jax.numpy.take(x, np.maximum(index, 0), axis=axis, mode="clip")


def linear_resize(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    layer = node.layer
    assert isinstance(layer, LinearResize)
    for axis, taps in enumerate(layer.taps(x.shape[1:]), start=1):
        if taps is not None:
            share = taps.share.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1 - axis))
            low, high = _take(ctx, x, axis, taps.low), _take(ctx, x, axis, taps.high)
            x = low * (1 - share) + high * share
    return x


def argument(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    """JAX's function returns the first of equal values."""
    layer = node.layer
    assert isinstance(layer, ArgMax | ArgMin)
    find, axis = getattr(ctx.jax.numpy, layer.kind.lower()), row_axis(layer.axis, ctx.net.types[node.inputs[0]])
    if not layer.last:
        return find(x, axis=axis, keepdims=layer.keep)
    return x.shape[axis] - 1 - find(ctx.jax.numpy.flip(x, axis), axis=axis, keepdims=layer.keep)


def top_k(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    """JAX's function covers only the last axis and the largest values."""
    layer = node.layer
    assert isinstance(layer, TopK | ArgTopK)
    axis = row_axis(layer.axis, ctx.net.types[node.inputs[0]])
    last = ctx.jax.numpy.moveaxis(x, axis, -1)
    values, indices = ctx.jax.lax.top_k(last if layer.largest else -last, layer.k)
    y = indices if isinstance(layer, ArgTopK) else values if layer.largest else -values
    return ctx.jax.numpy.moveaxis(y, -1, axis)


def cum_sum(ctx: Context, node: Node, w: Weights, x: Value) -> Value:
    layer, numpy = node.layer, ctx.jax.numpy
    assert isinstance(layer, CumSum)
    axis = row_axis(layer.axis, ctx.net.types[node.inputs[0]])
    x = numpy.flip(x, axis) if layer.reverse else x
    if layer.exclusive:  # shifted by one, with a leading 0
        leading = [slice(None)] * axis
        x = numpy.concatenate([numpy.zeros_like(x[(*leading, slice(0, 1))]), x[(*leading, slice(0, -1))]], axis=axis)
    y = numpy.cumsum(x, axis=axis)
    return numpy.flip(y, axis) if layer.reverse else y


def sequence_max(ctx: Context, node: Node, w: Weights, x: Value, lengths: Value) -> Value:
    layer, numpy = node.layer, ctx.jax.numpy
    assert isinstance(layer, SequenceMax)
    ends = np.arange(x.shape[2]) * layer.stride + layer.window
    inside = lengths.reshape(-1, 1, 1) >= ends
    largest = numpy.max(numpy.where(inside, x, np.asarray(-np.inf, x.dtype)), axis=-1)
    return numpy.where(inside[:, :, 0], largest, np.asarray(0, x.dtype))  # 0: no window fits
