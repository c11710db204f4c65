"""BatchNormalization in inference; LayerNormalization, RMSNormalization, Group- and InstanceNormalization."""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.ops.missing import INFERENCE
from onchip.network.graph import Node
from onchip.network.layers import BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm, Reshape, RMSNorm
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype

_ROLES = ("weight", "bias", "mean", "var")  # in ONNX's order, after x


@reads("BatchNormalization")
def read_batch_norm(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    graph.need_channels(op, x, 2)
    trains = op.attribute("training_mode", 0) if graph.opset > 6 else not op.attribute("is_test", 0)
    if trains or len([name for name in op.outputs if name]) > 1:
        raise FormatError(f"{op} is in training mode", expected="inference", hint=INFERENCE)
    if not op.attribute("spatial", 1):
        raise FormatError(f"{op}: one mean and variance per channel", got="spatial=0", expected="spatial=1")
    roles = {}
    for index, role in enumerate(_ROLES, start=1):
        roles[role] = graph.weight(op.inputs[index], graph.weight_constant(op, index, x))
    row_shape, eps = graph.types[x].row_shape, op.number("epsilon", 1e-5)
    if len(row_shape) < 4:
        graph.add(op, (BatchNorm2d if len(row_shape) == 3 else BatchNorm1d)(eps), (x,), roles)
        return
    flat = graph.add_step(op, Reshape((row_shape[0], -1)), (x,))  # the axes after the channels are equivalent
    graph.add(op, Reshape(row_shape), (graph.add_step(op, BatchNorm1d(eps), (flat,), roles),))


@writes(BatchNorm1d, BatchNorm2d)
def write_batch_norm(graph: GraphWriter, node: Node) -> None:
    C = int(graph.net.input_types(node)[0].shape[1])
    operands = [graph.value(node)]
    for role in _ROLES:
        if role in node.weights:
            operands.append(graph.weight(node, role))
        else:  # ONNX needs all four
            neutral = np.full(C, role == "weight", numpy_dtype(graph.dtype(node)))
            operands.append(graph.constant(f"{node.name}_{role}", neutral))
    graph.emit("BatchNormalization", node, operands, epsilon=node.layer.attributes()["eps"])


# -- norms with statistics of the row ---------------------------------------------------------------------------

_LAST_AXES: dict[str, type[LayerNorm] | type[RMSNorm]] = {
    "LayerNormalization": LayerNorm, "RMSNormalization": RMSNorm,
}  # fmt: skip
_SCALES_ARE_CHANNELS = 21  # opset from which GroupNormalization has one scale per channel, not per group


@reads(*_LAST_AXES)
def read_last_axes_norm(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    if any(graph.readers[name] for name in op.outputs[1:] if name):
        got, expected = ", ".join(op.outputs), "only the first output"
        raise FormatError(f"{op}: its mean or deviation is used", got=got, expected=expected)
    axis = graph.axis(op, x, op.attribute("axis", -1))
    layer = _LAST_AXES[op.kind](axis - len(graph.types[x].shape), op.number("epsilon", 1e-5))
    shape, roles = layer.weight_shape(graph.types[x]), {}
    for index, role in ((1, "weight"), (2, "bias")):
        if graph.has(op, index):
            array = graph.weight_constant(op, index, x)
            roles[role] = graph.weight(op.inputs[index], _broadcast(graph, op, array, shape))
    graph.add(op, layer, (x,), roles)


def _broadcast(graph: GraphReader, op: Op, array: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast a scale or bias, which may lack axes or have size 1."""
    while array.ndim > len(shape) and array.shape[0] == 1:
        array = array[0]
    if array.shape != shape:
        graph.spend(op, int(np.prod(shape)))
    return np.broadcast_to(array, shape)


@reads("GroupNormalization", "InstanceNormalization")
def read_group_norm(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    graph.need_channels(op, x, 3)
    C = int(graph.types[x].shape[1])
    groups = op.attribute("num_groups", 0) if op.kind == "GroupNormalization" else C
    layer = GroupNorm(groups, op.number("epsilon", 1e-5))
    layer.parts(graph.types[x])  # checks the groups before their scales are expanded
    roles = {}
    for index, role in ((1, "weight"), (2, "bias")):
        array = graph.weight_constant(op, index, x)
        if op.kind == "GroupNormalization" and graph.opset < _SCALES_ARE_CHANNELS and array.shape == (groups,):
            array = np.repeat(array, C // groups)
        roles[role] = graph.weight(op.inputs[index], array)
    graph.add(op, layer, (x,), roles)


@writes(LayerNorm, RMSNorm)
def write_last_axes_norm(graph: GraphWriter, node: Node) -> None:
    """ONNX needs a scale; RMSNormalization needs opset 23."""
    attributes = node.layer.attributes()
    operands = [graph.value(node), _scale(graph, node, "weight"), *graph.weights(node, "bias")]
    op_type = next(op_type for op_type, layer in _LAST_AXES.items() if layer is type(node.layer))
    graph.emit(op_type, node, operands, axis=attributes["axis"], epsilon=attributes["eps"])


@writes(GroupNorm)
def write_group_norm(graph: GraphWriter, node: Node) -> None:
    """ONNX needs scale and bias. One group per channel is an InstanceNormalization, which older opsets have."""
    attributes, x = node.layer.attributes(), graph.net.input_types(node)[0]
    operands = [graph.value(node), _scale(graph, node, "weight"), _scale(graph, node, "bias")]
    if attributes["groups"] == x.shape[1]:
        graph.emit("InstanceNormalization", node, operands, epsilon=attributes["eps"])
    else:
        graph.emit("GroupNormalization", node, operands, num_groups=attributes["groups"], epsilon=attributes["eps"])


def _scale(graph: GraphWriter, node: Node, role: str) -> str:
    """A weight, or a neutral constant instead."""
    if role in node.weights:
        return graph.weight(node, role)
    layer = node.layer
    assert isinstance(layer, LayerNorm | RMSNorm | GroupNorm)
    shape = layer.weight_shape(graph.net.input_types(node)[0])
    return graph.constant(f"{node.name}_{role}", np.full(shape, role == "weight", numpy_dtype(graph.dtype(node))))
