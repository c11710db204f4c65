"""ToPixels: a pattern of ONNX nodes, most of which have no layer of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.gelu import scaled
from onchip.formats.onnx.ops.graph_reader import GraphReader, Unfinished
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.tensors import ELEMENT_TYPES
from onchip.network.graph import Node
from onchip.network.layers import Add, Clip, Equal, Mask, Mul, Sub, ToInts, ToPixels
from onchip.network.types import numpy_dtype


@dataclass(frozen=True)
class PixelPart(Unfinished):
    """The first nodes of the pattern: IsNaN(x), Where(IsNaN(x), 0, x) or Clip of that."""

    op_kind: str
    expected: ClassVar[str] = "the rest of uint8(Clip(Where(IsNaN(y), 0, y), 0, 255)) with y = (x + 1) / 2 * 255"

    def finish(self, graph: GraphReader, op: Op | None) -> str:
        """Add layers for its value, as the pattern is incomplete."""
        mask = not_nan(graph, op, self.x)
        if self.op_kind == "IsNaN":
            one = graph.weight("one", np.ones((), numpy_dtype(graph.types[self.x].dtype)))
            return graph.add_step(op, ToInts("bool"), (graph.add_step(op, Sub(), (mask,), {"first": one}),))
        masked = graph.add_step(op, Mask(), (self.x, mask))
        return masked if self.op_kind == "Where" else graph.add_step(op, Clip(0.0, 255.0), (masked,))


def not_nan(graph: GraphReader, op: Op | None, x: str) -> str:
    """1.0 where x is not NaN, 0.0 where it is: x == x."""
    return graph.add_step(op, Equal(), (x, x))


@reads("IsNaN")
def read_is_nan(graph: GraphReader, op: Op) -> None:
    graph.begin(op, PixelPart(graph.value(op), op.kind))


def completes_pixels(graph: GraphReader, op: Op) -> bool:
    """Handle a Where, Clip or Cast that continues or completes a ToPixels; return whether it was handled."""
    if op.kind == "Where":
        part = _part(graph, op, "IsNaN")
        if part is None or not begins_pixels(graph, op):
            return False
        graph.begin(op, PixelPart(part.x, op.kind))
        return True
    if op.kind == "Clip":
        part = _part(graph, op, "Where")
        if part is None or graph.opset < 11 or not (graph.is_number(op, 1, 0) and graph.is_number(op, 2, 255)):
            return False
        graph.begin(op, PixelPart(part.x, op.kind))
        return True
    part = _part(graph, op, "Clip")
    if part is None or op.attribute("to", 0) != ELEMENT_TYPES["uint8"]:
        return False
    value = part.x
    for kind, factor in ((Mul, 255), (Mul, 0.5), (Add, 1)):
        inner = scaled(graph, value, kind)
        if inner is None or inner[1] != factor:
            return False
        value = inner[0]
    graph.add(op, ToPixels(), (value,))
    return True


def begins_pixels(graph: GraphReader, op: Op) -> bool:
    """Whether a Where is Where(IsNaN(x), 0, x)."""
    part = _part(graph, op, "IsNaN")
    is_where = op.kind == "Where" and part is not None and graph.is_number(op, 1, 0) and not graph.is_constant(op, 2)
    return is_where and part is not None and graph.value(op, 2) == part.x


def _part(graph: GraphReader, op: Op, op_kind: str) -> PixelPart | None:
    found = graph.unfinished.get(op.inputs[0]) if op.inputs else None
    return found if isinstance(found, PixelPart) and found.op_kind == op_kind else None


@writes(ToPixels)
def write_pixels(graph: GraphWriter, node: Node) -> None:
    """uint8(Clip((x + 1) / 2 * 255, 0, 255)), with NaN replaced by 0 first: runtimes cast NaN differently."""
    x, zero, full = graph.value(node), graph.number(node, "zero", 0), graph.number(node, "full", 255)
    # Subtract -1 instead of adding 1, which the reader would take for the bias of a preceding Linear.
    shifted = graph.emit_step("Sub", node, [x, graph.number(node, "minus_one", -1)])
    halved = graph.emit_step("Div", node, [shifted, graph.number(node, "two", 2)])
    scaled_up = graph.emit_step("Mul", node, [halved, full])
    not_nan_value = graph.emit_step("Where", node, [graph.emit_step("IsNaN", node, [scaled_up]), zero, scaled_up])
    clipped = graph.emit_step("Clip", node, [not_nan_value, zero, full])
    graph.emit("Cast", node, [clipped], to=ELEMENT_TYPES["uint8"])
