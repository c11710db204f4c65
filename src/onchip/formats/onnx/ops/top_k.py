"""TopK: values and indices are separate layers, added where they are used."""

from __future__ import annotations

from typing import cast

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.network.graph import Node
from onchip.network.layers import ArgTopK, Cast, ToInts, TopK
from onchip.network.layers.cast import IntDtype
from onchip.network.reading import show


@reads("TopK")
def read_top_k(graph: GraphReader, op: Op) -> None:
    """Results are sorted even if the file does not ask for it."""
    x = graph.value(op)
    k = [op.attribute("k", 0)] if graph.opset < 10 else graph.ints(op, 1)
    if len(k) != 1 or len(op.outputs) > 2:
        raise FormatError(f"{op}: bad k", got=show(k), expected="one int")
    options = k[0], graph.axis(op, x, op.attribute("axis", -1)), op.attribute("largest", 1) != 0
    dtype = graph.types[x].dtype
    if "int" in dtype:  # through float64, which is exact for ints up to 2^53
        x = graph.add_step(op, Cast("float64"), (x,))
    for output, layer in enumerate((TopK(*options), ArgTopK(*options))[: len(op.outputs)]):
        if not graph.readers[op.outputs[output]]:
            continue
        if "int" in dtype and isinstance(layer, TopK):
            graph.add(op, ToInts(cast(IntDtype, dtype)), (graph.add_step(op, layer, (x,)),), output=output)
        else:
            graph.add(op, layer, (x,), output=output)


@writes(TopK, ArgTopK)
def write_top_k(graph: GraphWriter, node: Node) -> None:
    given, used = node.layer.attributes(), graph.values[node.name]
    k = graph.constant(f"{node.name}_k", np.array([given["k"]], np.int64))
    unused = graph.fresh(f"{node.name}_{'places' if isinstance(node.layer, TopK) else 'numbers'}")
    outputs = [used, unused] if isinstance(node.layer, TopK) else [unused, used]
    attributes = {"axis": given["axis"], "largest": int(given["largest"])}
    graph.emit_outputs("TopK", node.name, [graph.value(node), k], outputs, **attributes)
