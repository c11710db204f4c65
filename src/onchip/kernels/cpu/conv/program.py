"""Lowering of layers to operations on images: the layout of every value and the order of execution.

A subgraph becomes a list of operations (conv/operation.py) on NHWC values (conv/values.py). Layers that only move data
cost nothing: a phase of an Interleave is written with strides, a Slice is a view, a Flatten permutes the columns of a
Linear, a Reshape after a Linear permutes its rows, and an activation is fused into the previous operation.
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
from onchip.kernels.cpu.conv.operations.prelu import lower_prelu
from onchip.kernels.cpu.conv.operations.resize import lower_resize
from onchip.kernels.cpu.conv.operations.rows import (
    StoreRows,
    lower_embedding,
    lower_output,
    lower_permute,
    lower_to_pixels,
    with_layout,
)
from onchip.kernels.cpu.conv.operations.slice import lower_slice
from onchip.kernels.cpu.conv.operations.softmax import lower_softmax
from onchip.kernels.cpu.conv.operations.taps import Taps
from onchip.kernels.cpu.conv.operations.windows import Windows
from onchip.kernels.cpu.conv.scratch import Scratch, plan_scratch
from onchip.kernels.cpu.conv.values import Store, UnsupportedError
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Activation,
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

# Layers and their lowering functions: a new operation adds a line here.
_LOWERINGS: tuple[tuple[tuple[type, ...], Callable[[Lowering, Node], None]], ...] = (
    ((Convolution,), lower_convolution),
    ((TransposedConvolution,), lower_transposed),
    ((Linear,), lower_linear),
    ((Reshape,), lower_reshape),
    ((Activation,), lower_activation),
    ((Interleave,), lower_interleave),
    ((MaxPool1d, MaxPool2d, AvgPool1d, AvgPool2d), lower_pool),
    ((GlobalMax, GlobalMean), lower_global_pool),
    ((Add, Mul, Max, Min, Sub, Div), lower_combine),
    ((PReLU,), lower_prelu),
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
    source: str  # the input value

    @property
    def recipes(self) -> dict[str, Recipe]:
        """By field name and operation index: "w3"."""
        each = ((i, op.recipes()) for i, op in enumerate(self.operations))
        return {f"{name}{i}": recipe for i, recipes in each for name, recipe in recipes.items()}

    @property
    def image_flop(self) -> int:
        return sum(op.flop() for op in self.operations)

    @property
    def order(self) -> str:
        return "; ".join(dict.fromkeys(op.order for op in self.operations if op.order))

    @property
    def image_moves(self) -> int:
        """Elements that the operations read and write, per image."""
        return sum(op.moves() for op in self.operations)

    @property
    def weight_bytes(self) -> int:
        return sum(op.weight_bytes() for op in self.operations)

    def nhwc_ends(self) -> tuple[bool, bool]:
        """Whether its input, and its output, may be NHWC as well as NCHW."""
        return any(map(_is_load, self.operations)), any(map(_is_store, self.operations))

    def scratch(self, images: int, fast_bytes: int) -> Scratch:
        """One thread's scratch for tiles of `images` images."""
        return plan_scratch(self.operations, self.layers, images, fast_bytes)

    def table(
        self, weights: Mapping[str, Array], scratch: Scratch, x_nhwc: bool = False, y_nhwc: bool = False
    ) -> Array:
        """One row per operation.

        weights         the computed recipes; rows contain their addresses
        x_nhwc, y_nhwc  layout of the input and of the output
        """
        for store, offset in scratch.offsets.items():
            store.offset, store.is_per_tile = offset, store in scratch.live_out
        rows = []
        for segment in scratch.segments:
            for i in range(segment.first, segment.last + 1):
                op = self.operations[i]
                if _is_load(op):
                    op = with_layout(op, x_nhwc)
                elif _is_store(op):
                    op = with_layout(op, y_nhwc)
                addresses = {name: address(weights[f"{name}{i}"]) for name in op.recipes()}
                rows.append(list(op.row(segment.group, segment.last, addresses)))
        table = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for values, row in zip(rows, table, strict=True):
            row[: len(values)] = values
        return table


def lower(net: Network, nodes: Sequence[Node]) -> Program:
    """Lower nodes that read one outside value and whose only output is the last node's."""
    to = Lowering(net, nodes)
    for i, node in enumerate(nodes):
        try:
            _lower_node(to, node)
        except UnsupportedError as reason:
            reason.index = i
            raise
    lower_output(to)
    read_with_pads = {op.x.store for op in to.operations if op.reads_pads}  # type: ignore[attr-defined]
    operations = [
        dataclasses.replace(op, padded=op.y.store.pixel)
        if isinstance(op, Taps | Pointwise | Windows | Dense) and op.y.store in read_with_pads and op.y.is_whole
        else op
        for op in to.operations
    ]
    return Program(tuple(operations), tuple(to.layers), tuple(to.stores), to.source)


def _lower_node(to: Lowering, node: Node) -> None:
    for name in node.weights.values():
        if to.net.weight_type(name).dtype != "float32":
            raise UnsupportedError(f"computes on float32, but {name} is {to.net.weight_type(name).dtype}")
    to.layer = to.buffer_of(node.name)
    handler = next((f for kinds, f in _LOWERINGS if isinstance(node.layer, kinds)), None)
    if handler is None:
        raise UnsupportedError(f"no operation for {node.layer.kind}")
    handler(to, node)


def _is_load(op: Operation) -> bool:
    return isinstance(op, Load)


def _is_store(op: Operation) -> bool:
    return isinstance(op, StoreRows) and op.may_change
