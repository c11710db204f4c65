"""The state of lowering a run of layers to operations on images: which value lies where, and what is known before.

The files of the operations have a function for every kind of layer; each gets the one Lowering of its run.
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
from onchip.kernels.cpu.conv.values import Rim, Sizes, Store, UnsupportedError, View
from onchip.kernels.cpu.microkernels.tile import padded
from onchip.kernels.pointwise import CPU_ACTIVATIONS
from onchip.network.graph import Network, Node
from onchip.network.layers import (
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

TAP_CHANNELS = 64  # with as many channels a tap is a product worth its own call; with fewer, a whole window is one
DOT_OUTPUTS = min(4, 2 * LANES // 5)  # so few outputs would leave most lanes of a vector empty


class Way(enum.Enum):
    """How a convolution is done."""

    TAPS = "taps"  # tap by tap
    WINDOWS = "windows"  # a window at a time, over an input with a rim of zeros
    DOT = "dot"  # the same, with the terms of a sum in the lanes
    DEPTHWISE = "depthwise"  # every channel by itself
    GROUPS = "groups"  # a group of channels after the other


@dataclass(eq=False)
class Value:
    view: View
    maker: int | None  # the operation that an activation behind it may join
    flat: bool = False  # seen as a row of C * H * W numbers


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
        outside = dict.fromkeys(v for node in nodes for v in node.inputs if v not in self.by_name)
        if len(outside) != 1:
            raise UnsupportedError(f"reads {len(outside)} values")
        self.source = next(iter(outside))
        self.operations: list[Operation] = []
        self.layers: list[str] = []  # of operations: phases of a transposed convolution with what follows are one
        self.stores: list[Store] = []
        self.values: dict[str, Value] = {}
        self.layer = ""  # that is being lowered
        self.paired: dict[tuple[View, int, int, int], Store] = {}  # what was made ready for products in pairs
        self.phases = {
            value: (node, i)
            for node in nodes
            if isinstance(node.layer, Interleave)
            for i, value in enumerate(node.inputs)
        }
        self.concats = self._find_concats()
        self.homes: dict[str, str] = {}  # of values that lie in another's memory, once asked for
        self.rims = self._find_rims()
        convolutions = [node for node in nodes if isinstance(node.layer, Convolution)]
        self.in_vectors = {self.home(node.inputs[0]) for node in convolutions if self.way(node) == Way.DOT}

    # -- what is known before -------------------------------------------------------------------------------

    def readers(self, value: str) -> list[Node]:
        return self.read_by.get(value, [])

    def joins(self, node: Node) -> bool:
        """An activation that is done where what it reads lies: nobody else sees that memory."""
        value = node.inputs[0]
        while value != self.source and len(self.readers(value)) == 1:
            before = self.by_name[value]
            if not isinstance(before.layer, Reshape | Permute | Slice):  # those only say how the same numbers are seen
                return isinstance(node.layer, (*CPU_ACTIVATIONS, PReLU))
            value = before.inputs[0]
        return False

    def home(self, value: str) -> str:
        """The value in whose memory another one lies."""
        passed = []
        while value in self.by_name and value not in self.homes:
            node = self.by_name[value]
            before = self.by_name.get(node.inputs[0])
            seen = isinstance(node.layer, Permute) and before is not None and isinstance(before.layer, Embedding)
            if not (seen or isinstance(node.layer, Reshape) or self.joins(node)):
                break
            passed.append(value)
            value = node.inputs[0]
        found = self.homes.get(value) or (self.phases[value][0].name if value in self.phases else value)
        self.homes |= dict.fromkeys(passed, found)
        return found

    def writers(self, name: str) -> list[Node]:
        """The nodes that write a value: its own, or the phases of an Interleave."""
        node = self.by_name.get(name)
        if node is None:
            return []
        if not isinstance(node.layer, Interleave):
            return [node]
        return [self.by_name[value] for value in node.inputs if value != self.source]

    def way(self, node: Node) -> Way:
        """How a convolution is done."""
        N, C, *kernel = self.net.weights[node.weights["weight"]].shape
        groups = node.layer.attributes()["groups"]
        if groups > 1:
            return Way.DEPTHWISE if C == 1 and groups == N else Way.GROUPS
        _, _, dilation = geometry(node.layer)
        made_by = self.by_name.get(self.home(node.inputs[0]))
        in_vectors = made_by is None or not isinstance(made_by.layer, Linear | Embedding | Slice)
        if in_vectors and N <= DOT_OUTPUTS and C >= LANES and set(dilation) == {1}:
            return Way.DOT
        one_by_one = math.prod(kernel) == 1
        return Way.TAPS if C >= TAP_CHANNELS or one_by_one or dilation[-1] > 1 else Way.WINDOWS

    def side(self, node: Node) -> int:
        """How many neighbouring outputs of a convolution by windows a vector holds.

        Together they read (side - 1) SX pixels more than one of them, and multiply what it does not see by zero; so
        they are worth it where windows overlap.
        """
        if not isinstance(node.layer, Convolution) or self.way(node) != Way.WINDOWS or node.name in self.phases:
            return 1
        N, _, WO = image_sizes(self.net.types[node.name].row_shape)
        KW, SX = self.net.weights[node.weights["weight"]].shape[-1], geometry(node.layer)[0][-1]
        side = 1
        while KW > SX and 2 * side * N <= LANES and 2 * side <= WO:
            side *= 2
        return side

    def _find_rims(self) -> dict[str, Rim]:
        """The rims that convolutions want around what they read. A Linear writes without a gap: no rim there."""
        rims: dict[str, Rim] = {}
        for node in self.nodes:
            if isinstance(node.layer, Convolution) and self.way(node) in (Way.WINDOWS, Way.DOT):
                home = self.home(node.inputs[0])
                if not (home in self.by_name and isinstance(self.by_name[home].layer, Linear)):
                    rims[home] = _around(rims.get(home, (0, 0, 0, 0)), pads_of(node))
        return rims

    def _find_concats(self) -> dict[str, tuple[Node, int]]:
        """Of values that a Concat of channels alone reads, once: it, and where among its channels they lie."""
        found: dict[str, tuple[Node, int]] = {}
        for node in self.nodes:
            if not isinstance(node.layer, Concat) or not is_of_channels(self.net, node):
                continue
            channel = 0
            for value in node.inputs:
                if len(self.readers(value)) == 1 == node.inputs.count(value):
                    found[value] = node, channel
                channel += self.net.types[value].row_shape[0]
        return found

    # -- values ---------------------------------------------------------------------------------------------

    def new(self, name: str, sizes: Sizes, exact: bool) -> View:
        """Memory for a node's value: its own, or its place in an Interleave or, where nothing is written behind its
        channels, in a Concat."""
        if name in self.phases:
            weave, i = self.phases[name]
            assert isinstance(weave.layer, Interleave)
            if weave.name not in self.values:
                whole = image_sizes(self.net.types[weave.name].row_shape)
                self.values[weave.name] = Value(self.own(weave.name, whole), None)
            phase, stride = weave.layer.phases()[i], weave.layer.stride
            start = (0, phase[0]) if len(phase) == 1 else (phase[0], phase[1])
            step = (1, stride[0]) if len(stride) == 1 else (stride[0], stride[1])
            return View(self.values[weave.name].view.store, sizes, start, step)
        if exact and name in self.concats:
            concat, channel = self.concats[name]
            return View(self.whole(concat).store, sizes, channel=channel)
        return self.own(name, sizes, exact)

    def whole(self, concat: Node) -> View:
        """Memory for what a Concat of channels gives."""
        if concat.name not in self.values:
            sizes = image_sizes(self.net.types[concat.name].row_shape)
            self.values[concat.name] = Value(self.own(concat.name, sizes, exact=True), None)
        return self.values[concat.name].view

    def own(self, name: str, sizes: Sizes, exact: bool = False) -> View:
        """Memory of its own. exact: whoever writes it writes C numbers a pixel, not whole vectors."""
        writers = self.writers(name)
        exact = exact or (bool(writers) and all(self.is_dot(node) for node in writers))
        pixel = sizes[0] if exact and name not in self.in_vectors else padded(sizes[0])
        if len(writers) == 1 and self.side(writers[0]) > 1:
            pixel = LANES // self.side(writers[0])
        store = Store(*sizes, pixel, self.rims.get(name, (0, 0, 0, 0)))
        self.stores.append(store)
        return View(store, sizes)

    def is_dot(self, node: Node) -> bool:
        return isinstance(node.layer, Convolution) and self.way(node) == Way.DOT

    def emit(self, op: Operation) -> int:
        """The number of the operation."""
        self.operations.append(op)
        self.layers.append(self.layer)
        return len(self.operations) - 1

    def read(self, name: str) -> Value:
        if name == self.source and name not in self.values:
            given = self.net.types[name]
            if given.dtype != "float32":
                raise UnsupportedError(f"computes on float32, got {given}")
            view = self.own(name, image_sizes(given.row_shape), exact=True)
            self.emit(Load(y=view))
            self.values[name] = Value(view, None)
        return self.values[name]

    def image(self, name: str) -> View:
        value = self.read(name)
        if value.flat and value.view.sizes[1:] != (1, 1):
            raise UnsupportedError("a flattened image is read by something else than Linear")
        return value.view

    def make(self, node: Node, kind: type[Activated], **fields: Any) -> None:
        """The operation that makes a node's value."""
        y = self.new(node.name, image_sizes(self.net.types[node.name].row_shape), kind.exact)
        self.values[node.name] = Value(y, self.emit(kind(y=y, **fields)))

    def join(self, maker: int | None, activation: Elementwise) -> bool:
        """Whether an activation joined the operation."""
        op = None if maker is None else self.operations[maker]
        if maker is None or not isinstance(op, Activated) or op.activation is not None:
            return False
        self.operations[maker] = dataclasses.replace(op, activation=activation)
        return True


def is_of_channels(net: Network, concat: Node) -> bool:
    return int(concat.layer.attributes()["axis"]) % len(net.types[concat.name].shape) == 1


def pads_of(node: Node) -> Rim:
    _, pads, _ = geometry(node.layer)
    return (pads[0], pads[1], pads[2], pads[3]) if len(pads) == 4 else (0, pads[0], 0, pads[1])


def _around(a: Rim, b: Rim) -> Rim:
    return (max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3]))


def window_of(node: Node, kernel: tuple[int, ...]) -> Window:
    """Of a convolution or a pool with this kernel, of one axis or two."""
    stride, pads, dilation = geometry(node.layer)
    if len(kernel) == 1:
        kernel, stride, pads, dilation = (1, *kernel), (1, *stride), (0, pads[0]), (1, *dilation)
    return Window(*kernel, *stride, *dilation, *pads[:2])
