"""SequenceMax: sequence lengths are a mask in ONNX, recognised as a pattern.

y = ReduceMax(Where(ends <= n, x, Where(window <= n, -inf, 0)), axis 2)

with n the lengths as (B, 1, 1) and ends = window, window + stride, .. as (1, 1, P): a sequence shorter than the first
window has zeros everywhere. This form is written. Others are read too, as exporters write
`x.masked_fill(arange(P) > n - window, 0).amax(2)`: the mask by any comparison, or inverted, n plus a constant, and
zeros outside if x is never negative.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from onchip.errors import InputError
from onchip.formats.onnx.ops.base import AXES_ARE_INPUTS, Op, writes
from onchip.formats.onnx.ops.gelu import scaled
from onchip.formats.onnx.ops.graph_reader import GraphReader, Unfinished
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.tensors import ELEMENT_TYPES
from onchip.network.graph import Node
from onchip.network.layers import Add, Cast, Clip, Greater, Mask, ReLU, Reshape, SequenceMax, Sigmoid, ToInts
from onchip.network.layers.cast import CastTo
from onchip.network.layers.embedding import ID_DTYPES
from onchip.network.types import BATCH, Dim, numpy_dtype

# A constant a compared with n: whether true means inside, and the offset from a to the window's end.
_COMPARES = {"LessOrEqual": (True, 0), "Less": (True, 1), "Greater": (False, 0), "GreaterOrEqual": (False, 1)}
MIRRORED = {"LessOrEqual": "GreaterOrEqual", "GreaterOrEqual": "LessOrEqual", "Less": "Greater", "Greater": "Less"}


@dataclass(frozen=True)
class MaskPart(Unfinished):
    """mask: which windows are inside, or outside; others: Where(window <= n, -inf, 0), the fill value outside;
    masked: x inside, others or zeros elsewhere. Before the Where, x is n.
    """

    stage: str  # "mask", "others" or "masked"
    lengths: str  # our name of n, (B,)
    layer: SequenceMax
    shape: tuple[Dim, ...]  # (B, .., P)
    is_inside: bool = True
    has_others: bool = False  # elsewhere; else zeros
    expected: ClassVar[str] = "the rest of ReduceMax(Where(ends <= n, x, Where(window <= n, -inf, 0)), axis 2)"

    def finish(self, graph: GraphReader, op: Op | None) -> str | None:
        """x inside and zeros elsewhere, for readers other than the maximum; for a mask, the bools."""
        if self.stage == "mask":
            return graph.add_step(op, ToInts("bool"), (inside(graph, op, self, not self.is_inside),))
        if self.stage != "masked" or self.has_others:
            return None
        mask, dtype = inside(graph, op, self), graph.types[self.x].dtype
        if graph.types[mask].dtype != dtype:
            mask = graph.add_step(op, Cast(cast(CastTo, dtype)), (mask,))
        return graph.add_step(op, Mask(), (self.x, mask))


def inside(graph: GraphReader, op: Op | None, mask: MaskPart, is_inverted: bool = False) -> str:
    """1.0 for windows inside: n > end - 1. Inverted, for the others: end > n."""
    rank, P = len(mask.shape) - 1, int(mask.shape[-1])
    n = graph.add_step(op, Cast("float32"), (graph.add_step(op, Reshape((1,) * rank), (mask.lengths,)),))
    ends = mask.layer.window - (not is_inverted) + mask.layer.stride * np.arange(P, dtype=np.float32)
    return graph.add_step(op, Greater(), (n,), {"first" if is_inverted else "constant": graph.weight("ends", ends)})


@dataclass(frozen=True)
class WiderInts(Unfinished):
    """Lengths or ids as int64; x is the same as int32."""

    expected: ClassVar[str] = "ints"

    def finish(self, graph: GraphReader, op: Op | None) -> str:
        return graph.add_step(op, ToInts("int64"), (self.x,))


# -- mask --------------------------------------------------------------------------------------------------


def begins_mask(graph: GraphReader, op: Op) -> bool:
    """Handle a comparison of positions, a constant (.., P), with lengths (B, .., 1); return whether it was handled."""
    at = next((i for i in range(len(op.inputs)) if graph.is_constant(op, i)), None)
    found = None if at is None or op.kind not in _COMPARES else _lengths(graph, narrow_ints(graph, op, 1 - at))
    if at is None or found is None:
        return False
    lengths, added = found
    is_inside, more = _COMPARES[MIRRORED[op.kind] if at else op.kind]
    array, shape = graph.constant(op, at), graph.shape(narrow_ints(graph, op, 1 - at))
    ends = [int(position) - added + more for position in array.reshape(-1)]
    window, stride = ends[0] if ends else 0, ends[1] - ends[0] if len(ends) > 1 else 1
    if window < 1 or stride < 1 or ends != [window + p * stride for p in range(len(ends))]:
        return False  # not windows: an ordinary comparison
    if array.shape[-1:] != (len(ends),) or array.ndim > len(shape) or len(shape) < 2:
        return False
    layer = SequenceMax(window, stride)
    graph.begin(op, MaskPart(lengths, "mask", lengths, layer, (*shape[:-1], len(ends)), is_inside))
    return True


def narrow_ints(graph: GraphReader, op: Op, index: int) -> str:
    """The node's int input before it was widened."""
    wider = graph.unfinished.get(op.inputs[index]) if index < len(op.inputs) else None
    return wider.x if isinstance(wider, WiderInts) else graph.value(op, index)


