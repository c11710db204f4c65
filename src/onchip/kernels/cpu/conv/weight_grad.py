"""conv_weight_grad: the gradient of a convolution's weight, and of a transposed one's.

    dw[m, c, k] = sum over images and windows p of maps[m, p] image[c, p * stride - before + k * dilation]

Idea      A convolution's maps are dy and its image is x; a transposed one's are x and dy. A task has some images and up
          to PANEL maps. Chunk by chunk, it writes their windows p as rows of maps, and multiplies them by the register
          tile with the pixels that each tap reads: with images that have no pads, without a copy of them.
Order     The windows of a chunk in order, then chunk by chunk; images are divided into parts, whose sums are added in
          order: how many depends on the sizes and the batch only.
Floor     2 C_out C_in taps flop per window. The sums of a task, C_in taps PANEL floats, stay in L2.
Limits    float32. Maps are vectors: groups of few maps leave lanes idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CPU, CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.dense import multiply_panel, next_panel, padded_width
from onchip.kernels.cpu.microkernels.tile import ORDER, PANEL, padded
from onchip.kernels.cpu.microkernels.transpose import transpose
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import Convolution, TransposedConvolution, WeightGrad
from onchip.network.layers.conv import conv_groups, geometry
from onchip.network.recipe import Array
from onchip.network.types import TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim

_CHUNK = 128  # windows per chunk, at most: a panel of their maps is 32 KiB with AVX-512
_ROWS = 64  # of sums, per task that adds parts
_TASKS = 16  # if there are fewer panels of maps, images are divided into parts
_MAX_IMAGE_FLOATS = 1 << 22  # per worker: the pixels that a chunk reads, in copies
_THREAD_FLOP = 100_000  # the least work per thread that is worth waking it
_NO_FLOOR, _ZERO = np.float32(-np.inf), np.float32(0)


def panel_count(maps: int) -> int:
    """Panels of the maps of a group."""
    rest = maps % PANEL
    return maps // PANEL + (rest > 0) + (2 * LANES < rest <= 3 * LANES)


_panel_count = compiled(inline=True)(panel_count)


@dataclass(frozen=True)
class Sizes:
    """In the order in which `_run` reads them; axes: height, width. Channels and maps are those of a group."""

    groups: int
    C: int
    maps: int
    H: int
    W: int
    OH: int
    OW: int
    KH: int
    KW: int
    stride_h: int
    stride_w: int
    top: int
    left: int
    dilation_h: int
    dilation_w: int
    lines: int  # per chunk: rows of windows; if an image has one, of images
    columns: int  # windows per line of a chunk
    is_padded: bool  # pixels are copied, with zeros for pads, each phase of the stride contiguous

    @property
    def taps(self) -> int:
        return self.KH * self.KW

    @property
    def blocks(self) -> int:
        """Panels of maps, over all groups."""
        return self.groups * panel_count(self.maps)

    @property
    def most_parts(self) -> int:
        return -(-_TASKS // self.blocks)

    @property
    def row_floats(self) -> int:
        """Of a copied row of pixels."""
        return self.stride_w * (self.columns + (self.KW - 1) * self.dilation_w // self.stride_w)

    @property
    def line_rows(self) -> int:
        """Rows of pixels that a chunk reads per channel."""
        rows = (self.KH - 1) * self.dilation_h + 1
        return self.lines * rows if self.OH == 1 else (self.lines - 1) * self.stride_h + rows


(
    _GROUPS, _C, _MAPS, _H, _W, _OH, _OW, _KH, _KW, _STRIDE_H, _STRIDE_W, _TOP, _LEFT, _DILATION_H, _DILATION_W, _LINES,
    _COLUMNS, _IS_PADDED, _ROW_FLOATS, _LINE_ROWS, _PARTS, _IMAGE, _MAP, _Y, _SUMS, _SCRATCH, _FLOATS, _FIELDS,
) = range(28)  # fmt: skip


@compiled()
def _write_maps(layer: Array, maps: int, b: int, line: int, lines: int, p: int, columns: int, panel: int, width: int,
                count: int) -> None:  # fmt: skip
    """The windows of a chunk as rows of `width` maps: from column p on, of `lines` lines.

    maps  address of the first map of image 0
    b     the first image; line: its first line
    """
    windows = layer[_OH] * layer[_OW]
    image_bytes = layer[_GROUPS] * layer[_MAPS] * windows * 4
    for i in range(lines):
        at = maps + (b + i) * image_bytes if layer[_OH] == 1 else maps + b * image_bytes + (line + i) * layer[_OW] * 4
        transpose(panel + i * columns * width * 4, width * 4, at + p * 4, windows * 4, count, columns)


@compiled()
def _copy_row(layer: Array, source: int, first: int, columns: int, target: int) -> None:
    """One row of pixels from column `first` on, in phases of the stride; zeros outside the image.

    source  address of the row; 0 for a row of zeros
    """
    stride, W = layer[_STRIDE_W], layer[_W]
    size = columns + (layer[_KW] - 1) * layer[_DILATION_W] // stride
    for phase in range(stride):
        y, x = floats_at(target + phase * size * 4, size), floats_at(source, W)
        start = first + phase
        inside = max(0, min(size, (-start + stride - 1) // stride)) if source != 0 else size
        end = max(inside, min(size, (W - start + stride - 1) // stride)) if source != 0 else size
        for i in range(inside):
            y[i] = _ZERO
        if stride == 1:  # as constants: then the loops are vectorised
            for i in range(inside, end):
                y[i] = x[start + i]
        elif stride == 2:
            for i in range(inside, end):
                y[i] = x[start + 2 * i]
        else:
            for i in range(inside, end):
                y[i] = x[start + i * stride]
        for i in range(end, size):
            y[i] = _ZERO


@compiled()
def _copy_pixels(layer: Array, image: int, b: int, line: int, lines: int, p: int, columns: int, target: int) -> None:
    """The pixels that the chunk reads: for each channel, its rows."""
    H, W, C = layer[_H], layer[_W], layer[_C]
    image_bytes, span = layer[_GROUPS] * C * H * W * 4, (layer[_KH] - 1) * layer[_DILATION_H] + 1
    is_flat = layer[_OH] == 1
    rows = lines * span if is_flat else (lines - 1) * layer[_STRIDE_H] + span
    row_bytes = layer[_ROW_FLOATS] * 4
    for c in range(C):
        for r in range(rows):
            at, h = image + b * image_bytes, line * layer[_STRIDE_H] - layer[_TOP] + r
            if is_flat:
                at, h = at + r // span * image_bytes, r % span - layer[_TOP]
            source = at + (c * H + h) * W * 4 if 0 <= h < H else 0
            first = p * layer[_STRIDE_W] - layer[_LEFT]
            _copy_row(layer, source, first, columns, target + (c * layer[_LINE_ROWS] + r) * row_bytes)


@compiled()
def _add_chunk(layer: Array, pixels: int, channel: int, row: int, line: int, panel: int, width: int, lines: int,
               columns: int, sums: int) -> None:  # fmt: skip
    """sums[c, k, m] += sum over the windows of a chunk of pixel[c, k] map[m].

    pixels              address of the first pixel of channel 0
    channel, row, line  bytes from one channel, row of pixels and line of windows to the next
    """
    C, KH, KW, stride = layer[_C], layer[_KH], layer[_KW], layer[_STRIDE_W]
    size = columns + (KW - 1) * layer[_DILATION_W] // stride  # of a phase
    by_columns, tap_bytes = C < KW and stride == 1, width * 4
    for h in range(KH):
        at = pixels + h * layer[_DILATION_H] * row
        if by_columns:
            for c in range(C):
                out = sums + (c * KH + h) * KW * tap_bytes
                multiply_panel(
                    at + c * channel, layer[_DILATION_W] * 4, KW, panel, width, out, tap_bytes, out, tap_bytes, lines,
                    line, columns, _NO_FLOOR,
                )  # fmt: skip
            continue
        for k in range(KW):
            offset = k * layer[_DILATION_W]
            if layer[_IS_PADDED]:
                offset = offset % stride * size + offset // stride
            out, out_row = sums + (h * KW + k) * tap_bytes, KH * KW * tap_bytes
            multiply_panel(
                at + offset * 4, channel, C, panel, width, out, out_row, out, out_row, lines, line, columns, _NO_FLOOR
            )


@compiled(inline=True)
def _sums_at(layer: Array, part: int, block: int, blocks: int) -> int:
    """The address of a task's sums."""
    return layer[_SUMS] + (part * blocks + block) * layer[_C] * layer[_KH] * layer[_KW] * PANEL * 4  # type: ignore[no-any-return]


