"""Gemm and MatMul: Linear if the matrix is constant, with a following constant Add as bias; else MatMul."""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.network.graph import Node
from onchip.network.layers import Add, Linear, MatMul, Mul, Permute
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype


@reads("Gemm")
def read_gemm(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    if len(graph.shape(x)) != 2:
        raise FormatError(f"{op} needs a matrix", got=str(graph.types[x]), expected="[B, D_in]")
    if op.attribute("transA", 0):
        if not graph.one_row:
            raise FormatError(f"{op}: transA would mix the rows of the batch", got="transA=1", expected="transA=0")
        x = graph.add_step(op, Permute((0, 2, 1)), (x,))
    alpha, beta = op.attribute("alpha", 1.0), op.attribute("beta", 1.0)
    matrix = _matrix(graph, op, x)
    weight = _scale(matrix if op.attribute("transB", 0) else matrix.T, alpha)
    roles = {"weight": graph.weight(op.inputs[1], weight)}
    if not graph.has(op, 2) or beta == 0:
        graph.add(op, Linear(), (x,), roles)
    elif not graph.is_constant(op, 2):
        added = graph.value(op, 2)
        if beta != 1:
            factor = np.array(beta, numpy_dtype(graph.types[x].dtype))
            added = graph.add_step(op, Mul(), (added,), {"constant": graph.weight(f"{op.outputs[0]}_beta", factor)})
        graph.add(op, Add(), (graph.add_step(op, Linear(), (x,), roles), added))
    else:
        _add_constant(graph, op, x, roles, _scale(graph.weight_constant(op, 2, x), beta))


def _add_constant(graph: GraphReader, op: Op, x: str, roles: dict[str, str], added: Array) -> None:
    D_out = graph.weights[roles["weight"]].shape[0]
    bias = _as_bias(added, 2, D_out)
    if bias is not None:
        graph.add(op, Linear(), (x,), {**roles, "bias": graph.weight(op.inputs[2], bias)})
    elif graph.one_row:  # a different bias per row of the matrix
        y = graph.add_step(op, Linear(), (x,), roles)
        graph.add(op, Add(), (y,), {"constant": graph.weight(op.inputs[2], added)})
    else:
        raise FormatError(f"{op}: its constant is not a bias", got=f"shape {added.shape}", expected=f"({D_out},)")


@reads("MatMul")
def read_matmul(graph: GraphReader, op: Op) -> None:
    if graph.is_constant(op, 0) or not graph.is_constant(op, 1) or graph.constant(op, 1).ndim > 2:
        _multiply(graph, op)
        return
    x, array = graph.value(op), graph.constant(op, 1)
    if array.ndim != 1:
        graph.add(op, Linear(), (x,), {"weight": graph.weight(op.inputs[1], _matrix(graph, op, x).T)})
        return
    column = graph.weight_constant(op, 1, x)[None]  # a vector as a matrix of one column, which is removed afterwards
    y = graph.add_step(op, Linear(), (x,), {"weight": graph.weight(op.inputs[1], column)})
    graph.add(op, graph.reshape(op, graph.shape(y)[:-1]), (y,))


def _multiply(graph: GraphReader, op: Op) -> None:
    """MatMul of two values, or of a value and a constant that is not one shared matrix. A vector becomes a matrix of
    one row or column, which is removed afterwards; operands get equal rank.
    """
    values = {index: graph.value(op, index) for index in (0, 1) if not graph.is_constant(op, index)}
    some = next(iter(values.values()))
    constants = {index: graph.weight_constant(op, index, some) for index in (0, 1) if index not in values}
    shapes = {index: graph.shape(value) for index, value in values.items()}
    shapes |= {index: array.shape for index, array in constants.items()}
    if not graph.one_row and any(len(shapes[index]) < 3 for index in values):
        got = " and ".join(str(graph.types[value]) for value in values.values())
        raise FormatError(f"{op} would mix the rows of the batch", got=got, expected="values [B, ..., M, K]")
    is_vector = {index: len(shape) == 1 for index, shape in shapes.items()}
    if is_vector[0]:
        shapes[0] = (1, *shapes[0])
    if is_vector[1]:
        shapes[1] = (*shapes[1], 1)
    rank = max(len(shape) for shape in shapes.values())
    for index, value in values.items():
        # The batch stays first; missing axes are inserted after it.
        leading = 0 if graph.one_row else 1
        shape = (*shapes[index][:leading], *(1,) * (rank - len(shapes[index])), *shapes[index][leading:])
        if shape != graph.shape(value):
            values[index] = graph.add_step(op, graph.reshape(op, shape), (value,))
    weights = {}
    for index, array in constants.items():
        array = array.reshape([int(d) for d in shapes[index]])
        if not graph.one_row and array.ndim == rank:
            array = graph.once(array)
            if len(array) != 1:
                raise FormatError(
                    f"{op}: its constant varies over the batch",
                    got=f"shape {array.shape}",
                    expected="size 1 on axis 0",
                )
            array = array[0]
        weights["first" if index == 0 else "constant"] = graph.weight(op.inputs[index], array)
    read = tuple(values[index] for index in sorted(values))
    if not any(is_vector.values()):
        graph.add(op, MatMul(), read, weights)
        return
    y = graph.add_step(op, MatMul(), read, weights)
    sizes = list(graph.shape(y))
    result_shape = [d for axis, d in enumerate(sizes, -len(sizes)) if not is_vector.get(axis + 2, False)]
    graph.add(op, graph.reshape(op, result_shape), (y,))


@writes(MatMul)
def write_matmul(graph: GraphWriter, node: Node) -> None:
    operands = [*graph.weights(node, "first"), *graph.inputs(node), *graph.weights(node, "constant")]
    graph.emit("MatMul", node, operands)


def fuses_bias(graph: GraphReader, op: Op) -> bool:
    """Handle an Add that only adds a bias to a Linear without one; return whether it was handled."""
    side = 0 if graph.is_constant(op, 0) else 1
    if len(op.inputs) != 2 or not graph.is_constant(op, side) or op.inputs[1 - side] not in graph.values:
        return False
    x = graph.value(op, 1 - side)
    linear, rank = graph.nodes.get(x), len(graph.types[x].shape)
    if linear is None or not isinstance(linear.layer, Linear) or "bias" in linear.weights:
        return False
    if graph.opset < 7 and op.attribute("axis", rank - 1) not in (rank - 1, -1):
        return False
    bias = _as_bias(graph.weight_constant(op, side, x), rank, graph.types[x].row_shape[-1])
    if bias is None:
        return False
    roles = {"bias": graph.weight(op.inputs[side], bias)}
    if graph.readers[op.inputs[1 - side]] == 1:
        graph.add_weights(x, roles)
        graph.pass_on(op, 1 - side)
    else:  # other nodes read the gemm without bias
        graph.add(op, Linear(), linear.inputs, {**linear.weights, **roles})
    return True


def _matrix(graph: GraphReader, op: Op, x: str) -> Array:
    array = graph.constant(op, 1)
    if array.ndim != 2:
        raise FormatError(f"{op}: its constant is not a matrix", got=f"shape {array.shape}", expected="two axes")
    return graph.weight_constant(op, 1, x)


def _as_bias(array: Array, rank: int, D_out: int) -> Array | None:
    """The constant as one value per output, (D_out,); None if it is larger or varies per row."""
    *others, width = array.shape or (1,)
    if array.ndim > rank or any(size != 1 for size in others) or width not in (1, D_out):
        return None
    return np.broadcast_to(array.reshape(-1), (D_out,))


def _scale(array: Array, factor: float) -> Array:
    if factor == 1:
        return array
    with np.errstate(all="ignore"):
        return (array.astype(np.float64) * factor).astype(array.dtype)


@writes(Linear)
def write_linear(graph: GraphWriter, node: Node) -> None:
    if len(graph.net.input_types(node)[0].shape) == 2:
        graph.emit("Gemm", node, [graph.value(node), *graph.weights(node, "weight", "bias")], transB=1)
        return
    operands = [graph.value(node), graph.weight(node, "weight", np.transpose)]
    if "bias" not in node.weights:
        graph.emit("MatMul", node, operands)
        return
    y = graph.fresh(f"{node.name}_product")
    graph.emit_part("MatMul", node.name, operands, y)
    graph.emit_part("Add", f"{node.name}_bias", [y, graph.weight(node, "bias")], graph.values[node.name])
