"""Weights in the order in which the gemms of conv_fused read them: recipes shared by several operations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.tile import pack, packed_size, padded, padded_bias
from onchip.network.graph import Node
from onchip.network.recipe import Array, Attribute, Recipe, recipe_op


def weight_recipe(op: Callable[..., Array], node: Node, size: int, **attributes: Attribute) -> Recipe:
    return Recipe.of(op, (node.weights["weight"],), (size,), "float32", 0, size=size, **attributes)


def bias_recipe(op: Callable[..., Array], node: Node, width: int, **attributes: Attribute) -> Recipe:
    """The bias in output order, padded to whole vectors; zeros if the node has none."""
    if "bias" not in node.weights:
        return padded_bias(None, width)
    return Recipe.of(op, (node.weights["bias"],), (padded(width),), "float32", 0, size=padded(width), **attributes)


def packed_taps(
    node: Node, KH: int, KW: int, pixel: int, side: int, columns: int, stride: int
) -> tuple[Recipe, Recipe]:
    """Weights and bias of a convolution that computes `side` neighbouring outputs of `columns` channels per vector.

    K covers all pixels that these `side` windows read together; each output has `columns` columns.
    """
    K = KH * (KW + (side - 1) * stride) * pixel
    attributes = {"KH": KH, "pixel": pixel, "side": side, "columns": columns, "stride": stride}
    w = weight_recipe(pack_taps, node, packed_size(K, side * columns), **attributes)
    return w, bias_recipe(bias_of_pixels, node, side * columns, count=side, columns=columns)


@recipe_op
def pack_taps(W: Array, size: int, KH: int, pixel: int, side: int, columns: int, stride: int) -> Array:
    """(N, C, KH, KW) -> packed (KH, taps, pixel; side * columns); zero for channel pads and outside a window."""
    N, C, KW = W.shape[0], W.shape[1], W.shape[-1]
    placed = np.zeros((KH, KW + (side - 1) * stride, pixel, side, columns), np.float32)
    for i in range(side):
        placed[:, i * stride : i * stride + KW, :C, i, :N] = W.reshape(N, C, KH, KW).transpose(2, 3, 1, 0)
    return pack(placed.reshape(-1, side * columns), aligned_zeros(size))


@recipe_op
def bias_of_pixels(bias: Array, size: int, count: int, columns: int) -> Array:
    """The same bias for each of `count` pixels."""
    placed = aligned_zeros(size)
    placed[: count * columns].reshape(count, columns)[:, : len(bias)] = bias
    return placed
