"""Constant folding of layers: a network may, for example, normalise its learned queries."""

from __future__ import annotations

import math

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, folds
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.network.error_function import erf
from onchip.network.reading import show
from onchip.network.recipe import Array
from onchip.network.types import BATCH


@folds("Gelu")
def fold_gelu(graph: GraphReader, op: Op) -> Array:
    array = graph.constant(op, 0)
    graph.spend(op, array.size)
    x = array.astype(np.float64)
    if op.attribute("approximate", b"none") == b"tanh":
        inside = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    else:
        inside = erf(x / math.sqrt(2))
    return np.asarray(0.5 * x * (1 + inside), array.dtype)


@folds("Softmax", "LogSoftmax")
def fold_softmax(graph: GraphReader, op: Op) -> Array:
    array, is_new = graph.constant(op, 0), graph.opset >= 13
    graph.spend(op, array.size)
    axis, rank = op.attribute("axis", -1 if is_new else 1), array.ndim
    if not -rank <= axis < rank:
        raise FormatError(f"{op}: axis out of range", got=f"axis {axis}", expected=f"up to {rank - 1}")
    axes = axis if is_new else tuple(range(axis % rank, rank))  # old: all axes from `axis` on
    x = array.astype(np.float64)
    x = x - x.max(axes, keepdims=True)
    total = np.exp(x).sum(axes, keepdims=True)
    return np.asarray(np.exp(x) / total if op.kind == "Softmax" else x - np.log(total), array.dtype)


@folds("LayerNormalization", "RMSNormalization")
def fold_norm(graph: GraphReader, op: Op) -> Array:
    array = graph.constant(op, 0)
    graph.spend(op, array.size)
    if any(graph.readers[name] for name in op.outputs[1:] if name):
        got, expected = ", ".join(op.outputs), "only the first output"
        raise FormatError(f"{op}: its mean or deviation is used", got=got, expected=expected)
    axis, x = op.attribute("axis", -1), array.astype(np.float64)
    if not -array.ndim <= axis < array.ndim:
        raise FormatError(f"{op}: axis out of range", got=f"axis {axis}", expected=f"up to {array.ndim - 1}")
    axes = tuple(range(axis % array.ndim, array.ndim))
    if op.kind == "LayerNormalization":
        x = x - x.mean(axes, keepdims=True)
    x = x / np.sqrt((x * x).mean(axes, keepdims=True) + op.number("epsilon", 1e-5))
    for index, function in ((1, np.multiply), (2, np.add)):
        if graph.has(op, index):
            x = np.broadcast_to(function(x, graph.constant(op, index)), array.shape)
    return x.astype(array.dtype)


@folds("Tile")
def fold_tile(graph: GraphReader, op: Op) -> Array:
    """A constant repeated for every row of the batch keeps size 1 on the batch axis."""
    array, counts = graph.constant(op, 0), graph.constant_or_shape(op, 1).ravel().tolist()
    if len(counts) != array.ndim or BATCH in counts[1:] or (BATCH in counts[:1] and array.shape[0] != 1):
        got, expected = f"{array.shape} times {show(counts)}", "one count per axis, the batch only on axis 0 of size 1"
        raise FormatError(f"{op}: bad repeats", got=got, expected=expected)
    repeats = [1 if count == BATCH else int(count) for count in counts]
    if min(repeats, default=0) < 0:
        raise FormatError(f"{op}: bad repeats", got=show(counts), expected="at least 0 each")
    graph.spend(op, array.size * math.prod(repeats))
    return np.tile(array, repeats)