@compiled(inline=True)
def _panel(maps: int, i: int) -> tuple[int, int]:
    """The first map and the width of panel i of a group: wide ones, then one or two of fewer vectors."""
    whole = maps // PANEL
    if i < whole:
        return i * PANEL, PANEL
    m = whole * PANEL
    width = next_panel(padded_width(maps) - m)
    return (m, width) if i == whole else (m + width, next_panel(padded_width(maps) - m - width))


@compiled()
def _task(worker: int, task: int, layer: Array, operands: int, B: int, part_images: int, parts: int) -> None:
    """The sums of up to PANEL maps over the images of a part."""
    C, H, W, OH, OW = layer[_C], layer[_H], layer[_W], layer[_OH], layer[_OW]
    panels = _panel_count(layer[_MAPS])
    blocks, block, part = layer[_GROUPS] * panels, task // parts, task % parts
    group = block // panels
    m, width = _panel(layer[_MAPS], block % panels)
    count = min(width, layer[_MAPS] - m)
    sums = _sums_at(layer, part, block, blocks)
    image = int_at(operands + layer[_IMAGE] * 8) + group * C * H * W * 4
    maps = int_at(operands + layer[_MAP] * 8) + (group * layer[_MAPS] + m) * OH * OW * 4
    panel = layer[_SCRATCH] + worker * layer[_FLOATS] * 4
    pixels = panel + _CHUNK * PANEL * 4
    zeros = floats_at(sums, C * layer[_KH] * layer[_KW] * width)
    for i in range(len(zeros)):
        zeros[i] = _ZERO
    begin, end = part * part_images, min(B, (part + 1) * part_images)
    image_bytes = layer[_GROUPS] * C * H * W * 4
    row_bytes = layer[_ROW_FLOATS] * 4 if layer[_IS_PADDED] else W * 4
    channel = layer[_LINE_ROWS] * row_bytes if layer[_IS_PADDED] else H * W * 4
    line_bytes = layer[_STRIDE_H] * row_bytes
    if OH == 1:
        line_bytes = ((layer[_KH] - 1) * layer[_DILATION_H] + 1) * row_bytes if layer[_IS_PADDED] else image_bytes
    images = layer[_LINES] if OH == 1 else 1
    for b in range(begin, end, images):
        for line in range(0, OH, layer[_LINES]):
            lines = min(images, end - b) if OH == 1 else min(layer[_LINES], OH - line)
            for p in range(0, OW, layer[_COLUMNS]):
                columns = min(layer[_COLUMNS], OW - p)
                _write_maps(layer, maps, b, line, lines, p, columns, panel, width, count)
                source = image + b * image_bytes + (line * layer[_STRIDE_H] * W + p) * 4
                if layer[_IS_PADDED]:
                    _copy_pixels(layer, image, b, line, lines, p, columns, pixels)
                    source = pixels
                _add_chunk(layer, source, channel, row_bytes, line_bytes, panel, width, lines, columns, sums)


