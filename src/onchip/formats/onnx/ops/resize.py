"""Resize and Upsample: nearest, linear and cubic; DepthToSpace and SpaceToDepth."""

from __future__ import annotations

import math
from typing import Any, cast, get_args

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.axis_filter import filter_axis, filter_taps
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter, OpsetError
from onchip.network.graph import Node
from onchip.network.layers import LinearResize, NearestResize, Permute, Reshape
from onchip.network.layers.resize import Coordinates, Rounding, source_positions
from onchip.network.reading import show
from onchip.network.types import BATCH, Dim

_IN_11 = 11  # opset from which a Resize has coordinate modes
_MAX_SIZE = 1 << 28


@reads("Resize", "Upsample")
def read_resize(graph: GraphReader, op: Op) -> None:
    x, mode = graph.value(op), op.attribute("mode", b"nearest")
    if mode not in (b"nearest", b"linear", b"bilinear", b"cubic"):
        raise FormatError(f"{op}: unsupported resize", got=show(mode), expected="mode nearest, linear or cubic")
    sizes, scales = _sizes(graph, op, x)
    coordinates, rounding = _how(graph, op)
    smooths = op.attribute("antialias", 0) != 0 and mode != b"nearest" and min(scales, default=1.0) < 1
    if not graph.one_row:
        if (sizes[0], scales[0]) not in ((BATCH, 1.0), (graph.batch, 1.0)):
            raise FormatError(f"{op} would resize the batch", got=show(sizes), expected="axis 0 unchanged")
        sizes, scales = sizes[1:], scales[1:]
    row_sizes = tuple(int(size) for size in sizes)
    if mode == b"cubic" or smooths:
        a = op.number("cubic_coeff_a", -0.75) if mode == b"cubic" else None
        within = op.attribute("exclude_outside", 0) != 0
        axes = list(enumerate(zip(graph.types[x].row_shape, row_sizes, scales, strict=True), 1))
        for axis, (n, size, scale) in reversed(axes):
            if (n, scale) != (size, 1.0):
                at = source_positions(n, size, scale, coordinates)
                x = filter_axis(graph, op, x, axis, *filter_taps(at, n, scale if smooths else 1.0, a, within))
        graph.bind_output(op, 0, x)
    elif mode == b"nearest":
        graph.add(op, NearestResize(row_sizes, tuple(scales), coordinates, rounding), (x,))
    else:
        graph.add(op, LinearResize(row_sizes, tuple(scales), coordinates), (x,))


def _how(graph: GraphReader, op: Op) -> tuple[Coordinates, Rounding]:
    """Before opset 11 the coordinate is i / scale, rounded down."""
    if graph.opset < _IN_11 or op.kind == "Upsample":
        return "asymmetric", "floor"
    coordinates = op.attribute("coordinate_transformation_mode", b"half_pixel").decode(errors="replace")
    rounding = op.attribute("nearest_mode", b"round_prefer_floor").decode(errors="replace")
    if coordinates == "tf_half_pixel_for_nn" and rounding == "floor":  # (i + 0.5) / scale: shifted by half a pixel
        coordinates, rounding = "half_pixel", "round_prefer_ceil"
    if coordinates not in get_args(Coordinates) or rounding not in get_args(Rounding):
        expected = f"{', '.join(get_args(Coordinates))}; {', '.join(get_args(Rounding))}"
        raise FormatError(f"{op}: unsupported resize", got=show((coordinates, rounding)), expected=expected)
    return cast(Coordinates, coordinates), cast(Rounding, rounding)


def _sizes(graph: GraphReader, op: Op, x: str) -> tuple[list[Dim], list[float]]:
    """Output size and scale per axis, batch included."""
    shape = list(graph.shape(x))
    axes = list(range(len(shape)))
    if "axes" in op.attributes:
        axes = [graph.axis(op, x, axis) - graph.one_row for axis in op.sizes("axes", [])]
    at_scales = 1 if graph.opset < _IN_11 or op.kind == "Upsample" else 2
    sizes, scales = list(shape), [1.0] * len(shape)
    if "scales" in op.attributes or (graph.has(op, at_scales) and graph.constant(op, at_scales).size):
        values = op.attribute("scales", [0.0]) if "scales" in op.attributes else graph.constant(op, at_scales).tolist()
        _check_length(op, values, axes)
        for axis, scale in zip(axes, values, strict=True):
            n = shape[axis]
            if not 0 < scale < math.inf or (n == BATCH and scale != 1) or (n != BATCH and int(n) * scale > _MAX_SIZE):
                raise FormatError(f"{op}: bad scales", got=show(values), expected="values above 0; 1 for the batch")
            sizes[axis], scales[axis] = n if n == BATCH else math.floor(int(n) * scale), float(scale)
        return sizes, scales
    wanted: list[Dim] = graph.constant_or_shape(op, 3).tolist()
    _check_length(op, wanted, axes)
    for axis, size in zip(axes, wanted, strict=True):
        n = shape[axis]
        if n == BATCH and size not in (BATCH, graph.batch):
            raise FormatError(f"{op} would resize the batch", got=show(wanted), expected="axis 0 unchanged")
        if n != BATCH and (size == BATCH or not 0 < int(size) <= _MAX_SIZE or not n):
            raise FormatError(f"{op}: bad sizes", got=show(wanted), expected="sizes above 0")
        sizes[axis], scales[axis] = n if n == BATCH else size, 1.0 if n == BATCH else int(size) / int(n)
    policy = op.attribute("keep_aspect_ratio_policy", b"stretch")
    if policy != b"stretch":
        if policy not in (b"not_larger", b"not_smaller") or BATCH in [shape[axis] for axis in axes]:
            expected = "stretch; not_larger or not_smaller only if the batch is not resized"
            raise FormatError(f"{op}: unsupported resize", got=show(policy), expected=expected)
        scale = (min if policy == b"not_larger" else max)(scales[axis] for axis in axes)
        for axis in axes:
            sizes[axis], scales[axis] = math.floor(scale * int(shape[axis]) + 0.5), scale
    return sizes, scales


