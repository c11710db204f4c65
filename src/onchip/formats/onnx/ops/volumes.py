"""Windows over three axes, (B, C, D, H, W), by layers over two axes.

A convolution unfolds the window along D into channels and stacks the planes vertically. Zero rows between planes keep
windows from crossing into the next one; outputs that span both are cropped. A transposed convolution does the same and
sums overlapping planes. Pools reduce rows and columns first, then D.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.windows import Window
from onchip.network.layers import AvgPool2d, Conv2d, ConvTranspose2d, Gather, MaxPool2d, Pad, Reshape, Slice
from onchip.network.layers.conv import window_counts
from onchip.network.types import numpy_dtype

MAX_PLANES = 1 << 14  # total planes seen by windows along D: each has a name


def add_conv(graph: GraphReader, op: Op, x: str, window: Window, groups: int, roles: Mapping[str, str]) -> None:
    """A Conv with a kernel of three axes."""
    C, D, H, W = graph.types[x].row_shape
    D_out, H_out, W_out = window_counts(graph.types[x], window.kernel, window.stride, window.pads, window.dilation)
    kernel, stride, dilation, pads = window.kernel, window.stride, window.dilation, window.pads
    weight = graph.weights[roles["weight"]]
    C_out = len(weight)
    if kernel[1:] == stride[1:] == (1, 1) and not any(pads[1:3] + pads[4:]):  # along D only
        narrow = graph.weight(roles["weight"], weight.reshape(*weight.shape[:3], 1))
        flat = graph.add_step(op, Reshape((C, D, H * W)), (x,))
        layer = Conv2d((stride[0], 1), (pads[0], 0, pads[3], 0), (dilation[0], 1), groups)
        y = graph.add_named(op, layer, (flat,), {**roles, "weight": narrow})
        graph.add(op, Reshape((C_out, D_out, H_out, W_out)), (y,))
        return
    steps = -(-(H + pads[1] + pads[4]) // stride[1])  # windows per plane, including those that reach past its end
    below = steps * stride[1] - H - pads[1]
    x = _padded(graph, op, x, (0, pads[0], pads[1], 0, 0, pads[3], below, 0))
    _check_planes(op, kernel[0] * D_out)
    planes_read = [first * stride[0] + tap * dilation[0] for tap in range(kernel[0]) for first in range(D_out)]
    if planes_read != list(range(graph.types[x].row_shape[1])):
        x = graph.add_step(op, Gather(2, tuple(planes_read)), (x,))
    planes = graph.add_step(op, Reshape((C * kernel[0], D_out * steps * stride[1], W)), (x,))
    reshaped = graph.weight(roles["weight"], weight.reshape(C_out, -1, *kernel[1:]))
    layer = Conv2d(stride[1:], (0, pads[2], max(0, window.span(1) - stride[1]), pads[5]), dilation[1:], groups)
    y = graph.add_named(op, layer, (planes,), {**roles, "weight": reshaped})
    cut = graph.add_step(op, Reshape((C_out, D_out, steps, W_out)), (y,))
    graph.add(op, Slice((0, 0, 0, 0), (C_out, D_out, H_out, W_out), (1, 1, 1, 1)), (cut,))


def add_transposed(
    graph: GraphReader, op: Op, x: str, window: Window, extra: list[int], groups: int, roles: Mapping[str, str]
) -> None:
    """A ConvTranspose with a kernel of three axes; `extra` is its output_padding."""
    C, D, H, W = graph.types[x].row_shape
    kernel, stride, dilation, pads = window.kernel, window.stride, window.dilation, window.pads
    weight = graph.weights[roles["weight"]]
    C_out = weight.shape[1] * groups
    reach = (H - 1) * stride[1] + window.span(1)  # output rows of a plane
    H_out = reach - pads[1] - pads[4] + extra[1]
    steps = -(-max(reach, pads[1] + H_out) // stride[1])
    x = _padded(graph, op, x, (0, 0, 0, 0, 0, 0, steps - H, 0))
    planes = graph.add_step(op, Reshape((C, D * steps, W)), (x,))
    reshaped = graph.weight(roles["weight"], weight.reshape(C, -1, *kernel[1:]))
    over = window.span(1) - stride[1]  # how far the last row's window reaches past its stride
    within = ConvTranspose2d(
        stride[1:], (0, pads[2], max(0, over), pads[5]), (max(0, -over), extra[2]), dilation[1:], groups
    )
    y = graph.add_named(op, within, (planes,), {"weight": reshaped})
    W_out = graph.types[y].row_shape[2]
    cut = graph.add_step(op, Reshape((C_out * kernel[0], D, steps * stride[1], W_out)), (y,))
    layer = Slice((0, 0, pads[1], 0), (C_out * kernel[0], D, H_out, W_out), (1, 1, 1, 1))
    flat = graph.add_step(op, Reshape((C_out * kernel[0], D, H_out * W_out)), (graph.add_step(op, layer, (cut,)),))
    _check_planes(op, kernel[0] * kernel[0])
    # Move each tap's planes to its position along D.
    taps = np.eye(kernel[0], dtype=numpy_dtype(graph.types[x].dtype)).reshape(kernel[0], 1, kernel[0], 1)
    name = graph.weight(f"{op.outputs[0]}_taps", np.tile(taps, (C_out, 1, 1, 1)))
    depth = ConvTranspose2d((stride[0], 1), (pads[0], 0, pads[3], 0), (extra[0], 0), (dilation[0], 1), C_out)
    bias = {"bias": roles["bias"]} if "bias" in roles else {}
    summed = graph.add_step(op, depth, (flat,), {"weight": name, **bias})
    graph.add(op, Reshape((C_out, graph.types[summed].row_shape[1], H_out, W_out)), (summed,))


def add_pool(
    graph: GraphReader, op: Op, x: str, window: Window, pads: tuple[int, ...], ceil: bool, count_pads: bool | None
) -> None:
    """A MaxPool, or with `count_pads` an AveragePool: separable, as the part of a window inside the input is a box."""

    def pool(size: tuple[int, int], strides: tuple[int, int], zeros: tuple[int, ...], apart: tuple[int, int]) -> (
        MaxPool2d | AvgPool2d
    ):  # fmt: skip
        if count_pads is None:
            return MaxPool2d(size, strides, zeros, apart, ceil)
        return AvgPool2d(size, strides, zeros, apart, ceil, count_pads)

    C, D, H, W = graph.types[x].row_shape
    (kd, *size), (sd, *strides), (dd, *apart) = window.kernel, window.stride, window.dilation
    flat = graph.add_step(op, Reshape((C * D, H, W)), (x,))
    within = pool((size[0], size[1]), (strides[0], strides[1]), (*pads[1:3], *pads[4:]), (apart[0], apart[1]))
    y = graph.add_step(op, within, (flat,))
    H_out, W_out = graph.types[y].row_shape[1:]
    lines = graph.add_step(op, Reshape((C, D, H_out * W_out)), (y,))
    y = graph.add_step(op, pool((kd, 1), (sd, 1), (pads[0], 0, pads[3], 0), (dd, 1)), (lines,))
    graph.add(op, Reshape((C, graph.types[y].row_shape[1], H_out, W_out)), (y,))


def _check_planes(op: Op, count: int) -> None:
    if count > MAX_PLANES:
        raise FormatError(f"{op}: too many planes", got=f"{count:,}", expected=f"at most {MAX_PLANES:,}")


def _padded(graph: GraphReader, op: Op, x: str, pads: tuple[int, ...]) -> str:
    return graph.add_step(op, Pad(pads), (x,)) if any(pads) else x
