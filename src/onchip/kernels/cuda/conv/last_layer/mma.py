"""Host side of conv/last_layer/mma.cu: convolution to few output channels on the tensor cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from ctypes import c_int32, c_uint32
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.arguments import Argument, Input, Int64, Output, UInt32, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.fast_divide import Divider, divider
from onchip.kernels.cuda.common.precision import PRECISIONS, order_of, round_up
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.conv.direct import Geometry, Pair, bias_recipe, geometry_of
from onchip.kernels.cuda.conv.fusion import TAPS, ConvLowering
from onchip.kernels.cuda.conv.last_layer.cells import CellAxis, Table, cell_axis, cell_weights
from onchip.kernels.cuda.conv.last_layer.match import LastLayerKernel, find_last_layers
from onchip.kernels.cuda.conv.warp_mma import (
    COLUMNS,
    PART,
    even_share,
    fragment_shape,
    in_fragments,
    multiplied_fragments,
)
from onchip.network.graph import Network, Node
from onchip.network.recipe import Array, Recipe, rearranging_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
Y_TYPES = ELEMENT_TYPES | {"uint8": "unsigned char"}
GROUPS = (1, 2, 3)  # tiles of 8 columns per warp tile
READ_BYTES = 16  # alignment of a pixel's channels
STEP_BYTES = 32  # bytes of channels per step of k
WARPS, FRAGMENTS = 8, 2  # warps per block, and fragments of 16 cells per warp tile
BLOCK_BYTES = 1 << 10  # shared memory that the system reserves per block
MAX_CELLS = WARPS * FRAGMENTS * 16  # per tile
ROW_CELLS = (256, 128, 64, 32, 16, 8, 4, 2, 1)  # cells per row of a tile, at most
Axes = tuple[CellAxis, CellAxis]
Tile = tuple[int, int, int]  # images; rows of cells, and cells per row


class AxisStruct(CStruct):
    source, c_name = SOURCE, "Axis"
    _fields_ = (
        ("side_in", c_int32), ("side_out", c_int32), ("cell", c_int32), ("step", c_int32), ("first", c_int32),
        ("taps", c_int32), ("dilation", c_int32), ("cells", c_int32), ("pixels", c_int32), ("by_cells", Divider),
        ("by_pixels", Divider), ("by_tiles", Divider),
    )  # fmt: skip


class LayerStruct(CStruct):
    source, c_name = SOURCE, "Layer"
    _fields_ = (
        ("C", c_int32), ("N", c_int32), ("steps", c_int32), ("chunks", c_int32), ("pitch", c_int32),
        ("images", c_int32), ("is_nhwc", c_uint32), ("unit", c_int32), ("holds_weights", c_uint32), ("h", AxisStruct),
        ("w", AxisStruct), ("by_chunks", Divider),
    )  # fmt: skip


@dataclass(frozen=True)
class ConvLastLayerLowering(ConvLowering):
    fast_bytes: int
    is_nhwc: bool = False  # whether y is NHWC
    cell_size: Pair = (1, 1)  # in positions of y; transposed: in pixels of x

    @property
    def steps(self) -> int:
        """Steps of k per tap."""
        return math.ceil(self.geometry.C / PRECISIONS[self.precision].step)

    @property
    def pitch(self) -> int:
        """Bytes per pixel in shared memory: an odd number of 16 B chunks, so neighbours hit different banks."""
        return self.steps * STEP_BYTES + READ_BYTES

    @property
    def max_blocks(self) -> int:
        """Blocks per SM that registers allow."""
        return 2 if PRECISIONS[self.precision].splits > 1 else 3

    @property
    def axes(self) -> Axes:
        return self._axes(self.cell_size)

    def _axes(self, cell_size: Pair) -> Axes:
        return cell_axis(self.geometry, 0, cell_size[0]), cell_axis(self.geometry, 1, cell_size[1])

    def with_best_cells(self) -> ConvLastLayerLowering:
        """The same with the cells of fewest clocks, whatever B."""
        pairs = [(down, right) for right in (1, 2) for down in range(1, 9)]
        allowed = [pair for pair in pairs if self._allows(0, pair[0]) and self._allows(1, pair[1])]
        return replace(self, cell_size=min(allowed, key=lambda size: self._clocks(self._axes(size))))

    def _allows(self, axis: int, size: int) -> bool:
        g = self.geometry
        positions = size * g.stride[axis] if g.is_transposed else size
        return size == 1 or (positions < 2 * g.sides_out[axis] and g.dilation[axis] == 1)

    def _clocks(self, axes: Axes) -> float:
        """Clocks per image in large tiles."""
        return self._tile_clocks(axes, *(self._large_tile(axes) or (1, (1, 1, 1))))

    def _tile_clocks(self, axes: Axes, blocks: int, tile: Tile) -> float:
        """Clocks per image: the maximum of shared memory, tensor cores, issue, and latency with too few warps."""
        (down, right), (images, h, w), precision = axes, tile, PRECISIONS[self.precision]
        columns = math.ceil(self._columns(axes) / COLUMNS)
        group = self._group(columns)
        chunks = math.ceil(columns / group)
        is_split = precision.splits > 1
        conflicts = math.gcd(right.step, 8)  # bank conflicts of rows so far apart
        costs = self.costs.last_layer
        shared = FRAGMENTS * costs.rows_clocks * conflicts + precision.splits * group * costs.weights_clocks
        mma_clocks = costs.mma_clocks * FRAGMENTS * group * (3 if is_split else 1)
        issued = precision.splits * (costs.issue_clocks + costs.group_clocks * group)
        warp_tiles = math.ceil(images * h * w / (16 * FRAGMENTS)) * chunks  # per tile
        latency = costs.step_clocks + costs.split_clocks * is_split
        latency += costs.global_clocks * (not self._holds_weights(axes))
        step = max(shared, mma_clocks, issued, latency / (blocks * min(WARPS, warp_tiles)))
        pixels = images * down.pixels(h) * right.pixels(w) * self.pitch / costs.bytes_per_clock
        tiles = math.ceil(down.cells / h) * math.ceil(right.cells / w) / images
        return tiles * (warp_tiles * down.taps * right.taps * self.steps * step + pixels)

    def _group(self, tiles: int) -> int:
        """The element of GROUPS with the least column padding; the larger on a tie."""
        return min(GROUPS, key=lambda group: (round_up(tiles, group), -group))

    def _columns(self, axes: Axes) -> int:
        return axes[0].cell * axes[1].cell * self.geometry.N

    @property
    def columns(self) -> int:
        return self._columns(self.axes)

    @property
    def group(self) -> int:
        return self._group(math.ceil(self.columns / COLUMNS))

    @property
    def all_columns(self) -> int:
        """Columns, padded to whole groups."""
        return round_up(self.columns, COLUMNS * self.group)

    def shared_bytes(self, tile: Tile) -> int:
        return self._fixed_bytes(self.axes) + self._tile_bytes(self.axes)(tile)

    def _fixed_bytes(self, axes: Axes) -> int:
        """Shared memory of every tile: tables, and weights that stay."""
        weights = self._weight_bytes(axes) if self._holds_weights(axes) else 0
        return 8 * round_up(self._columns(axes), COLUMNS * max(GROUPS)) + weights

    def _tile_bytes(self, axes: Axes) -> Callable[[Tile], int]:
        """The shared memory of a tile's x and y. A function, as the search for a tile calls it a thousand times."""
        (down, right), pitch = axes, self.pitch
        y_bytes = self._columns(axes) * DTYPE_BYTES[self.dtypes[1]]

        def tile_bytes(tile: Tile) -> int:
            images, h, w = tile
            return images * down.pixels(h) * right.pixels(w) * pitch + round_up(images * h * w * y_bytes, 16)

        return tile_bytes

    def _weight_bytes(self, axes: Axes) -> int:
        (down, right), precision = axes, PRECISIONS[self.precision]
        tiles = math.ceil(self._columns(axes) / COLUMNS)
        columns = COLUMNS * round_up(tiles, self._group(tiles))
        return precision.splits * down.taps * right.taps * self.steps * STEP_BYTES * columns

    def _holds_weights(self, axes: Axes) -> bool:
        """Whether weights stay in shared memory: they do if they fit in half of it."""
        return 2 * self._weight_bytes(axes) <= self.fast_bytes

    def _large_tile(self, axes: Axes) -> tuple[int, Tile] | None:
        """Blocks per SM and tile with the fewest clocks: fewer blocks allow larger tiles."""
        found = [(blocks, self._tile_of(axes, blocks)) for blocks in range(self.max_blocks, 0, -1)]
        tiles = [(blocks, tile) for blocks, tile in found if tile is not None]
        return min(tiles, key=lambda each: self._tile_clocks(axes, *each), default=None)

    def _tile_of(self, axes: Axes, blocks: int) -> Tile | None:
        """The tile with the least halo, for so many blocks per SM."""
        (down, right), bytes_of = axes, self._tile_bytes(axes)
        most_bytes = self.fast_bytes // blocks - BLOCK_BYTES - self._fixed_bytes(axes)  # of x and y
        if most_bytes < bytes_of((1, 1, 1)):
            return None

        def pixels_per_cell(tile: Tile) -> float:
            lines = 1.0 if tile[2] == right.cells else self.costs.last_layer.partial_factor
            return lines * down.pixels(tile[1]) * right.pixels(tile[2]) / (tile[1] * tile[2])

        tiles = list[Tile]()
        for w in dict.fromkeys(even_share(right.cells, most) for most in ROW_CELLS):
            h = even_share(down.cells, max(1, MAX_CELLS // w))
            while h > 1 and bytes_of((1, h, w)) > most_bytes:
                h = math.ceil(h / 2)
            tiles += [(1, h, w)] if bytes_of((1, h, w)) <= most_bytes else []
        if not tiles:
            return None
        images, h, w = min(tiles, key=pixels_per_cell)
        if (h, w) == (down.cells, right.cells):
            many = range(MAX_CELLS // (h * w), 1, -1)
            images = next((n for n in many if bytes_of((n, h, w)) <= most_bytes), 1)
        return images, h, w

    def tile(self, B: int) -> Tile | None:
        """The large tile, with fewer cells if there would be fewer tiles than SMs; None if no cell fits.

        All compute the same bits.
        """
        found = self._large_tile(self.axes)
        if found is None:
            return None
        images, h, w = found[1]
        while self.count(B, (images, h, w)) < self.units and images > 1:
            images = math.ceil(images / 2)
        while self.count(B, (images, h, w)) < self.units and h > 1 and h * w > 16 * FRAGMENTS:
            h = math.ceil(h / 2)
        return images, h, w

    def count(self, B: int, tile: Tile) -> int:
        (down, right), (images, h, w) = self.axes, tile
        return math.ceil(B / images) * math.ceil(down.cells / h) * math.ceil(right.cells / w)

    def why_not(self) -> str:
        g = self.geometry
        if g.C * DTYPE_BYTES[self.dtypes[0]] % READ_BYTES:
            return f"needs channels in multiples of {READ_BYTES} B, got {g.C} in {self.dtypes[0]}"
        if g.reach >= 1 << 30:
            return "convolves images of less than 2^30 elements, padding included"
        if self.tile(1) is None:
            needed = self.shared_bytes((1, 1, 1)) + BLOCK_BYTES
            return f"a window's pixels take {needed:,} B of shared memory, more than {self.fast_bytes:,}"
        return ""

    def rate(self, B: int) -> float:
        """Share of the sustained rate: useful mma clocks among all clocks of an SM."""
        g, tile, precision, (down, right) = self.geometry, self.tile(B), PRECISIONS[self.precision], self.axes
        assert tile is not None
        costs = self.costs.last_layer
        epilogue = math.ceil(down.cells * right.cells / 16) * self.all_columns / COLUMNS * costs.epilogue_clocks
        clocks = B * (self._clocks(self.axes) + epilogue)
        fmas = B * math.prod(g.sides_in if g.is_transposed else g.sides_out) * g.C * math.prod(g.taps) * g.N
        useful = (3 if precision.splits > 1 else 1) * fmas / (16 * COLUMNS * precision.step)
        return min(1.0, costs.mma_clocks * useful / clocks) * min(1.0, self.count(B, tile) / self.units)

    @property
    def min_us(self) -> float:
        """Time of a launch, whatever B."""
        (down, right), costs = self.axes, self.costs.last_layer
        step_us = costs.step_us[PRECISIONS[self.precision].splits]
        return costs.launch_us + step_us * down.taps * right.taps * self.steps

    def at(self, B: int) -> Steps:
        return Steps((self.launch(B),) if B else ())

    def unit(self, tile: Tile) -> int:
        """Bytes per store of y: 16 or 4 if contiguous runs are multiples, else one element."""
        (down, right), (_, h, w), (H, W) = self.axes, tile, self.geometry.sides_out
        per_position, planes = (self.geometry.N, 1) if self.is_nhwc else (1, self.geometry.N)
        run = W * per_position
        if w * right.cell != W:
            run = math.gcd(run, w * right.cell * per_position)
        elif h * down.cell == H:
            run *= planes * H
        size = DTYPE_BYTES[self.dtypes[1]]
        return next((unit for unit in (16, 4) if run * size % unit == 0), size)

    def launch(self, B: int) -> KernelLaunch:
        """conv_last_layer(x, w, bias, y, B, layer, activation code and parameters)"""
        g, tile, precision = self.geometry, self.tile(B), PRECISIONS[self.precision]
        assert tile is not None
        x_dtype, y_dtype = self.dtypes
        read = READ_BYTES // DTYPE_BYTES[x_dtype] if x_dtype == precision.dtype else 4  # channels per load
        h, w = (
            AxisStruct.of(
                side_in=axis.side_in, side_out=axis.side_out, cell=axis.cell, step=axis.step, first=axis.first,
                taps=axis.taps, dilation=axis.dilation, cells=cells, pixels=axis.pixels(cells),
                by_cells=divider(cells), by_pixels=divider(axis.pixels(cells)),
                by_tiles=divider(math.ceil(axis.cells / cells)),
            )
            for axis, cells in zip(self.axes, tile[1:], strict=True)
        )  # fmt: skip
        layer = LayerStruct.of(
            C=g.C, N=g.N, steps=self.steps, chunks=self.all_columns // (COLUMNS * self.group), pitch=self.pitch,
            images=tile[0], is_nhwc=self.is_nhwc, unit=self.unit(tile), holds_weights=self._holds_weights(self.axes),
            h=h, w=w, by_chunks=divider(self.steps * precision.step // read),
        )  # fmt: skip
        arguments: tuple[Argument, ...] = (
            Input(0), Weight("weight"), self.bias, Output(0), Int64(B), layer,
            *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        shared_bytes = self.shared_bytes(tile)
        blocks = self.units * max(1, min(self.max_blocks, self.fast_bytes // (shared_bytes + BLOCK_BYTES)))
        config = LaunchConfig(
            (min(blocks, self.count(B, tile)), 1, 1), (32 * WARPS, 1, 1), shared_bytes, overlaps=True
        )  # fmt: skip
        template = (precision.name, ELEMENT_TYPES[x_dtype], Y_TYPES[y_dtype], str(self.group))
        budget = Budget(65536 // (self.max_blocks * 32 * WARPS) // 8 * 8)
        return KernelLaunch(Program(SOURCE, f"conv_last_layer<{', '.join(template)}>"), config, arguments, budget)


class ConvLastLayerKernel(LastLayerKernel):
    name = "conv_last_layer"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        for run, is_nhwc in find_last_layers(net, start):
            lowering = ConvLastLayerLowering.of(
                net, run, geometry_of(net, run.conv), device, job, fast_bytes=device.fast_bytes, is_nhwc=is_nhwc
            ).with_best_cells()  # fmt: skip
            if why := lowering.why_not():
                yield Refusal(self.name, run.conv.name, why)
                return
            tile, recipes = lowering.tile(job.batch), _recipes(net, run.conv, lowering)
            assert tile is not None
            yield self.claim_last(
                net, run, is_nhwc, lowering, why="tensor cores, few channels", recipes=recipes,
                cost=run.cost(net, job.precision, recipes, lowering.rate(job.batch), lowering.min_us),
                order=order_of(job.precision, "mma.sync", PART, TAPS), fast_bytes=lowering.shared_bytes(tile),
            )  # fmt: skip


def _recipes(net: Network, node: Node, lowering: ConvLastLayerLowering) -> dict[str, Recipe]:
    name, precision, (down, right) = node.weights["weight"], PRECISIONS[lowering.precision], lowering.axes
    channels = lowering.steps * precision.step
    arranged = Recipe.of(
        cell_fragments, (name,),
        fragment_shape(down.taps * right.taps * channels, lowering.all_columns, precision.per_word),
        net.weight_type(name).dtype, per_word=precision.per_word, channels=channels, columns=lowering.all_columns,
        down=down.table, right=right.table, channel_axis=0 if lowering.geometry.is_transposed else 1,
    )  # fmt: skip
    return {"weight": multiplied_fragments(arranged, lowering.precision), **bias_recipe(net, node)}


@rearranging_op
def cell_fragments(
    weight: Array, per_word: int, channels: int, columns: int, down: Table, right: Table, channel_axis: int
) -> Array:
    """A cell's weights (cell_weights) as fragments: k over the window's taps and channels."""
    full = cell_weights(weight, channels, columns, down, right, channel_axis)
    return in_fragments(full.reshape(-1, columns), per_word)


def _instance(name: str, precision: str, dtypes: tuple[str, str], taps: int = 3, N: int = 3) -> Instance:
    stride, out = (1, 32) if taps == 3 else (2, 64)
    geometry = Geometry(
        stride > 1, 64, N, 1, (32, 32), (out, out), (taps, taps), (stride, stride), (1, 1), (1, 1)
    )  # fmt: skip
    return Instance(
        name,
        lambda device: ConvLastLayerLowering(
            geometry, precision, dtypes, None, True, device.units, device.fast_bytes
        ).with_best_cells().launch(1024),
    )  # fmt: skip


INSTANCES = (
    _instance("64 channels fp16, 4x4, stride 2", "fp16", ("float16", "float16"), 4),
    _instance("64 channels fp16, 4x4, stride 2, to pixels", "fp16", ("float16", "uint8"), 4),
    _instance("64 channels fp32, 4x4, stride 2", "fp32", ("float32", "float32"), 4),
    _instance("64 channels fp32, 3x3", "fp32", ("float32", "float32")),
    _instance("64 channels tf32, 3x3", "tf32", ("float32", "float32")),
    _instance("64 channels bf16, in float32, 4x4", "bf16", ("float32", "bfloat16"), 4),
    _instance("64 channels fp16 to 1, 3x3", "fp16", ("float16", "float16"), N=1),
    _instance("64 channels tf32 to 1, 3x3", "tf32", ("float32", "float32"), N=1),
    _instance("64 channels fp32, in float16, 4x4", "fp32", ("float16", "float32"), 4),
)
