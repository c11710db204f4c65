"""Products of conv_fused: convolutions and Linear layers as operations, and the order of their weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onchip.kernels.cpu import image_table as ops
from onchip.kernels.cpu.dot import NARROW
from onchip.kernels.cpu.emit import LANES
from onchip.kernels.cpu.image_lowering import Lowering, geometry_of, image_sizes, pads_of
from onchip.kernels.cpu.image_values import Sizes, UnsupportedError, Value, View
from onchip.kernels.cpu.tile import aligned_zeros, pack, packed_size, padded, padded_bias
from onchip.kernels.pointwise import CPU_ACTIVATIONS
from onchip.spec.layers import Reshape
from onchip.spec.layers.conv import geometry
from onchip.spec.network import Node
from onchip.spec.recipe import Array, Attribute, Recipe, recipe_op


def convolution(to: Lowering, node: Node) -> None:
    x = to.image(node.inputs[0])
    shape = to.net.weights[node.weights["weight"]].shape
    if node.layer.attributes()["groups"] != 1:
        raise UnsupportedError("groups of channels")
    N, C = shape[:2]
    KH, KW = (1, shape[2]) if len(shape) == 3 else shape[2:]
    code = to.way(node)
    if code == ops.TAPS and _goes_in_pairs(to, node, KW):
        _pairs(to, node, x, KH, KW)
        return
    if code != ops.TAPS:
        x = to.rimmed(x, pads_of(node))
    side, across = to.side(node), C if code == ops.TAPS else x.store.pixel
    numbers = geometry_of(node)
    op = to.make(node, code, x, fields={ops.KH: KH, ops.KW: KW, ops.SIDE: side, **numbers})
    # A term for each pixel that `side` windows side by side read, and as many columns for each of their outputs.
    wide, columns = KW + (side - 1) * numbers[ops.SX], N if side == 1 else LANES // side
    K = KH * wide * across

    if code == ops.DOT:
        w = _recipe(taps_in_lanes, node, N * K, KH=KH, pixel=across)
    else:
        told = {"KH": KH, "pixel": across, "side": side, "columns": columns, "stride": numbers[ops.SX]}
        w = _recipe(pack_taps, node, packed_size(K, side * columns), **told)
    to.weigh(op, w, _bias(node, side * columns, bias_of_pixels, count=side, columns=columns))


def _goes_in_pairs(to: Lowering, node: Node, KW: int) -> bool:
    stride, _, dilation = geometry(node.layer)
    N, _, WO = image_sizes(to.net.types[node.name].row_shape)
    return KW in (2, 3) and stride[-1] == dilation[-1] == 1 and WO > 1 and N >= LANES


def _pairs(to: Lowering, node: Node, x: View, KH: int, KW: int) -> None:
    """A convolution of two or three taps along a row, for two neighbouring outputs at a time (Winograd).

    With three taps g0, g1, g2 on d0 .. d3, four products do for six:
        m0 = g0 (d0 - d2)                   m1 = (g0 + g1 + g2) / 2 (d1 + d2)
        m2 = (g0 - g1 + g2) / 2 (d2 - d1)   m3 = g2 (d1 - d3)
        y0 = m0 + m1 + m2   y1 = m1 - m2 - m3
    With two taps on d0 .. d2, three for four:
        m0 = g0 (d0 - d1)   m1 = (g0 + g1) d1   m2 = g1 (d1 - d2)        y0 = m0 + m1   y1 = m1 - m2
    Each product is one over the channels and the kernel's rows: a convolution of KH x 1 taps.
    """
    (C, H, _), (N, HO, WO) = x.sizes, image_sizes(to.net.types[node.name].row_shape)
    planes, pairs = KW + 1, -(-WO // 2)
    numbers = geometry_of(node)
    key = (x, KW, numbers[ops.PX], pairs)
    if key not in to.paired:  # phases of a transposed convolution share it
        given = to.own("", (planes * padded(C), H, pairs))
        to.emit(ops.PAIRS_IN, x, View(given.store, (C, H, pairs)), fields={ops.KW: KW, ops.PX: numbers[ops.PX]})
        to.paired[key] = given.store
    made = to.own("", (planes * padded(N), HO, pairs)).store
    for i in range(planes):
        part = View(to.paired[key], (C, H, pairs), channel=i * padded(C))
        fields = numbers | {ops.KH: KH, ops.KW: 1, ops.PX: 0}
        op = to.emit(ops.TAPS, part, View(made, (N, HO, pairs), channel=i * padded(N)), fields=fields)
        w = _recipe(pack_pairs, node, packed_size(KH * C, N), plane=i, KH=KH)
        to.weigh(op, w, padded_bias(node.weights.get("bias") if i == 1 else None, N))  # m1 is in both outputs
    to.make(node, ops.PAIRS_OUT, View(made, (N, HO, pairs)), fields={ops.KW: KW})


def linear(to: Lowering, node: Node) -> None:
    """From a vector or a flattened image, to a vector or, if a Reshape follows, to an image."""
    value = to.read(node.inputs[0])
    if len(to.net.types[node.name].shape) != 2:
        raise UnsupportedError("Linear over several vectors a row")
    x = value.view
    _, H, W = x.sizes
    if x.store.rim != (0, 0, 0, 0) or x.step != (1, 1):
        raise UnsupportedError("Linear over an image with a rim")
    pixel = x.store.pixel
    N, HO, WO = _seen_as(to, node)
    wide, is_narrow = padded(N), HO * WO == 1 and N <= NARROW
    K, columns = H * W * pixel, HO * WO * wide

    y = to.own(node.name, (N, HO, WO))
    if is_narrow:
        op = to.emit(ops.NARROW, x, y, fields={ops.KH: K, ops.KW: N})
        w = _recipe(rows_in_lanes, node, N * K, sizes=x.sizes, pixel=pixel)
    else:
        op = to.emit(ops.DENSE, x, y, fields={ops.KH: K, ops.KW: columns, ops.SX: N})
        w = _recipe(pack_in_order, node, packed_size(K, columns), sizes=x.sizes, pixel=pixel, made=(N, HO, WO))
    to.values[node.name] = Value(y, op, flat=(HO, WO) != (1, 1))
    to.weigh(op, w, _bias(node, columns, bias_of_image, made=(N, HO, WO)))


def _seen_as(to: Lowering, node: Node) -> Sizes:
    """The image that a Linear's output becomes, through activations, by a Reshape."""
    value = node.name
    while len(readers := to.readers(value)) == 1 and isinstance(readers[0].layer, (*CPU_ACTIVATIONS, Reshape)):
        value = readers[0].name
        if isinstance(readers[0].layer, Reshape):
            return image_sizes(to.net.types[value].row_shape)
    return image_sizes(to.net.types[node.name].row_shape)


