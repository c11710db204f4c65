"""What an operator's handler registers with and talks to.

@reads("Relu")
def read_relu(graph: GraphReader, op: Op) -> None:
    graph.add(op, ReLU(), (graph.value(op),))

@writes(ReLU)
def write_relu(graph: GraphWriter, node: Node) -> None:
    graph.emit("Relu", node, [graph.value(node)])
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from onchip.errors import FormatError, InputError, ShapeError
from onchip.spec.layers import Layer
from onchip.spec.network import Network, Node
from onchip.spec.onnx_tensors import TensorReader, make_tensor
from onchip.spec.reading import show
from onchip.spec.recipe import Array, materialise
from onchip.spec.types import TensorType, numpy_dtype

T = TypeVar("T")
ReadHandler = Callable[["GraphReader", "Op"], None]
WriteHandler = Callable[["GraphWriter", Node], None]

READERS: dict[str, ReadHandler] = {}  # by ONNX operator
WRITERS: dict[str, WriteHandler] = {}  # by kind of layer


def reads(*op_types: str) -> Callable[[ReadHandler], ReadHandler]:
    def register(handler: ReadHandler) -> ReadHandler:
        READERS.update(dict.fromkeys(op_types, handler))
        return handler

    return register


def writes(*layers: type[Layer]) -> Callable[[WriteHandler], WriteHandler]:
    def register(handler: WriteHandler) -> WriteHandler:
        WRITERS.update({layer.__name__: handler for layer in layers})
        return handler

    return register


@dataclass(frozen=True)
class Op:
    """One node of an ONNX graph, out of its protobuf."""

    kind: str
    name: str
    inputs: tuple[str, ...]  # "" stands for an optional input that is left out
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]

    def __str__(self) -> str:
        made = f"the {self.kind} that makes {show(self.outputs[0])}"
        return f"node {show(self.name)} ({self.kind})" if self.name else made

    def attribute(self, name: str, default: T) -> T:
        """The attribute's value, of the type that the default has."""
        value = self.attributes.get(name, default)
        if type(value) is not type(default):
            raise FormatError(f"{self}: bad attribute '{name}'", got=show(value), expected=type(default).__name__)
        return value


class GraphReader:
    """A network in the making. Handlers ask it about values and constants and add their layers to it."""

    def __init__(
        self,
        opset: int,
        batch: int | None,
        inputs: Mapping[str, TensorType],
        constants: Mapping[str, Any],
        ops: Sequence[Op],
        outputs: Sequence[str],
        tensors: TensorReader,
    ) -> None:
        self.opset = opset
        self.batch = batch  # rows that the file fixes, if it does
        self.values = {name: name for name in inputs}  # ONNX's name of a value -> ours
        self.types = dict(inputs)  # by our names, as everything below
        self.nodes: dict[str, Node] = {}
        self.weights: dict[str, Array] = {}
        self.readers = Counter(name for op in ops for name in op.inputs) + Counter(outputs)
        self._constants = dict(constants)  # ONNX name -> TensorProto, or array once it was read
        self._op_names = {op.name for op in ops}
        self._tensors = tensors

    # -- what handlers ask ---------------------------------------------------------------------------------

    def has(self, op: Op, index: int) -> bool:
        return index < len(op.inputs) and op.inputs[index] != ""

    def is_constant(self, op: Op, index: int) -> bool:
        return self.has(op, index) and op.inputs[index] in self._constants

    def value(self, op: Op, index: int = 0) -> str:
        """Our name for the value that the node reads there; it depends on the network's input."""
        if not self.has(op, index):
            raise FormatError(f"{op} has too few inputs", got=str(len(op.inputs)), expected=f"{index + 1} at least")
        name = op.inputs[index]
        if name in self._constants:
            raise FormatError(f"{op}: input {index} is a constant", got=show(name), expected="a value of the network")
        if name not in self.values:
            raise FormatError(f"{op} reads {show(name)}, which nothing before it makes", expected="nodes in order")
        return self.values[name]

    def constant(self, op: Op, index: int) -> Array:
        """The array of an initializer or Constant that the node reads there."""
        if not self.is_constant(op, index):
            got = show(op.inputs[index]) if self.has(op, index) else "nothing"
            raise FormatError(f"{op}: input {index} must be a constant", got=got, expected="initializer or Constant")
        name = op.inputs[index]
        if not isinstance(self._constants[name], np.ndarray):
            self._constants[name] = self._tensors.read(self._constants[name], name)
        return cast(Array, self._constants[name])

    # -- what handlers answer ------------------------------------------------------------------------------

    def add(self, op: Op, layer: Layer, inputs: tuple[str, ...], weights: Mapping[str, str] | None = None) -> None:
        """A layer that makes the node's output."""
        name, count = op.name, 0
        while not name or name in self.types or (count and name in self._op_names):
            count += 1
            name = f"{op.kind.lower()}{count}"
        node = Node(name, layer, inputs, weights or {})
        arrays = {role: self.weights[weight] for role, weight in node.weights.items()}
        roles = {role: TensorType(array.shape, array.dtype.name) for role, array in arrays.items()}
        try:
            self.types[name] = layer.infer(tuple(self.types[value] for value in inputs), roles)
        except ShapeError as error:
            raise FormatError(f"{op}: {error.what}", got=error.got, expected=error.expected, hint=error.hint) from None
        self.nodes[name] = node
        self._make(op, op.outputs[0], self.values, name)

    def pass_on(self, op: Op, index: int = 0) -> None:
        """The node's output is its input, value or constant."""
        source, made = op.inputs[index] if self.has(op, index) else "", op.outputs[0]
        if source in self._constants:
            self._make(op, made, self._constants, self._constants[source])
        else:
            self._make(op, made, self.values, self.value(op, index))
            self.readers[made] += self.readers[source] - 1

    def add_constant(self, op: Op, tensor: Any) -> None:
        """The node's output is this array or TensorProto."""
        self._make(op, op.outputs[0], self._constants, tensor)

    def add_weights(self, node: str, weights: Mapping[str, str]) -> None:
        """Give more weights to a layer that is already there."""
        self.nodes[node] = dataclasses.replace(self.nodes[node], weights={**self.nodes[node].weights, **weights})

    def weight(self, name: str, array: Array) -> str:
        """Keep `array` as a weight called `name`, or 'name_2' ... if that one holds other numbers."""
        array, kept, count = np.ascontiguousarray(array), name, 1
        while kept in self.weights and not _same_bits(self.weights[kept], array):
            count += 1
            kept = f"{name}_{count}"
        self.weights.setdefault(kept, array)
        return kept

    def _make(self, op: Op, made: str, table: dict[str, Any], content: Any) -> None:
        if not made or made in self.values or made in self._constants:
            raise FormatError(f"{op}: its output has no name of its own", got=show(made), expected="a new name")
        table[made] = content


