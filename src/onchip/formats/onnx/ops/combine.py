"""Add, Sub, Mul, Div, Mod, Neg, Sum, Max, Min, Mean, PRelu, Where, Concat, of values and constants."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.gelu import exact_gelu, pairs, tanh_gelu
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.ops.linear import fuses_bias
from onchip.formats.onnx.ops.pixels import completes_pixels
from onchip.formats.onnx.ops.select import concat_constants
from onchip.formats.onnx.tensors import ELEMENT_TYPES
from onchip.network.graph import Node
from onchip.network.layers import (
    GELU,
    Add,
    Broadcast,
    Clip,
    Concat,
    Div,
    Equal,
    Greater,
    GreaterOrEqual,
    HardSigmoid,
    HardSwish,
    Layer,
    LeakyReLU,
    Mask,
    Max,
    Min,
    Mish,
    Mod,
    Mul,
    Ordered,
    PReLU,
    ReLU,
    Sigmoid,
    SiLU,
    Softplus,
    Sub,
    Tanh,
)
from onchip.network.reading import show
from onchip.network.recipe import Array
from onchip.network.types import Dim, numpy_dtype

_MANY = ("Sum", "Max", "Min", "Mean")
_FOLDED: dict[type[Layer], Callable[[Array, Array], Array]] = {Add: np.add, Max: np.maximum, Min: np.minimum}


@reads("Add", "Sum")
def read_add(graph: GraphReader, op: Op) -> None:
    if fuses_bias(graph, op):
        return
    if op.kind == "Sum" and len(op.inputs) == 1:
        graph.pass_on(op)
        return
    values, constants = operands(graph, op)
    combine(graph, op, Add(), values, constants)


@reads("Sub")
def read_sub(graph: GraphReader, op: Op) -> None:
    values, constants = operands(graph, op)
    if 1 in constants:
        constants[1] = -constants[1]
    combine(graph, op, Add() if 1 in constants else Sub(), values, constants)


@reads("Neg")
def read_neg(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    graph.add(op, Mul(), (x,), _minus_one(graph, x))


@reads("Mul")
def read_mul(graph: GraphReader, op: Op) -> None:
    values, constants = operands(graph, op)
    found = _activation(graph, values, constants)
    if found is None:
        combine(graph, op, Mul(), values, constants)
    else:
        graph.add(op, found[0], (found[1],))


def _activation(graph: GraphReader, values: dict[int, str], constants: dict[int, Array]) -> tuple[Layer, str] | None:
    """The activation that a Mul completes, and its input."""
    if len(values) == 2:
        first, second = values[0], values[1]
        source = exact_gelu(graph, (first, second), 1.0)
        if source is not None:
            return GELU(), source
        return _of_two(graph, first, second) or _of_two(graph, second, first)
    (value,), (array,) = values.values(), constants.values()
    if array.size != 1:
        return None
    number = float(array.reshape(-1)[0])
    source = tanh_gelu(graph, value, number)
    if source is not None:
        return GELU("tanh"), source
    sources = (exact_gelu(graph, pair, number) for pair in pairs(graph, value, Mul))
    source = next((source for source in sources if source is not None), None)
    return None if source is None else (GELU(), source)


def _of_two(graph: GraphReader, x: str, factor: str) -> tuple[Layer, str] | None:
    """x times a function of x, if that is an activation."""
    node = graph.nodes.get(factor)
    if node is None or not node.inputs:
        return None
    if isinstance(node.layer, Tanh):
        inside = graph.nodes.get(node.inputs[0])
        is_mish = inside is not None and isinstance(inside.layer, Softplus) and inside.inputs == (x,)
        return (Mish(), x) if is_mish else None
    if node.inputs != (x,):
        return None
    if isinstance(node.layer, HardSigmoid) and abs(node.layer.slope - 1 / 6) < 1e-6 and node.layer.shift == 0.5:
        return HardSwish(), x
    return (SiLU(), x) if isinstance(node.layer, Sigmoid) else None


@reads("Div")
def read_div(graph: GraphReader, op: Op) -> None:
    """Division by a constant becomes a Mul by its reciprocal, if that is accurate to one rounding."""
    values, constants = operands(graph, op)
    _check_divisor(op, constants)
    if 1 in constants and constants[1].dtype.kind in "fV":
        exact = constants[1].astype(np.float64)
        inverse = (1 / exact).astype(constants[1].dtype)
        # A reciprocal that is subnormal or overflows in this dtype changes the result.
        off = np.abs(1 / inverse.astype(np.float64) - exact) > float(ml_dtypes.finfo(inverse.dtype).eps) * np.abs(exact)
        if not np.any(off & np.isfinite(exact)):
            combine(graph, op, Mul(), values, {1: inverse})
            return
    combine(graph, op, Div(), values, constants)


@reads("Mod")
def read_mod(graph: GraphReader, op: Op) -> None:
    values, constants = operands(graph, op)
    _check_divisor(op, constants)
    combine(graph, op, Mod(op.attribute("fmod", 0) != 0), values, constants)


def _check_divisor(op: Op, constants: dict[int, Array]) -> None:
    if 1 in constants and constants[1].dtype.kind in "iu" and not constants[1].all():
        got, expected = show(constants[1].tolist()), "ints other than 0"
        raise FormatError(f"{op} divides by zero", got=got, expected=expected)


@reads("Max", "Min", "Mean")
def read_many(graph: GraphReader, op: Op) -> None:
    if len(op.inputs) == 1:
        graph.pass_on(op)
        return
    values, constants = operands(graph, op)
    some = next(iter(values.values()))
    if op.kind != "Mean":
        array = next(iter(constants.values()), np.zeros(0))
        is_bound = len(values) == len(constants) == 1 and array.size == 1 and array.ndim <= len(graph.shape(some))
        if is_bound and array.dtype.kind in "fV" and not np.isnan(array).any():
            bound = float(str(array.reshape(())[()]))  # as written, see Op.number
            clip = Clip(low=bound) if op.kind == "Max" else Clip(high=bound)
            graph.add(op, ReLU() if clip == Clip(low=0.0) else clip, (some,))
        else:
            combine(graph, op, Max() if op.kind == "Max" else Min(), values, constants)
        return
    share = np.array(1 / len(op.inputs)).astype(numpy_dtype(graph.types[some].dtype))
    total = combine(graph, op, Add(), values, constants, is_step=True)
    graph.add(op, Mul(), (total,), {"constant": graph.weight("share", share)})


@reads("PRelu")
def read_prelu(graph: GraphReader, op: Op) -> None:
    """With a single slope it is a LeakyReLU."""
    values, constants = operands(graph, op)
    if 1 in constants and constants[1].size == 1:
        graph.add(op, LeakyReLU(float(constants[1].reshape(-1)[0])), (values[0],))
        return
    if graph.opset < 7 and 1 in constants and constants[1].ndim == 1:  # one slope per channel
        constants[1] = constants[1].reshape(-1, *(1,) * (len(graph.shape(values[0])) - 2))
    combine(graph, op, PReLU(), values, constants)


@reads("Where")
def read_where(graph: GraphReader, op: Op) -> None:
    """With a constant condition: the sum of both operands, each masked."""
    if completes_pixels(graph, op):
        return
    if not graph.is_constant(op, 0):
        got = str(graph.types[graph.value(op, 0)])
        raise FormatError(f"{op}: its condition is not a constant", got=got, expected="a constant mask")
    condition = graph.constant(op, 0)
    values = {index: graph.value(op, index) for index in (1, 2) if not graph.is_constant(op, index)}
    some = next(iter(values.values()))
    dtype = numpy_dtype(graph.types[some].dtype)
    masked: dict[int, str] = {}
    constants: dict[int, Array] = {}
    for index, mask in ((1, condition), (2, ~condition)):
        if index not in values:
            array = graph.weight_constant(op, index, some)
            graph.spend(op, math.prod(np.broadcast_shapes(array.shape, mask.shape)))
            constants[index] = np.where(mask, array, np.zeros((), dtype))
    is_all = len(values) == 1 and not next(iter(constants.values())).any()  # then no Add is needed
    for index, value in values.items():
        selected = (condition if index == 1 else ~condition).astype(dtype)
        masked[index] = combine(graph, op, Mask(), {0: value}, {1: selected}, is_step=not is_all, name=op.inputs[0])
    if not is_all:
        combine(graph, op, Add(), masked, constants)


@reads("Concat")
def read_concat(graph: GraphReader, op: Op) -> None:
    indices = range(max(1, len(op.inputs)))
    values = tuple(graph.value(op, index) for index in indices if not graph.is_constant(op, index))
    axis = graph.axis(op, values[0], op.attribute("axis", 1))
    if len(values) == len(indices):
        graph.add(op, Concat(axis), values)
    else:
        concat_constants(graph, op, axis)


def operands(graph: GraphReader, op: Op, same_dtype: bool = True) -> tuple[dict[int, str], dict[int, Array]]:
    """The node's values and constants by input index; at least one is a value."""
    if op.kind not in _MANY and len(op.inputs) != 2:
        raise FormatError(f"{op}: wrong number of inputs", got=str(len(op.inputs)), expected="2")
    indices = range(len(op.inputs))
    values = {index: graph.value(op, index) for index in indices if not graph.is_constant(op, index)}
    if not values:  # a Sum of constants, or of nothing
        raise FormatError(f"{op} has only constants", got=", ".join(op.inputs), expected="a value of the network")
    some = next(iter(values.values()))
    if graph.types[some].dtype == "bool":
        raise FormatError(f"{op}: unsupported dtype", got=str(graph.types[some]), expected="a float or int dtype")
    others = [index for index in indices if index not in values]
    if not same_dtype:
        return values, {index: graph.constant(op, index) for index in others}
    return values, {index: graph.weight_constant(op, index, some) for index in others}