def _recipe(op: Callable[..., Array], node: Node, size: int, **attributes: Attribute) -> Recipe:
    return Recipe.of(op, (node.weights["weight"],), (size,), "float32", 0, size=size, **attributes)


def _bias(node: Node, width: int, op: Callable[..., Array], **attributes: Attribute) -> Recipe:
    """The bias in the order of the outputs, padded to whole vectors; zero where there is none."""
    if "bias" not in node.weights:
        return padded_bias(None, width)
    return Recipe.of(op, (node.weights["bias"],), (padded(width),), "float32", 0, size=padded(width), **attributes)


# -- weights as the operations read them -----------------------------------------------------------------------


@recipe_op
def pack_taps(W: Array, size: int, KH: int, pixel: int, side: int, columns: int, stride: int) -> Array:
    """(N, C, KH, KW) -> columns of terms, taps first, zeros where x is padded or lies outside a window, packed."""
    N, C, KW = W.shape[0], W.shape[1], W.shape[-1]
    placed = np.zeros((KH, KW + (side - 1) * stride, pixel, side, columns), np.float32)
    for i in range(side):
        placed[:, i * stride : i * stride + KW, :C, i, :N] = W.reshape(N, C, KH, KW).transpose(2, 3, 1, 0)
    return pack(placed.reshape(-1, side * columns), aligned_zeros(size))


@recipe_op
def taps_in_lanes(W: Array, size: int, KH: int, pixel: int) -> Array:
    """(N, C, KH, KW) -> (N, KH, KW, pixel of x)."""
    N, C, KW = W.shape[0], W.shape[1], W.shape[-1]
    flat = aligned_zeros(size)
    flat.reshape(N, KH, KW, pixel)[..., :C] = W.reshape(N, C, KH, KW).transpose(0, 2, 3, 1)
    return flat


@recipe_op
def pack_pairs(W: Array, size: int, plane: int, KH: int) -> Array:
    """(N, C, KH, KW) -> what one product of _pairs multiplies by, packed (KH * C, N)."""
    N, C, KW = W.shape[0], W.shape[1], W.shape[-1]
    g = np.moveaxis(W.reshape(N, C, KH, KW).astype(np.float64), -1, 0)
    if KW == 3:
        made = (g[0], (g[0] + g[1] + g[2]) / 2, (g[0] - g[1] + g[2]) / 2, g[2])[plane]
    else:
        made = (g[0], g[0] + g[1], g[1])[plane]
    return pack(made.transpose(2, 1, 0).reshape(KH * C, N).astype(np.float32), aligned_zeros(size))


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
def bias_of_pixels(bias: Array, size: int, count: int, columns: int) -> Array:
    """The same for each of `count` pixels."""
    placed = aligned_zeros(size)
    placed[: count * columns].reshape(count, columns)[:, : len(bias)] = bias
    return placed


@recipe_op
def bias_of_image(bias: Array, size: int, made: Sizes) -> Array:
    """(N * HO * WO) -> (HO, WO, N padded)."""
    N, HO, WO = made
    turned = aligned_zeros(size)
    turned.reshape(HO, WO, padded(N))[..., :N] = bias.reshape(N, HO, WO).transpose(1, 2, 0)
    return turned
