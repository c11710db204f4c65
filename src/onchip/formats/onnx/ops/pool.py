"""MaxPool and AveragePool over windows; GlobalMaxPool and GlobalAveragePool over all pixels."""

from __future__ import annotations

from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.ops.volumes import add_pool
from onchip.formats.onnx.ops.windows import check_padded, read_window, sum_pads, unpadded, window_attributes
from onchip.network.graph import Node
from onchip.network.layers import AvgPool1d, AvgPool2d, GlobalMax, GlobalMean, MaxPool1d, MaxPool2d

_MAX = {1: MaxPool1d, 2: MaxPool2d}
_AVERAGE = {1: AvgPool1d, 2: AvgPool2d}
_GLOBAL: dict[str, type[GlobalMax] | type[GlobalMean]] = {"GlobalMaxPool": GlobalMax, "GlobalAveragePool": GlobalMean}


@reads("MaxPool")
def read_max_pool(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    window = read_window(graph, op, x)
    check_padded(graph, op, x, window.pads)
    if window.rank == 3:
        add_pool(graph, op, x, window, window.pads, _ceil(op), count_pads=None)
        return
    layer = _MAX[window.rank](window.kernel, window.stride, window.pads, window.dilation, _ceil(op))
    graph.add(op, layer, (x,))


@reads("AveragePool")
def read_average_pool(graph: GraphReader, op: Op) -> None:
    x, zeros = unpadded(graph, op)
    window, count_pads = read_window(graph, op, x), op.attribute("count_include_pad", 0) != 0
    pads = window.pads
    if any(zeros):  # explicit zeros count as elements
        pads, count_pads = sum_pads(pads, zeros), True
    check_padded(graph, op, x, pads)
    if window.rank == 3:
        add_pool(graph, op, x, window, pads, _ceil(op), count_pads)
        return
    layer = _AVERAGE[window.rank](window.kernel, window.stride, pads, window.dilation, _ceil(op), count_pads)
    graph.add(op, layer, (x,))


def _ceil(op: Op) -> bool:
    return op.attribute("ceil_mode", 0) != 0


@reads("GlobalMaxPool", "GlobalAveragePool")
def read_global(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    graph.need_channels(op, x, 3)
    graph.add(op, _GLOBAL[op.kind](tuple(range(2, len(graph.types[x].shape))), keep=True), (x,))


@writes(MaxPool1d, MaxPool2d)
def write_max_pool(graph: GraphWriter, node: Node) -> None:
    attributes = node.layer.attributes()
    window = window_attributes(node.layer, attributes["kernel"])
    graph.emit("MaxPool", node, [graph.value(node)], ceil_mode=int(attributes["ceil"]), **window)


@writes(AvgPool1d, AvgPool2d)
def write_average_pool(graph: GraphWriter, node: Node) -> None:
    attributes = node.layer.attributes()
    window = window_attributes(node.layer, attributes["kernel"])
    if set(window["dilations"]) == {1}:
        del window["dilations"]  # not in opset 17
    graph.emit("AveragePool", node, [graph.value(node)], ceil_mode=int(attributes["ceil"]),
               count_include_pad=int(attributes["count_pads"]), **window)  # fmt: skip