def combine(
    graph: GraphReader,
    op: Op,
    layer: Broadcast,
    values: dict[int, str],
    constants: dict[int, Array],
    is_step: bool = False,
    name: str = "",
) -> str:
    """Add one layer over all operands, broadcast to equal rank with leading axes. Returns its name.

    is_step  it is an intermediate layer of the node
    name     of its constant; default: the node's input
    """
    shapes: dict[int, tuple[Dim, ...]] = {index: graph.shape(value) for index, value in values.items()}
    shapes |= {index: array.shape for index, array in constants.items()}
    if graph.opset < 7 and "axis" in op.attributes:
        shapes[1] += (1,) * _old_broadcast(op, shapes)
    rank = max(len(shape) for shape in shapes.values())
    shapes = {index: (1,) * (rank - len(shape)) + shape for index, shape in shapes.items()}
    read = []
    for index, value in sorted(values.items()):
        is_wide = shapes[index] == graph.shape(value)
        read.append(value if is_wide else graph.add_step(op, graph.reshape(op, shapes[index]), (value,)))
    if not constants:
        return _added(graph, op, layer, tuple(read), {}, is_step)
    arrays = [array.reshape([int(d) for d in shapes[index]]) for index, array in constants.items()]
    if not graph.one_row:
        arrays = [graph.once(array) for array in arrays]
        if any(len(array) != 1 for array in arrays):
            got = f"shape {arrays[0].shape}"
            raise FormatError(f"{op}: its constant varies over the batch", got=got, expected="size 1 on axis 0")
        arrays = [array[0] for array in arrays]
    total: Array = arrays[0]
    for array in arrays[1:]:  # of a Sum, a Max or a Min
        graph.spend(op, math.prod(np.broadcast_shapes(total.shape, array.shape)))
        total = np.asarray(_FOLDED[type(layer)](total, array))
    first = next(iter(constants))
    role = "first" if isinstance(layer, Ordered) and first == 0 else "mask" if isinstance(layer, Mask) else "constant"
    weights = {role: graph.weight(name or op.inputs[first], total)}
    return _added(graph, op, layer, tuple(read), weights, is_step)


