"""Add, Sub, Mul, Div, Neg, Sum and Concat: values with values, and with constants."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx_ops.base import Op, reads, writes
from onchip.formats.onnx_ops.gelu import completes_gelu, tanh_gelu
from onchip.formats.onnx_ops.graph_reader import GraphReader
from onchip.formats.onnx_ops.graph_writer import GraphWriter
from onchip.formats.onnx_ops.linear import takes_bias
from onchip.formats.onnx_ops.select import concat_constants
from onchip.spec.layers import GELU, Add, Concat, Layer, Mul, Sigmoid, SiLU
from onchip.spec.network import Node
from onchip.spec.recipe import Array
from onchip.spec.types import Dim, numpy_dtype


@reads("Add", "Sum")
def read_add(graph: GraphReader, op: Op) -> None:
    if completes_gelu(graph, op) or takes_bias(graph, op):
        return
    if op.kind == "Sum" and len(op.inputs) == 1:
        graph.pass_on(op)
        return
    values, constants = _operands(graph, op)
    _combine(graph, op, Add(), values, constants)


@reads("Sub")
def read_sub(graph: GraphReader, op: Op) -> None:
    values, constants = _operands(graph, op)
    if 1 in constants:
        constants[1] = -constants[1]
    else:
        values[1] = graph.add_step(op, Mul(), (values[1],), _minus_one(graph, values[1]))
    _combine(graph, op, Add(), values, constants)


@reads("Neg")
def read_neg(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    graph.add(op, Mul(), (x,), _minus_one(graph, x))


@reads("Mul")
def read_mul(graph: GraphReader, op: Op) -> None:
    if completes_gelu(graph, op):
        return
    values, constants = _operands(graph, op)
    if len(values) == 2:
        for x, factor in ((values[0], values[1]), (values[1], values[0])):
            node = graph.nodes.get(factor)
            if node is not None and isinstance(node.layer, Sigmoid) and node.inputs == (x,):
                graph.add(op, SiLU(), (x,))
                return
    elif next(iter(constants.values())).size == 1:
        (value,), (number,) = values.values(), constants.values()
        source = tanh_gelu(graph, value, float(number.reshape(-1)[0]))
        if source is not None:
            graph.add(op, GELU("tanh"), (source,))
            return
    _combine(graph, op, Mul(), values, constants)


@reads("Div")
def read_div(graph: GraphReader, op: Op) -> None:
    """By a constant: times its inverse, as exact as a rounding more allows."""
    values, constants = _operands(graph, op)
    if 1 not in constants or constants[1].dtype.kind not in "fV":
        raise FormatError(f"{op}: only a float can be divided, and only by a constant", got=", ".join(op.inputs))
    exact = constants[1].astype(np.float64)
    inverse = (1 / exact).astype(constants[1].dtype)
    # An inverse below or above what the dtype holds in full says something else than the division.
    off = np.abs(1 / inverse.astype(np.float64) - exact) > float(ml_dtypes.finfo(inverse.dtype).eps) * np.abs(exact)
    if np.any(off & np.isfinite(exact)):
        raise FormatError(f"{op}: its constant has no inverse", got=f"{inverse.dtype.name} constant")
    constants[1] = inverse
    _combine(graph, op, Mul(), values, constants)


@reads("Concat")
def read_concat(graph: GraphReader, op: Op) -> None:
    places = range(max(1, len(op.inputs)))
    values = tuple(graph.value(op, index) for index in places if not graph.is_constant(op, index))
    axis = graph.axis(op, values[0], op.attribute("axis", 1))
    if len(values) == len(places):
        graph.add(op, Concat(axis), values)
    else:
        concat_constants(graph, op, axis)


def _operands(graph: GraphReader, op: Op) -> tuple[dict[int, str], dict[int, Array]]:
    """The node's values and constants by their place; at least one is a value."""
    if op.kind != "Sum" and len(op.inputs) != 2:
        raise FormatError(f"{op}: wrong number of inputs", got=str(len(op.inputs)), expected="2")
    places = range(len(op.inputs))
    values = {index: graph.value(op, index) for index in places if not graph.is_constant(op, index)}
    if not values:  # a Sum of constants, or of nothing
        raise FormatError(f"{op} adds up no value", got=", ".join(op.inputs), expected="a value of the network")
    some = next(iter(values.values()))
    if graph.types[some].dtype == "bool":
        raise FormatError(f"{op} needs numbers", got=str(graph.types[some]), expected="a float or int dtype")
    constants = {index: graph.weight_constant(op, index, some) for index in places if index not in values}
    return values, constants


def _combine(graph: GraphReader, op: Op, layer: Layer, values: dict[int, str], constants: dict[int, Array]) -> None:
    """One layer over all operands, each with as many axes as the widest has; missing ones are in front."""
    shapes: dict[int, tuple[Dim, ...]] = {index: graph.shape(value) for index, value in values.items()}
    shapes |= {index: array.shape for index, array in constants.items()}
    if graph.opset < 7 and "axis" in op.attributes:
        shapes[1] += (1,) * _old_broadcast(op, shapes)
    rank = max(len(shape) for shape in shapes.values())
    shapes = {index: (1,) * (rank - len(shape)) + shape for index, shape in shapes.items()}
    read = []
    for index, value in values.items():
        is_wide = shapes[index] == graph.shape(value)
        read.append(value if is_wide else graph.add_step(op, graph.reshape(op, shapes[index]), (value,)))
    if not constants:
        graph.add(op, layer, tuple(read))
        return
    arrays = [array.reshape([int(d) for d in shapes[index]]) for index, array in constants.items()]
    if not graph.one_row:
        if any(len(array) != 1 for array in arrays):
            got = f"shape {arrays[0].shape}"
            raise FormatError(f"{op}: its constant differs from row to row", got=got, expected="1 along the batch")
        arrays = [array[0] for array in arrays]
    total: Array = arrays[0]
    for array in arrays[1:]:  # of a Sum
        graph.spend(op, math.prod(np.broadcast_shapes(total.shape, array.shape)))
        total = total + array
    graph.add(op, layer, tuple(read), {"constant": graph.weight(op.inputs[next(iter(constants))], total)})


def _old_broadcast(op: Op, shapes: dict[int, tuple[Dim, ...]]) -> int:
    """Before opset 7 the second operand lay against the first from `axis` on: how many axes are left behind it."""
    behind = len(shapes[0]) - op.attribute("axis", 0) - len(shapes[1])
    if not 0 <= behind <= len(shapes[0]):
        raise FormatError(f"{op}: axis out of range", got=f"axis {op.attributes['axis']}")
    return behind


def _minus_one(graph: GraphReader, value: str) -> dict[str, str]:
    return {"constant": graph.weight("minus_one", np.array(-1).astype(numpy_dtype(graph.types[value].dtype)))}


@writes(Add, Mul)
def write_broadcast(graph: GraphWriter, node: Node) -> None:
    """ONNX's take two operands: a chain of them for more."""
    operands = [*graph.inputs(node), *graph.weights(node, "constant")]
    while len(operands) > 2:
        operands[:2] = [graph.emit_step(node.layer.kind, node, operands[:2])]
    graph.emit(node.layer.kind, node, operands)


@writes(Concat)
def write_concat(graph: GraphWriter, node: Node) -> None:
    graph.emit("Concat", node, graph.inputs(node), axis=node.layer.attributes()["axis"])
