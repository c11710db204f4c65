"""Reductions: ReduceMax, ReduceMin, ReduceSum, ReduceMean, ReduceL2 and compositions of them; ArgMax and ArgMin."""

from __future__ import annotations

import math
from typing import cast

import ml_dtypes
import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.ops.lengths import completes_mask
from onchip.formats.onnx.ops.truth import Truth, counts_truths
from onchip.network.graph import Node
from onchip.network.layers import (
    Abs,
    Add,
    ArgMax,
    ArgMin,
    Cast,
    Clip,
    Exp,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
    Layer,
    Log,
    Mul,
    Reshape,
    Slice,
    Sub,
    ToInts,
)
from onchip.network.layers.cast import IntDtype
from onchip.network.types import numpy_dtype

Reduction = GlobalMax | GlobalMin | GlobalSum | GlobalMean | GlobalNorm

_REDUCTIONS: dict[str, type[Reduction]] = {
    "ReduceMax": GlobalMax, "ReduceMin": GlobalMin, "ReduceSum": GlobalSum, "ReduceMean": GlobalMean,
    "ReduceL2": GlobalNorm,
}  # fmt: skip
_OP_TYPES = {layer.__name__: op_type for op_type, layer in _REDUCTIONS.items()}
_ARGUMENTS: dict[str, type[ArgMax] | type[ArgMin]] = {"ArgMax": ArgMax, "ArgMin": ArgMin}


_MAX_FACTORS = 64  # of a ReduceProd: each becomes a node


def axes_input_opset(op_type: str) -> int:
    """The opset from which axes are an input, not an attribute."""
    return 13 if op_type == "ReduceSum" else 18


@reads(*_REDUCTIONS)
def read_reduction(graph: GraphReader, op: Op) -> None:
    if op.kind == "ReduceMax" and completes_mask(graph, op):
        return
    truth = graph.unfinished.get(op.inputs[0]) if op.inputs else None
    x = truth.x if isinstance(truth, Truth) else graph.value(op)
    axes, keep = _axes(graph, op, x), keeps_axes(op)
    if axes is None:
        graph.pass_on(op)
    elif op.kind != "ReduceSum" or not counts_truths(graph, op, axes, keep):
        graph.add(op, *_widened(graph, op, _REDUCTIONS[op.kind](axes, keep)))


@reads("ReduceL1", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
def read_sum_of_functions(graph: GraphReader, op: Op) -> None:
    """An elementwise function, a sum, and a function of the sum. LogSumExp subtracts the maximum first, clamped to the
    largest finite value: inf - inf is NaN.
    """
    x, keep = graph.value(op), keeps_axes(op)
    axes = _axes(graph, op, x)
    if axes is None:
        graph.pass_on(op)
    elif op.kind == "ReduceL1":
        graph.add(op, GlobalSum(axes, keep), (graph.add_step(op, Abs(), (x,)),))
    elif op.kind == "ReduceSumSquare":
        graph.add(op, GlobalSum(axes, keep), (graph.add_step(op, Mul(), (x, x)),))
    elif op.kind == "ReduceLogSum":
        graph.add(op, Log(), (graph.add_step(op, GlobalSum(axes, keep), (x,)),))
    else:
        largest = float(ml_dtypes.finfo(numpy_dtype(graph.types[x].dtype)).max)
        finite = Clip(-largest, largest)
        highest = graph.add_step(op, finite, (graph.add_step(op, GlobalMax(axes, True), (x,)),))
        powers = graph.add_step(op, Exp(), (graph.add_step(op, Sub(), (x, highest)),))
        total = graph.add_step(op, Log(), (graph.add_step(op, GlobalSum(axes, keep), (powers,)),))
        if not keep:
            highest = graph.add_step(op, finite, (graph.add_step(op, GlobalMax(axes, False), (x,)),))
        graph.add(op, Add(), (total, highest))


@reads("ReduceProd")
def read_product(graph: GraphReader, op: Op) -> None:
    """Split the elements along each axis and multiply them."""
    x = graph.value(op)
    axes, keep = _axes(graph, op, x), keeps_axes(op)
    if axes is None:
        graph.pass_on(op)
        return
    row = list(graph.types[x].row_shape)
    if 0 in axes:
        raise FormatError(f"{op}: multiplies rows of the batch", got=f"axes {axes}", expected="axes from 1 on")
    count = math.prod(row[axis - 1] for axis in axes)
    if not 0 < count <= _MAX_FACTORS:
        got, expected = f"{count} of {graph.types[x]}", f"1 to {_MAX_FACTORS} factors"
        raise FormatError(f"{op}: too many factors", got=got, expected=expected)
    for axis in axes:
        size, row[axis - 1] = row[axis - 1], 1
        starts, steps = [0] * len(row), (1,) * len(row)
        factors = []
        for index in range(size):
            starts[axis - 1] = index
            factors.append(graph.add_step(op, Slice(tuple(starts), tuple(row), steps), (x,)))
        x = graph.add_step(op, Mul(), tuple(factors)) if size > 1 else factors[0]
    if keep:
        graph.bind_output(op, 0, x)
    else:
        graph.add(op, Reshape(tuple(size for axis, size in enumerate(row, start=1) if axis not in axes)), (x,))


def _widened(graph: GraphReader, op: Op, layer: Layer) -> tuple[Layer, tuple[str]]:
    """The layer and its inputs; ints are reduced in float64, which is exact up to 2^53."""
    x = graph.value(op)
    dtype = graph.types[x].dtype
    if "int" not in dtype:
        return layer, (x,)
    wide = graph.add_step(op, Cast("float64"), (x,))
    return ToInts(cast(IntDtype, dtype)), (graph.add_step(op, layer, (wide,)),)


def _axes(graph: GraphReader, op: Op, x: str) -> tuple[int, ...] | None:
    """The axes in the network's numbering; None if nothing is reduced."""
    axes = graph.axes(op, axes_input_opset(op.kind))
    if not axes and op.attribute("noop_with_empty_axes", 0):
        return None
    return tuple(graph.axis(op, x, axis) for axis in axes or range(len(graph.shape(x))))


def keeps_axes(op: Op) -> bool:
    return op.attribute("keepdims", 1) != 0


@writes(*_REDUCTIONS.values())
def write_reduction(graph: GraphWriter, node: Node) -> None:
    attributes, op_type = node.layer.attributes(), _OP_TYPES[node.layer.kind]
    axes, keep = [int(axis) for axis in attributes["axes"]], int(attributes["keep"])
    if graph.opset < axes_input_opset(op_type):
        graph.emit(op_type, node, [graph.value(node)], axes=axes, keepdims=keep)
    else:
        operand = graph.constant(f"{node.name}_axes", np.array(axes, np.int64))
        graph.emit(op_type, node, [graph.value(node), operand], keepdims=keep)


@reads(*_ARGUMENTS)
def read_argument(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    if "int" in graph.types[x].dtype:
        x = graph.add_step(op, Cast("float64"), (x,))
    last = op.attribute("select_last_index", 0) != 0
    graph.add(op, _ARGUMENTS[op.kind](graph.axis(op, x, op.attribute("axis", 0)), keeps_axes(op), last), (x,))


@writes(ArgMax, ArgMin)
def write_argument(graph: GraphWriter, node: Node) -> None:
    attributes = node.layer.attributes()
    graph.emit(
        node.layer.kind, node, [graph.value(node)], axis=attributes["axis"], keepdims=int(attributes["keep"]),
        select_last_index=int(attributes["last"]),
    )  # fmt: skip