def _added(
    graph: GraphReader, op: Op, layer: Layer, read: tuple[str, ...], weights: dict[str, str], is_step: bool
) -> str:
    if is_step:
        return graph.add_step(op, layer, read, weights)
    graph.add(op, layer, read, weights)
    return graph.values[op.outputs[0]]


def _old_broadcast(op: Op, shapes: dict[int, tuple[Dim, ...]]) -> int:
    """Before opset 7 the second operand was aligned at `axis` of the first. Returns the number of axes after it."""
    trailing = len(shapes[0]) - op.attribute("axis", 0) - len(shapes[1])
    if not 0 <= trailing <= len(shapes[0]):
        raise FormatError(
            f"{op}: axis out of range", got=f"axis {op.attributes['axis']}", expected="an axis of the first operand"
        )
    return trailing


def _minus_one(graph: GraphReader, value: str) -> dict[str, str]:
    return {"constant": graph.weight("minus_one", np.array(-1).astype(numpy_dtype(graph.types[value].dtype)))}


@writes(Add, Mul, Max, Min)
def write_broadcast(graph: GraphWriter, node: Node) -> None:
    """ONNX's operators are binary: more operands form a chain."""
    operands = [*graph.inputs(node), *graph.weights(node, "constant")]
    while len(operands) > 2:
        operands[:2] = [graph.emit_step(node.layer.kind, node, operands[:2])]
    graph.emit(node.layer.kind, node, operands)


