"""Grouped and transposed convolutions of conv_fused: one Taps operation per group of channels."""

from __future__ import annotations

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.conv.lowering import DOT_OUTPUTS, Lowering, Value, image_sizes, window_of
from onchip.kernels.cpu.conv.operations.combine import Copy
from onchip.kernels.cpu.conv.operations.dot import lower_phases
from onchip.kernels.cpu.conv.operations.taps import Taps
from onchip.kernels.cpu.conv.values import Store, UnsupportedError, View
from onchip.kernels.cpu.conv.weights import bias_recipe, pack_taps, weight_recipe
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.tile import packed_size, padded
from onchip.network.graph import Node
from onchip.network.layers import TransposedConvolution
from onchip.network.recipe import Array, recipe_op

_FEW = 4  # outputs per group: with fewer, most lanes are empty and the reference kernel is faster on many images


def lower_groups(to: Lowering, node: Node, x: View) -> None:
    """Where a group's outputs are no whole vectors, each group writes past its last one and the next group overwrites
    that: in a padded buffer, from which the result is copied."""
    is_transposed = isinstance(node.layer, TransposedConvolution)
    kernel = to.net.weights[node.weights["weight"]].shape[2:]
    window, groups = window_of(node, tuple(kernel)), node.layer.attributes()["groups"]
    N, HO, WO = sizes = image_sizes(to.net.types[node.name].row_shape)
    columns, C = N // groups, x.sizes[0] // groups
    is_whole = columns % LANES == 0 or groups == 1
    if is_whole:
        out = to.output_view(node.name, sizes, exact=groups > 1)
    else:
        out = View(Store(*sizes, (groups - 1) * columns + padded(columns)), sizes)
        to.stores.append(out.store)
    size, maker = packed_size(window.KH * window.KW * C, columns), 0
    for g in range(groups):
        w = weight_recipe(
            pack_group, node, size, KH=window.KH, group=g, groups=groups, is_transposed=is_transposed
        )  # fmt: skip
        b = bias_recipe(bias_of_group, node, columns, first=g * columns, count=columns)
        group = View(x.store, (C, *x.sizes[1:]), x.start, x.step, x.channel + g * C)
        y = View(out.store, (columns, HO, WO), out.start, out.step, out.channel + g * columns)
        maker = to.emit(Taps(x=group, y=y, window=window, w=w, b=b, is_transposed=is_transposed))
    if is_whole:
        to.values[node.name] = Value(out, maker if groups == 1 else None)
    else:
        to.make(node, Copy, x=out)


def lower_transposed(to: Lowering, node: Node) -> None:
    """Tap by tap: also with dilation, and with strides or pads larger than the kernel. With very few outputs, whose
    vectors would be mostly empty, as the phases of its stride, if it has them."""
    groups = node.layer.attributes()["groups"]
    columns = to.net.weights[node.weights["weight"]].shape[1]
    if groups > 1 and columns < _FEW:
        raise UnsupportedError(f"a transposed convolution with {columns} outputs per group")
    x = to.image(node.inputs[0])
    if not (groups == 1 and columns <= DOT_OUTPUTS and x.sizes[0] % LANES == 0 and lower_phases(to, node, x)):
        lower_groups(to, node, x)


@recipe_op
def pack_group(W: Array, size: int, KH: int, group: int, groups: int, is_transposed: bool) -> Array:
    """One group of (N, C, KH, KW), or transposed of (groups * C, N / groups, KH, KW), packed as taps of C channels."""
    weights = W.reshape(groups, -1, *W.shape[1:])[group]
    weights = weights.swapaxes(0, 1) if is_transposed else weights
    return pack_taps(weights, size, KH, weights.shape[1], 1, len(weights), 1)


@recipe_op
def bias_of_group(bias: Array, size: int, first: int, count: int) -> Array:
    placed = aligned_zeros(size)
    placed[:count] = bias[first : first + count]
    return placed
