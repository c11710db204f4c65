"""Selection, resize and arg/top-k layers as functions of JAX."""

from __future__ import annotations

import numpy as np

from onchip.bench.peers.frameworks.jax_forms.context import Context, Value, Weights
from onchip.network.graph import Node
from onchip.network.layers import ArgMax, ArgMin, ArgTopK, CumSum, LinearResize, Selection, SequenceMax, TopK
from onchip.network.layers.base import row_axis
from onchip.network.recipe import Array


def select(to: Context, node: Node, w: Weights, x: Value) -> Value:
    layer = node.layer
    assert isinstance(layer, Selection)
    for axis, places in enumerate(layer.places(x.shape[1:]), start=1):
        if places is None:
            continue
        x = _take(to, x, axis, places)
        if (places < 0).any():
            there = (places >= 0).reshape(-1, *(1,) * (x.ndim - 1 - axis))
            x = to.jax.numpy.where(there, x, np.asarray(layer.fill, x.dtype))
    return x


def _take(to: Context, x: Value, axis: int, places: Array) -> Value:
    """Values of x at these indices of an axis, any value for index -1: a slice if they are equally spaced."""
    step = int(places[1] - places[0]) if len(places) > 1 else 1
    front = [slice(None)] * axis
    if len(places) and step and places.min() >= 0 and np.array_equal(places, places[0] + step * np.arange(len(places))):
        low, high = int(places.min()), int(places.max())
        y = x[(*front, slice(low, high + 1, abs(step)))]
        return y if step > 0 else to.jax.numpy.flip(y, axis)
    return to.jax.numpy.take(x, np.maximum(places, 0), axis=axis, mode="clip")


def linear_resize(to: Context, node: Node, w: Weights, x: Value) -> Value:
    layer = node.layer
    assert isinstance(layer, LinearResize)
    for axis, taps in enumerate(layer.taps(x.shape[1:]), start=1):
        if taps is not None:
            share = taps.share.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1 - axis))
            low, high = _take(to, x, axis, taps.low), _take(to, x, axis, taps.high)
            x = low * (1 - share) + high * share
    return x


def argument(to: Context, node: Node, w: Weights, x: Value) -> Value:
    """JAX's function returns the first of equal values."""
    layer = node.layer
    assert isinstance(layer, ArgMax | ArgMin)
    find, axis = getattr(to.jax.numpy, layer.kind.lower()), row_axis(layer.axis, to.net.types[node.inputs[0]])
    if not layer.last:
        return find(x, axis=axis, keepdims=layer.keep)
    return x.shape[axis] - 1 - find(to.jax.numpy.flip(x, axis), axis=axis, keepdims=layer.keep)


def top_k(to: Context, node: Node, w: Weights, x: Value) -> Value:
    """JAX's function covers only the last axis and the largest values."""
    layer = node.layer
    assert isinstance(layer, TopK | ArgTopK)
    axis = row_axis(layer.axis, to.net.types[node.inputs[0]])
    last = to.jax.numpy.moveaxis(x, axis, -1)
    numbers, places = to.jax.lax.top_k(last if layer.largest else -last, layer.k)
    made = places if isinstance(layer, ArgTopK) else numbers if layer.largest else -numbers
    return to.jax.numpy.moveaxis(made, -1, axis)


def cum_sum(to: Context, node: Node, w: Weights, x: Value) -> Value:
    layer, numpy = node.layer, to.jax.numpy
    assert isinstance(layer, CumSum)
    axis = row_axis(layer.axis, to.net.types[node.inputs[0]])
    x = numpy.flip(x, axis) if layer.reverse else x
    if layer.exclusive:  # shifted by one, with a leading 0
        front = [slice(None)] * axis
        x = numpy.concatenate([numpy.zeros_like(x[(*front, slice(0, 1))]), x[(*front, slice(0, -1))]], axis=axis)
    y = numpy.cumsum(x, axis=axis)
    return numpy.flip(y, axis) if layer.reverse else y


def sequence_max(to: Context, node: Node, w: Weights, x: Value, lengths: Value) -> Value:
    layer, numpy = node.layer, to.jax.numpy
    assert isinstance(layer, SequenceMax)
    ends = np.arange(x.shape[2]) * layer.stride + layer.window
    inside = lengths.reshape(-1, 1, 1) >= ends
    largest = numpy.max(numpy.where(inside, x, np.asarray(-np.inf, x.dtype)), axis=-1)
    return numpy.where(inside[:, :, 0], largest, np.asarray(0, x.dtype))  # without a first window there is none
