"""Pattern matching for matmul: batched gemms with the strided views, scales and softmax around them.

A chain of layers, as attention is exported: Slices, Reshapes, Permutes and scales of the operands; a MatMul; a scale,
an added mask, a Softmax and a second MatMul; Permutes and Reshapes of the result. The moves are applied to an empty
NumPy array, and the strides of the resulting view say how the operand is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.chain import is_closed
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Add,
    Div,
    Dropout,
    Gather,
    Identity,
    Layer,
    MatMul,
    Mul,
    Permute,
    Reshape,
    Slice,
    Softmax,
)
from onchip.network.recipe import Array

Scales = tuple[tuple[str, str], ...]  # (weight of one element, "Mul" or "Div")

_SAME = (Identity, Dropout)
_MOVES = (Reshape, Permute, Slice, Gather, *_SAME)
MAX_OPERANDS = 3  # of a chain's gemms: a, b, c


@dataclass(frozen=True)
class View:
    """A value or a weight as a strided view: per-row sizes, element strides, offset."""

    source: str
    is_weight: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    row: int  # elements between batch rows; 0 for a weight

    def batch_strides(self, batch_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Strides along the batch axes of its matrices, for batch axes of this shape; 0 where it broadcasts."""
        missing = len(batch_shape) + 2 - len(self.sizes)
        whole = zip((*(1,) * missing, *self.sizes), (*(0,) * missing, *self.strides), strict=True)
        return tuple(step if size > 1 else 0 for size, step in whole)[: len(batch_shape)]


@dataclass(frozen=True)
class Run:
    """y = softmax(scale a b + mask) c; without c, y = scale a b."""

    a: View
    b: View
    scale: Scales
    mask: View | None
    c: View | None
    y: View  # the result as a view of the last node's output
    nodes: tuple[Node, ...]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """M, K, N of the first gemm; D, the columns of the second, or 0."""
        return self.a.sizes[-2], self.a.sizes[-1], self.b.sizes[-1], self.c.sizes[-1] if self.c else 0

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.y.sizes[:-2]


def find_run(net: Network, start: int) -> Run | None:
    """The longest chain from net.nodes[start] on with no intermediate used outside it."""
    walk = _Walk(net, start)
    matmul = walk.take_matmul()
    if matmul is None:
        return None
    a, b = (walk.operand(matmul, i) for i in range(2))
    scale = sum((walk.scales.get(value, ()) for value in matmul.inputs), ())
    while scaled := walk.scale_of(walk.reader()):
        scale += scaled
        walk.take()
    found = walk.ended(a, b, scale)
    mask = walk.take_mask()
    if not walk.take_softmax():
        return walk.with_moves(found) if mask is None else found
    softmax = walk.last
    matmul = walk.take_matmul()
    if matmul is None or "first" in matmul.weights or matmul.inputs[0] != softmax or softmax in matmul.inputs[1:]:
        return found  # the softmax output is not the left operand
    c = walk.operand(matmul, 1)
    if walk.scales.get(matmul.inputs[-1]):
        return found
    return walk.with_moves(walk.ended(a, b, scale, mask, c)) or found


