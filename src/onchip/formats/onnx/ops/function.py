"""Pow, and functions that are composed of others: Tan, Sinh, Cosh, Asin, Acos."""

from __future__ import annotations

import typing
from typing import cast

import numpy as np

from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.combine import combine, operands
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.network.graph import Node
from onchip.network.layers import (
    Add,
    Atan,
    Cast,
    Cos,
    Div,
    Exp,
    Mul,
    Pow,
    Reciprocal,
    Sin,
    Sqrt,
    Sub,
)
from onchip.network.layers.cast import CastTo
from onchip.network.types import numpy_dtype


@reads("Tan", "Sinh", "Cosh")
def read_tan_sinh_cosh(graph: GraphReader, op: Op) -> None:
    """Tan as sin / cos; Sinh and Cosh as exp(x) / 2 -+ exp(-x) / 2."""
    x = graph.value(op)
    if op.kind == "Tan":
        graph.add(op, Div(), (graph.add_step(op, Sin(), (x,)), graph.add_step(op, Cos(), (x,))))
        return
    half = graph.weight("half", np.array(0.5, numpy_dtype(graph.types[x].dtype)))
    half_exp = graph.add_step(op, Mul(), (graph.add_step(op, Exp(), (x,)),), {"constant": half})
    quarter = graph.weight("quarter", np.array(0.25, numpy_dtype(graph.types[x].dtype)))
    half_exp_minus = graph.add_step(op, Div(), (half_exp,), {"first": quarter})  # 0.25 / (exp(x) / 2) = exp(-x) / 2
    graph.add(op, Sub() if op.kind == "Sinh" else Add(), (half_exp, half_exp_minus))


@reads("Asin", "Acos")
def read_asin_acos(graph: GraphReader, op: Op) -> None:
    """Asin as atan(x / sqrt((1 - x) (1 + x))); Acos as pi / 2 minus that."""
    x = graph.value(op)
    dtype = numpy_dtype(graph.types[x].dtype)
    one, half_pi = graph.weight("plus_one", np.ones((), dtype)), graph.weight("right_angle", np.array(np.pi / 2, dtype))
    factors = graph.add_step(op, Sub(), (x,), {"first": one}), graph.add_step(op, Add(), (x,), {"constant": one})
    root = graph.add_step(op, Sqrt(), (graph.add_step(op, Mul(), factors),))
    tangent = graph.add_step(op, Div(), (x, root))
    if op.kind == "Asin":
        graph.add(op, Atan(), (tangent,))
    else:
        graph.add(op, Sub(), (graph.add_step(op, Atan(), (tangent,)),), {"first": half_pi})


@reads("Pow")
def read_pow(graph: GraphReader, op: Op) -> None:
    """Powers 2 and 3 become Mul, and -1 Reciprocal, which are faster and more accurate."""
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
            if power == -1:
                graph.add(op, Reciprocal(), (x,))
                return
    base = constants[0].dtype.name if 0 in constants else graph.types[values[0]].dtype
    if 1 in constants:  # ONNX allows an exponent of any dtype
        constants[1] = constants[1].astype(numpy_dtype(base))
    elif graph.types[values[1]].dtype != base and base in typing.get_args(CastTo):
        values[1] = graph.add_step(op, Cast(cast(CastTo, base)), (values[1],))
    combine(graph, op, Pow(), values, constants)


@writes(Pow)
def write_pow(graph: GraphWriter, node: Node) -> None:
    graph.emit("Pow", node, [*graph.weights(node, "first"), *graph.inputs(node), *graph.weights(node, "constant")])