def _check_length(op: Op, values: list[Dim] | list[float], axes: list[int]) -> None:
    if len(values) != len(axes) or len(set(axes)) < len(axes):
        raise FormatError(f"{op}: bad sizes or scales", got=show(values), expected=f"one for each of {len(axes)} axes")


@writes(NearestResize, LinearResize)
def write_resize(graph: GraphWriter, node: Node) -> None:
    """Write scales if exact in float32, else sizes (opset 18 and later, which can omit the batch axis)."""
    layer, row = node.layer, graph.net.input_types(node)[0].row_shape
    assert isinstance(layer, NearestResize | LinearResize)
    if layer.coordinates == "half_pixel_symmetric" and graph.opset < 19:
        raise OpsetError("half_pixel_symmetric needs opset 19")
    attributes: dict[str, Any] = {"mode": "linear", "coordinate_transformation_mode": layer.coordinates}
    if isinstance(layer, NearestResize):
        attributes |= {"mode": "nearest", "nearest_mode": layer.rounding}
    axes = list(zip(row, layer.sizes, layer.scales, strict=True))
    if all(float(np.float32(scale)) == scale and math.floor(n * scale) == size for n, size, scale in axes):
        scales = graph.constant(f"{node.name}_scales", np.array([1, *layer.scales], np.float32))
        graph.emit("Resize", node, [graph.value(node), "", scales], **attributes)
        return
    if graph.opset < 18 or any(scale != size / n for n, size, scale in axes):
        raise OpsetError("float32 scales cannot represent its sizes")
    sizes = graph.constant(f"{node.name}_sizes", np.array(layer.sizes, np.int64))
    graph.emit("Resize", node, [graph.value(node), "", "", sizes], axes=list(range(1, len(row) + 1)), **attributes)


# -- DepthToSpace and SpaceToDepth -----------------------------------------------------------------------------------


@reads("DepthToSpace")
def read_depth_to_space(graph: GraphReader, op: Op) -> None:
    """Channels (b, b, C) or, in CRD mode, (C, b, b), become blocks of b x b pixels."""
    x, b = graph.value(op), op.attribute("blocksize", 0)
    C, H, W = _image(graph, op, x)
    mode = op.attribute("mode", b"DCR")
    if b < 1 or C % (b * b) or mode not in (b"DCR", b"CRD"):
        raise FormatError(f"{op}: bad blocks", got=f"{b} of {graph.types[x]}, {show(mode)}", expected="b * b divides C")
    c = C // (b * b)
    split, axes = ((b, b, c, H, W), (0, 3, 4, 1, 5, 2)) if mode == b"DCR" else ((c, b, b, H, W), (0, 1, 4, 2, 5, 3))
    _moved(graph, op, x, split, axes, (c, H * b, W * b))


@reads("SpaceToDepth")
def read_space_to_depth(graph: GraphReader, op: Op) -> None:
    """Blocks of b x b pixels become channels (b, b, C) or, in CRD mode, (C, b, b)."""
    x, b = graph.value(op), op.attribute("blocksize", 0)
    C, H, W = _image(graph, op, x)
    mode = op.attribute("mode", b"DCR")
    if b < 1 or H % b or W % b or mode not in (b"DCR", b"CRD"):
        got = f"{b} of {graph.types[x]}, {show(mode)}"
        raise FormatError(f"{op}: bad blocks", got=got, expected="H and W divisible by blocksize, DCR or CRD")
    axes = (0, 3, 5, 1, 2, 4) if mode == b"DCR" else (0, 1, 3, 5, 2, 4)
    _moved(graph, op, x, (C, H // b, b, W // b, b), axes, (b * b * C, H // b, W // b))


def _image(graph: GraphReader, op: Op, x: str) -> tuple[int, int, int]:
    graph.need_channels(op, x, 4)
    if len(graph.types[x].shape) != 4:
        raise FormatError(f"{op}: images only", got=str(graph.types[x]), expected="[B, C, H, W]")
    C, H, W = graph.types[x].row_shape
    return C, H, W


def _moved(
    graph: GraphReader, op: Op, x: str, split: tuple[int, ...], axes: tuple[int, ...], row: tuple[int, ...]
) -> None:
    blocks = graph.add_step(op, Reshape(split), (x,))
    graph.add(op, Reshape(row), (graph.add_step(op, Permute(axes), (blocks,)),))
