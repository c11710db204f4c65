"""MaxPool and AveragePool over windows; GlobalMaxPool, GlobalAveragePool, ReduceMax and ReduceMean over whole axes."""

from __future__ import annotations

import numpy as np

from onchip.formats.onnx_ops.base import Op, reads, writes
from onchip.formats.onnx_ops.graph_reader import GraphReader
from onchip.formats.onnx_ops.graph_writer import GraphWriter
from onchip.formats.onnx_ops.windows import check_padded, read_window, sum_pads, unpadded, window_attributes
from onchip.spec.layers import AvgPool1d, AvgPool2d, GlobalMax, GlobalMean, MaxPool1d, MaxPool2d
from onchip.spec.network import Node

_MAX = {1: MaxPool1d, 2: MaxPool2d}
_AVERAGE = {1: AvgPool1d, 2: AvgPool2d}
_GLOBAL: dict[str, type[GlobalMax] | type[GlobalMean]] = {
    "GlobalMaxPool": GlobalMax, "GlobalAveragePool": GlobalMean, "ReduceMax": GlobalMax, "ReduceMean": GlobalMean,
}  # fmt: skip
_REDUCTIONS = {"GlobalMax": "ReduceMax", "GlobalMean": "ReduceMean"}
AXES_ARE_INPUTS = 18  # the opset from which a reduction's axes are


@reads("MaxPool")
def read_max_pool(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    window = read_window(graph, op, x)
    check_padded(graph, op, x, window.pads)
    layer = _MAX[window.rank](window.kernel, window.stride, window.pads, window.dilation, _ceil(op))
    graph.add(op, layer, (x,))


@reads("AveragePool")
def read_average_pool(graph: GraphReader, op: Op) -> None:
    x, zeros = unpadded(graph, op)
    window, count_pads = read_window(graph, op, x), op.attribute("count_include_pad", 0) != 0
    pads = window.pads
    if any(zeros):  # they count as numbers
        pads, count_pads = sum_pads(pads, zeros), True
    check_padded(graph, op, x, pads)
    layer = _AVERAGE[window.rank](window.kernel, window.stride, pads, window.dilation, _ceil(op), count_pads)
    graph.add(op, layer, (x,))


def _ceil(op: Op) -> bool:
    return op.attribute("ceil_mode", 0) != 0


@reads("GlobalMaxPool", "GlobalAveragePool")
def read_global(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    graph.need_channels(op, x, 3)
    graph.add(op, _GLOBAL[op.kind](tuple(range(2, len(graph.types[x].shape))), keep=True), (x,))


@reads("ReduceMax", "ReduceMean")
def read_reduction(graph: GraphReader, op: Op) -> None:
    x, axes = graph.value(op), graph.axes(op, AXES_ARE_INPUTS)
    if not axes and op.attribute("noop_with_empty_axes", 0):
        graph.pass_on(op)
        return
    over = [graph.axis(op, x, axis) for axis in axes or range(len(graph.shape(x)))]
    graph.add(op, _GLOBAL[op.kind](tuple(over), keep=op.attribute("keepdims", 1) != 0), (x,))


@writes(MaxPool1d, MaxPool2d)
def write_max_pool(graph: GraphWriter, node: Node) -> None:
    given = node.layer.attributes()
    window = window_attributes(node.layer, given["kernel"])
    graph.emit("MaxPool", node, [graph.value(node)], ceil_mode=int(given["ceil"]), **window)


@writes(AvgPool1d, AvgPool2d)
def write_average_pool(graph: GraphWriter, node: Node) -> None:
    given = node.layer.attributes()
    window = window_attributes(node.layer, given["kernel"])
    if set(window["dilations"]) == {1}:
        del window["dilations"]  # opset 17 does not know them
    graph.emit("AveragePool", node, [graph.value(node)], ceil_mode=int(given["ceil"]),
               count_include_pad=int(given["count_pads"]), **window)  # fmt: skip


@writes(GlobalMax, GlobalMean)
def write_reduction(graph: GraphWriter, node: Node) -> None:
    given, op_type = node.layer.attributes(), _REDUCTIONS[node.layer.kind]
    axes, keep = [int(axis) for axis in given["axes"]], int(given["keep"])
    if graph.opset < AXES_ARE_INPUTS:
        graph.emit(op_type, node, [graph.value(node)], axes=axes, keepdims=keep)
    else:
        operand = graph.constant(f"{node.name}_axes", np.array(axes, np.int64))
        graph.emit(op_type, node, [graph.value(node), operand], keepdims=keep)
