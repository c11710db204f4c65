"""ToPixels, written only: what it is made of has no layers of its own."""

from __future__ import annotations

from onchip.spec.layers import ToPixels
from onchip.spec.network import Node
from onchip.spec.onnx_ops.base import writes
from onchip.spec.onnx_ops.graph_writer import GraphWriter
from onchip.spec.onnx_tensors import ELEMENT_TYPES


@writes(ToPixels)
def write_pixels(graph: GraphWriter, node: Node) -> None:
    """uint8(Clip((x + 1) / 2 * 255, 0, 255)), a NaN made 0 first: no two runtimes cast one alike."""
    x, zero, full = graph.value(node), graph.number(node, "zero", 0), graph.number(node, "full", 255)
    shifted = graph.emit_step("Add", node, [x, graph.number(node, "one", 1)])
    halved = graph.emit_step("Div", node, [shifted, graph.number(node, "two", 2)])
    stretched = graph.emit_step("Mul", node, [halved, full])
    number = graph.emit_step("Where", node, [graph.emit_step("IsNaN", node, [stretched]), zero, stretched])
    clipped = graph.emit_step("Clip", node, [number, zero, full])
    graph.emit("Cast", node, [clipped], to=ELEMENT_TYPES["uint8"])
