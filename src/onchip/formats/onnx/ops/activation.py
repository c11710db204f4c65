"""Activations that are more than one operator, or have inputs: HardSwish, Mish, Celu, Selu, Clip, SiLU, Softmax."""

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
    HardSwish,
    LogSoftmax,
    Max,
    Min,
    Mish,
    Mul,
    ReLU,
    SiLU,
    Softmax,
)
from onchip.network.types import numpy_dtype

_SOFTMAX: dict[str, type[Softmax] | type[LogSoftmax]] = {"Softmax": Softmax, "LogSoftmax": LogSoftmax}


@reads("HardSwish", "Mish")
def read_product(graph: GraphReader, op: Op) -> None:
    graph.add(op, HardSwish() if op.kind == "HardSwish" else Mish(), (graph.value(op),))


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