def widens_ints(graph: GraphReader, op: Op, dtype: str) -> bool:
    """Handle a Cast from int32 to int64, as exporters write before comparing lengths or looking up ids."""
    x = graph.value(op)
    if (graph.types[x].dtype, dtype) != ("int32", "int64"):
        return False
    graph.begin(op, WiderInts(x))
    return True


def _lengths(graph: GraphReader, value: str) -> tuple[str, int] | None:
    """n (B,) and the constant added to it, if the value is n plus a constant as (B, 1, ..)."""
    added = 0
    while (tensor_type := graph.types[value]).dtype in ID_DTYPES and not graph.one_row and tensor_type.row_size == 1:
        node, number = graph.nodes.get(value), scaled(graph, value, Add)
        if number is not None:
            value, added = number[0], added + int(number[1])
        elif node is not None and isinstance(node.layer, Reshape):
            (value,) = node.inputs
        else:
            return None if tensor_type.row_shape else (value, added)
    return None


def inverts_mask(graph: GraphReader, op: Op) -> bool:
    """Handle a Not that inverts a mask; return whether it was handled."""
    mask = _mask(graph, op)
    if mask is not None:
        graph.begin(op, dataclasses.replace(mask, is_inside=not mask.is_inside))
    return mask is not None


def passes_mask(graph: GraphReader, op: Op) -> bool:
    """Handle an Unsqueeze or a Cast to bool of a mask; return whether it was handled."""
    mask = _mask(graph, op)
    if mask is None or op.kind not in ("Cast", "Identity", "Unsqueeze"):
        return False
    if op.kind == "Cast" and op.attribute("to", 0) != ELEMENT_TYPES["bool"]:
        return False
    if op.kind == "Unsqueeze":
        axes = graph.new_axes(op)
        rank = len(mask.shape) + len(axes)
        sizes, new = iter(mask.shape), {axis % rank for axis in axes if -rank <= axis < rank}
        if len(new) < len(axes):
            return False
        mask = dataclasses.replace(mask, shape=tuple(1 if axis in new else next(sizes) for axis in range(rank)))
    graph.begin(op, mask)
    return True


def _mask(graph: GraphReader, op: Op) -> MaskPart | None:
    found = graph.unfinished.get(op.inputs[0]) if op.inputs else None
    return found if isinstance(found, MaskPart) and found.stage == "mask" else None


# -- masked values -----------------------------------------------------------------------------------------


def continues_mask(graph: GraphReader, op: Op) -> bool:
    """Handle a Where on a mask that a comparison began; return whether it was handled."""
    mask = _mask(graph, op)
    if mask is None or len(op.inputs) != 3:
        return False
    inside, outside = (1, 2) if mask.is_inside else (2, 1)
    if graph.is_constant(op, inside):
        is_others = graph.is_number(op, inside, -np.inf) and graph.is_number(op, outside, 0)
        if not is_others or mask.shape != (BATCH, 1, 1):
            return False
        graph.begin(op, dataclasses.replace(mask, stage="others"))
        return True
    x, others = graph.value(op, inside), graph.unfinished.get(op.inputs[outside])
    if isinstance(others, MaskPart):
        same = (others.stage, others.lengths, others.layer.window) == ("others", mask.lengths, mask.layer.window)
    else:
        same = graph.is_number(op, outside, 0) and _is_never_negative(graph.nodes.get(x))
    if not same or len(graph.types[x].shape) != 3 or mask.shape != (BATCH, 1, graph.types[x].shape[2]):
        return False
    has_others = isinstance(others, MaskPart)
    graph.begin(op, dataclasses.replace(mask, x=x, stage="masked", has_others=has_others))
    return True


def _is_never_negative(node: Node | None) -> bool:
    layer = None if node is None else node.layer
    return isinstance(layer, ReLU | Sigmoid) or (isinstance(layer, Clip) and layer.low is not None and layer.low >= 0)


def completes_mask(graph: GraphReader, op: Op) -> bool:
    """Handle a ReduceMax that completes such a mask; return whether it was handled."""
    masked = graph.unfinished.get(op.inputs[0]) if op.inputs else None
    if not isinstance(masked, MaskPart) or masked.stage != "masked":
        return False
    if graph.axes(op, AXES_ARE_INPUTS) not in ([2], [-1]):
        return False
    reads = masked.x, masked.lengths
    if op.attribute("keepdims", 1):
        most = graph.add_step(op, masked.layer, reads)
        graph.add(op, Reshape((*graph.types[most].row_shape, 1)), (most,))
    else:
        graph.add(op, masked.layer, reads)
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
        graph.emit_step("LessOrEqual", node, [graph.constant(f"{node.name}_{name}", positions), n])
        for name, positions in (("window", ends[..., :1]), ("ends", ends))
    )
    least, zero = graph.number(node, "least", -np.inf), graph.number(node, "zero", 0)
    others = graph.emit_step("Where", node, [first, least, zero])
    masked = graph.emit_step("Where", node, [inside, graph.value(node), others])
    if graph.opset < AXES_ARE_INPUTS:
        graph.emit("ReduceMax", node, [masked], axes=[2], keepdims=0)
    else:
        graph.emit("ReduceMax", node, [masked, graph.constant(f"{node.name}_axis", np.array([2]))], keepdims=0)
