"""Nodes without computation: Constant and Identity add no layer, Dropout one that does nothing."""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.ops.missing import INFERENCE
from onchip.network.graph import Node
from onchip.network.layers import Dropout, Identity


@reads("Constant")
def read_constant(graph: GraphReader, op: Op) -> None:
    fields = op.attributes
    if len(fields) != 1:
        raise FormatError(f"{op}: not exactly one value", got=", ".join(fields) or "nothing", expected="one attribute")
    if "value" in fields and hasattr(fields["value"], "dims"):
        graph.add_constant(op, fields["value"])
    elif isinstance(fields.get("value_float"), float) or isinstance(fields.get("value_floats"), list):
        graph.add_constant(op, np.array(fields.get("value_float", fields.get("value_floats")), np.float32))
    elif isinstance(fields.get("value_int"), int) or isinstance(fields.get("value_ints"), list):
        graph.add_constant(op, np.array(fields.get("value_int", fields.get("value_ints")), np.int64))
    else:
        raise FormatError(f"{op} has no numeric value", got=", ".join(fields), expected="a dense tensor")


@reads("Identity")
def read_identity(graph: GraphReader, op: Op) -> None:
    graph.pass_on(op)


@reads("Dropout")
def read_dropout(graph: GraphReader, op: Op) -> None:
    drops = not graph.has(op, 1) or graph.constant(op, 1).any()
    trains = graph.has(op, 2) and graph.constant(op, 2).any() if graph.opset > 6 else not op.attribute("is_test", 0)
    if drops and trains:
        raise FormatError(f"{op} is in training mode", expected="inference", hint=INFERENCE)
    ratio = op.number("ratio", 0.5)
    if graph.has(op, 1):
        ratio = float(graph.constant(op, 1).max(initial=0))
    if 0 < ratio < 1 and not graph.is_constant(op, 0):
        graph.add(op, Dropout(ratio), (graph.value(op),))  # retained for training, which reports it
    else:
        graph.pass_on(op)


@writes(Identity)
def write_identity(graph: GraphWriter, node: Node) -> None:
    graph.emit("Identity", node, [graph.value(node)])


@writes(Dropout)
def write_dropout(graph: GraphWriter, node: Node) -> None:
    ratio = graph.number(node, "ratio", node.layer.attributes()["p"])
    graph.emit("Dropout", node, [graph.value(node), ratio])
