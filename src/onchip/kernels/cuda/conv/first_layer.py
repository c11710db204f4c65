"""Host side of conv/first_layer.cu: convolution of few input channels on the tensor cores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int32, c_uint32
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.arguments import Argument, Input, Int64, Output, UInt32, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.fast_divide import Divider, divider
from onchip.kernels.cuda.common.precision import PRECISIONS, order_of, round_up
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.conv.direct import Geometry, bias_recipe, by_axis, geometry_of
from onchip.kernels.cuda.conv.fusion import (
    ConvKernel,
    ConvLowering,
    ConvRun,
    find_conv,
    with_conversion,
)
from onchip.kernels.cuda.conv.warp_mma import (
    COLUMNS,
    PART,
    THREADS,
    even_share,
    fragment_shape,
    in_fragments,
    multiplied_fragments,
)
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.kernels.token_branches import is_monotonic
from onchip.kernels.window import POOLS
from onchip.network.graph import Network, Node
from onchip.network.layers import Cast, Convolution, MaxPool1d, MaxPool2d, ToPixels
from onchip.network.recipe import Array, Recipe, rearranging_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels

SOURCE = Path(__file__).with_suffix(".cu")
MAX_CHANNELS = 15  # of x: more fill a step and are stored as NHWC
TILE_POSITIONS = (1024, 512, 256, 128, 64, 32)  # positions per tile, at most
MAX_LINE = 64  # positions per row of a tile with several rows
SECTOR_BYTES = 32  # unit of a full memory write
MAX_STAGED_BYTES = 32 << 10
UNIT = 8  # pixels of a row per thread and load
WARP_TILE = 32  # positions per warp tile
BLOCK_BYTES = 1 << 10  # shared memory that the system reserves per block
WINDOWS = (2, 4, 8, 16)  # positions per pool window
# Up to this K, fp32 is left to FFMA kernels. 3xTF32 drops low * low, up to 2^-22 of each product: more than
# the rounding error of an fp32 sum of so few terms.
MAX_INEXACT_K = 8


class Tiles(CStruct):
    source, c_name = SOURCE, "Tiles"
    _fields_ = (
        ("C", c_int32), ("H", c_int32), ("W", c_int32), ("N", c_int32), ("HO", c_int32), ("WO", c_int32),
        ("taps_h", c_int32), ("taps_w", c_int32), ("stride_h", c_int32), ("stride_w", c_int32), ("before_h", c_int32),
        ("before_w", c_int32), ("dilation_h", c_int32), ("dilation_w", c_int32), ("images", c_int32), ("rows", c_int32),
        ("columns", c_int32), ("patch_rows", c_int32), ("pitch", c_int32), ("tiles", c_uint32),
        ("vector_size", c_int32), ("steps", c_int32), ("is_nhwc", c_int32), ("is_staged", c_int32),
        ("down_bits", c_int32), ("across_bits", c_int32), ("YH", c_int32), ("YW", c_int32), ("by_columns", Divider),
        ("by_rows", Divider), ("by_units", Divider), ("by_patch_rows", Divider), ("by_channels", Divider),
        ("by_across", Divider), ("by_down", Divider), ("by_groups", Divider),
    )  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """Output positions per block iteration."""

    images: int
    rows: int
    columns: int

    @property
    def positions(self) -> int:
        return self.images * self.rows * self.columns

    def count(self, B: int, sides: tuple[int, int]) -> int:
        return math.ceil(B / self.images) * math.ceil(sides[0] / self.rows) * math.ceil(sides[1] / self.columns)


@dataclass(frozen=True)
class Pool:
    """A pool of non-overlapping windows, fused after the convolution."""

    mode: str  # "MaxPool" or "MeanPool"
    window: tuple[int, int]

    def crop(self, sides: tuple[int, int]) -> tuple[int, int]:
        """Sides cropped to whole windows."""
        H, W = (side // size * size for side, size in zip(sides, self.window, strict=True))
        return H, W


NO_POOL = Pool("NoPool", (1, 1))


@dataclass(frozen=True)
class ConvFirstLayerLowering(ConvLowering):
    """With a pool, sides_out of the geometry is cropped to its windows."""

    fast_bytes: int
    is_nhwc: bool = False  # whether y is NHWC
    pool: Pool = NO_POOL

    @property
    def y_sides(self) -> tuple[int, int]:
        """Sides of y: positions, or pool windows."""
        H, W = (side // size for side, size in zip(self.geometry.sides_out, self.pool.window, strict=True))
        return H, W

    @property
    def depth(self) -> int:
        """K, padded to whole 32-bit registers."""
        g, per_word = self.geometry, PRECISIONS[self.precision].per_word
        return g.C * g.taps[0] * round_up(g.taps[1], per_word)

    @property
    def steps(self) -> int:
        return math.ceil(self.depth / PRECISIONS[self.precision].step)

    @property
    def group(self) -> int:
        """Tiles of 8 channels per warp tile."""
        return min(4, 1 << (math.ceil(self.geometry.N / COLUMNS) - 1).bit_length())

    @property
    def channels(self) -> int:
        """Channels, padded to whole groups."""
        return round_up(self.geometry.N, COLUMNS * self.group)

    @property
    def weight_bytes(self) -> int:
        precision = PRECISIONS[self.precision]
        return precision.splits * self.steps * precision.step * self.channels * 4 // precision.per_word

    def patch(self, tile: Tile) -> tuple[int, int]:
        """Rows and columns of x under a tile; rows begin and end at multiples of UNIT columns of x."""
        g = self.geometry
        rows, columns = (
            (count - 1) * stride + (taps - 1) * dilation + 1
            for count, stride, taps, dilation in zip(
                (tile.rows, tile.columns), g.stride, g.taps, g.dilation, strict=True
            )
        )
        step = tile.columns * g.stride[1] if tile.columns < g.sides_out[1] else UNIT
        before = -g.before[1] % UNIT if step % UNIT == 0 else UNIT - 1
        return rows, round_up(before + columns, UNIT)

    def staged_bytes(self, tile: Tile) -> int:
        """Shared memory to assemble a tile of y: only whole NCHW images whose channels are not whole sectors."""
        channel = math.prod(self.y_sides) * DTYPE_BYTES[self.dtypes[1]]
        is_whole = (tile.rows, tile.columns) == self.geometry.sides_out
        if self.is_nhwc or not is_whole or channel % SECTOR_BYTES == 0 or self.geometry.N * channel % 16:
            return 0
        y_bytes = tile.images * self.geometry.N * channel
        return y_bytes if y_bytes <= MAX_STAGED_BYTES else 0

    def shared_bytes(self, tile: Tile) -> int:
        pixels = tile.images * self.geometry.C * math.prod(self.patch(tile))
        positions = round_up(tile.positions, WARP_TILE)
        tables = 64 * self.steps + 4 * self.channels + 8 * positions
        return self.weight_bytes + tables + 4 * pixels + self.staged_bytes(tile)

    def tile_of(self, most: int) -> Tile:
        """A tile of at most `most` positions: whole rows of windows, and several images if they are small."""
        (H, W), (down, right) = self.y_sides, self.pool.window
        windows = most // (down * right)
        columns = even_share(W, windows if H == 1 else min(windows, MAX_LINE // right))
        rows = even_share(H, max(1, windows // columns))
        is_whole = (rows, columns) == (H, W)
        return Tile(max(1, windows // (rows * columns)) if is_whole else 1, rows * down, columns * right)

    def tile(self, B: int) -> Tile:
        """The largest tile that gives every SM enough of them, else the smallest. All compute the same bits."""
        sides, found = self.geometry.sides_out, [self.tile_of(most) for most in TILE_POSITIONS]
        for most, tile, larger in zip(TILE_POSITIONS, found, (found[0], *found), strict=False):
            blocks, tiles = (self.max_blocks, 8 * self.units) if most > 256 else (1, self.units)
            if self.fits(tile, blocks) and tile.count(B, sides) >= tiles:
                # More than one wave: take the next larger tile, if it fits and has at most one warp tile per warp.
                multi_wave = tile.count(B, sides) > self.units * self.resident(tile)
                return larger if multi_wave and self.fits(larger) and self.warp_tiles(larger) <= THREADS // 32 else tile
        return found[-1]

    def warp_tiles(self, tile: Tile) -> int:
        """Warp tiles per block tile."""
        return math.ceil(tile.positions / WARP_TILE) * (self.channels // (COLUMNS * self.group))

    def resident(self, tile: Tile) -> int:
        """Resident blocks per SM with this tile."""
        return max(1, min(self.max_blocks, self.fast_bytes // (self.shared_bytes(tile) + BLOCK_BYTES)))

    @property
    def max_blocks(self) -> int:
        """Blocks per SM that registers allow."""
        return 2 if PRECISIONS[self.precision].splits > 1 else 3

    def fits(self, tile: Tile, blocks: int = 1) -> bool:
        """Whether so many blocks per SM fit in shared memory with this tile."""
        return blocks * (self.shared_bytes(tile) + BLOCK_BYTES) <= self.fast_bytes

    def why_not(self) -> str:
        g = self.geometry
        if max(g.C * math.prod(g.sides_in), g.N * math.prod(g.sides_out)) >= 1 << 31:
            return "convolves images of fewer than 2^31 elements"
        smallest = self.tile_of(TILE_POSITIONS[-1])
        if not self.fits(smallest):
            needed = self.shared_bytes(smallest) + BLOCK_BYTES
            return f"weights and a patch of x take {needed:,} B of shared memory, more than {self.fast_bytes:,}"
        return ""

    def rate(self, B: int) -> float:
        """Share of the tensor cores' sustained rate, given padding and idle SMs."""
        g, tile, costs = self.geometry, self.tile(B), self.costs.first_layer
        filled = g.C * math.prod(g.taps) * g.N / (self.steps * PRECISIONS[self.precision].step * self.channels)
        share = math.prod(g.sides_out) * B / (tile.count(B, g.sides_out) * round_up(tile.positions, WARP_TILE))
        issued = costs.warp_tile_instructions + costs.tile_instructions * self.group
        issued += self.steps * (costs.step_instructions + costs.mma_instructions * self.group)
        rate = self.costs.warp_mma.instructions_per_mma * WARP_TILE / 16 * self.steps * self.group / issued
        return rate * filled * min(1.0, share) * min(1.0, tile.count(B, g.sides_out) / self.units)

    @property
    def min_us(self) -> float:
        """Time of a launch, whatever B."""
        g, costs = self.geometry, self.costs.first_layer
        weight_us = costs.weight_us[PRECISIONS[self.precision].splits]
        return costs.launch_us + weight_us * g.C * math.prod(g.taps) * g.N

    def at(self, B: int) -> Steps:
        return Steps((self.launch(B),) if B else ())

    def launch(self, B: int) -> KernelLaunch:
        """conv_first_layer(x, w, bias, y, B, tiles, activation code and parameters)"""
        g, tile = self.geometry, self.tile(B)
        patch_rows, pitch = self.patch(tile)
        (H, W), (HO, WO), (YH, YW) = g.sides_in, g.sides_out, self.y_sides
        window_h, window_w = self.pool.window
        tiles = Tiles.of(
            C=g.C, H=H, W=W, N=g.N, HO=HO, WO=WO,
            **by_axis(taps=g.taps, stride=g.stride, before=g.before, dilation=g.dilation),
            images=tile.images, rows=tile.rows, columns=tile.columns, patch_rows=patch_rows, pitch=pitch,
            tiles=tile.count(B, g.sides_out), vector_size=math.gcd(W, 16 // DTYPE_BYTES[self.dtypes[0]]),
            steps=self.steps, is_nhwc=self.is_nhwc, is_staged=self.staged_bytes(tile) > 0,
            down_bits=window_h.bit_length() - 1, across_bits=window_w.bit_length() - 1, YH=YH, YW=YW,
            by_columns=divider(tile.columns // window_w), by_rows=divider(tile.rows // window_h),
            by_units=divider(pitch // UNIT), by_patch_rows=divider(patch_rows), by_channels=divider(g.C),
            by_across=divider(math.ceil(WO / tile.columns)), by_down=divider(math.ceil(HO / tile.rows)),
            by_groups=divider(self.channels // (COLUMNS * self.group)),
        )  # fmt: skip
        arguments: tuple[Argument, ...] = (
            Input(0), Weight("weight"), self.bias, Output(0), Int64(B), tiles,
            *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        shared = self.shared_bytes(tile)
        blocks = self.units * self.resident(tile)
        config = LaunchConfig((min(blocks, tile.count(B, g.sides_out)), 1, 1), (THREADS, 1, 1), shared)
        types = (PRECISIONS[self.precision].name, *(ELEMENT_TYPES[dtype] for dtype in self.dtypes))
        program = Program(SOURCE, f"conv_first_layer<{', '.join(types)}, {self.group}, {self.pool.mode}>")
        # Some accumulators spill: up to 78 B on an H200, more on newer GPUs.
        budget = Budget(65536 // (self.max_blocks * THREADS) // 8 * 8, spill_bytes=256 if self.pool == NO_POOL else 448)
        return KernelLaunch(program, config, arguments, budget)


class ConvFirstLayerKernel(ConvKernel):
    name = "conv_first_layer"
    layers = (Cast, Convolution)

    def applies(self, net: Network, start: int) -> bool:
        run = find_conv(net, start)
        if run is None or not isinstance(run.conv.layer, Convolution):
            return False
        geometry = geometry_of(net, run.conv)
        return geometry.groups == 1 and geometry.C <= MAX_CHANNELS

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """A convolution of few NCHW channels with its activation, surrounding Casts and a pool."""
        begun = find_conv(net, start)
        assert begun is not None
        run = with_conversion(net, start, begun)
        if isinstance(run.nodes[-1].layer, ToPixels):
            run = ConvRun(run.nodes[:-1], run.conv)
        if not run.are_floats(net):
            return
        geometry = geometry_of(net, run.conv)
        K = geometry.C * math.prod(geometry.taps)
        if PRECISIONS[job.precision].splits > 1 and K <= MAX_INEXACT_K:
            yield Refusal(self.name, run.conv.name, f"is not exact enough for K = {K} in {job.precision}")
            return
        yield from self._claims(net, run, geometry, NO_POOL, device, job)
        found = _with_pool(net, start, run)
        if found is not None and found[0].are_floats(net):
            pooled, pool = found
            cropped = replace(geometry, sides_out=pool.crop(geometry.sides_out))
            yield from self._claims(net, pooled, cropped, pool, device, job)

    def _claims(
        self, net: Network, run: ConvRun, geometry: Geometry, pool: Pool, device: Device, job: Job
    ) -> Iterator[Claim | Refusal]:
        lowering = ConvFirstLayerLowering.of(
            net, run, geometry, device, job, fast_bytes=device.fast_bytes, pool=pool
        )  # fmt: skip
        if why := lowering.why_not():
            yield Refusal(self.name, run.conv.name, why)
            return
        y, recipes = run.output_name, _recipes(net, run.conv, lowering)
        for is_nhwc in (False, True) if net.readers(y) and has_channels(net.types[y]) else (False,):
            lowering = replace(lowering, is_nhwc=is_nhwc)
            yield self.claim_run(
                net, run, lowering, label=f"{self.name}<{run.label(net, hidden=(Cast,))}>",
                cost=run.cost(net, job.precision, recipes, lowering.rate(job.batch), lowering.min_us),
                why="tensor cores, a patch of x in shared memory: few channels", recipes=recipes,
                fast_bytes=lowering.shared_bytes(lowering.tile(job.batch)),
                order=order_of(job.precision, "mma.sync", PART, "channels, then taps"),
                reads={run.input_name: Use(ROWS, is_read_often=True)}, writes={y: CHANNELS_LAST} if is_nhwc else {},
            )  # fmt: skip


def _with_pool(net: Network, start: int, run: ConvRun) -> tuple[ConvRun, Pool] | None:
    """The run, extended by a supported pool and the layers that may follow it; and the pool."""
    following = net.nodes[start + len(run.nodes) : start + len(run.nodes) + 3]
    pool = _pool_of(following[0]) if following else None
    pooled = run.extended(net, following[0]) if pool is not None else None
    if pool is None or pooled is None:
        return None
    for node in following[1:]:
        longer = pooled.extended(net, node)
        if longer is None or not _may_follow(node, pooled, pool.mode == "MaxPool"):
            break
        pooled = longer
    return pooled, pool


def _may_follow(node: Node, run: ConvRun, is_largest: bool) -> bool:
    """Whether a node may follow the pool: an activation that commutes with it, and the last Cast."""
    if isinstance(node.layer, Cast):
        return "Cast" not in run.epilogue()
    has_activation = run.activation is not None
    return is_largest and not has_activation and isinstance(node.layer, ACTIVATIONS) and is_monotonic(node.layer)


def _pool_of(node: Node) -> Pool | None:
    layer = node.layer
    if not isinstance(layer, POOLS) or layer.stride != layer.kernel or any(layer.pads) or layer.ceil:
        return None
    if any(step > 1 for step in layer.dilation):
        return None
    down, right = (1, *layer.kernel)[-2:]
    if down * right not in WINDOWS or any(size & (size - 1) for size in (down, right)):
        return None
    return Pool("MaxPool" if isinstance(layer, MaxPool1d | MaxPool2d) else "MeanPool", (down, right))


def _recipes(net: Network, node: Node, lowering: ConvFirstLayerLowering) -> dict[str, Recipe]:
    name, per_word = node.weights["weight"], PRECISIONS[lowering.precision].per_word
    arranged = Recipe.of(
        window_fragments, (name,), fragment_shape(lowering.depth, lowering.channels, per_word),
        net.weight_type(name).dtype, per_word=per_word, columns=lowering.channels,
    )  # fmt: skip
    return {"weight": multiplied_fragments(arranged, lowering.precision), **bias_recipe(net, node)}


@rearranging_op
def window_fragments(weight: Array, per_word: int, columns: int) -> Array:
    """(N, C, taps...) -> fragments: k over channels and taps, rows of taps zero-padded to whole 32-bit registers."""
    N, taps = weight.shape[0], weight.shape[-1]
    lines = weight.reshape(N, -1, taps)
    full = np.zeros((columns, lines.shape[1], round_up(taps, per_word)), weight.dtype)
    full[:N, :, :taps] = lines
    return in_fragments(full.reshape(columns, -1).T, per_word)


def _instance(
    name: str, precision: str, dtypes: tuple[str, str], N: int = 64, taps: int = 3, pool: Pool = NO_POOL
) -> Instance:
    side = (32, 32)
    geometry = Geometry(False, 3, N, 1, side, side, (taps, taps), (1, 1), (taps // 2, taps // 2), (1, 1))

    def launch(device: Device) -> KernelLaunch:
        return ConvFirstLayerLowering(
            geometry, precision, dtypes, None, True, device.units, device.fast_bytes, True, pool
        ).launch(1024)  # fmt: skip

    return Instance(name, launch)


INSTANCES = (
    _instance("3 channels fp16, in float32", "fp16", ("float32", "float16")),
    _instance("3 channels fp32", "fp32", ("float32", "float32")),
    _instance("3 channels tf32", "tf32", ("float32", "float32")),
    _instance("3 channels bf16", "bf16", ("bfloat16", "bfloat16")),
    _instance("to 6 channels fp32, 5x5", "fp32", ("float32", "float32"), 6, 5),
    _instance("to 16 channels fp16, 5x5", "fp16", ("float16", "float32"), 16, 5),
    _instance("3 channels fp32, pooled", "fp32", ("float32", "float32"), pool=Pool("MaxPool", (2, 2))),
    _instance("to 6 channels fp16, 5x5, pooled", "fp16", ("float16", "float16"), 6, 5, Pool("MaxPool", (2, 2))),
    _instance("3 channels bf16, means", "bf16", ("bfloat16", "bfloat16"), pool=Pool("MeanPool", (4, 4))),
)
