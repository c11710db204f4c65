"""Convolutions with a single window position, replaced by Linears."""

from __future__ import annotations

import math

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import Convolution, Embedding, Linear, Reshape, TransposedConvolution
from onchip.network.layers.conv import conv_groups, geometry
from onchip.network.recipe import Array, recipe_op
from onchip.plan.rewrites.edit import Draft, Rewritten, moves_before

Sizes = tuple[int, ...]


def multiply_windows(net: Network) -> Rewritten:
    """Conv whose only window is all of x   becomes   Reshape -> Linear -> Reshape;
    ConvTranspose of an x of one pixel   becomes   the same.

    Only if every pixel has a tap: a zero for a missing tap would be extra work, and NaN if it multiplied an infinity.
    """
    draft = Draft(net)
    notes = []
    for node in net.nodes:
        layer = node.layer
        if not isinstance(layer, Convolution | TransposedConvolution) or conv_groups(layer) > 1:
            continue
        source, _ = moves_before(draft, node)
        if source is not None and isinstance(source.layer, Embedding):
            continue  # its taps can become lookup tables
        x, y = (draft.types[value].row_shape for value in (node.inputs[0], node.name))
        is_transposed = isinstance(layer, TransposedConvolution)
        pixel, image = (x, y) if is_transposed else (y, x)
        kernel = draft.weights[node.weights["weight"]].shape[2:]
        _, pads, dilation = geometry(layer)
        if math.prod(pixel[1:]) > 1 or math.prod(image[1:]) > math.prod(kernel):
            continue
        if len(_taps_inside(kernel, image[1:], pads[: layer.rank], dilation)[0]) < math.prod(image[1:]):
            continue
        op = matrix_of_pixel if is_transposed else matrix_of_window
        roles = {
            "weight": draft.derive(
                f"{node.name}.matrix", op, (node.weights["weight"],), (math.prod(y), math.prod(x)), sides=image[1:],
                before=pads[: layer.rank], dilation=dilation,
            )
        }  # fmt: skip
        if "bias" in node.weights:
            bias = (node.weights["bias"],)
            roles["bias"] = draft.derive(f"{node.name}.biases", bias_of_pixels, bias, (math.prod(y),), sides=y[1:])
        flat, linear = (draft.fresh(f"{node.name}.{part}") for part in ("flat", "product"))
        draft.put(
            Node(flat, Reshape((math.prod(x),)), node.inputs), Node(linear, Linear(), (flat,), roles),
            Node(node.name, Reshape(y), (linear,)),
        )  # fmt: skip
        notes.append(f"replaced {node.name} by a Linear: it has one {'pixel' if is_transposed else 'window'}")
    return draft.done(notes)


@recipe_op
def matrix_of_window(W: Array, sides: Sizes, before: Sizes, dilation: Sizes) -> Array:
    """(N, C, taps...) -> (N, C * pixels): the taps of the only window, without those on padding."""
    N, C, *kernel = W.shape
    matrix = np.zeros((N, C, math.prod(sides)), W.dtype)
    taps, pixels = _taps_inside(tuple(kernel), sides, before, dilation)
    matrix[:, :, pixels] = W.reshape(N, C, -1)[:, :, taps]
    return matrix.reshape(N, -1)


@recipe_op
def matrix_of_pixel(W: Array, sides: Sizes, before: Sizes, dilation: Sizes) -> Array:
    """(C, N, taps...) -> (N * pixels, C): what x's only pixel contributes to y."""
    C, N, *kernel = W.shape
    matrix = np.zeros((N, math.prod(sides), C), W.dtype)
    taps, pixels = _taps_inside(tuple(kernel), sides, before, dilation)
    matrix[:, pixels] = W.reshape(C, N, -1)[:, :, taps].transpose(1, 2, 0)
    return matrix.reshape(-1, C)


@recipe_op
def bias_of_pixels(bias: Array, sides: Sizes) -> Array:
    """(N) -> (N * pixels)."""
    return np.repeat(bias, math.prod(sides))


def _taps_inside(kernel: Sizes, sides: Sizes, before: Sizes, dilation: Sizes) -> tuple[list[int], list[int]]:
    """The taps inside an image, of a window that starts `before` pixels before it, and the pixel of each tap."""
    taps, pixels = list[int](), list[int]()
    for index, tap in enumerate(np.ndindex(*kernel)):
        pixel = tuple(k * d - b for k, d, b in zip(tap, dilation, before, strict=True))
        if all(0 <= p < side for p, side in zip(pixel, sides, strict=True)):
            taps.append(index)
            pixels.append(int(np.ravel_multi_index(pixel, sides)))
    return taps, pixels
