"""ReduceMax, ReduceMin, ReduceSum, ReduceMean, ReduceL2 and what is made of them; ArgMax and ArgMin."""

from __future__ import annotations

import numpy as np

from onchip.formats.onnx_ops.base import Op, reads, writes
from onchip.formats.onnx_ops.graph_reader import GraphReader
from onchip.formats.onnx_ops.graph_writer import GraphWriter
from onchip.formats.onnx_ops.lengths import completes_mask
from onchip.spec.layers import (
    Abs,
    Add,
    ArgMax,
    ArgMin,
    Exp,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
    Log,
    Mul,
    Sub,
)
from onchip.spec.network import Node

Reduction = GlobalMax | GlobalMin | GlobalSum | GlobalMean | GlobalNorm

_REDUCTIONS: dict[str, type[Reduction]] = {
    "ReduceMax": GlobalMax, "ReduceMin": GlobalMin, "ReduceSum": GlobalSum, "ReduceMean": GlobalMean,
    "ReduceL2": GlobalNorm,
}  # fmt: skip
_OP_TYPES = {layer.__name__: op_type for op_type, layer in _REDUCTIONS.items()}
_ARGUMENTS: dict[str, type[ArgMax] | type[ArgMin]] = {"ArgMax": ArgMax, "ArgMin": ArgMin}


def axes_are_inputs(op_type: str) -> int:
    """The opset from which they are."""
    return 13 if op_type == "ReduceSum" else 18


@reads(*_REDUCTIONS)
def read_reduction(graph: GraphReader, op: Op) -> None:
    if op.kind == "ReduceMax" and completes_mask(graph, op):
        return
    x, axes = graph.value(op), _axes(graph, op)
    if axes is None:
        graph.pass_on(op)
    else:
        graph.add(op, _REDUCTIONS[op.kind](axes, keeps_axes(op)), (x,))


@reads("ReduceL1", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
def read_sum_of_functions(graph: GraphReader, op: Op) -> None:
    """A function of each number, the sum, and a function of that; of exponentials the largest is taken out before."""
    x, axes, keep = graph.value(op), _axes(graph, op), keeps_axes(op)
    if axes is None:
        graph.pass_on(op)
    elif op.kind == "ReduceL1":
        graph.add(op, GlobalSum(axes, keep), (graph.add_step(op, Abs(), (x,)),))
    elif op.kind == "ReduceSumSquare":
        graph.add(op, GlobalSum(axes, keep), (graph.add_step(op, Mul(), (x, x)),))
    elif op.kind == "ReduceLogSum":
        graph.add(op, Log(), (graph.add_step(op, GlobalSum(axes, keep), (x,)),))
    else:
        highest = graph.add_step(op, GlobalMax(axes, True), (x,))
        powers = graph.add_step(op, Exp(), (graph.add_step(op, Sub(), (x, highest)),))
        total = graph.add_step(op, Log(), (graph.add_step(op, GlobalSum(axes, keep), (powers,)),))
        if not keep:
            highest = graph.add_step(op, GlobalMax(axes, False), (x,))
        graph.add(op, Add(), (total, highest))


def _axes(graph: GraphReader, op: Op) -> tuple[int, ...] | None:
    """The axes as the network counts them; None if nothing is to be reduced."""
    x, axes = graph.value(op), graph.axes(op, axes_are_inputs(op.kind))
    if not axes and op.attribute("noop_with_empty_axes", 0):
        return None
    return tuple(graph.axis(op, x, axis) for axis in axes or range(len(graph.shape(x))))


def keeps_axes(op: Op) -> bool:
    return op.attribute("keepdims", 1) != 0


@writes(*_REDUCTIONS.values())
def write_reduction(graph: GraphWriter, node: Node) -> None:
    given, op_type = node.layer.attributes(), _OP_TYPES[node.layer.kind]
    axes, keep = [int(axis) for axis in given["axes"]], int(given["keep"])
    if graph.opset < axes_are_inputs(op_type):
        graph.emit(op_type, node, [graph.value(node)], axes=axes, keepdims=keep)
    else:
        operand = graph.constant(f"{node.name}_axes", np.array(axes, np.int64))
        graph.emit(op_type, node, [graph.value(node), operand], keepdims=keep)


@reads(*_ARGUMENTS)
def read_argument(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    last = op.attribute("select_last_index", 0) != 0
    graph.add(op, _ARGUMENTS[op.kind](graph.axis(op, x, op.attribute("axis", 0)), keeps_axes(op), last), (x,))


@writes(ArgMax, ArgMin)
def write_argument(graph: GraphWriter, node: Node) -> None:
    given = node.layer.attributes()
    graph.emit(
        node.layer.kind, node, [graph.value(node)], axis=given["axis"], keepdims=int(given["keep"]),
        select_last_index=int(given["last"]),
    )  # fmt: skip