class _Walk:
    """Walks the graph node by node; tracks the last output and the views of the operands."""

    def __init__(self, net: Network, start: int) -> None:
        self.net, self.at, self.last = net, start, ""
        self.nodes: list[Node] = []
        self.views: dict[str, tuple[str, Array]] = {}  # output of a move: its source and its view of it
        self.scales: dict[str, Scales] = {}
        self.ends: set[str] = set()  # outputs of moves and scales that no other move or scale reads

    def node(self) -> Node | None:
        return self.net.nodes[self.at] if self.at < len(self.net.nodes) else None

    def reader(self) -> Node | None:
        """The next node, if its only input is the last output."""
        node = self.node()
        return node if node is not None and set(node.inputs) == {self.last} else None

    def take(self) -> None:
        node = self.net.nodes[self.at]
        self.nodes.append(node)
        self.last, self.at = node.name, self.at + 1

    def take_matmul(self) -> Node | None:
        """The next MatMul, with the moves and scales of its operands before it."""
        last = self.last
        while (node := self.node()) is not None and self._is_operand(node):
            self.take()
        self.last = last
        if node is None or not isinstance(node.layer, MatMul) or (last and last not in node.inputs):
            return None
        self.take()
        self.ends -= set(node.inputs)
        return node

    def take_mask(self) -> View | None:
        node = self.reader()
        if node is None or not isinstance(node.layer, Add) or self.net.types[node.name] != self.net.types[self.last]:
            return None
        name = node.weights.get("constant")
        if name is None or len(node.inputs) != 1:
            return None
        self.take()
        return self._weight(name)

    def take_softmax(self) -> bool:
        node = self.reader()
        if node is None or not isinstance(node.layer, Softmax):
            return False
        rank = len(self.net.types[node.name].shape)
        if node.layer.axis % rank != rank - 1:
            return False
        self.take()
        while (node := self.reader()) is not None and isinstance(node.layer, _SAME):
            self.take()
        return True

    def ended(self, a: View, b: View, scale: Scales, mask: View | None = None, c: View | None = None) -> Run | None:
        """The chain, if it may end here."""
        if not is_closed(self.net, self.nodes):
            return None
        y = _as_view(_empty(self.net.types[self.last].row_shape), self.last, False)
        return Run(a, b, scale, mask, c, y, tuple(self.nodes))

    def with_moves(self, run: Run | None) -> Run | None:
        """The chain with the moves that follow it."""
        moves: list[Node] = []
        while run and (node := self.reader()) is not None and isinstance(node.layer, (Permute, Reshape, *_SAME)):
            moves.append(node)
            self.take()
            y = _output_view(self.net, moves)
            if y is not None and is_closed(self.net, self.nodes):
                run = dataclasses.replace(run, y=_as_view(y, node.name, False), nodes=tuple(self.nodes))
        return run

    def scale_of(self, node: Node | None) -> Scales:
        """The constant number that a layer multiplies or divides by; () for any other layer."""
        if node is None or not isinstance(node.layer, Mul | Div) or len(node.inputs) != 1:
            return ()
        name = node.weights.get("constant")
        is_one = name is not None and all(d == 1 for d in self.net.weights[name].shape)
        is_fixed = name is not None and is_one and not self.net.changes(name)
        return ((name, node.layer.kind),) if name is not None and is_fixed else ()

    def operand(self, node: Node, index: int) -> View:
        """Operand 0 (a) or 1 (b) of a MatMul."""
        role = ("first", "constant")[index]
        if role in node.weights:
            return self._weight(node.weights[role])
        value = node.inputs[index if len(node.inputs) == 2 else 0]
        source, view = self._view(value)
        return _as_view(view, source, False)

    def _is_operand(self, node: Node) -> bool:
        """Whether the node moves or scales a value from outside the chain; if so, records the view of its result."""
        if not isinstance(node.layer, _MOVES) and not self.scale_of(node):
            return False
        (value,) = node.inputs
        if value not in self.views and any(value == each.name for each in self.nodes):
            return False
        source, view = self._view(value)
        moved = _moved(node.layer, view, self.net.types[node.name].row_shape)
        if moved is None:
            return False
        if len(ends := self.ends - {value} | {node.name}) > MAX_OPERANDS:
            return False  # more than the gemms can read; bounds the walk, which restarts at every node
        self.ends = ends
        self.views[node.name] = source, moved
        self.scales[node.name] = self.scales.get(value, ()) + self.scale_of(node)
        return True

    def _view(self, value: str) -> tuple[str, Array]:
        return self.views[value] if value in self.views else (value, _empty(self.net.types[value].row_shape))

    def _weight(self, name: str) -> View:
        return _as_view(_empty(tuple(int(d) for d in self.net.weights[name].shape)), name, True)


def _empty(row: tuple[int, ...]) -> Array:
    return np.empty(row, np.uint8)


def _as_view(view: Array, source: str, is_weight: bool) -> View:
    base = view
    while isinstance(base.base, np.ndarray):
        base = base.base
    offset = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return View(source, is_weight, view.shape, view.strides, offset, 0 if is_weight else base.size)


def _moved(layer: Layer, view: Array, row: tuple[int, ...]) -> Array | None:
    """The view of a row after a move; None if strides cannot express it."""
    if isinstance(layer, Permute):
        return view.transpose([axis - 1 for axis in layer.axes[1:]])
    if isinstance(layer, Slice | Gather):
        slices = [
            _slice(indices, size) for indices, size in zip(layer.source_indices(view.shape), view.shape, strict=True)
        ]
        if any(each is None for each in slices):
            return None
        return view[tuple(each or slice(None) for each in slices)].view()
    return _reshaped(view, row)


def _slice(indices: Array | None, size: int) -> slice | None:
    """Evenly spaced indices as a slice; None if they are not."""
    if indices is None:
        return slice(0, size)
    steps = np.diff(indices)
    if not len(indices) or indices[0] < 0 or (len(steps) and (steps[0] <= 0 or np.any(steps != steps[0]))):
        return None
    return slice(int(indices[0]), int(indices[-1]) + 1, int(steps[0]) if len(steps) else 1)


def _reshaped(view: Array, row: tuple[int, ...]) -> Array | None:
    reshaped = view.reshape(row)
    return reshaped if np.may_share_memory(reshaped, view) or not view.size else None


def _output_view(net: Network, moves: Sequence[Node]) -> Array | None:
    """The view through which the result is written: the inverse moves applied to a row of the final layout."""
    view: Array | None = _empty(net.types[moves[-1].name].row_shape)
    for node in reversed(moves):
        shape = net.types[node.inputs[0]].row_shape
        if view is None:
            return None
        if isinstance(node.layer, Permute):
            order = [axis - 1 for axis in node.layer.axes[1:]]
            view = view.transpose([order.index(axis) for axis in range(len(order))])
        else:
            view = _reshaped(view, shape)
    return view
