"""QuantizeLinear and DequantizeLinear: a quantised network is computed in floats.

    DequantizeLinear(QuantizeLinear(x)) = Clip(Round(x / scale), least - zero, most - zero) * scale

Integer weights are dequantised while reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, folds, reads
from onchip.formats.onnx.ops.combine import combine
from onchip.formats.onnx.ops.graph_reader import GraphReader, Unfinished
from onchip.formats.onnx.ops.missing import FLOAT_MODEL
from onchip.network.layers import Add, Cast, Clip, Div, Max, Min, Mul, Round, ToInts
from onchip.network.layers.cast import CastTo, IntDtype
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype

_DTYPES = ("int8", "uint8", "int16", "int32")


@dataclass(frozen=True)
class Quantised(Unfinished):
    """x is the quantised ints, as floats, minus the zero point."""

    zero: Array
    dtype: IntDtype
    expected: ClassVar[str] = "a DequantizeLinear"

    def finish(self, graph: GraphReader, op: Op | None) -> str:
        zero = graph.weight("zero_point", self.zero.astype(numpy_dtype(graph.types[self.x].dtype)))
        moved = graph.add_step(op, Add(), (self.x,), {"constant": zero}) if self.zero.any() else self.x
        return graph.add_step(op, ToInts(self.dtype), (moved,))


@reads("QuantizeLinear")
def read_quantize(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    scale = _broadcastable(graph, op, graph.constant(op, 1), len(graph.shape(x)))
    zero = graph.constant(op, 2) if graph.has(op, 2) else np.zeros((), np.uint8)
    if zero.dtype.name not in _DTYPES or op.attribute("block_size", 0):
        got = f"{zero.dtype.name}, blocks of {op.attribute('block_size', 0)}"
        expected = f"{', '.join(_DTYPES)}, no blocks"
        raise FormatError(f"{op}: unsupported quantisation", got=got, expected=expected, hint=FLOAT_MODEL)
    zeros = _broadcastable(graph, op, zero, len(graph.shape(x))).astype(np.int64)
    limits, dtype = np.iinfo(zero.dtype), numpy_dtype(graph.types[x].dtype)
    divided = combine(graph, op, Div(), {0: x}, {1: scale.astype(dtype)}, is_step=True, name=op.inputs[1])
    whole = graph.add_step(op, Round(), (divided,))
    low, high = limits.min - zeros, limits.max - zeros
    if zeros.size == 1:
        inside = graph.add_step(op, Clip(float(low.reshape(())), float(high.reshape(()))), (whole,))
    else:
        inside = whole
        for layer, bound in ((Max(), low), (Min(), high)):
            name = f"{op.outputs[0]}_{layer.kind.lower()}"
            inside = combine(graph, op, layer, {0: inside}, {1: bound.astype(dtype)}, is_step=True, name=name)
    row = zeros if graph.one_row or zeros.ndim == 0 else zeros[0]
    graph.begin(op, Quantised(inside, row, cast(IntDtype, zero.dtype.name)))


@reads("DequantizeLinear")
def read_dequantize(graph: GraphReader, op: Op) -> None:
    """Dequantise a preceding QuantizeLinear with the same zero point, or ints from elsewhere."""
    scale = graph.constant(op, 1)
    quantised = graph.unfinished.get(op.inputs[0])
    x = quantised.x if isinstance(quantised, Quantised) else graph.value(op)
    rank = len(graph.shape(x))
    zero = _broadcastable(graph, op, graph.constant(op, 2), rank) if graph.has(op, 2) else np.zeros((), np.int8)
    if isinstance(quantised, Quantised):
        same = np.array_equal(zero.reshape(-1), quantised.zero.reshape(-1)) or not (zero.any() or quantised.zero.any())
        if not same:
            quantised, x = None, graph.value(op)
    if not isinstance(quantised, Quantised):
        x = graph.add_step(op, Cast(cast(CastTo, scale.dtype.name)), (x,))
        if zero.any():
            name = f"{op.outputs[0]}_zero"
            x = combine(graph, op, Add(), {0: x}, {1: -zero.astype(scale.dtype)}, is_step=True, name=name)
    combine(graph, op, Mul(), {0: x}, {1: _broadcastable(graph, op, scale, rank)}, name=op.inputs[1])


@folds("DequantizeLinear")
def fold_dequantize(graph: GraphReader, op: Op) -> Array:
    array, scale = graph.constant(op, 0), graph.constant(op, 1)
    graph.spend(op, array.size)
    if op.attribute("block_size", 0):
        expected = "one scale, or one per channel"
        raise FormatError(f"{op}: unsupported quantisation", got="blocks", expected=expected, hint=FLOAT_MODEL)
    zero = graph.constant(op, 2) if graph.has(op, 2) else np.zeros((), array.dtype)
    less = array.astype(np.int64) - _broadcastable(graph, op, zero, array.ndim).astype(np.int64)
    return np.asarray(less.astype(scale.dtype) * _broadcastable(graph, op, scale, array.ndim), scale.dtype)


def _broadcastable(graph: GraphReader, op: Op, array: Array, rank: int) -> Array:
    """A scalar, or one value per index of an axis, shaped to broadcast."""
    if array.size == 1:
        return array.reshape(())
    axis = op.attribute("axis", 1)
    if array.ndim != 1 or not -rank <= axis < rank:
        raise FormatError(f"{op}: bad scale", got=f"{array.shape}, axis {axis}", expected="one value, or one per index")
    return array.reshape([-1 if at == axis % rank else 1 for at in range(rank)])
