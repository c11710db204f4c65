"""GraphReader: the network to which readers add their layers."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.op import Op
from onchip.formats.onnx.tensors import TEXT, TensorReader
from onchip.network.graph import Node
from onchip.network.layers import Layer, Permute, Reshape
from onchip.network.reading import MAX_RANK, show
from onchip.network.recipe import Array
from onchip.network.types import BATCH, Dim, TensorType

MAX_ROW = 1 << 28  # elements per row of any value: a few bytes of a file can request too many
MAX_APART = 6  # groups of axes that a Permute moves separately
MAX_FOLDED = 1 << 24  # elements computed by operators on constants: a few nodes can double one repeatedly


@dataclass(frozen=True)
class Unfinished:
    """A node's result that becomes a layer only together with later nodes."""

    x: str  # our name of the underlying value
    expected: ClassVar[str]  # the nodes that must follow
    hint: ClassVar[str] = "end the network after a complete layer, the batch first"  # if none do

    def finish(self, graph: GraphReader, op: Op | None) -> str | None:
        """The name of its value, if it is one by itself; may add layers for `op`, or for the network."""
        return None


class GraphReader:
    """A network under construction. Handlers query it for values and constants and add their layers.

    The first axis of the file's values is the batch. With `one_row` all values of the file form one row: their axes
    follow a batch axis that the file does not have.
    """

    def __init__(
        self,
        opset: int,
        batch: int | None,
        one_row: bool,
        inputs: Mapping[str, TensorType],
        constants: Mapping[str, Any],
        ops: Sequence[Op],
        outputs: Sequence[str],
        tensors: TensorReader,
    ) -> None:
        self.opset = opset
        self.batch = batch  # batch size fixed by the file, or None
        self.one_row = one_row
        self.values = {name: name for name in inputs}  # ONNX name of a value -> ours
        self.types = dict(inputs)  # by our names, like all below
        self.nodes: dict[str, Node] = {}
        self.weights: dict[str, Array] = {}
        self.readers = Counter(name for op in ops for name in op.inputs) + Counter(outputs)
        self.unfinished: dict[str, Unfinished] = {}  # by ONNX name
        # ONNX name -> TensorProto, or the array once read. A shape is an object array of sizes and BATCH.
        self._constants = dict(constants)
        self._origins: dict[str, str] = {}  # folded constant -> the initializer it is a view of
        self._op_names = {op.name for op in ops}
        self._named: Counter[str] = Counter()  # number of names tried per kind
        self._stored: dict[tuple[str, str], str] = {}  # (weight name, digest) -> stored name
        self._tensors = tensors
        self._folded = 0

    # -- queries -------------------------------------------------------------------------------------------

    def has(self, op: Op, index: int) -> bool:
        return index < len(op.inputs) and op.inputs[index] != ""

    def is_constant(self, op: Op, index: int) -> bool:
        return self.has(op, index) and op.inputs[index] in self._constants

    def value(self, op: Op, index: int = 0) -> str:
        """Our name of the node's input value, which depends on the network's input."""
        if not self.has(op, index):
            raise FormatError(f"{op} has too few inputs", got=str(len(op.inputs)), expected=f"at least {index + 1}")
        name = op.inputs[index]
        if name in self._constants:
            raise FormatError(f"{op}: input {index} is a constant", got=show(name), expected="a value of the network")
        if name in self.unfinished and not self.finish(name, op):
            raise FormatError(f"{op} cannot use this value", got=show(name), expected=self.unfinished[name].expected)
        if name not in self.values:
            raise FormatError(f"{op} reads {show(name)}, which no earlier node computes", expected="nodes in order")
        return self.values[name]

    def constant(self, op: Op, index: int) -> Array:
        """The array of an initializer or Constant that the node reads."""
        array = self.constant_or_shape(op, index)
        if array.dtype == object:
            if BATCH in array.ravel().tolist():
                got = f"input {index}: {show(array.tolist())}"
                raise FormatError(f"{op} would depend on the batch", got=got, expected="row sizes")
            array = array.astype(np.int64)
        return array

    def constant_or_shape(self, op: Op, index: int) -> Array:
        """The same, but sizes from a Shape may include BATCH."""
        if not self.is_constant(op, index):
            got = show(op.inputs[index]) if self.has(op, index) else "nothing"
            raise FormatError(f"{op}: input {index} must be a constant", got=got, expected="initializer or Constant")
        name = op.inputs[index]
        if not isinstance(self._constants[name], np.ndarray):
            self._constants[name] = self._tensors.read(self._constants[name], name)
        return cast(Array, self._constants[name])

    def text_count(self, op: Op, index: int) -> int:
        """The number of strings in the node's constant input; 0 if it is something else."""
        tensor = self._constants.get(op.inputs[index]) if self.has(op, index) else None
        is_text = getattr(tensor, "data_type", 0) == TEXT
        return len(tensor.string_data) if tensor is not None and is_text else 0

    def is_number(self, op: Op, index: int, number: float) -> bool:
        """Whether the node's input is this scalar constant."""
        array = self.constant(op, index) if self.is_constant(op, index) else None
        return array is not None and array.size == 1 and float(array.reshape(())) == number

    def tensor(self, op: Op, name: str) -> Array:
        """A tensor attribute."""
        proto = op.attributes.get(name)
        if not hasattr(proto, "dims"):
            raise FormatError(f"{op}: bad attribute '{name}'", got=show(proto), expected="a tensor")
        return self._tensors.read(proto, name)

    def weight_constant(self, op: Op, index: int, x: str) -> Array:
        """A constant used in arithmetic with x, which must have the same dtype."""
        array = self.constant(op, index)
        if array.dtype.name != self.types[x].dtype:
            raise FormatError(f"{op} mixes dtypes", got=array.dtype.name, expected=self.types[x].dtype)
        return array

    def once(self, array: Array, axis: int = 0) -> Array:
        """Deduplicate a constant that a file with a fixed batch repeats per row: size 1 along that axis."""
        if self.batch is None or array.shape[axis : axis + 1] != (self.batch,):
            return array
        first = array.take([0], axis)
        return first if np.array_equal(array, np.broadcast_to(first, array.shape)) else array

    def ints(self, op: Op, index: int, most: int = MAX_RANK) -> list[int]:
        """A constant list of axes, sizes or indices."""
        array = self.constant(op, index)
        if array.ndim > 1 or array.dtype not in (np.int64, np.int32) or array.size > most:
            got, expected = f"{array.dtype.name} {array.shape}", f"up to {most} ints"
            raise FormatError(f"{op}: bad input {index}", got=got, expected=expected)
        return [int(n) for n in array.ravel()]

    def axes(self, op: Op, since: int) -> list[int] | None:
        """The node's axes, an attribute before opset `since` and input 1 from then on; None if absent."""
        if self.opset < since:
            return op.sizes("axes", []) if "axes" in op.attributes else None
        return self.ints(op, 1) if self.has(op, 1) else None

    def new_axes(self, op: Op) -> list[int]:
        """The axes that an Unsqueeze adds, which are required."""
        axes = self.axes(op, since=13)
        if axes is None:
            raise FormatError(f"{op} has no axes", got=f"{len(op.inputs)} inputs", expected="axes")
        return axes

    def shape(self, x: str) -> tuple[Dim, ...]:
        """The value's shape in the file."""
        return self.types[x].shape[1:] if self.one_row else self.types[x].shape

    def axis(self, op: Op, x: str, axis: int) -> int:
        """The file's axis, normalised to the network's numbering: the batch is 0."""
        rank = len(self.shape(x))
        if not -rank <= axis < rank:
            raise FormatError(f"{op}: axis out of range", got=f"axis {axis}", expected=f"{-rank} to {rank - 1}")
        return axis % rank + self.one_row

    def need_channels(self, op: Op, x: str, least: int) -> None:
        """Raise FormatError unless the value is [B, C, ...] with at least that many axes."""
        if self.one_row or len(self.types[x].shape) < least:
            raise FormatError(f"{op} needs batch and channels first", got=str(self.types[x]), expected="[B, C, ...]")

    # -- results -------------------------------------------------------------------------------------------

    def add(
        self, op: Op, layer: Layer, inputs: tuple[str, ...], weights: Mapping[str, str] | None = None, output: int = 0
    ) -> None:
        """Add a layer that computes the node's output, or one of several."""
        self._bind(op, op.outputs[output], self.values, self._add(op, op.name, layer, inputs, weights or {}))

    def add_step(
        self, op: Op | None, layer: Layer, inputs: tuple[str, ...], weights: Mapping[str, str] | None = None
    ) -> str:
        """Add an intermediate layer of the node, or of the network; returns its name."""
        return self._add(op, "", layer, inputs, weights or {})

    def add_named(self, op: Op, layer: Layer, inputs: tuple[str, ...], weights: Mapping[str, str]) -> str:
        """The same, under the node's name: for the main layer of an output that is viewed differently."""
        return self._add(op, op.name, layer, inputs, weights)

    def _add(self, op: Op | None, name: str, layer: Layer, inputs: tuple[str, ...], weights: Mapping[str, str]) -> str:
        kind, own_name = (op.kind, op.name) if op else (layer.kind, "")
        while not name or name in self.types or (name != own_name and name in self._op_names):
            self._named[kind] += 1
            name = f"{kind.lower()}{self._named[kind]}"
        if isinstance(layer, Permute) and len(set(layer.axes)) == len(layer.axes):
            *first, last = _moves(layer.axes)
            for axes in first:
                inputs = (self._add(op, "", Permute(axes), inputs, {}),)
            layer = Permute(last)
        node = Node(name, layer, inputs, weights)
        arrays = {role: self.weights[weight] for role, weight in node.weights.items()}
        roles = {role: TensorType(array.shape, array.dtype.name) for role, array in arrays.items()}
        output = layer.infer(tuple(self.types[value] for value in inputs), roles)
        if output.row_size > MAX_ROW:
            raise FormatError(
                f"{op or name}: rows are too large", got=str(output), expected=f"at most {MAX_ROW:,} elements per row"
            )
        self.types[name], self.nodes[name] = output, node
        return name

    def reshape(self, op: Op, shape: Sequence[Dim]) -> Reshape:
        """A Reshape to the file's shape: the batch, or -1 for it, stays first."""
        if not self.one_row:
            first, *shape = shape or [0]
            if first not in (BATCH, -1, self.batch):
                raise FormatError(
                    f"{op}: the first size must be the batch", got=show([first, *shape]),
                    expected="0, -1 or the batch size of the graph's input",
                    hint="a reshape that keeps the batch: x.flatten(1) or x.reshape(x.shape[0], ...) in torch",
                )  # fmt: skip
            if first == -1 and -1 in shape:
                raise FormatError(f"{op}: two sizes are -1", got=show([first, *shape]), expected="at most one")
        if BATCH in shape:
            raise FormatError(f"{op} would mix the rows of the batch", got=show(list(shape)), expected="the batch once")
        return Reshape(tuple(int(d) for d in shape))

    def begin(self, op: Op, part: Unfinished, index: int = 0) -> None:
        """Mark the node's output as part of a layer that later nodes complete."""
        self._bind(op, op.outputs[index], self.unfinished, part)

    def finish(self, name: str, op: Op | None = None) -> bool:
        """Convert the unfinished result under this ONNX name to a value, if possible; return whether it was."""
        if (value := self.unfinished[name].finish(self, op)) is None:
            return False
        del self.unfinished[name]
        self.values[name] = value
        return True

    def part(self, op: Op, kind: str, inputs: Sequence[str], **attributes: object) -> str:
        """Read another operator as an intermediate step of the node; names are ONNX's."""
        if kind not in READERS:
            raise FormatError(f"{op} needs an unsupported operator", got=kind, expected="another layer")
        READERS[kind](self, Op(kind, "", tuple(inputs), (name := self._fresh(op, kind),), attributes))
        return name

    def part_constant(self, op: Op, array: Array) -> str:
        """The ONNX name of a constant for an intermediate operator."""
        self._bind(op, name := self._fresh(op, "constant"), self._constants, array)
        return name

    def part_value(self, op: Op, value: str) -> str:
        """The same for a value."""
        self._bind(op, name := self._fresh(op, "value"), self.values, value)
        return name

    def _fresh(self, op: Op, kind: str) -> str:
        self._named["part"] += 1
        return f"{op.outputs[0]}/{kind}/{self._named['part']}"

    def pass_on(self, op: Op, index: int = 0) -> None:
        """Bind the node's output to its input, value or constant."""
        source, output = op.inputs[index] if self.has(op, index) else "", op.outputs[0]
        if source in self._constants:
            self._bind(op, output, self._constants, self._constants[source])
        else:
            self._bind(op, output, self.values, self.value(op, index))
            self.readers[output] += self.readers[source] - 1

    def add_constant(self, op: Op, tensor: Any, origin: str = "") -> None:
        """Bind the node's output to this array or TensorProto; `origin` is the constant that it only rearranges."""
        self._bind(op, op.outputs[0], self._constants, tensor)
        if origin:
            self._origins[op.outputs[0]] = self._origins.get(origin, origin)

    def bind_output(self, op: Op, index: int, value: str) -> None:
        """Bind the node's output with this index to an existing value."""
        self._bind(op, op.outputs[index], self.values, value)

    def spend(self, op: Op, elements: int) -> None:
        """Account for elements that an operator on constants is about to compute."""
        self._folded += elements
        if self._folded > MAX_FOLDED:
            got, expected = f"{self._folded:,} elements so far", f"at most {MAX_FOLDED:,}"
            raise FormatError(f"{op}: too much arithmetic on constants", got=got, expected=expected)

    def add_weights(self, node: str, weights: Mapping[str, str]) -> None:
        """Add weights to an existing layer."""
        self.nodes[node] = dataclasses.replace(self.nodes[node], weights={**self.nodes[node].weights, **weights})

    def weight(self, name: str, array: Array) -> str:
        """Store `array` as weight `name`, or 'name_2' ... if that holds other values."""
        array, name = np.ascontiguousarray(array).reshape(array.shape), self._origins.get(name, name)
        if name in self.weights:  # rare, so values are compared only then
            self._stored.setdefault((name, _digest(self.weights[name])), name)
            key = (name, _digest(array))
            if key in self._stored:
                return self._stored[key]
            while name in self.weights:
                self._named[key[0]] += 1
                name = f"{key[0]}_{self._named[key[0]] + 1}"
            self._stored[key] = name
        self._tensors.charge(array.nbytes)
        self.weights[name] = array
        return name

    def _bind(self, op: Op, name: str, table: dict[str, Any], content: Any) -> None:
        if not name or name in self.values or name in self._constants or name in self.unfinished:
            raise FormatError(f"{op}: its output name is missing or repeated", got=show(name), expected="a new name")
        table[name] = content

    # -- end -----------------------------------------------------------------------------------------------

    def needed_nodes(self, outputs: Sequence[str]) -> tuple[Node, ...]:
        """The layers that the outputs depend on, in order."""
        needed = set(outputs)
        for name, node in reversed(self.nodes.items()):
            if name in needed:
                needed.update(node.inputs)
        return tuple(node for name, node in self.nodes.items() if name in needed)


def _moves(axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Split a permutation into steps that kernels support: move single axes into position until few groups remain."""
    moves = []
    while 1 + sum(b != a + 1 for a, b in itertools.pairwise(axes)) > MAX_APART:
        position = next(position for position, axis in enumerate(axes) if axis != position)
        rest = [axis for axis in range(position, len(axes)) if axis != axes[position]]
        moves.append((*range(position), axes[position], *rest))
        axes = tuple(moves[-1].index(axis) for axis in axes)
    return [*moves, axes]


def _digest(array: Array) -> str:
    digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


ReadHandler = Callable[[GraphReader, Op], None]
READERS: dict[str, ReadHandler] = {}  # by ONNX operator; filled by `reads` (base.py)
