"""Linear layers of conv_fused: from a vector or a flattened image to a vector or, before a Reshape, an image."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import floats_at
from onchip.kernels.cpu.conv.lowering import Lowering, Value, image_sizes
from onchip.kernels.cpu.conv.operation import Activated, call_at, fields_of, finish, runs
from onchip.kernels.cpu.conv.operations.combine import contiguous
from onchip.kernels.cpu.conv.values import Sizes, UnsupportedError, View
from onchip.kernels.cpu.conv.weights import bias_recipe, weight_recipe
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels import dot, tile
from onchip.kernels.cpu.microkernels.activation import activate
from onchip.kernels.cpu.microkernels.dense import dense
from onchip.kernels.cpu.microkernels.dot import NARROW, dense_narrow
from onchip.kernels.cpu.microkernels.tile import PANEL, pack, packed_size, padded
from onchip.kernels.pointwise import IDENTITY, RELU
from onchip.network.graph import Node
from onchip.network.layers import Activation, Reshape
from onchip.network.recipe import Array, Recipe, recipe_op

_NO_FLOOR, _ZERO = np.float32(-np.inf), np.float32(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Gemm(Activated):
    """K: elements of x, including channel pads; columns: elements of y, including channel pads."""

    reads_pads = True
    x: View
    K: int
    columns: int
    w: Recipe
    b: Recipe

    def flop(self) -> int:
        return 2 * math.prod(self.x.sizes) * math.prod(self.y.sizes)

    def moves(self) -> int:
        return 0  # included in its flop rate


@dataclass(frozen=True, eq=False, kw_only=True)
class Dense(Gemm):
    order = tile.ORDER
    padded: int = 0  # padded channels per pixel of y, if the pads must be zero


@dataclass(frozen=True, eq=False, kw_only=True)
class NarrowDense(Gemm):
    """Few columns: vector lanes run along K."""

    order = dot.ORDER


def lower_linear(to: Lowering, node: Node) -> None:
    value = to.read(node.inputs[0])
    if len(to.net.types[node.name].shape) != 2:
        raise UnsupportedError("Linear over several vectors per row")
    x = contiguous(to, value.view)
    _, H, W = x.sizes
    pixel, out_sizes = x.store.pixel, _output_image(to, node)
    N, HO, WO = out_sizes
    K, columns, is_narrow = H * W * pixel, HO * WO * padded(N), HO * WO == 1 and N <= NARROW

    y, b = to.allocate(node.name, out_sizes), bias_recipe(bias_of_image, node, columns, made=out_sizes)
    if is_narrow:
        w = weight_recipe(rows_in_lanes, node, N * K, sizes=x.sizes, pixel=pixel)
        producer = to.emit(NarrowDense(x=x, y=y, K=K, columns=N, w=w, b=b))
    else:
        w = weight_recipe(pack_in_order, node, packed_size(K, columns), sizes=x.sizes, pixel=pixel, made=out_sizes)
        producer = to.emit(Dense(x=x, y=y, K=K, columns=columns, w=w, b=b))
    to.values[node.name] = Value(y, producer, flat=(HO, WO) != (1, 1))


def _output_image(to: Lowering, node: Node) -> Sizes:
    """The sizes of a Linear's output after a Reshape that follows it, directly or after activations."""
    value = node.name
    while len(readers := to.readers(value)) == 1 and isinstance(readers[0].layer, Activation | Reshape):
        value = readers[0].name
        if isinstance(readers[0].layer, Reshape):
            return image_sizes(to.net.types[value].row_shape)
    return image_sizes(to.net.types[node.name].row_shape)


def lower_reshape(to: Lowering, node: Node) -> None:
    """A view: the same image, or a flat row, which a Linear reads in NHWC order."""
    value = to.read(node.inputs[0])
    sizes = to.net.types[node.name].row_shape
    if math.prod(sizes) != math.prod(value.view.sizes):
        raise UnsupportedError("a Reshape of padded rows")
    if image_sizes(sizes) == value.view.sizes:
        to.values[node.name] = Value(value.view, value.producer)
    elif len(sizes) == 1:
        to.values[node.name] = Value(value.view, value.producer, flat=True)
    else:
        raise UnsupportedError("a Reshape that moves channels")


@recipe_op
def pack_in_order(W: Array, size: int, sizes: Sizes, pixel: int, made: Sizes) -> Array:
    """(D_out, D_in) with both axes in NHWC order, zeros for channel pads, packed."""
    (C, H, width), (N, HO, WO) = sizes, made
    nhwc = np.zeros((H, width, pixel, HO, WO, padded(N)), np.float32)
    nhwc[:, :, :C, :, :, :N] = W.reshape(N, HO, WO, C, H, width).transpose(4, 5, 3, 1, 2, 0)
    return pack(nhwc.reshape(H * width * pixel, -1), aligned_zeros(size))


@recipe_op
def rows_in_lanes(W: Array, size: int, sizes: Sizes, pixel: int) -> Array:
    """(N, D_in) in NHWC order, zeros for channel pads."""
    C, H, width = sizes
    nhwc = aligned_zeros(size)
    nhwc.reshape(-1, H, width, pixel)[..., :C] = W.reshape(-1, C, H, width).transpose(0, 2, 3, 1)
    return nhwc


@recipe_op
def bias_of_image(bias: Array, size: int, made: Sizes) -> Array:
    """(N * HO * WO) -> (HO, WO, N padded)."""
    N, HO, WO = made
    nhwc = aligned_zeros(size)
    nhwc.reshape(HO, WO, padded(N))[..., :N] = bias.reshape(N, HO, WO).transpose(1, 2, 0)
    return nhwc


_dense, _narrow = fields_of(Dense), fields_of(NarrowDense)


@runs(Dense)
def dense_columns(row: int, call: int) -> None:
    """Threads split the columns at panel boundaries: packed panels are contiguous."""
    op, args = _dense(row, call), call_at(call)
    x, y = op.x, op.y
    share = (op.columns + args.parts * PANEL - 1) // (args.parts * PANEL) * PANEL
    first = args.part * share
    count = min(share, op.columns - first)
    if count <= 0:
        return
    floor = _ZERO if op.activation == RELU else _NO_FLOOR
    out = args.base + (y.offset + first) * 4
    dense(
        args.base + x.offset * 4, x.image * 4, args.images, op.w + first * op.K * 4, op.K, count, op.b + first * 4, out,
        y.image * 4, floor,
    )  # fmt: skip
    if op.padded > y.C:  # an infinity times a zero weight is a NaN there
        for i in range(args.images):
            columns = floats_at(out + i * y.image * 4, count)
            for c in range(count):
                if (first + c) % op.padded >= y.C:
                    columns[c] = _ZERO
    if op.activation != RELU and op.activation != IDENTITY:
        activate(out, args.images, count, y.image, op.activation)


@runs(NarrowDense)
def narrow(row: int, call: int) -> None:
    op, args = _narrow(row, call), call_at(call)
    if args.part > 0:
        return
    x, y = op.x, op.y
    floor = _ZERO if op.activation == RELU else _NO_FLOOR
    dense_narrow(
        args.base + x.offset * 4, x.image * 4, args.images, op.w, op.K, op.columns, op.b, args.base + y.offset * 4,
        y.image * 4, floor,
    )  # fmt: skip
    if op.activation != RELU:
        finish(args.base, y, args.images, 0, 1, op.activation)
