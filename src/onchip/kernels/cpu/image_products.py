"""Products of conv_fused: convolutions and Linear layers as operations, and the order of their weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onchip.kernels.cpu import image_table as ops
from onchip.kernels.cpu.activation import ACTIVATIONS
from onchip.kernels.cpu.dot import NARROW
from onchip.kernels.cpu.emit import LANES
from onchip.kernels.cpu.image_lowering import Lowering, geometry_of, image_sizes, pads_of
from onchip.kernels.cpu.image_values import Sizes, UnsupportedError, Value, View
from onchip.kernels.cpu.tile import aligned_zeros, pack, packed_size, padded, padded_bias
from onchip.spec.layers import Reshape
from onchip.spec.layers.conv import geometry
from onchip.spec.network import Node
from onchip.spec.recipe import Array, Recipe


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

    def terms(W: Array) -> Array:
        """(N, C, KH, KW) -> columns of terms, taps first, zeros where x is padded or lies outside a window, packed."""
        placed = np.zeros((KH, wide, across, side, columns), np.float32)
        for i in range(side):
            first = i * numbers[ops.SX]
            placed[:, first : first + KW, :C, i, :N] = W.reshape(N, C, KH, KW).transpose(2, 3, 1, 0)
        return pack(placed.reshape(K, side * columns), aligned_zeros(packed_size(K, side * columns)))

    def lanes(W: Array) -> Array:
        """(N, C, KH, KW) -> (N, KH, KW, pixel of x)."""
        flat = aligned_zeros(N * K)
        flat.reshape(N, KH, KW, across)[..., :C] = W.reshape(N, C, KH, KW).transpose(0, 2, 3, 1)
        return flat

    def biases(b: Array) -> Array:
        placed = np.zeros((side, columns), np.float32)
        placed[:, :N] = b
        return placed.reshape(-1)

    if code == ops.DOT:
        w = _recipe("dot_lanes", node, (N * K,), lanes)
    else:
        w = _recipe("pack_taps", node, (packed_size(K, side * columns),), terms)
    to.weigh(op, w, _bias(node, side * columns, biases))


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
        w = _recipe("pack_pairs", node, (packed_size(KH * C, N),), _paired_weights(i, KH, KW))
        to.weigh(op, w, _bias(node if i == 1 else None, N, lambda b: b))  # m1 is in both outputs
    to.make(node, ops.PAIRS_OUT, View(made, (N, HO, pairs)), fields={ops.KW: KW})


def linear(to: Lowering, node: Node) -> None:
    """From a vector or a flattened image, to a vector or, if a Reshape follows, to an image."""
    value = to.read(node.inputs[0])
    if len(to.net.types[node.name].shape) != 2:
        raise UnsupportedError("Linear over several vectors a row")
    x = value.view
    C, H, W = x.sizes
    if x.store.rim != (0, 0, 0, 0) or x.step != (1, 1):
        raise UnsupportedError("Linear over an image with a rim")
    pixel = x.store.pixel
    N, HO, WO = _seen_as(to, node)
    wide, is_narrow = padded(N), HO * WO == 1 and N <= NARROW
    K, columns = H * W * pixel, HO * WO * wide

    def order(w: Array) -> Array:
        """(D_out, D_in) with both axes in the order in which the images lie, zeros for the padding."""
        turned = np.zeros((H, W, pixel, HO, WO, wide), np.float32)
        turned[:, :, :C, :, :, :N] = w.reshape(N, HO, WO, C, H, W).transpose(4, 5, 3, 1, 2, 0)
        return pack(turned.reshape(K, columns), aligned_zeros(packed_size(K, columns)))

    def lanes(w: Array) -> Array:
        """(N, D_in) in the order in which the image lies, zeros for its padding."""
        turned = aligned_zeros(N * K)
        turned.reshape(N, H, W, pixel)[..., :C] = w.reshape(N, C, H, W).transpose(0, 2, 3, 1)
        return turned

    def order_bias(b: Array) -> Array:
        turned = np.zeros((HO, WO, wide), np.float32)
        turned[..., :N] = b.reshape(N, HO, WO).transpose(1, 2, 0)
        return turned.reshape(-1)

    y = to.own(node.name, (N, HO, WO))
    if is_narrow:
        op = to.emit(ops.NARROW, x, y, fields={ops.KH: K, ops.KW: N})
        w = _recipe("order_lanes", node, (N * K,), lanes)
    else:
        op = to.emit(ops.DENSE, x, y, fields={ops.KH: K, ops.KW: columns, ops.SX: N})
        w = _recipe("pack_order", node, (packed_size(K, columns),), order)
    to.values[node.name] = Value(y, op, flat=(HO, WO) != (1, 1))
    to.weigh(op, w, _bias(node, columns, order_bias))


def _seen_as(to: Lowering, node: Node) -> Sizes:
    """The image that a Linear's output becomes, through activations, by a Reshape."""
    value = node.name
    while len(readers := to.readers(value)) == 1 and isinstance(readers[0].layer, (*ACTIVATIONS, Reshape)):
        value = readers[0].name
        if isinstance(readers[0].layer, Reshape):
            return image_sizes(to.net.types[value].row_shape)
    return image_sizes(to.net.types[node.name].row_shape)


def _paired_weights(i: int, KH: int, KW: int) -> Callable[[Array], Array]:
    def paired(W: Array) -> Array:
        """(N, C, KH, KW) -> what product i multiplies by, packed (KH * C, N); see _pairs."""
        g = np.moveaxis(W.reshape(*W.shape[:2], KH, KW).astype(np.float64), -1, 0)
        if KW == 3:
            made = (g[0], (g[0] + g[1] + g[2]) / 2, (g[0] - g[1] + g[2]) / 2, g[2])[i]
        else:
            made = (g[0], g[0] + g[1], g[1])[i]
        N, C, _ = made.shape
        flat = aligned_zeros(packed_size(KH * C, N))
        return pack(made.transpose(2, 1, 0).reshape(KH * C, N).astype(np.float32), flat)

    return paired


def _recipe(op: str, node: Node, shape: tuple[int, ...], make: Callable[[Array], Array]) -> Recipe:
    return Recipe(op, (node.weights["weight"],), shape, "float32", 0, make)


def _bias(node: Node | None, width: int, order: Callable[[Array], Array]) -> Recipe:
    return padded_bias(None if node is None else node.weights.get("bias"), width, order)
