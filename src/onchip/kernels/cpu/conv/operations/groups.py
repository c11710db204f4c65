"""Convolutions of conv_fused in groups of channels, and transposed ones: a group after the other, tap by tap, each on
its own channels.
"""

from __future__ import annotations

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.conv.lowering import Lowering, Value, image_sizes, window_of
from onchip.kernels.cpu.conv.operations.combine import Copy
from onchip.kernels.cpu.conv.operations.taps import Taps
from onchip.kernels.cpu.conv.values import Store, UnsupportedError, View
from onchip.kernels.cpu.conv.weights import bias_recipe, pack_taps, weight_recipe
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.tile import packed_size, padded
from onchip.network.graph import Node
from onchip.network.layers import TransposedConvolution
from onchip.network.recipe import Array, recipe_op

_FEW = 4  # outputs of a group: most lanes of a vector stay empty, and NumPy takes many images sooner


def lower_groups(to: Lowering, node: Node, x: View) -> None:
    """Where the outputs of a group are no whole vectors, each group writes into the next one's, which comes after it:
    in memory with room for the last one's, from where all are copied."""
    is_transposed = isinstance(node.layer, TransposedConvolution)
    kernel = to.net.weights[node.weights["weight"]].shape[2:]
    window, groups = window_of(node, tuple(kernel)), node.layer.attributes()["groups"]
    N, HO, WO = sizes = image_sizes(to.net.types[node.name].row_shape)
    columns, C = N // groups, x.sizes[0] // groups
    is_whole = columns % LANES == 0 or groups == 1
    if is_whole:
        made = to.new(node.name, sizes, exact=groups > 1)
    else:
        made = View(Store(*sizes, (groups - 1) * columns + padded(columns)), sizes)
        to.stores.append(made.store)
    size, maker = packed_size(window.KH * window.KW * C, columns), 0
    for g in range(groups):
        w = weight_recipe(
            pack_group, node, size, KH=window.KH, group=g, groups=groups, is_transposed=is_transposed
        )  # fmt: skip
        b = bias_recipe(bias_of_group, node, columns, first=g * columns, count=columns)
        given = View(x.store, (C, *x.sizes[1:]), x.start, x.step, x.channel + g * C)
        y = View(made.store, (columns, HO, WO), made.start, made.step, made.channel + g * columns)
        maker = to.emit(Taps(x=given, y=y, window=window, w=w, b=b, is_transposed=is_transposed))
    if is_whole:
        to.values[node.name] = Value(made, maker if groups == 1 else None)
    else:
        to.make(node, Copy, x=made)


def lower_transposed(to: Lowering, node: Node) -> None:
    """As it is, without phases: also with dilation, a stride past the kernel, or pads past it."""
    groups = node.layer.attributes()["groups"]
    columns = to.net.weights[node.weights["weight"]].shape[1]
    if groups > 1 and columns < _FEW:
        raise UnsupportedError(f"a transposed convolution in groups of {columns} outputs")
    lower_groups(to, node, to.image(node.inputs[0]))


@recipe_op
def pack_group(W: Array, size: int, KH: int, group: int, groups: int, is_transposed: bool) -> Array:
    """The outputs of a group of (N, C, KH, KW), or of (groups C, N / groups, KH, KW), packed as taps of C channels."""
    mine = W.reshape(groups, -1, *W.shape[1:])[group]
    mine = mine.swapaxes(0, 1) if is_transposed else mine
    return pack_taps(mine, size, KH, mine.shape[1], 1, len(mine), 1)


@recipe_op
def bias_of_group(bias: Array, size: int, first: int, count: int) -> Array:
    placed = aligned_zeros(size)
    placed[:count] = bias[first : first + count]
    return placed
