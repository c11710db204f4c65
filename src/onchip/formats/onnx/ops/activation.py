"""Relu and its variants, Clip, Sigmoid, Tanh, Softplus, Softsign, Mish, HardSwish, Softmax, LogSoftmax."""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.ops.pixels import completes_pixels
from onchip.network.graph import Node
from onchip.network.layers import (
    ELU,
    SELU,
    Clip,
    HardSigmoid,
    HardSwish,
    Layer,
    LeakyReLU,
    LogSoftmax,
    Max,
    Min,
    Mish,
    Mul,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Softsign,
    Tanh,
)
from onchip.network.types import numpy_dtype

_ELEMENTWISE: dict[str, type[Layer]] = {
    "Relu": ReLU, "Sigmoid": Sigmoid, "Tanh": Tanh, "Softplus": Softplus, "Softsign": Softsign, "Mish": Mish,
    "HardSwish": HardSwish,
}  # fmt: skip
_SOFTMAX: dict[str, type[Softmax] | type[LogSoftmax]] = {"Softmax": Softmax, "LogSoftmax": LogSoftmax}
_OP_TYPES = {layer.__name__: op_type for op_type, layer in _ELEMENTWISE.items()}


@reads(*_ELEMENTWISE)
def read_elementwise(graph: GraphReader, op: Op) -> None:
    graph.add(op, _ELEMENTWISE[op.kind](), (graph.value(op),))


@writes(*(layer for layer in _ELEMENTWISE.values() if layer not in (HardSwish, Mish)))
def write_elementwise(graph: GraphWriter, node: Node) -> None:
    graph.emit(_OP_TYPES[node.layer.kind], node, [graph.value(node)])


@writes(HardSwish)
def write_hard_swish(graph: GraphWriter, node: Node) -> None:
    """x * HardSigmoid(x), which the reader recognises: no runtime has HardSwish in every dtype."""
    x = graph.value(node)
    graph.emit("Mul", node, [x, graph.emit_step("HardSigmoid", node, [x], alpha=1 / 6, beta=0.5)])


@writes(Mish)
def write_mish(graph: GraphWriter, node: Node) -> None:
    """x * Tanh(Softplus(x)), which the reader recognises: Mish needs opset 18."""
    x = graph.value(node)
    graph.emit("Mul", node, [x, graph.emit_step("Tanh", node, [graph.emit_step("Softplus", node, [x])])])


@reads("Elu")
def read_elu(graph: GraphReader, op: Op) -> None:
    graph.add(op, ELU(op.number("alpha", 1.0)), (graph.value(op),))


@writes(ELU)
def write_elu(graph: GraphWriter, node: Node) -> None:
    graph.emit("Elu", node, [graph.value(node)], alpha=node.layer.attributes()["alpha"])


@reads("Celu")
def read_celu(graph: GraphReader, op: Op) -> None:
    """alpha * Elu(x / alpha)."""
    x, alpha = graph.value(op), op.number("alpha", 1.0)
    if alpha == 1:
        graph.add(op, ELU(), (x,))
        return
    inside = graph.add_step(op, Mul(), (x,), {"constant": _scalar(graph, op, x, "inverse", 1 / alpha)})
    elu = graph.add_step(op, ELU(), (inside,))
    graph.add(op, Mul(), (elu,), {"constant": _scalar(graph, op, x, "alpha", alpha)})


@reads("Selu")
def read_selu(graph: GraphReader, op: Op) -> None:
    x, alpha, scale = graph.value(op), op.attribute("alpha", SELU.ALPHA), op.attribute("gamma", SELU.SCALE)
    if (alpha, scale) == (SELU.ALPHA, SELU.SCALE):
        graph.add(op, SELU(), (x,))
        return
    elu = graph.add_step(op, ELU(alpha), (x,))
    graph.add(op, Mul(), (elu,), {"constant": _scalar(graph, op, x, "gamma", scale)})


def _scalar(graph: GraphReader, op: Op, x: str, what: str, number: float) -> str:
    return graph.weight(f"{op.outputs[0]}_{what}", np.array(number, numpy_dtype(graph.types[x].dtype)))


@writes(SELU)
def write_selu(graph: GraphWriter, node: Node) -> None:
    graph.emit("Selu", node, [graph.value(node)])


@reads("HardSigmoid")
def read_hard_sigmoid(graph: GraphReader, op: Op) -> None:
    graph.add(op, HardSigmoid(op.number("alpha", 0.2), op.number("beta", 0.5)), (graph.value(op),))


@writes(HardSigmoid)
def write_hard_sigmoid(graph: GraphWriter, node: Node) -> None:
    attributes = node.layer.attributes()
    graph.emit("HardSigmoid", node, [graph.value(node)], alpha=attributes["slope"], beta=attributes["shift"])


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
    if graph.opset >= 12 and "int" in graph.types[x].dtype:
        _clip_ints(graph, op, x)
        return
    if graph.opset < 11:
        bounds = [op.number(name, 0.0) if name in op.attributes else None for name in ("min", "max")]
    else:
        bounds = [_bound(graph, op, index, x) for index in (1, 2)]
    graph.add(op, ReLU() if bounds == [0, None] else Clip(*bounds), (x,))


def _clip_ints(graph: GraphReader, op: Op, x: str) -> None:
    """Ids clamped to the size of a table."""
    for index, layer in ((1, Max()), (2, Min())):
        if graph.has(op, index):
            bound = graph.weight(op.inputs[index], graph.weight_constant(op, index, x))
            x = graph.add_step(op, layer, (x,), {"constant": bound})
    graph.bind_output(op, 0, x)


def _bound(graph: GraphReader, op: Op, index: int, x: str) -> float | None:
    """A bound as written, see Op.number."""
    return float(str(graph.weight_constant(op, index, x).reshape(())[()])) if graph.has(op, index) else None


@writes(Clip)
def write_clip(graph: GraphWriter, node: Node) -> None:
    bounds = [
        graph.number(node, name, bound) if bound is not None else "" for name, bound in node.layer.attributes().items()
    ]
    graph.emit("Clip", node, [graph.value(node), *bounds])


@writes(SiLU)
def write_silu(graph: GraphWriter, node: Node) -> None:
    """x * Sigmoid(x), which the reader recognises as SiLU."""
    graph.emit("Mul", node, [graph.value(node), graph.emit_step("Sigmoid", node, [graph.value(node)])])


@reads(*_SOFTMAX)
def read_softmax(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    axis = graph.axis(op, x, op.attribute("axis", -1 if graph.opset >= 13 else 1))
    shape = graph.types[x].shape
    last = len(shape) - 1
    # Before opset 13 all axes from `axis` on were flattened: equivalent to the last axis if the others are 1.
    if graph.opset < 13 and any(dim != 1 for dim in shape[axis:last]):
        raise FormatError(
            f"{op}: before opset 13, softmax runs over several axes", got=f"axis {axis} of {graph.types[x]}",
            expected=f"axis {last}", hint="onnx.version_converter.convert_version(model, 13)",
        )  # fmt: skip
    if axis == last or graph.opset < 13:
        axis = -1
    graph.add(op, _SOFTMAX[op.kind](axis), (x,))


@writes(Softmax, LogSoftmax)
def write_softmax(graph: GraphWriter, node: Node) -> None:
    graph.emit(node.layer.kind, node, [graph.value(node)], axis=node.layer.attributes()["axis"])
