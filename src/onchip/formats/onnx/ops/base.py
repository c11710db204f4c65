"""Registration of operator handlers.

@reads("Relu")
def read_relu(graph: GraphReader, op: Op) -> None:
    graph.add(op, ReLU(), (graph.value(op),))

@writes(ReLU)
def write_relu(graph: GraphWriter, node: Node) -> None:
    graph.emit("Relu", node, [graph.value(node)])
"""

from __future__ import annotations

from collections.abc import Callable

from onchip.formats.onnx.ops.graph_reader import READERS as READERS
from onchip.formats.onnx.ops.graph_reader import GraphReader, ReadHandler
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.ops.op import Op as Op
from onchip.network.graph import Node
from onchip.network.layers import Layer
from onchip.network.recipe import Array

FoldHandler = Callable[[GraphReader, Op], Array]
WriteHandler = Callable[[GraphWriter, Node], None]

FOLDS: dict[str, FoldHandler] = {}  # by ONNX operator, for nodes whose inputs are all constant
WRITERS: dict[str, WriteHandler] = {}  # by kind of layer

AXES_ARE_INPUTS = 18  # opset from which the axes of reductions are inputs; ReduceSum: 13


def reads(*op_types: str) -> Callable[[ReadHandler], ReadHandler]:
    def register(handler: ReadHandler) -> ReadHandler:
        READERS.update(dict.fromkeys(op_types, handler))
        return handler

    return register


def folds(*op_types: str) -> Callable[[FoldHandler], FoldHandler]:
    def register(handler: FoldHandler) -> FoldHandler:
        FOLDS.update(dict.fromkeys(op_types, handler))
        return handler

    return register


def writes(*layers: type[Layer]) -> Callable[[WriteHandler], WriteHandler]:
    def register(handler: WriteHandler) -> WriteHandler:
        WRITERS.update({layer.__name__: handler for layer in layers})
        return handler

    return register
