"""Linear layers of conv_fused: from a vector or a flattened image to a vector or, before a Reshape, to an image."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import floats_at
from onchip.kernels.cpu.conv.lowering import Lowering, Value, image_sizes
from onchip.kernels.cpu.conv.operation import Activated, call_at, fields_of, finish, runs
from onchip.kernels.cpu.conv.operations.combine import gapless
from onchip.kernels.cpu.conv.values import Sizes, UnsupportedError, View
from onchip.kernels.cpu.conv.weights import bias_recipe, weight_recipe
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels import dot, tile
from onchip.kernels.cpu.microkernels.activation import activate
from onchip.kernels.cpu.microkernels.dense import dense
from onchip.kernels.cpu.microkernels.dot import NARROW, dense_narrow
from onchip.kernels.cpu.microkernels.tile import PANEL, pack, packed_size, padded
from onchip.kernels.pointwise import CPU_ACTIVATIONS, IDENTITY, RELU
from onchip.network.graph import Node
from onchip.network.layers import Reshape
from onchip.network.recipe import Array, Recipe, recipe_op

_NO_FLOOR, _ZERO = np.float32(-np.inf), np.float32(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Product(Activated):
    """K terms, all numbers of x with what pads its pixels; y is `columns` numbers, with what pads its pixels."""

    reads_pads = True
    x: View
    K: int
    columns: int
    w: Recipe
    b: Recipe

    def flop(self) -> int:
        return 2 * math.prod(self.x.sizes) * math.prod(self.y.sizes)

    def moves(self) -> int:
        return 0  # those are in its pace


@dataclass(frozen=True, eq=False, kw_only=True)
class Dense(Product):
    order = tile.ORDER
    padded: int = 0  # what a pixel of y is padded to, where those pads must be zero


@dataclass(frozen=True, eq=False, kw_only=True)
class Narrow(Product):
    """Few columns, sums in lanes."""

    order = dot.ORDER


def lower_linear(to: Lowering, node: Node) -> None:
    value = to.read(node.inputs[0])
    if len(to.net.types[node.name].shape) != 2:
        raise UnsupportedError("Linear over several vectors a row")
    x = gapless(to, value.view)
    _, H, W = x.sizes
    pixel, made = x.store.pixel, _seen_as(to, node)
    N, HO, WO = made
    K, columns, is_narrow = H * W * pixel, HO * WO * padded(N), HO * WO == 1 and N <= NARROW

    y, b = to.own(node.name, made), bias_recipe(bias_of_image, node, columns, made=made)
    if is_narrow:
        w = weight_recipe(rows_in_lanes, node, N * K, sizes=x.sizes, pixel=pixel)
        maker = to.emit(Narrow(x=x, y=y, K=K, columns=N, w=w, b=b))
    else:
        w = weight_recipe(pack_in_order, node, packed_size(K, columns), sizes=x.sizes, pixel=pixel, made=made)
        maker = to.emit(Dense(x=x, y=y, K=K, columns=columns, w=w, b=b))
    to.values[node.name] = Value(y, maker, flat=(HO, WO) != (1, 1))


def _seen_as(to: Lowering, node: Node) -> Sizes:
    """The image that a Linear's output becomes, through activations, by a Reshape."""
    value = node.name
    while len(readers := to.readers(value)) == 1 and isinstance(readers[0].layer, (*CPU_ACTIVATIONS, Reshape)):
        value = readers[0].name
        if isinstance(readers[0].layer, Reshape):
            return image_sizes(to.net.types[value].row_shape)
    return image_sizes(to.net.types[node.name].row_shape)


def lower_reshape(to: Lowering, node: Node) -> None:
    """It says how numbers are seen: the same image, or a flat row, which a Linear reads in the order of the image."""
    value = to.read(node.inputs[0])
    sizes = to.net.types[node.name].row_shape
    if math.prod(sizes) != math.prod(value.view.sizes):
        raise UnsupportedError("a Reshape of padded rows")
    if image_sizes(sizes) == value.view.sizes:
        to.values[node.name] = Value(value.view, value.maker)
    elif len(sizes) == 1:
        to.values[node.name] = Value(value.view, value.maker, flat=True)
    else:
        raise UnsupportedError("a Reshape that moves channels")


@recipe_op
def pack_in_order(W: Array, size: int, sizes: Sizes, pixel: int, made: Sizes) -> Array:
    """(D_out, D_in) with both axes in the order in which the images lie, zeros for the padding, packed."""
    (C, H, width), (N, HO, WO) = sizes, made
    turned = np.zeros((H, width, pixel, HO, WO, padded(N)), np.float32)
    turned[:, :, :C, :, :, :N] = W.reshape(N, HO, WO, C, H, width).transpose(4, 5, 3, 1, 2, 0)
    return pack(turned.reshape(H * width * pixel, -1), aligned_zeros(size))


@recipe_op
def rows_in_lanes(W: Array, size: int, sizes: Sizes, pixel: int) -> Array:
    """(N, D_in) in the order in which the image lies, zeros for its padding."""
    C, H, width = sizes
    turned = aligned_zeros(size)
    turned.reshape(-1, H, width, pixel)[..., :C] = W.reshape(-1, C, H, width).transpose(0, 2, 3, 1)
    return turned


@recipe_op
def bias_of_image(bias: Array, size: int, made: Sizes) -> Array:
    """(N * HO * WO) -> (HO, WO, N padded)."""
    N, HO, WO = made
    turned = aligned_zeros(size)
    turned.reshape(HO, WO, padded(N))[..., :N] = bias.reshape(N, HO, WO).transpose(1, 2, 0)
    return turned


_dense, _narrow = fields_of(Dense), fields_of(Narrow)


@runs(Dense)
def dense_columns(row: int, call: int) -> None:
    """Threads share its columns, in whole panels: those are packed one behind the other."""
    op, at = _dense(row, call), call_at(call)
    x, y = op.x, op.y
    share = (op.columns + at.parts * PANEL - 1) // (at.parts * PANEL) * PANEL
    first = at.part * share
    count = min(share, op.columns - first)
    if count <= 0:
        return
    floor = _ZERO if op.activation == RELU else _NO_FLOOR
    out = at.here + (y.at + first) * 4
    dense(
        at.here + x.at * 4, x.image * 4, at.images, op.w + first * op.K * 4, op.K, count, op.b + first * 4, out,
        y.image * 4, floor,
    )  # fmt: skip
    if op.padded > y.C:  # an infinity times a zero weight would be a NaN there
        for i in range(at.images):
            columns = floats_at(out + i * y.image * 4, count)
            for c in range(count):
                if (first + c) % op.padded >= y.C:
                    columns[c] = _ZERO
    if op.activation != RELU and op.activation != IDENTITY:
        activate(out, at.images, count, y.image, op.activation)


@runs(Narrow)
def narrow(row: int, call: int) -> None:
    op, at = _narrow(row, call), call_at(call)
    if at.part > 0:
        return
    x, y = op.x, op.y
    floor = _ZERO if op.activation == RELU else _NO_FLOOR
    dense_narrow(
        at.here + x.at * 4, x.image * 4, at.images, op.w, op.K, op.columns, op.b, at.here + y.at * 4, y.image * 4,
        floor,
    )  # fmt: skip
    if op.activation != RELU:
        finish(at.here, y, at.images, 0, 1, op.activation)
