"""Elementwise layers that are one ONNX operator each, under the name that the layer gives."""

from __future__ import annotations

import numpy as np

from onchip.formats.onnx.ops.base import Op, folds, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.network.graph import Node
from onchip.network.layers import LAYERS, Elementwise, Greater, Max, Mul, Sub
from onchip.network.layers.base import Spelling
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype

_SPELLINGS: dict[type[Elementwise], Spelling] = {
    layer: layer.onnx for layer in LAYERS.values() if issubclass(layer, Elementwise) and layer.onnx is not None
}
_LAYERS = {spelling.name: layer for layer, spelling in _SPELLINGS.items()}


@reads(*_LAYERS)
def read_elementwise(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    if op.kind in ("Abs", "Sign") and "int" in graph.types[x].dtype:
        _read_of_ints(graph, op, x)
    else:
        graph.add(op, _layer_of(op), (x,))


def _layer_of(op: Op) -> Elementwise:
    layer = _LAYERS[op.kind]
    names = _SPELLINGS[layer].attributes
    return layer(**{ours: op.number(theirs, getattr(layer, ours)) for theirs, ours in names.items()})


def _read_of_ints(graph: GraphReader, op: Op, x: str) -> None:
    """Abs as max(x, -x), Sign as (x > 0) - (x < 0)."""
    dtype = numpy_dtype(graph.types[x].dtype)
    if op.kind == "Abs" and dtype.kind == "u":
        graph.pass_on(op)
    elif op.kind == "Abs":
        minus = graph.weight("minus_one", np.array(-1, dtype))
        graph.add(op, Max(), (x, graph.add_step(op, Mul(), (x,), {"constant": minus})))
    else:
        zero = graph.weight("zero", np.zeros((), dtype))
        is_positive, is_negative = (graph.add_step(op, Greater(), (x,), {role: zero}) for role in ("constant", "first"))
        graph.add(op, Sub(), (is_positive, is_negative))


@folds(*_LAYERS)
def fold_elementwise(graph: GraphReader, op: Op) -> Array:
    array = graph.constant(op, 0)
    graph.spend(op, array.size)
    wide = array.astype(np.float64) if array.dtype.kind in "fV" else array
    return np.asarray(_layer_of(op).function(wide)).astype(array.dtype)


@folds("Neg")
def fold_neg(graph: GraphReader, op: Op) -> Array:
    array = graph.constant(op, 0)
    graph.spend(op, array.size)
    return np.asarray(np.negative(array), array.dtype)


@writes(*_SPELLINGS)
def write_elementwise(graph: GraphWriter, node: Node) -> None:
    spelling = _SPELLINGS[type(node.layer)]  # type: ignore[index]
    attributes = {theirs: node.layer.attributes()[ours] for theirs, ours in spelling.attributes.items()}
    graph.emit(spelling.name, node, [graph.value(node)], **attributes)