def _same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


class GraphWriter:
    """An ONNX graph in the making. Names are kept where ONNX, which has one space for them, lets them be."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._taken: set[str] = set()
        self._arrays: dict[str, Array] = {}
        self._filed: dict[tuple[str, str, bool], str] = {}  # (weight, dtype, transposed) -> initializer
        self.values = {name: self.fresh(name) for name in net.inputs}
        used = {weight for node in net.nodes for weight in node.weights.values()}
        self._weight_names = {name: self.fresh(name) for name in net.weights if name in used}
        self.values |= {node.name: self.fresh(node.name) for node in net.nodes}

    def fresh(self, wanted: str) -> str:
        """`wanted`, or 'wanted_2', 'wanted_3' ... if that is taken."""
        wanted = wanted or "value"
        name, count = wanted, 1
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name

    def value(self, node: Node, index: int = 0) -> str:
        """ONNX's name for the value that a node reads."""
        return self.values[node.inputs[index]]

    def weight(self, node: Node, role: str, transposed: bool = False) -> str:
        """ONNX's name for a node's weight, in the dtype of what the node reads: ONNX mixes none."""
        name, dtype = node.weights[role], self.net.input_types(node)[0].dtype
        key = (name, dtype, transposed)
        if key not in self._filed:
            array = materialise(name, self.net.weights, self._arrays)
            if not np.can_cast(array.dtype, numpy_dtype(dtype)):
                raise InputError(
                    f"layer '{node.name}': ONNX needs weights and values of one dtype",
                    got=f"{array.dtype.name} {role}, {dtype} values",
                    hint="convert the weights, or save as .safetensors",
                )  # fmt: skip
            array = array.astype(numpy_dtype(dtype), copy=False)
            is_first = all(filed[0] != name for filed in self._filed)
            self._filed[key] = self._weight_names[name] if is_first else self.fresh(name)
            self.initializers.append(make_tensor(self._filed[key], array.T if transposed else array))
        return self._filed[key]

    def constant(self, name: str, array: Array) -> str:
        """A constant that is no weight of the network, under a name like `name`."""
        name = self.fresh(name)
        self.initializers.append(make_tensor(name, array))
        return name

    def emit(self, op_type: str, node: Node, inputs: list[str], **attributes: Any) -> None:
        """The ONNX node that makes the layer's output."""
        self.emit_part(op_type, node.name, inputs, self.values[node.name], **attributes)

    def emit_part(self, op_type: str, name: str, inputs: list[str], output: str, **attributes: Any) -> None:
        import onnx

        self.nodes.append(onnx.helper.make_node(op_type, inputs, [output], name, **attributes))
