"""Registration of operator handlers.

@reads("Relu")
def read_relu(graph: GraphReader, op: Op) -> None:
    graph.add(op, ReLU(), (graph.value(op),))

@writes(ReLU)
def write_relu(graph: GraphWriter, node: Node) -> None:
    graph.emit("Relu", node, [graph.value(node)])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from onchip.errors import FormatError
from onchip.network.graph import Node
from onchip.network.layers import Layer
from onchip.network.reading import show
from onchip.network.recipe import Array

if TYPE_CHECKING:
    from onchip.formats.onnx.ops.graph_reader import GraphReader
    from onchip.formats.onnx.ops.graph_writer import GraphWriter

T = TypeVar("T")
ReadHandler = Callable[["GraphReader", "Op"], None]
FoldHandler = Callable[["GraphReader", "Op"], Array]
WriteHandler = Callable[["GraphWriter", Node], None]

READERS: dict[str, ReadHandler] = {}  # by ONNX operator
FOLDS: dict[str, FoldHandler] = {}  # by ONNX operator, if all inputs are constant
WRITERS: dict[str, WriteHandler] = {}  # by kind of layer

AXES_ARE_INPUTS = 18  # opset from which a reduction's axes are inputs
MAX_SIZE = 2**31 - 1  # of a window, a stride, a pad: larger values are invalid and would overflow


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


@dataclass(frozen=True)
class Op:
    """One node of an ONNX graph, decoded from its protobuf."""

    kind: str
    name: str
    inputs: tuple[str, ...]  # "": an omitted optional input
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]

    def __str__(self) -> str:
        made = f"the {self.kind} that makes {show(self.outputs[0])}"
        return f"node {show(self.name)} ({self.kind})" if self.name else made

    def attribute(self, name: str, default: T) -> T:
        """The attribute's value, of the default's type."""
        value = self.attributes.get(name, default)
        if type(value) is not type(default):
            raise FormatError(f"{self}: bad attribute '{name}'", got=show(value), expected=type(default).__name__)
        return value

    def number(self, name: str, default: float) -> float:
        """A float attribute as written: ONNX stores 32 bits, and 0.01 must not become 0.0099999998."""
        return float(str(np.float32(self.attribute(name, default))))

    def sizes(self, name: str, default: list[int], length: int = 0) -> list[int]:
        """A list of ints, `length` of them (0: any number), each of plausible size."""
        value = self.attribute(name, default)
        if not all(type(n) is int and abs(n) <= MAX_SIZE for n in value) or length not in (0, len(value)):
            expected = f"{length or 'some'} ints of at most {MAX_SIZE:,}"
            raise FormatError(f"{self}: bad attribute '{name}'", got=show(value), expected=expected)
        return value