@writes(Sub, Div, PReLU)
def write_ordered(graph: GraphWriter, node: Node) -> None:
    op_type = "PRelu" if isinstance(node.layer, PReLU) else node.layer.kind
    operands = [*graph.weights(node, "first"), *graph.inputs(node), *graph.weights(node, "constant")]
    graph.emit(op_type, node, operands)


@writes(Mod)
def write_mod(graph: GraphWriter, node: Node) -> None:
    operands = [*graph.weights(node, "first"), *graph.inputs(node), *graph.weights(node, "constant")]
    is_truncated = node.layer.attributes()["truncated"]
    if is_truncated or "float" not in graph.dtype(node):
        graph.emit("Mod", node, operands, fmod=int(is_truncated))
        return
    # ONNX's float Mod has the sign of a: if that differs from b's, b is added.
    zero = graph.number(node, "zero", 0)
    rest = graph.emit_step("Mod", node, operands, fmod=1)
    signs = [graph.emit_step("Less", node, [each, zero]) for each in (rest, operands[1])]
    is_some = graph.emit_step("Cast", node, [rest], to=ELEMENT_TYPES["bool"])
    is_across = graph.emit_step("And", node, [graph.emit_step("Xor", node, signs), is_some])
    graph.emit("Where", node, [is_across, graph.emit_step("Add", node, [rest, operands[1]]), rest])


@writes(Mask)
def write_mask(graph: GraphWriter, node: Node) -> None:
    """Where(Cast(mask, bool), x, 0)."""
    x, mask = [*graph.weights(node, "first"), *graph.inputs(node), *graph.weights(node, "mask")]
    condition = graph.emit_step("Cast", node, [mask], to=ELEMENT_TYPES["bool"])
    graph.emit("Where", node, [condition, x, graph.number(node, "zero", 0)])


@writes(Greater, GreaterOrEqual, Equal)
def write_comparison(graph: GraphWriter, node: Node) -> None:
    """Cast(a > b)."""
    operands = [*graph.weights(node, "first"), *graph.inputs(node), *graph.weights(node, "constant")]
    found = graph.emit_step(node.layer.kind, node, operands)
    graph.emit("Cast", node, [found], to=ELEMENT_TYPES[graph.dtype(node)])


@writes(Concat)
def write_concat(graph: GraphWriter, node: Node) -> None:
    graph.emit("Concat", node, graph.inputs(node), axis=node.layer.attributes()["axis"])
