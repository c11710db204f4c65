"""From layers to operations on images: where every value lies, and what is done in which order.

A run of layers becomes a list of operations (conv/operation.py) on values that lie with their channels last
(conv/values.py). Layers that only say how numbers are seen cost nothing: a phase of an Interleave is written to its
place, a Slice is seen where it lies, a Flatten is the order of a Linear's columns, a Reshape behind a Linear the order
of its rows, and an activation joins the operation before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address
from onchip.kernels.cpu.conv.lowering import Lowering
from onchip.kernels.cpu.conv.operation import Operation
from onchip.kernels.cpu.conv.operations.combine import lower_activation, lower_batch_norm, lower_combine, lower_concat
from onchip.kernels.cpu.conv.operations.conv import lower_convolution, lower_interleave
from onchip.kernels.cpu.conv.operations.dense import Dense, lower_linear, lower_reshape
from onchip.kernels.cpu.conv.operations.groups import lower_transposed
from onchip.kernels.cpu.conv.operations.load import Load
from onchip.kernels.cpu.conv.operations.pointwise import Pointwise
from onchip.kernels.cpu.conv.operations.pool import lower_global_pool, lower_pool
from onchip.kernels.cpu.conv.operations.prelu import lower_slope
from onchip.kernels.cpu.conv.operations.resize import lower_resize
from onchip.kernels.cpu.conv.operations.rows import (
    StoreRows,
    laid_out,
    lower_embedding,
    lower_end,
    lower_permute,
    lower_to_pixels,
)
from onchip.kernels.cpu.conv.operations.slice import lower_slice
from onchip.kernels.cpu.conv.operations.softmax import lower_softmax
from onchip.kernels.cpu.conv.operations.taps import Taps
from onchip.kernels.cpu.conv.operations.windows import Windows
from onchip.kernels.cpu.conv.scratch import Scratch, make_scratch
from onchip.kernels.cpu.conv.values import Store, UnsupportedError
from onchip.kernels.pointwise import CPU_ACTIVATIONS
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Add,
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Concat,
    Convolution,
    Div,
    Embedding,
    GlobalMax,
    GlobalMean,
    Interleave,
    Linear,
    LinearResize,
    LogSoftmax,
    Max,
    MaxPool1d,
    MaxPool2d,
    Min,
    Mul,
    NearestResize,
    Permute,
    PReLU,
    Reshape,
    Slice,
    Softmax,
    Sub,
    ToPixels,
    TransposedConvolution,
)  # fmt: skip
from onchip.network.recipe import Array, Recipe

# The layers that are lowered, and what lowers them: a new operation has its line here.
_LOWERINGS: tuple[tuple[tuple[type, ...], Callable[[Lowering, Node], None]], ...] = (
    ((Convolution,), lower_convolution),
    ((TransposedConvolution,), lower_transposed),
    ((Linear,), lower_linear),
    ((Reshape,), lower_reshape),
    (CPU_ACTIVATIONS, lower_activation),
    ((Interleave,), lower_interleave),
    ((MaxPool1d, MaxPool2d, AvgPool1d, AvgPool2d), lower_pool),
    ((GlobalMax, GlobalMean), lower_global_pool),
    ((Add, Mul, Max, Min, Sub, Div), lower_combine),
    ((PReLU,), lower_slope),
    ((Slice,), lower_slice),
    ((BatchNorm1d, BatchNorm2d), lower_batch_norm),
    ((Concat,), lower_concat),
    ((LinearResize, NearestResize), lower_resize),
    ((Softmax, LogSoftmax), lower_softmax),
    ((Embedding,), lower_embedding),
    ((Permute,), lower_permute),
    ((ToPixels,), lower_to_pixels),
)
SUPPORTED = tuple(kind for kinds, _ in _LOWERINGS for kind in kinds)


@dataclass(eq=False)
class Program:
    operations: tuple[Operation, ...]
    layers: tuple[str, ...]  # of the operations
    stores: tuple[Store, ...]
    source: str  # the value it reads

    @property
    def recipes(self) -> dict[str, Recipe]:
        """By the name of a field and the number of its operation: "w3"."""
        each = ((i, op.recipes()) for i, op in enumerate(self.operations))
        return {f"{name}{i}": recipe for i, mine in each for name, recipe in mine.items()}

    @property
    def image_flop(self) -> int:
        return sum(op.flop() for op in self.operations)

    @property
    def order(self) -> str:
        return "; ".join(dict.fromkeys(op.order for op in self.operations if op.order))

    @property
    def image_moves(self) -> int:
        """Numbers of an image that the operations read and write, one after the other."""
        return sum(op.moves() for op in self.operations)

    @property
    def weight_bytes(self) -> int:
        return sum(op.weight_bytes() for op in self.operations)

    def lies_at_ends(self) -> tuple[bool, bool]:
        """Whether what it reads, and what it makes, may lie with channels last as well as in rows."""
        return any(map(_is_load, self.operations)), any(map(_is_store, self.operations))

    def scratch(self, images: int, fast_bytes: int) -> Scratch:
        """Of a thread, for tiles of so many images."""
        return make_scratch(self.operations, self.layers, images, fast_bytes)

    def table(
        self, weights: Mapping[str, Array], scratch: Scratch, last_in: bool = False, last_out: bool = False
    ) -> Array:
        """A row an operation.

        weights            what the recipes made: the rows have their addresses
        last_in, last_out  what it reads, and what it makes, lies with channels last
        """
        for store, at in scratch.places.items():
            store.offset, store.is_of_tile = at, store in scratch.handed_on
        rows = []
        for part in scratch.parts:
            for i in range(part.first, part.last + 1):
                op = self.operations[i]
                if _is_load(op):
                    op = laid_out(op, last_in)
                elif _is_store(op):
                    op = laid_out(op, last_out)
                addresses = {name: address(weights[f"{name}{i}"]) for name in op.recipes()}
                rows.append(list(op.row(part.group, part.last, addresses)))
        table = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for numbers, row in zip(rows, table, strict=True):
            row[: len(numbers)] = numbers
        return table


def lower(net: Network, nodes: Sequence[Node]) -> Program:
    """The operations of a run of nodes that reads one value and whose last value alone is read outside."""
    to = Lowering(net, nodes)
    for i, node in enumerate(nodes):
        try:
            _lower_node(to, node)
        except UnsupportedError as reason:
            reason.at = i
            raise
    lower_end(to)
    read_whole = {op.x.store for op in to.operations if op.reads_pads}  # type: ignore[attr-defined]
    operations = [
        dataclasses.replace(op, padded=op.y.store.pixel)
        if isinstance(op, Taps | Pointwise | Windows | Dense) and op.y.store in read_whole and op.y.is_whole
        else op
        for op in to.operations
    ]
    return Program(tuple(operations), tuple(to.layers), tuple(to.stores), to.source)


def _lower_node(to: Lowering, node: Node) -> None:
    for name in node.weights.values():
        if to.net.weight_type(name).dtype != "float32":
            raise UnsupportedError(f"computes on float32, and {name} is {to.net.weight_type(name).dtype}")
    to.layer = to.home(node.name)
    handler = next((f for kinds, f in _LOWERINGS if isinstance(node.layer, kinds)), None)
    if handler is None:
        raise UnsupportedError(f"no operation for {node.layer.kind}")
    handler(to, node)


def _is_load(op: Operation) -> bool:
    return isinstance(op, Load)


def _is_store(op: Operation) -> bool:
    return isinstance(op, StoreRows) and op.is_layout
