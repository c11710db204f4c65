"""The state of lowering a subgraph to operations on images: the buffer of each value, and facts known in advance.

The operations' files have one function per kind of layer; each receives the subgraph's Lowering.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.conv.operation import Activated, Operation, Window
from onchip.kernels.cpu.conv.operations.load import Load
from onchip.kernels.cpu.conv.values import Border, Sizes, Store, UnsupportedError, View
from onchip.kernels.cpu.microkernels.tile import padded
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Activation,
    Concat,
    Convolution,
    Elementwise,
    Embedding,
    Interleave,
    Linear,
    Permute,
    PReLU,
    Reshape,
    Slice,
)
from onchip.network.layers.conv import geometry

TAP_CHANNELS = 64  # from here on, one gemm per tap pays off; with fewer channels, K runs over the window
DOT_OUTPUTS = min(4, 2 * LANES // 5)  # with at most this many outputs, vectors of outputs would be mostly empty


class Algo(enum.Enum):
    """How a convolution is computed."""

    TAPS = "taps"  # one gemm per tap
    WINDOWS = "windows"  # implicit GEMM: K runs over the window of an input with a zero border
    DOT = "dot"  # the same, with lanes over K
    DEPTHWISE = "depthwise"  # each channel separately
    GROUPS = "groups"  # one group of channels after the other


@dataclass(eq=False)
class Value:
    view: View
    producer: int | None  # the operation that a following activation may fuse into
    flat: bool = False  # viewed as a row of C * H * W elements


def image_sizes(row_shape: tuple[int, ...]) -> Sizes:
    """C, H, W of a row (C,), (C, L) or (C, H, W)."""
    if not 1 <= len(row_shape) <= 3 or 0 in row_shape:
        raise UnsupportedError(f"rows of shape {row_shape}")
    C, *rest = row_shape
    return (C, *((1, 1) if not rest else (1, rest[0]) if len(rest) == 1 else (rest[0], rest[1])))


class Lowering:
    def __init__(self, net: Network, nodes: Sequence[Node]) -> None:
        self.net, self.nodes = net, nodes
        self.by_name = {node.name: node for node in nodes}
        self.read_by: dict[str, list[Node]] = {}
        for node in nodes:
            for value in dict.fromkeys(node.inputs):
                self.read_by.setdefault(value, []).append(node)
        external = dict.fromkeys(v for node in nodes for v in node.inputs if v not in self.by_name)
        if len(external) != 1:
            raise UnsupportedError(f"reads {len(external)} values, expected one")
        self.source = next(iter(external))
        self.operations: list[Operation] = []
        self.layers: list[str] = []  # of each operation; phases of a transposed convolution share one
        self.stores: list[Store] = []
        self.values: dict[str, Value] = {}
        self.layer = ""  # the one being lowered
        self.winograd_inputs: dict[tuple[View, int, int, int], Store] = {}  # transformed inputs, shared by phases
        self.phases = {
            value: (node, i)
            for node in nodes
            if isinstance(node.layer, Interleave)
            for i, value in enumerate(node.inputs)
        }
        self.concats = self._find_concats()
        self.buffers: dict[str, str] = {}  # memo of buffer_of for values in another's buffer
        self.borders = self._find_borders()
        convolutions = [node for node in nodes if isinstance(node.layer, Convolution)]
        self.dot_inputs = {self.buffer_of(node.inputs[0]) for node in convolutions if self.algo(node) == Algo.DOT}

    # -- known in advance -----------------------------------------------------------------------------------

    def readers(self, value: str) -> list[Node]:
        return self.read_by.get(value, [])

    def is_in_place(self, node: Node) -> bool:
        """Whether an activation runs in place: nothing else reads its input's buffer."""
        value = node.inputs[0]
        while value != self.source and len(self.readers(value)) == 1:
            producer = self.by_name[value]
            if not isinstance(producer.layer, Reshape | Permute | Slice):  # those are views
                return isinstance(node.layer, Activation | PReLU)
            value = producer.inputs[0]
        return False

    def buffer_of(self, value: str) -> str:
        """The value whose buffer this one uses."""
        passed = []
        while value in self.by_name and value not in self.buffers:
            node = self.by_name[value]
            producer = self.by_name.get(node.inputs[0])
            is_embedded = (
                isinstance(node.layer, Permute) and producer is not None and isinstance(producer.layer, Embedding)
            )
            if not (is_embedded or isinstance(node.layer, Reshape) or self.is_in_place(node)):
                break
            passed.append(value)
            value = node.inputs[0]
        found = self.buffers.get(value) or (self.phases[value][0].name if value in self.phases else value)
        self.buffers |= dict.fromkeys(passed, found)
        return found

    def writers(self, name: str) -> list[Node]:
        """The nodes that write a value: its node, or the phases of an Interleave."""
        node = self.by_name.get(name)
        if node is None:
            return []
        if not isinstance(node.layer, Interleave):
            return [node]
        return [self.by_name[value] for value in node.inputs if value != self.source]

    def algo(self, node: Node) -> Algo:
        """The algorithm for a convolution."""
        N, C, *kernel = self.net.weights[node.weights["weight"]].shape
        groups = node.layer.attributes()["groups"]
        if groups > 1:
            return Algo.DEPTHWISE if C == 1 and groups == N else Algo.GROUPS
        _, _, dilation = geometry(node.layer)
        producer = self.by_name.get(self.buffer_of(node.inputs[0]))
        is_padded = producer is None or not isinstance(producer.layer, Linear | Embedding | Slice)
        if is_padded and N <= DOT_OUTPUTS and C >= LANES and set(dilation) == {1}:
            return Algo.DOT
        one_by_one = math.prod(kernel) == 1
        return Algo.TAPS if C >= TAP_CHANNELS or one_by_one or dilation[-1] > 1 else Algo.WINDOWS

    def side(self, node: Node) -> int:
        """How many adjacent outputs of a convolution with Algo.WINDOWS share a vector.

        Together they read (side - 1) * SX more pixels than one output, and each multiplies pixels outside its window by
        zero: this pays off where windows overlap.
        """
        if not isinstance(node.layer, Convolution) or self.algo(node) != Algo.WINDOWS or node.name in self.phases:
            return 1
        N, _, WO = image_sizes(self.net.types[node.name].row_shape)
        KW, SX = self.net.weights[node.weights["weight"]].shape[-1], geometry(node.layer)[0][-1]
        side = 1
        while KW > SX and 2 * side * N <= LANES and 2 * side <= WO:
            side *= 2
        return side

    def _find_borders(self) -> dict[str, Border]:
        """Zero borders that convolutions need around their inputs; a Linear writes contiguously, without a border."""
        borders: dict[str, Border] = {}
        for node in self.nodes:
            if isinstance(node.layer, Convolution) and self.algo(node) in (Algo.WINDOWS, Algo.DOT):
                buffer = self.buffer_of(node.inputs[0])
                if not (buffer in self.by_name and isinstance(self.by_name[buffer].layer, Linear)):
                    borders[buffer] = _larger_border(borders.get(buffer, (0, 0, 0, 0)), pads_of(node))
        return borders

    def _find_concats(self) -> dict[str, tuple[Node, int]]:
        """Per value that only one input of a channel Concat reads: that Concat and the value's first channel in it."""
        found: dict[str, tuple[Node, int]] = {}
        for node in self.nodes:
            if not isinstance(node.layer, Concat) or not is_channel_concat(self.net, node):
                continue
            channel = 0
            for value in node.inputs:
                if len(self.readers(value)) == 1 == node.inputs.count(value):
                    found[value] = node, channel
                channel += self.net.types[value].row_shape[0]
        return found

    # -- values ---------------------------------------------------------------------------------------------

    def output_view(self, name: str, sizes: Sizes, exact: bool) -> View:
        """Where a node writes its output: a new buffer; or a view of the output of an Interleave, or of a Concat if it
        writes exactly C elements per pixel."""
        if name in self.phases:
            interleave, i = self.phases[name]
            assert isinstance(interleave.layer, Interleave)
            if interleave.name not in self.values:
                whole_sizes = image_sizes(self.net.types[interleave.name].row_shape)
                self.values[interleave.name] = Value(self.allocate(interleave.name, whole_sizes), None)
            phase, stride = interleave.layer.phases()[i], interleave.layer.stride
            start = (0, phase[0]) if len(phase) == 1 else (phase[0], phase[1])
            step = (1, stride[0]) if len(stride) == 1 else (stride[0], stride[1])
            return View(self.values[interleave.name].view.store, sizes, start, step)
        if exact and name in self.concats:
            concat, channel = self.concats[name]
            return View(self.concat_view(concat).store, sizes, channel=channel)
        return self.allocate(name, sizes, exact)

    def concat_view(self, concat: Node) -> View:
        """The output of a Concat of channels."""
        if concat.name not in self.values:
            sizes = image_sizes(self.net.types[concat.name].row_shape)
            self.values[concat.name] = Value(self.allocate(concat.name, sizes, exact=True), None)
        return self.values[concat.name].view

    def allocate(self, name: str, sizes: Sizes, exact: bool = False) -> View:
        """A new buffer. exact: its writers write C elements per pixel, not whole vectors."""
        writers = self.writers(name)
        exact = exact or (bool(writers) and all(self.is_dot(node) for node in writers))
        pixel = sizes[0] if exact and name not in self.dot_inputs else padded(sizes[0])
        if len(writers) == 1 and self.side(writers[0]) > 1:
            pixel = LANES // self.side(writers[0])
        store = Store(*sizes, pixel, self.borders.get(name, (0, 0, 0, 0)))
        self.stores.append(store)
        return View(store, sizes)

    def is_dot(self, node: Node) -> bool:
        return isinstance(node.layer, Convolution) and self.algo(node) == Algo.DOT

    def emit(self, op: Operation) -> int:
        """Append an operation; returns its index."""
        self.operations.append(op)
        self.layers.append(self.layer)
        return len(self.operations) - 1

    def read(self, name: str) -> Value:
        if name == self.source and name not in self.values:
            x_type = self.net.types[name]
            if x_type.dtype != "float32":
                raise UnsupportedError(f"computes on float32, got {x_type}")
            view = self.allocate(name, image_sizes(x_type.row_shape), exact=True)
            self.emit(Load(y=view))
            self.values[name] = Value(view, None)
        return self.values[name]

    def image(self, name: str) -> View:
        value = self.read(name)
        if value.flat and value.view.sizes[1:] != (1, 1):
            raise UnsupportedError("a flattened image can only be read by Linear")
        return value.view

    def make(self, node: Node, kind: type[Activated], **fields: Any) -> None:
        """Emit the operation that computes a node's output."""
        y = self.output_view(node.name, image_sizes(self.net.types[node.name].row_shape), kind.exact)
        self.values[node.name] = Value(y, self.emit(kind(y=y, **fields)))

    def fuse(self, producer: int | None, activation: Elementwise) -> bool:
        """Fuse an activation into the operation that computes its input; False where that is not possible."""
        op = None if producer is None else self.operations[producer]
        if producer is None or not isinstance(op, Activated) or op.activation is not None:
            return False
        self.operations[producer] = dataclasses.replace(op, activation=activation)
        return True


def is_channel_concat(net: Network, concat: Node) -> bool:
    return int(concat.layer.attributes()["axis"]) % len(net.types[concat.name].shape) == 1


def pads_of(node: Node) -> Border:
    _, pads, _ = geometry(node.layer)
    return (pads[0], pads[1], pads[2], pads[3]) if len(pads) == 4 else (0, pads[0], 0, pads[1])


def _larger_border(a: Border, b: Border) -> Border:
    return (max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3]))


def window_of(node: Node, kernel: tuple[int, ...]) -> Window:
    """The Window of a 1-D or 2-D convolution or pool."""
    stride, pads, dilation = geometry(node.layer)
    if len(kernel) == 1:
        kernel, stride, pads, dilation = (1, *kernel), (1, *stride), (0, pads[0]), (1, *dilation)
    return Window(*kernel, *stride, *dilation, *pads[:2])
