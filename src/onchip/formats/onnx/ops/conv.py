"""Conv and ConvTranspose over one, two or three axes."""

from __future__ import annotations

import dataclasses

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.ops.op import MAX_SIZE
from onchip.formats.onnx.ops.volumes import add_conv, add_transposed
from onchip.formats.onnx.ops.windows import (
    Window,
    auto_pad,
    check_padded,
    read_window,
    split_pad,
    sum_pads,
    unpadded,
    window_attributes,
)
from onchip.network.graph import Node
from onchip.network.layers import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d
from onchip.network.layers.conv import conv_groups
from onchip.network.reading import show
from onchip.network.recipe import Array

_CONVS = {1: Conv1d, 2: Conv2d}
_TRANSPOSED = {1: ConvTranspose1d, 2: ConvTranspose2d}


@reads("Conv")
def read_conv(graph: GraphReader, op: Op) -> None:
    x, zeros = unpadded(graph, op)
    weight = _weight(graph, op, x)
    window = read_window(graph, op, x, weight.shape[2:])
    pads = sum_pads(window.pads, zeros)
    check_padded(graph, op, x, pads)
    roles, groups = _roles(graph, op, x, weight), _groups(op)
    if window.rank == 3:
        add_conv(graph, op, x, dataclasses.replace(window, pads=pads), groups, roles)
    else:
        graph.add(op, _CONVS[window.rank](window.stride, pads, window.dilation, groups), (x,), roles)


@reads("ConvTranspose")
def read_conv_transpose(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    weight = _weight(graph, op, x)
    window = read_window(graph, op, x, weight.shape[2:])
    extra = op.sizes("output_padding", [0] * window.rank, window.rank)
    if "output_shape" in op.attributes or auto_pad(op) in (b"SAME_UPPER", b"SAME_LOWER"):
        window, extra = _fit_output(graph, op, x, window, extra)
    sizes = zip((int(d) for d in graph.types[x].shape[2:]), window.stride, strict=True)
    uncropped = [(n - 1) * s + window.span(axis) for axis, (n, s) in enumerate(sizes)]
    check_padded(graph, op, x, [*uncropped, *(0 for _ in uncropped)])
    roles, groups = _roles(graph, op, x, weight), _groups(op)
    if window.rank == 3:
        add_transposed(graph, op, x, window, extra, groups, roles)
        return
    layer = _TRANSPOSED[window.rank](window.stride, window.pads, tuple(extra), window.dilation, groups)
    graph.add(op, layer, (x,), roles)


def _fit_output(graph: GraphReader, op: Op, x: str, window: Window, extra: list[int]) -> tuple[Window, list[int]]:
    """The window's pads and output_padding for output_shape, or for SAME: input size times stride."""
    sizes = [int(d) for d in graph.types[x].shape[2:]]
    wanted = [n * s for n, s in zip(sizes, window.stride, strict=True)]
    if "output_shape" in op.attributes:
        wanted = op.sizes("output_shape", [])[-window.rank :]  # some exporters include batch and channels
    if len(wanted) != window.rank:
        raise FormatError(f"{op}: bad attribute 'output_shape'", got=show(wanted), expected=f"{window.rank} sizes")
    total = []
    for axis, (n, size) in enumerate(zip(sizes, wanted, strict=True)):
        total.append(window.stride[axis] * (n - 1) + window.span(axis) + extra[axis] - size)
    # output_padding extends an output that is too short.
    extended = [e + max(0, -n) for e, n in zip(extra, total, strict=True)]
    mode = b"SAME_UPPER" if auto_pad(op) == b"SAME_UPPER" else b"SAME_LOWER"
    return dataclasses.replace(window, pads=split_pad(mode, [max(0, n) for n in total])), extended


def _weight(graph: GraphReader, op: Op, x: str) -> Array:
    weight = graph.weight_constant(op, 1, x)
    if weight.ndim not in (3, 4, 5) or 0 in weight.shape:
        expected = "3 to 5 axes, none of them 0"
        raise FormatError(f"{op}: unsupported weight shape", got=f"shape {weight.shape}", expected=expected)
    return weight


def _groups(op: Op) -> int:
    groups = op.attribute("group", 1)
    if not 1 <= groups <= MAX_SIZE:
        raise FormatError(f"{op}: bad attribute 'group'", got=show(groups), expected="at least 1")
    return groups


def _roles(graph: GraphReader, op: Op, x: str, weight: Array) -> dict[str, str]:
    roles = {"weight": graph.weight(op.inputs[1], weight)}
    if graph.has(op, 2):
        roles["bias"] = graph.weight(op.inputs[2], graph.weight_constant(op, 2, x))
    return roles


@writes(Conv1d, Conv2d)
def write_conv(graph: GraphWriter, node: Node) -> None:
    _write(graph, node, "Conv")


@writes(ConvTranspose1d, ConvTranspose2d)
def write_conv_transpose(graph: GraphWriter, node: Node) -> None:
    _write(graph, node, "ConvTranspose", output_padding=list(node.layer.attributes()["output_padding"]))


def _write(graph: GraphWriter, node: Node, op_type: str, **attributes: list[int]) -> None:
    kernel = graph.net.node_weight_types(node)["weight"].shape[2:]
    window = window_attributes(node.layer, [int(d) for d in kernel])
    operands = [graph.value(node), *graph.weights(node, "weight", "bias")]
    graph.emit(op_type, node, operands, group=conv_groups(node.layer), **window, **attributes)
