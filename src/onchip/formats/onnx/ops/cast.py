"""Cast and CastLike: a Cast to floats, a ToInts to ints and bools; nothing if the dtype is unchanged."""

from __future__ import annotations

import typing
from typing import cast

from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.ops.lengths import widens_ints
from onchip.formats.onnx.ops.pixels import completes_pixels
from onchip.formats.onnx.tensors import ELEMENT_TYPES, dtype_of
from onchip.network.graph import Node
from onchip.network.layers import Cast, ToInts
from onchip.network.layers.cast import CastTo, IntDtype
from onchip.network.types import numpy_dtype


@reads("Cast")
def read_cast(graph: GraphReader, op: Op) -> None:
    if not completes_pixels(graph, op):
        _cast(graph, op, dtype_of(op.attribute("to", 0), str(op)))


@reads("CastLike")
def read_cast_like(graph: GraphReader, op: Op) -> None:
    dtype = graph.constant(op, 1).dtype.name if graph.is_constant(op, 1) else graph.types[graph.value(op, 1)].dtype
    if graph.is_constant(op, 0):
        array = graph.constant(op, 0)
        graph.spend(op, array.size)
        graph.add_constant(op, array.astype(numpy_dtype(dtype)))
    else:
        _cast(graph, op, dtype)


def _cast(graph: GraphReader, op: Op, dtype: str) -> None:
    x = graph.value(op)
    source = graph.types[x].dtype
    if source == dtype:
        graph.pass_on(op)
    elif dtype in typing.get_args(CastTo):
        graph.add(op, Cast(cast(CastTo, dtype)), (x,))
    elif not widens_ints(graph, op, dtype):
        graph.add(op, ToInts(cast(IntDtype, dtype)), (x,))


@writes(Cast, ToInts)
def write_cast(graph: GraphWriter, node: Node) -> None:
    graph.emit("Cast", node, [graph.value(node)], to=ELEMENT_TYPES[graph.dtype(node)])