@compiled()
def _finish(worker: int, task: int, layer: Array, dw: int, parts: int) -> None:
    """Add the parts of some rows of a task's sums, in order, and write them as columns of dw."""
    panels, size = _panel_count(layer[_MAPS]), layer[_C] * layer[_KH] * layer[_KW]
    blocks, chunks = layer[_GROUPS] * panels, (size + _ROWS - 1) // _ROWS
    block, first = task // chunks, task % chunks * _ROWS
    group, rows = block // panels, min(_ROWS, size - first)
    m, width = _panel(layer[_MAPS], block % panels)
    count = min(width, layer[_MAPS] - m)
    total = floats_at(_sums_at(layer, 0, block, blocks) + first * width * 4, rows * width)
    for part in range(1, parts):
        more = floats_at(_sums_at(layer, part, block, blocks) + first * width * 4, rows * width)
        for n in range(len(total)):
            total[n] += more[n]
    for i in range(count):
        y = floats_at(dw + ((group * layer[_MAPS] + m + i) * size + first) * 4, rows)
        for n in range(rows):
            y[n] = total[n * width + i]


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    layer = ints_at(facts, _FIELDS)
    blocks = layer[_GROUPS] * _panel_count(layer[_MAPS])
    parts = max(1, min(B, layer[_PARTS]))
    part_images = (B + parts - 1) // parts
    flop = 2 * B * layer[_GROUPS] * layer[_MAPS] * layer[_C] * layer[_KH] * layer[_KW] * layer[_OH] * layer[_OW]
    threads = max(1, min(threads, flop // _THREAD_FLOP))
    run_tasks(_task, (layer, operands, B, part_images, parts), blocks * parts, threads)
    chunks = (layer[_C] * layer[_KH] * layer[_KW] + _ROWS - 1) // _ROWS
    run_tasks(_finish, (layer, int_at(operands + layer[_Y] * 8), parts), blocks * chunks, threads)


@dataclass(frozen=True)
class Facts:
    sizes: Sizes
    operands: tuple[int, int, int]  # indices of image, maps and dw


class ConvWeightGradKernel(CpuKernel):
    name = "conv_weight_grad"
    layers = (WeightGrad,)
    order = f"{ORDER}, in chunks of windows; images in parts by the sizes and the batch"

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        is_conv = isinstance(layer, WeightGrad) and isinstance(layer.of, Convolution | TransposedConvolution)
        return is_conv and layer.role == "weight"  # type: ignore[attr-defined]

    def lower(self, node: Node, types: Mapping[str, TensorType], device: Device) -> Facts | str:
        facts = _facts(node, types)
        if any(types[value].dtype != "float32" for value in (node.inputs[-1], node.name)):
            return "computes on float32"
        if _image_floats(facts.sizes) > _MAX_IMAGE_FLOATS:
            return f"needs {4 * _image_floats(facts.sizes) >> 20} MiB of scratch per thread"
        return facts

    def label(self, net: Network, node: Node) -> str:
        assert isinstance(node.layer, WeightGrad)
        return f"{self.name}<{node.layer.of.kind}>"

    def cost(self, net: Network, node: Node) -> CoreCost:
        sizes = _facts(node, net.types).sizes
        x, dy, dw = (net.types[value] for value in (node.inputs[0], node.inputs[-1], node.name))
        windows = sizes.OH * sizes.OW
        columns = padded(sizes.maps)
        chunks = -(-windows // (sizes.lines * sizes.columns))
        rows = sizes.groups * sizes.C * sizes.taps
        copied = 4 * sizes.blocks * chunks * _image_floats(sizes) if sizes.is_padded else 0
        return CoreCost(
            2 * windows * rows * sizes.maps, x.row_bytes + dy.row_bytes, dw.row_bytes,
            share=CPU.tile_share * sizes.maps / columns, rows_per_core=1,
            row_cache_bytes=copied + 4 * columns * (2 * windows + 2 * chunks * rows),
            fixed_cache_bytes=4 * sizes.most_parts * columns * rows,
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)
        sizes = meta.sizes
        floats = _CHUNK * PANEL + _image_floats(sizes)

        def facts(threads: int) -> tuple[int, object]:
            sums = np.empty(sizes.most_parts * sizes.blocks * sizes.C * sizes.taps * PANEL, np.float32)
            scratch = aligned_zeros(threads * floats)
            layer = words(
                *astuple(sizes),
                sizes.row_floats,
                sizes.line_rows,
                sizes.most_parts,
                *meta.operands,
                sums,
                scratch,
                floats,
            )
            return address(layer), (layer, sums, scratch)

        return CompiledLaunch(address_of(_run), facts)


def _facts(node: Node, types: Mapping[str, TensorType]) -> Facts:
    assert isinstance(node.layer, WeightGrad)
    layer, values = node.layer.of, list(dict.fromkeys(node.inputs))
    is_transposed = isinstance(layer, TransposedConvolution)
    image, maps = (node.inputs[-1], node.inputs[0]) if is_transposed else (node.inputs[0], node.inputs[-1])
    (C, *pixels), (M, *windows) = types[image].row_shape, types[maps].row_shape
    (_, _, *kernel), groups = types[node.name].row_shape, conv_groups(layer)
    stride, pads, dilation = geometry(layer)
    rank = len(stride)

    def both(axes: Sequence[int], one: int = 1) -> tuple[int, int]:
        """Of height and width; `one` for the height of a single axis."""
        return (one, axes[0]) if rank == 1 else (axes[0], axes[1])

    windows_of = both(windows)
    columns = min(windows_of[1], _CHUNK)
    lines = max(1, _CHUNK // columns)
    sizes = Sizes(
        groups, C // groups, M // groups, *both(pixels), *windows_of, *both(kernel), *both(stride), *both(pads, 0),
        *both(dilation), lines if windows_of[0] == 1 else min(windows_of[0], lines), columns,
        any(pads) or stride[-1] > 1,
    )  # fmt: skip
    return Facts(sizes, (values.index(image), values.index(maps), len(values)))


def _image_floats(sizes: Sizes) -> int:
    """Of the pixels that a chunk reads, if they are copied."""
    return sizes.C * sizes.line_rows * sizes.row_floats if sizes.is_padded else 0
