"""Comparisons and bool inputs, up to the Cast, Where or sum that uses them: padding masks, length masks, thresholds.

A comparison is computed as 0.0 or 1.0; only what is used as a bool or an int is converted (ToInts).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, cast, get_args

import ml_dtypes
import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads
from onchip.formats.onnx.ops.combine import combine, operands
from onchip.formats.onnx.ops.graph_reader import GraphReader, Unfinished
from onchip.formats.onnx.ops.lengths import MaskPart, begins_mask, continues_mask, inside, inverts_mask, passes_mask
from onchip.formats.onnx.ops.pixels import PixelPart, begins_pixels, not_nan
from onchip.formats.onnx.ops.select import shape_part
from onchip.formats.onnx.tensors import ELEMENT_DTYPES
from onchip.network.layers import (
    Abs,
    Add,
    Cast,
    Equal,
    GlobalSum,
    Greater,
    GreaterOrEqual,
    Mask,
    Max,
    Min,
    Mul,
    Sub,
    ToInts,
)
from onchip.network.layers.cast import CastTo, IntDtype
from onchip.network.reading import show
from onchip.network.types import numpy_dtype

# The layer, and whether its operands are swapped.
_COMPARISONS = {
    "Equal": (Equal(), False), "Greater": (Greater(), False), "GreaterOrEqual": (GreaterOrEqual(), False),
    "Less": (Greater(), True), "LessOrEqual": (GreaterOrEqual(), True),
}  # fmt: skip
_SEEN = ("Identity", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Expand", "Tile", "Slice", "Gather", "Flatten")


@dataclass(frozen=True)
class Truth(Unfinished):
    """x is 1.0 for true and 0.0 for false, or the inverse."""

    is_inverted: bool = False
    dtype: IntDtype = "bool"  # in the file
    expected: ClassVar[str] = "a truth value"

    def finish(self, graph: GraphReader, op: Op | None) -> str:
        return graph.add_step(op, ToInts(self.dtype), (_mask(graph, op, self),))


@dataclass(frozen=True)
class Count(Unfinished):
    """x is the number of true values, as a float: usually a divisor."""

    dtype: IntDtype
    expected: ClassVar[str] = "a number"

    def finish(self, graph: GraphReader, op: Op | None) -> str:
        return graph.add_step(op, ToInts(self.dtype), (self.x,))


def counts_truths(graph: GraphReader, op: Op, axes: tuple[int, ...], keep: bool) -> bool:
    """Handle a ReduceSum over truth values cast to ints; return whether it was handled."""
    truth = graph.unfinished.get(op.inputs[0])
    if not isinstance(truth, Truth) or truth.dtype == "bool":
        return False
    graph.begin(op, Count(graph.add_step(op, GlobalSum(axes, keep), (_mask(graph, op, truth),)), truth.dtype))
    return True


@reads(*_COMPARISONS)
def read_comparison(graph: GraphReader, op: Op) -> None:
    if begins_mask(graph, op):
        return
    values, constants = operands(graph, op)
    dtype = graph.types[next(iter(values.values()))].dtype
    is_narrow = "int" in dtype and dtype not in ("int32", "int64")
    if is_narrow:  # exact in float32
        values = {index: graph.add_step(op, Cast("float32"), (value,)) for index, value in values.items()}
        constants = {index: array.astype(np.float32) for index, array in constants.items()}
    layer, is_inverted = _COMPARISONS[op.kind]
    if is_inverted:
        values = {1 - index: value for index, value in values.items()}
        constants = {1 - index: array for index, array in constants.items()}
    name = next((name for index, name in enumerate(op.inputs) if graph.is_constant(op, index)), "")
    found = combine(graph, op, layer, values, constants, is_step=True, name=name)
    if "int" in graph.types[found].dtype:
        found = graph.add_step(op, Cast("float32"), (found,))
    graph.begin(op, Truth(found))


@reads("IsInf")
def read_is_inf(graph: GraphReader, op: Op) -> None:
    """Whether |x|, x or -x exceeds the largest finite value."""
    x = graph.value(op)
    most = np.array(ml_dtypes.finfo(numpy_dtype(graph.types[x].dtype)).max, numpy_dtype(graph.types[x].dtype))
    signs = [op.attribute(name, 1) != 0 for name in ("detect_positive", "detect_negative")]
    if all(signs):
        x = graph.add_step(op, Abs(), (x,))
    if signs[0]:
        graph.begin(op, Truth(graph.add_step(op, Greater(), (x,), {"constant": graph.weight("largest", most)})))
    else:  # the case of neither sign does not occur
        graph.begin(op, Truth(graph.add_step(op, Greater(), (x,), {"first": graph.weight("least", -most)})))


@reads("And", "Or", "Xor")
def read_both(graph: GraphReader, op: Op) -> None:
    if len(op.inputs) != 2:
        raise FormatError(f"{op}: wrong number of inputs", got=str(len(op.inputs)), expected="2")
    indices = [index for index in (0, 1) if not graph.is_constant(op, index)]
    masks = {index: _mask(graph, op, _operand(graph, op, index)) for index in indices}
    if len({graph.types[mask].dtype for mask in masks.values()}) > 1:  # mixed float types
        masks = {index: graph.add_step(op, Cast("float32"), (mask,)) for index, mask in masks.items()}
    dtype = numpy_dtype(graph.types[next(iter(masks.values()))].dtype)
    constants = {index: graph.constant(op, index).astype(dtype) for index in (0, 1) if index not in masks}
    name = f"{op.outputs[0]}_mask"
    if op.kind != "Xor":
        layer = Mul() if op.kind == "And" else Max()
        graph.begin(op, Truth(combine(graph, op, layer, masks, constants, is_step=True, name=name)))
        return
    least, most = (combine(graph, op, layer, masks, constants, is_step=True, name=name) for layer in (Min(), Max()))
    graph.begin(op, Truth(graph.add_step(op, Sub(), (most, least))))


@reads("Not")
def read_not(graph: GraphReader, op: Op) -> None:
    if inverts_mask(graph, op):
        return
    truth = _operand(graph, op, 0)
    graph.begin(op, Truth(truth.x, not truth.is_inverted))


def _operand(graph: GraphReader, op: Op, index: int) -> Truth:
    """The node's input as a truth value: a comparison, a length mask, or a bool value."""
    found = _found(graph, op, index)
    if found is None:
        got = show(op.inputs[index] if index < len(op.inputs) else "")
        raise FormatError(f"{op} needs a bool", got=got, expected="a comparison, or a bool value")
    return found


