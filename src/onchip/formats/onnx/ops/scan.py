"""CumSum."""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.network.graph import Node
from onchip.network.layers import CumSum
from onchip.network.reading import show


@reads("CumSum")
def read_cumsum(graph: GraphReader, op: Op) -> None:
    x, axes = graph.value(op), graph.ints(op, 1)
    if len(axes) != 1:
        raise FormatError(f"{op}: bad axis", got=show(axes), expected="one")
    flags = [op.attribute(name, 0) != 0 for name in ("exclusive", "reverse")]
    graph.add(op, CumSum(graph.axis(op, x, axes[0]), *flags), (x,))


@writes(CumSum)
def write_cumsum(graph: GraphWriter, node: Node) -> None:
    attributes = node.layer.attributes()
    axis = graph.constant(f"{node.name}_axis", np.array(attributes["axis"], np.int64))
    flags = {name: int(attributes[name]) for name in ("exclusive", "reverse")}
    graph.emit("CumSum", node, [graph.value(node), axis], **flags)
