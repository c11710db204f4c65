"""Abs, Sqrt, Reciprocal, Exp, Log, Sin, Cos, Erf, and powers: of values, and of constants."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import cast

import numpy as np

from onchip.formats.onnx_ops.base import Op, folds, reads, writes
from onchip.formats.onnx_ops.combine import combine, operands
from onchip.formats.onnx_ops.graph_reader import GraphReader
from onchip.formats.onnx_ops.graph_writer import GraphWriter
from onchip.spec.error_function import erf
from onchip.spec.layers import Abs, Cast, Cos, Erf, Exp, Layer, Log, Mul, Pow, Reciprocal, Sin, Sqrt
from onchip.spec.layers.cast import CastTo
from onchip.spec.network import Node
from onchip.spec.recipe import Array
from onchip.spec.types import numpy_dtype

_FUNCTIONS: dict[str, tuple[type[Layer], Callable[[Array], Array]]] = {
    "Abs": (Abs, np.abs),
    "Sqrt": (Sqrt, np.sqrt),
    "Reciprocal": (Reciprocal, np.reciprocal),
    "Exp": (Exp, np.exp),
    "Log": (Log, np.log),
    "Sin": (Sin, np.sin),
    "Cos": (Cos, np.cos),
    "Erf": (Erf, erf),
}  # each has ONNX's name


@reads(*_FUNCTIONS)
def read_function(graph: GraphReader, op: Op) -> None:
    graph.add(op, _FUNCTIONS[op.kind][0](), (graph.value(op),))


@folds(*_FUNCTIONS, "Neg")
def fold_function(graph: GraphReader, op: Op) -> Array:
    array = graph.constant(op, 0)
    graph.spend(op, array.size)
    function = np.negative if op.kind == "Neg" else _FUNCTIONS[op.kind][1]
    return np.asarray(function(array), array.dtype)


@writes(*(layer for layer, _ in _FUNCTIONS.values()))
def write_function(graph: GraphWriter, node: Node) -> None:
    graph.emit(node.layer.kind, node, [graph.value(node)])


@reads("Pow")
def read_pow(graph: GraphReader, op: Op) -> None:
    """To the power of 2, 3, 1/2, -1 and -1/2 by products, roots and quotients, which are quicker and more exact."""
    values, constants = operands(graph, op, same_dtype=False)
    if 1 in constants and constants[1].size == 1 and 0 in values:
        x, power = values[0], float(constants[1].reshape(-1)[0])
        shape = graph.shape(x)
        if constants[1].ndim <= len(shape) and "float" in graph.types[x].dtype:
            if power in (2, 3):
                graph.add(op, Mul(), (x,) * int(power))
                return
            if power == 1:
                graph.pass_on(op)
                return
            if power in (0.5, -1):
                graph.add(op, Sqrt() if power == 0.5 else Reciprocal(), (x,))
                return
            if power == -0.5:
                graph.add(op, Reciprocal(), (graph.add_step(op, Sqrt(), (x,)),))
                return
    base = constants[0].dtype.name if 0 in constants else graph.types[values[0]].dtype
    if 1 in constants:  # an exponent may be of any dtype
        constants[1] = constants[1].astype(numpy_dtype(base))
    elif graph.types[values[1]].dtype != base and base in typing.get_args(CastTo):
        values[1] = graph.add_step(op, Cast(cast(CastTo, base)), (values[1],))
    combine(graph, op, Pow(), values, constants)


@writes(Pow)
def write_pow(graph: GraphWriter, node: Node) -> None:
    graph.emit("Pow", node, [*graph.weights(node, "first"), *graph.inputs(node), *graph.weights(node, "constant")])