def _found(graph: GraphReader, op: Op, index: int) -> Truth | None:
    name = op.inputs[index] if index < len(op.inputs) else ""
    truth = graph.unfinished.get(name)
    if isinstance(truth, MaskPart) and truth.stage == "mask":
        return Truth(inside(graph, op, truth), not truth.is_inside)
    if isinstance(truth, Truth):
        return truth
    if isinstance(truth, PixelPart) and truth.op_kind == "IsNaN" and not begins_pixels(graph, op):
        return Truth(not_nan(graph, op, truth.x), is_inverted=True)
    value = graph.values.get(name)
    if value is None or graph.types[value].dtype != "bool":
        return None
    return Truth(graph.add_step(op, Cast("float32"), (value,)))


def reads_truth(graph: GraphReader, op: Op) -> bool:
    """Handle a node that views a truth value differently or casts it; return whether it was handled."""
    if op.kind not in (*_SEEN, "Cast", "Where", "Shape") or not op.inputs or graph.is_constant(op, 0):
        return False
    if passes_mask(graph, op) or (op.kind == "Where" and continues_mask(graph, op)):
        return True
    if op.inputs[0] in graph.values and op.kind != "Where":
        return False  # a bool value that is moved or cast is an ordinary value
    if op.kind == "Cast" and isinstance(count := graph.unfinished.get(op.inputs[0]), Count):
        return _casts_count(graph, op, count)
    truth = _found(graph, op, 0)
    if truth is None:
        return False
    if op.kind == "Where":
        _select(graph, op, truth)
    elif op.kind == "Shape":
        graph.add_constant(op, np.array(shape_part(op, graph.shape(truth.x)), object))
    elif op.kind != "Cast":
        name = graph.part(op, op.kind, [graph.part_value(op, truth.x), *op.inputs[1:]], **op.attributes)
        seen = graph.value(Op(op.kind, op.name, (name,), op.outputs, {}))
        graph.begin(op, dataclasses.replace(truth, x=seen))
    elif (dtype := ELEMENT_DTYPES.get(op.attribute("to", 0))) in get_args(IntDtype):
        graph.begin(op, dataclasses.replace(truth, dtype=cast(IntDtype, dtype)))
    else:
        name = graph.part(op, "Cast", [graph.part_value(op, _mask(graph, op, truth))], **op.attributes)
        graph.bind_output(op, 0, graph.value(Op(op.kind, op.name, (name,), op.outputs, {})))
    return True


