"""Convolutions of conv_fused in groups of channels: one after the other, each tap by tap on its own channels."""

from __future__ import annotations

from onchip.kernels.cpu.emit import LANES
from onchip.kernels.cpu.image_combine import Copy
from onchip.kernels.cpu.image_lowering import Lowering, Value, image_sizes, window_of
from onchip.kernels.cpu.image_taps import Taps
from onchip.kernels.cpu.image_values import Store, View
from onchip.kernels.cpu.image_weights import bias_recipe, pack_taps, weight_recipe
from onchip.kernels.cpu.tile import aligned_zeros, packed_size, padded
from onchip.spec.network import Node
from onchip.spec.recipe import Array, recipe_op


def lower_groups(to: Lowering, node: Node, x: View) -> None:
    """Where the outputs of a group are no whole vectors, each group writes into the next one's, which comes after it:
    in memory with room for the last one's, from where all are copied."""
    N, C, *kernel = to.net.weights[node.weights["weight"]].shape
    window, groups = window_of(node, tuple(kernel)), node.layer.attributes()["groups"]
    columns = N // groups
    _, HO, WO = sizes = image_sizes(to.net.types[node.name].row_shape)
    is_whole = columns % LANES == 0
    if is_whole:
        made = to.new(node.name, sizes, exact=True)
    else:
        made = View(Store(*sizes, (groups - 1) * columns + padded(columns)), sizes)
        to.stores.append(made.store)
    size = packed_size(window.KH * window.KW * C, columns)
    for g in range(groups):
        told = {"first": g * columns, "count": columns}
        w = weight_recipe(pack_group, node, size, KH=window.KH, **told)
        b = bias_recipe(bias_of_group, node, columns, **told)
        given = View(x.store, (C, *x.sizes[1:]), x.start, x.step, x.channel + g * C)
        y = View(made.store, (columns, HO, WO), made.start, made.step, made.channel + g * columns)
        to.emit(Taps(x=given, y=y, window=window, w=w, b=b))
    if is_whole:
        to.values[node.name] = Value(made, None)
    else:
        to.make(node, Copy, x=made)


@recipe_op
def pack_group(W: Array, size: int, KH: int, first: int, count: int) -> Array:
    """`count` outputs of (N, C, KH, KW), packed as taps of C channels."""
    mine = W[first : first + count]
    return pack_taps(mine, size, KH, W.shape[1], 1, count, 1)


@recipe_op
def bias_of_group(bias: Array, size: int, first: int, count: int) -> Array:
    placed = aligned_zeros(size)
    placed[:count] = bias[first : first + count]
    return placed
