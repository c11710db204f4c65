"""BatchNormalization as inference sees it."""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx_ops.base import Op, reads, writes
from onchip.formats.onnx_ops.graph_reader import GraphReader
from onchip.formats.onnx_ops.graph_writer import GraphWriter
from onchip.spec.layers import BatchNorm1d, BatchNorm2d, Reshape
from onchip.spec.network import Node
from onchip.spec.types import numpy_dtype

_ROLES = ("weight", "bias", "mean", "var")  # in ONNX's order, behind x


@reads("BatchNormalization")
def read_batch_norm(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    graph.need_channels(op, x, 2)
    trains = op.attribute("training_mode", 0) if graph.opset > 6 else not op.attribute("is_test", 0)
    if trains or len([name for name in op.outputs if name]) > 1:
        raise FormatError(f"{op} is in training mode", expected="inference", hint="export after model.eval()")
    if not op.attribute("spatial", 1):
        raise FormatError(f"{op}: one mean and variance a channel", got="spatial=0", expected="spatial=1")
    roles = {}
    for index, role in enumerate(_ROLES, start=1):
        roles[role] = graph.weight(op.inputs[index], graph.weight_constant(op, index, x))
    row_shape, eps = graph.types[x].row_shape, op.number("epsilon", 1e-5)
    if len(row_shape) < 4:
        graph.add(op, (BatchNorm2d if len(row_shape) == 3 else BatchNorm1d)(eps), (x,), roles)
        return
    flat = graph.add_step(op, Reshape((row_shape[0], -1)), (x,))  # what lies behind the channels is all alike
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