def _casts_count(graph: GraphReader, op: Op, count: Count) -> bool:
    dtype = ELEMENT_DTYPES.get(op.attribute("to", 0))
    if dtype not in get_args(CastTo):
        return False
    if dtype == graph.types[count.x].dtype:
        graph.bind_output(op, 0, count.x)
    else:
        graph.add(op, Cast(cast(CastTo, dtype)), (count.x,))
    return True


def _select(graph: GraphReader, op: Op, truth: Truth) -> None:
    """A Where: the sum of both operands, each masked."""
    values = {index: graph.value(op, index) for index in (1, 2) if not graph.is_constant(op, index)}
    constants = [graph.constant(op, index).dtype.name for index in (1, 2) if index not in values]
    dtype = graph.types[next(iter(values.values()))].dtype if values else constants[0]
    if dtype == "bool":
        raise FormatError(f"{op}: a comparison cannot select bools", got=dtype, expected="floats or ints")
    masks = {1: _mask(graph, op, truth), 2: _mask(graph, op, Truth(truth.x, not truth.is_inverted))}
    if graph.types[truth.x].dtype != dtype:
        to = Cast(cast(CastTo, dtype)) if "float" in dtype else ToInts(cast(IntDtype, dtype))
        masks = {index: graph.add_step(op, to, (mask,)) for index, mask in masks.items()}
    parts: dict[int, str] = {}
    for index, mask in masks.items():
        if index in values:
            parts[index] = combine(graph, op, Mask(), {0: values[index], 1: mask}, {}, is_step=True)
            continue
        array = graph.weight_constant(op, index, masks[1])
        if array.size > 1 or array.any():
            parts[index] = combine(graph, op, Mask(), {1: mask}, {0: array}, is_step=True, name=op.inputs[index])
    if not parts:
        raise FormatError(f"{op} selects between zeros", got=show(op.inputs[1:]), expected="other operands")
    some = next(iter(parts.values()))
    graph.bind_output(op, 0, combine(graph, op, Add(), parts, {}, is_step=True) if len(parts) > 1 else some)


def _mask(graph: GraphReader, op: Op | None, truth: Truth) -> str:
    """1 for true, else 0; 1 - x if x is inverted."""
    if not truth.is_inverted:
        return truth.x
    dtype = numpy_dtype(graph.types[truth.x].dtype)
    negated = graph.add_step(op, Mul(), (truth.x,), {"constant": graph.weight("minus_one", np.array(-1, dtype))})
    return graph.add_step(op, Add(), (negated,), {"constant": graph.weight("plus_one", np.array(1, dtype))})
