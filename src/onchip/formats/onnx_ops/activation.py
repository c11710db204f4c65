"""Relu, LeakyRelu, Clip, Sigmoid, Tanh, Softmax, LogSoftmax."""

from __future__ import annotations

from onchip.errors import FormatError
from onchip.formats.onnx_ops.base import Op, reads, writes
from onchip.formats.onnx_ops.graph_reader import GraphReader
from onchip.formats.onnx_ops.graph_writer import GraphWriter
from onchip.formats.onnx_ops.pixels import completes_pixels
from onchip.spec.layers import Clip, Layer, LeakyReLU, LogSoftmax, ReLU, Sigmoid, SiLU, Softmax, Tanh
from onchip.spec.network import Node

_ELEMENTWISE: dict[str, type[Layer]] = {"Relu": ReLU, "Sigmoid": Sigmoid, "Tanh": Tanh}
_SOFTMAX: dict[str, type[Softmax] | type[LogSoftmax]] = {"Softmax": Softmax, "LogSoftmax": LogSoftmax}
_OP_TYPES = {layer.__name__: op_type for op_type, layer in _ELEMENTWISE.items()}


@reads(*_ELEMENTWISE)
def read_elementwise(graph: GraphReader, op: Op) -> None:
    graph.add(op, _ELEMENTWISE[op.kind](), (graph.value(op),))


@writes(*_ELEMENTWISE.values())
def write_elementwise(graph: GraphWriter, node: Node) -> None:
    graph.emit(_OP_TYPES[node.layer.kind], node, [graph.value(node)])


@reads("LeakyRelu")
def read_leaky_relu(graph: GraphReader, op: Op) -> None:
    graph.add(op, LeakyReLU(op.number("alpha", 0.01)), (graph.value(op),))


@writes(LeakyReLU)
def write_leaky_relu(graph: GraphWriter, node: Node) -> None:
    graph.emit("LeakyRelu", node, [graph.value(node)], alpha=node.layer.attributes()["slope"])


@reads("Clip")
def read_clip(graph: GraphReader, op: Op) -> None:
    if completes_pixels(graph, op):
        return
    x = graph.value(op)
    if graph.opset < 11:
        bounds = [op.number(name, 0.0) if name in op.attributes else None for name in ("min", "max")]
    else:
        bounds = [_bound(graph, op, index, x) for index in (1, 2)]
    graph.add(op, ReLU() if bounds == [0, None] else Clip(*bounds), (x,))


def _bound(graph: GraphReader, op: Op, index: int, x: str) -> float | None:
    """A bound as it was meant, see Op.number."""
    return float(str(graph.weight_constant(op, index, x).reshape(())[()])) if graph.has(op, index) else None


@writes(Clip)
def write_clip(graph: GraphWriter, node: Node) -> None:
    bounds = [
        graph.number(node, name, bound) if bound is not None else "" for name, bound in node.layer.attributes().items()
    ]
    graph.emit("Clip", node, [graph.value(node), *bounds])


@writes(SiLU)
def write_silu(graph: GraphWriter, node: Node) -> None:
    """x * Sigmoid(x): the reader makes a SiLU of that product again."""
    graph.emit("Mul", node, [graph.value(node), graph.emit_step("Sigmoid", node, [graph.value(node)])])


@reads(*_SOFTMAX)
def read_softmax(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    axis = graph.axis(op, x, op.attribute("axis", -1 if graph.opset >= 13 else 1))
    shape = graph.types[x].shape
    last = len(shape) - 1
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
