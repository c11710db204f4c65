"""Relu, Sigmoid, Tanh, Softmax, LogSoftmax."""

from __future__ import annotations

from onchip.errors import FormatError
from onchip.spec.layers import Layer, LogSoftmax, ReLU, Sigmoid, Softmax, Tanh
from onchip.spec.network import Node
from onchip.spec.onnx_ops.base import GraphReader, GraphWriter, Op, reads, writes

_ELEMENTWISE: dict[str, type[Layer]] = {"Relu": ReLU, "Sigmoid": Sigmoid, "Tanh": Tanh}
_SOFTMAX: dict[str, type[Softmax] | type[LogSoftmax]] = {"Softmax": Softmax, "LogSoftmax": LogSoftmax}
_OP_TYPES = {layer.__name__: op_type for op_type, layer in _ELEMENTWISE.items()}


@reads(*_ELEMENTWISE)
def read_elementwise(graph: GraphReader, op: Op) -> None:
    graph.add(op, _ELEMENTWISE[op.kind](), (graph.value(op),))


@writes(*_ELEMENTWISE.values())
def write_elementwise(graph: GraphWriter, node: Node) -> None:
    graph.emit(_OP_TYPES[node.layer.kind], node, [graph.value(node)])


@reads(*_SOFTMAX)
def read_softmax(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    shape = graph.types[x].shape
    last = len(shape) - 1
    axis = op.attribute("axis", -1 if graph.opset >= 13 else 1)
    if not -last - 1 <= axis <= last:
        raise FormatError(f"{op}: axis out of range", got=f"axis {axis}", expected=f"{-last - 1} to {last}")
    axis %= last + 1
    # Before opset 13 the axes from `axis` on were one: the same as the last axis where the others are 1.
    if graph.opset < 13 and any(dim != 1 for dim in shape[axis:last]):
        raise FormatError(
            f"{op}: before opset 13, softmax runs over several axes at once", got=f"axis {axis} of {graph.types[x]}",
            expected=f"axis {last}", hint="export with opset 13 or newer",
        )  # fmt: skip
    if axis == last or graph.opset < 13:
        axis = -1
    graph.add(op, _SOFTMAX[op.kind](axis), (x,))


@writes(Softmax, LogSoftmax)
def write_softmax(graph: GraphWriter, node: Node) -> None:
    graph.emit(node.layer.kind, node, [graph.value(node)], axis=node.layer.attributes()["axis"])
