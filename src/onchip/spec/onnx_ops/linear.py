"""Gemm, MatMul with a constant, and the Add of a constant behind it: all of them are Linear."""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError
from onchip.spec.layers import Linear
from onchip.spec.network import Node
from onchip.spec.onnx_ops.base import GraphReader, GraphWriter, Op, reads, writes
from onchip.spec.reading import show
from onchip.spec.recipe import Array


@reads("Gemm")
def read_gemm(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    if op.attribute("transA", 0):
        raise FormatError(f"{op}: transA would mix the rows of the batch", got="transA=1", expected="transA=0")
    if len(graph.types[x].shape) != 2:
        raise FormatError(f"{op} needs a matrix", got=str(graph.types[x]), expected="[B, D_in]")
    alpha, beta = op.attribute("alpha", 1.0), op.attribute("beta", 1.0)
    matrix = _matrix(graph, op, x)
    weight = _scale(matrix if op.attribute("transB", 0) else matrix.T, alpha)
    roles = {"weight": graph.weight(op.inputs[1], weight)}
    if graph.has(op, 2) and beta != 0:
        roles["bias"] = graph.weight(op.inputs[2], _scale(_bias(graph, op, 2, x, len(weight)), beta))
    graph.add(op, Linear(), (x,), roles)


@reads("MatMul")
def read_matmul(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    graph.add(op, Linear(), (x,), {"weight": graph.weight(op.inputs[1], _matrix(graph, op, x).T)})


@reads("Add")
def read_add(graph: GraphReader, op: Op) -> None:
    """Add a constant to what a Linear without bias makes: its bias."""
    side = 0 if graph.is_constant(op, 0) else 1
    x = graph.value(op, 1 - side)
    linear = graph.nodes.get(x)
    is_product = linear is not None and isinstance(linear.layer, Linear) and "bias" not in linear.weights
    if linear is None or not is_product or not graph.is_constant(op, side):
        raise FormatError(
            f"{op} is not supported here", got=f"{show(op.inputs[0])} + {show(op.inputs[-1])}",
            expected="a constant vector, added once to what a MatMul or Gemm makes",
        )  # fmt: skip
    rank = len(graph.types[x].shape)
    if graph.opset < 7 and op.attribute("axis", rank - 1) not in (rank - 1, -1):
        raise FormatError(f"{op}: a bias runs along the last axis", got=f"axis {op.attributes['axis']}")
    roles = {"bias": graph.weight(op.inputs[side], _bias(graph, op, side, x, graph.types[x].row_shape[-1]))}
    if graph.readers[op.inputs[1 - side]] == 1:
        graph.add_weights(x, roles)
        graph.pass_on(op, 1 - side)
    else:  # somebody else reads the product without the bias
        graph.add(op, Linear(), linear.inputs, {**linear.weights, **roles})


def _matrix(graph: GraphReader, op: Op, x: str) -> Array:
    array = graph.constant(op, 1)
    if array.ndim != 2:
        raise FormatError(f"{op}: its constant is no matrix", got=f"shape {array.shape}", expected="two axes")
    _check_dtype(graph, op, x, array)
    return array


def _bias(graph: GraphReader, op: Op, index: int, x: str, D_out: int) -> Array:
    """The constant as one number an output, (D_out,); one that differs from row to row is no bias."""
    array = graph.constant(op, index)
    _check_dtype(graph, op, x, array)
    *others, width = array.shape or (1,)
    if array.ndim > len(graph.types[x].shape) or any(size != 1 for size in others) or width not in (1, D_out):
        raise FormatError(f"{op}: its constant is no bias", got=f"shape {array.shape}", expected=f"({D_out},)")
    return np.broadcast_to(array.reshape(-1), (D_out,))


def _check_dtype(graph: GraphReader, op: Op, x: str, array: Array) -> None:
    if array.dtype.name != graph.types[x].dtype:
        raise FormatError(f"{op} mixes dtypes", got=array.dtype.name, expected=graph.types[x].dtype)


def _scale(array: Array, factor: float) -> Array:
    if factor == 1:
        return array
    with np.errstate(all="ignore"):
        return (array.astype(np.float64) * factor).astype(array.dtype)


@writes(Linear)
def write_linear(graph: GraphWriter, node: Node) -> None:
    has_bias = "bias" in node.weights
    if len(graph.net.input_types(node)[0].shape) == 2:
        operands = [graph.value(node), graph.weight(node, "weight")]
        graph.emit("Gemm", node, operands + ([graph.weight(node, "bias")] if has_bias else []), transB=1)
        return
    operands = [graph.value(node), graph.weight(node, "weight", transposed=True)]
    if not has_bias:
        graph.emit("MatMul", node, operands)
        return
    product = graph.fresh(f"{node.name}_product")
    graph.emit_part("MatMul", node.name, operands, product)
    graph.emit_part("Add", f"{node.name}_bias", [product, graph.weight(node, "bias")], graph.values[node.name])
