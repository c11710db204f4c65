"""SequenceMax: lengths of sequences are a mask in ONNX, read back where its nodes stand together.

y = ReduceMax(Where(ends <= n, x, Where(window <= n, -inf, 0)), axis 2)

with n the lengths as (B, 1, 1) and ends = window, window + stride, .. as (1, 1, P): a sequence too short for the first
window has zeros everywhere.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.formats.onnx_ops.base import AXES_ARE_INPUTS, Op, reads, writes
from onchip.formats.onnx_ops.graph_reader import GraphReader, Unfinished
from onchip.formats.onnx_ops.graph_writer import GraphWriter
from onchip.spec.layers import Reshape, SequenceMax
from onchip.spec.layers.embedding import ID_DTYPES
from onchip.spec.network import Node
from onchip.spec.reading import show
from onchip.spec.types import numpy_dtype


@dataclass(frozen=True)
class MaskPart(Unfinished):
    """inside: ends <= n; others: Where(window <= n, -inf, 0); masked: Where(inside, x, others). x is n until then."""

    made: str  # "inside", "others" or "masked"
    lengths: str  # our name of n, (B,)
    layer: SequenceMax
    windows: int
    expected: ClassVar[str] = "the rest of ReduceMax(Where(ends <= n, x, Where(window <= n, -inf, 0)), axis 2)"


@reads("LessOrEqual")
def read_less_or_equal(graph: GraphReader, op: Op) -> None:
    lengths = _lengths(graph, op)
    if lengths is None or not graph.is_constant(op, 0):
        expected = "constant ends of windows <= lengths (B, 1, 1), inside of a maximum over sequences"
        raise FormatError(f"{op} stands alone", got=show(op.inputs), expected=expected)
    array = graph.constant(op, 0)
    ends = [int(end) for end in array.reshape(-1)]
    window, stride = ends[0] if ends else 0, ends[1] - ends[0] if len(ends) > 1 else 1
    if array.shape != (1, 1, len(ends)) or ends != [window + p * stride for p in range(len(ends))]:
        expected = "window + p * stride for every p, (1, 1, P)"
        raise FormatError(f"{op}: bad ends of windows", got=f"{show(ends)}, {array.shape}", expected=expected)
    graph.begin(op, MaskPart(lengths, "inside", lengths, SequenceMax(window, stride), len(ends)))


def _lengths(graph: GraphReader, op: Op) -> str | None:
    """The value (B,) that the node reads as (B, 1, 1)."""
    node = None if graph.is_constant(op, 1) else graph.nodes.get(graph.value(op, 1))
    if node is None or not isinstance(node.layer, Reshape) or graph.types[node.name].row_shape != (1, 1):
        return None
    given = graph.types[node.inputs[0]]
    return node.inputs[0] if not given.row_shape and given.dtype in ID_DTYPES else None


def continues_mask(graph: GraphReader, op: Op) -> bool:
    """Whether a Where belongs to a mask that a LessOrEqual began; if so, it is done."""
    inside = graph.unfinished.get(op.inputs[0]) if len(op.inputs) == 3 else None
    if not isinstance(inside, MaskPart) or inside.made != "inside":
        return False
    if graph.is_constant(op, 1):
        if inside.windows != 1 or not (graph.is_number(op, 1, -np.inf) and graph.is_number(op, 2, 0)):
            return False
        graph.begin(op, dataclasses.replace(inside, made="others"))
        return True
    x, others = graph.value(op, 1), graph.unfinished.get(op.inputs[2])
    if not isinstance(others, MaskPart) or others.made != "others":
        return False
    is_same = (others.lengths, others.layer.window) == (inside.lengths, inside.layer.window)
    if not is_same or graph.types[x].row_shape[1:] != (inside.windows,):
        return False
    graph.begin(op, dataclasses.replace(inside, x=x, made="masked"))
    return True


def completes_mask(graph: GraphReader, op: Op) -> bool:
    """Whether a ReduceMax ends such a mask; if so, the layer is there."""
    masked = graph.unfinished.get(op.inputs[0]) if op.inputs else None
    if not isinstance(masked, MaskPart) or masked.made != "masked" or op.attribute("keepdims", 1):
        return False
    if graph.axes(op, AXES_ARE_INPUTS) not in ([2], [-1]):
        return False
    graph.add(op, masked.layer, (masked.x, masked.lengths))
    return True


@writes(SequenceMax)
def write_sequence_max(graph: GraphWriter, node: Node) -> None:
    layer, (x, lengths) = cast(SequenceMax, node.layer), graph.net.input_types(node)
    P, last = int(x.shape[2]), layer.window + (int(x.shape[2]) - 1) * layer.stride
    most = int(np.iinfo(lengths.dtype).max)
    if last > most:
        raise InputError(
            f"layer '{node.name}' cannot be written as ONNX", got=f"a window that ends at {last:,}",
            expected=f"at most {most:,}, the longest of {lengths.dtype} lengths", hint="save it as .safetensors",
        )  # fmt: skip
    ends = (layer.window + layer.stride * np.arange(P)).astype(numpy_dtype(lengths.dtype)).reshape(1, 1, P)
    n = graph.emit_step("Unsqueeze", node, [graph.value(node, 1), graph.constant(f"{node.name}_new", np.array([1, 2]))])
    first, inside = (
        graph.emit_step("LessOrEqual", node, [graph.constant(f"{node.name}_{name}", places), n])
        for name, places in (("window", ends[..., :1]), ("ends", ends))
    )
    least, zero = graph.number(node, "least", -np.inf), graph.number(node, "zero", 0)
    others = graph.emit_step("Where", node, [first, least, zero])
    masked = graph.emit_step("Where", node, [inside, graph.value(node), others])
    if graph.opset < AXES_ARE_INPUTS:
        graph.emit("ReduceMax", node, [masked], axes=[2], keepdims=0)
    else:
        graph.emit("ReduceMax", node, [masked, graph.constant(f"{node.name}_axis", np.array([2]))], keepdims=0)
