"""Host side of conv/implicit_gemm.cu: NHWC convolution by mma.sync, on every architecture."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.fast_divide import divider
from onchip.kernels.cuda.common.precision import PRECISIONS, round_up
from onchip.kernels.cuda.common.program import (
    ELEMENT_TYPES,
    EVERY_CHIP,
    IDS,
    Argument,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Output,
    Program,
    StatusWord,
    Steps,
    Struct,
    UInt32,
    Weight,
)
from onchip.kernels.cuda.common.weights import multiplied_weight, spread_taps
from onchip.kernels.cuda.conv.direct import MAX_OFFSET, Geometry, geometry_of
from onchip.kernels.cuda.conv.fusion import ConvRun, find_runs
from onchip.kernels.cuda.conv.sm90 import taps_in_order
from onchip.kernels.cuda.conv.windows import MAX_PHASES, Windows
from onchip.kernels.cuda.mma.mma_tile import PART, TILES, MmaTile, depth_of, scale_of, tiles_of, unit_of
from onchip.network.graph import Network, Node
from onchip.network.layers import Elementwise
from onchip.network.recipe import Array, Recipe, as_is, recipe_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.plan import values_read
from onchip.plan.rewrites.phases import AxisPhase

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
MIN_COLUMNS = 8  # of y per group: with fewer, most of a tile is padding
MAX_PIXELS = 1 << 23  # per image: pixel offsets of a tile of 128 positions, one per image, fit in 31 bits

# 16-bit gemms wait for pixels, which are gathered one by one: 64 -> 64 channels 3 x 3 and others took 1.5 to 1.8 times
# as long as with contiguous rows, 2.2 to 2.6 times with float32 pixels (H200).
WINDOW_RATE, FLOAT32_RATE = 0.6, 0.42
MIN_US = 1.6  # per launch: one slice of k took 0.8 to 2.2 us more than an empty kernel


@dataclass(frozen=True)
class ImplicitGemmLowering:
    """A convolution, a residual and its activation, lowered to one launch."""

    geometry: Geometry
    precision: str
    dtypes: tuple[str, str]  # dtypes of x (or of the table) and y
    activation: Elementwise | None
    has_bias: bool
    units: int
    scale: float  # factor on the tiles' rates (mma/mma_tile.py)
    residual: int | None = None  # input index of the residual
    ids: tuple[str, StatusWord] | None = None  # their dtype and status word; pixels are then rows of a table

    @property
    def windows(self) -> Windows:
        return Windows(self.geometry)

    @property
    def unit(self) -> int:
        """Elements of k per load."""
        return unit_of(self.precision)

    @property
    def channels(self) -> int:
        """Channels per group and tap, padded to whole units."""
        return round_up(self.geometry.C, self.unit)

    @property
    def alignment(self) -> int:
        """Alignment of a group's channels in bytes, up to 16."""
        return math.gcd(self.geometry.C * DTYPE_BYTES[self.dtypes[0]], 16)

    @property
    def is_whole(self) -> bool:
        """Whether channels are whole, aligned units."""
        return self.channels == self.geometry.C and self.alignment == 16

    @property
    def depths(self) -> list[int]:
        """K of each phase, padded to whole slices."""
        return [round_up(taps * self.channels, depth_of(self.precision)) for taps in self.windows.taps()]

    def positions(self, B: int) -> int:
        """Rows of a phase's gemm."""
        return B * math.prod(self.windows.positions)

    def tile_count(self, B: int, tile: MmaTile) -> int:
        return self.windows.count * self.geometry.groups * tile.count(self.positions(B), self.geometry.N)

    def work(self, B: int, tile: MmaTile) -> float:
        """Time as multiply-adds at the device's rate. With few tiles the phase with the most taps decides."""
        waves = math.ceil(self.tile_count(B, tile) / self.units)
        depth = max(self.depths) if waves == 1 else sum(self.depths) / self.windows.count
        return waves * self.units * tile.work(depth, self.scale * self._window_rate, self.is_whole)

    @property
    def _window_rate(self) -> float:
        """Rate relative to a gemm with contiguous rows."""
        if DTYPE_BYTES[PRECISIONS[self.precision].dtype] != 2:
            return 1.0
        return WINDOW_RATE if DTYPE_BYTES[self.dtypes[0]] == 2 else FLOAT32_RATE

    def tile(self, B: int) -> MmaTile:
        """The tile with the least estimated time. All compute the same bits."""
        return min(tiles_of(self.precision, self.is_whole), key=lambda tile: self.work(B, tile))

    def rate(self, B: int) -> float:
        """Share of the device's rate, without padding."""
        g, windows = self.geometry, self.windows
        down, right = windows.phases
        useful = sum(h.taps * h.outputs * w.taps * w.outputs for h in down for w in right) * g.C * g.N * g.groups
        return B * useful / self.work(B, self.tile(B))

    def why_not(self) -> str:
        g, windows = self.geometry, self.windows
        if g.is_transposed and max(g.dilation) > 1:
            return "no transposed convolutions with dilation"
        if max(windows.spread) > MAX_PHASES:
            return f"at most {MAX_PHASES} phases per axis"
        if g.reach >= MAX_OFFSET or g.pixel_reach >= MAX_PIXELS:
            return f"images of up to {MAX_OFFSET:,} elements and {MAX_PIXELS:,} pixels, padding included"
        return ""

    def at(self, B: int) -> Steps:
        if B == 0:
            return Steps(())
        sources: tuple[Argument, Argument, Argument] = (Input(0), Int64(0), Int64(0))
        if self.ids is not None:
            sources = Weight("table"), Input(0), self.ids[1]
        x, ids, status = sources
        bias: Argument = Weight("bias") if self.has_bias else Int64(0)
        residual: Argument = Int64(0) if self.residual is None else Input(self.residual)
        return Steps((self.launch(B, self.tile(B), x, ids, Weight("weight"), bias, residual, Output(0), status),))

    def launch(self, B: int, tile: MmaTile, *arrays: Argument) -> KernelLaunch:
        """conv_implicit_gemm(x, ids, w, bias, residual, y, status, V, M, N, windows, activation)"""
        ids, rows = ("void", 0) if self.ids is None else (IDS[self.ids[0]], self.ids[1].limit)
        x_type, y_type = (ELEMENT_TYPES[dtype] for dtype in self.dtypes)
        sizes = Int64(rows), Int64(self.positions(B)), Int64(self.geometry.N)
        arguments = (*arrays, *sizes, Struct(self._packed()), *map(UInt32, activation_words(self.activation)))
        head = f"{PRECISIONS[self.precision].name}, {x_type}, {y_type}, {ids}"
        tiled = f"{tile.template(self.precision, self.dtypes[0])}, {'true' if self.is_whole else 'false'}"
        program = Program(SOURCE, f"conv_implicit_gemm<{head}, {tiled}>")
        shared = tile.shared_bytes(self.precision, self.dtypes[0])
        config = LaunchConfig((self.tile_count(B, tile), 1, 1), (tile.threads, 1, 1), shared)
        return KernelLaunch(program, config, arguments, tile.budget(self.precision))

    def _packed(self) -> bytes:
        """The struct `Windows` of the .cu file."""
        g, windows = self.geometry, self.windows
        down, right = windows.phases
        window = (*windows.stride, *windows.before, *g.dilation)
        head = struct.pack(
            "<15i2I", *g.sides_in, g.C, g.groups * g.C, g.groups * g.N, *g.sides_out, *window,
            self.alignment, len(down), sum(phase.taps for phase in right),
            sum(windows.taps()) * self.channels // self.unit,
        )  # fmt: skip
        positions = math.prod(windows.positions), windows.positions[1]
        counts = (self.channels // self.unit, *positions, g.groups, windows.count, len(right))
        axes = (_packed(axis, before) for axis, before in zip(windows.phases, windows.before, strict=True))
        return head + b"".join(divider(count).data for count in counts) + b"".join(axes)


def _packed(axis: tuple[AxisPhase, ...], before: int) -> bytes:
    taps_before, data = 0, b""
    for phase in axis:
        data += divider(phase.taps).data if phase.taps else bytes(12)
        data += struct.pack("<I2i", taps_before, before - phase.before, phase.outputs)
        taps_before += phase.taps
    return data.ljust(MAX_PHASES * 24, b"\0")


class ConvImplicitGemm:
    name = "conv_implicit_gemm"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """Claim a convolution with the Casts, residual and activation around it; then shorter fusions."""
        if job.is_training or device.arch not in ARCHITECTURES:
            return
        for run in find_runs(net, start, PRECISIONS[job.precision].dtype):
            geometry = geometry_of(net, run.conv)
            if not run.are_floats(net) or geometry.N < MIN_COLUMNS:
                continue
            lowering = ImplicitGemmLowering(
                geometry, job.precision, run.dtypes(net), run.activation, "bias" in run.conv.weights, device.units,
                scale_of(device, job.precision), run.residual_input,
            )  # fmt: skip
            if why := lowering.why_not():
                yield Refusal(self.name, run.conv.name, why)
                return
            recipes = {"weight": tap_weight(net, run.conv, lowering), **bias_recipe(run.conv, geometry)}
            claim = Claim(
                self.name, f"{self.name}<{run.label(net)}>", run.names,
                cost_of(net, run, lowering, recipes, job), "tensor cores, one tile of positions per block", recipes,
                order=order_of(job.precision), facts=lowering, reads=run.reads(net), writes=run.writes(net),
            )  # fmt: skip
            assert values_read(net, claim)[lowering.residual or 0] == (run.residual or run.input_name)
            yield claim


def cost_of(
    net: Network,
    run: ConvRun,
    lowering: ImplicitGemmLowering,
    recipes: dict[str, Recipe],
    job: Job,
    extra_bytes: int = 0,
) -> Cost:
    """extra_bytes: per row, in addition to the values at both ends"""
    is_split = PRECISIONS[job.precision].splits > 1
    return Cost(
        run.row_flop(net) * (3 if is_split else 1),  # 3xTF32: three gemms per fp32 gemm
        run.row_bytes(net) + extra_bytes,
        sum(recipe.nbytes for name, recipe in recipes.items() if name != "table"),
        precision="tf32" if is_split else "",
        rate=lowering.rate(max(1, job.batch)),
        min_us=MIN_US,
    )


def order_of(precision: str) -> str:
    operand = PRECISIONS[precision]
    return f"taps, then channels in steps of {operand.step} by mma" + (
        f", partial sums of {PART}" if operand.splits > 1 else ""
    )


def bias_recipe(node: Node, g: Geometry) -> dict[str, Recipe]:
    if "bias" not in node.weights:
        return {}
    return {"bias": Recipe.of(as_is, (node.weights["bias"],), (g.groups * g.N,))}


def tap_weight(net: Network, node: Node, lowering: ImplicitGemmLowering) -> Recipe:
    """Weight of a convolution: (N, taps of all phases * channels)."""
    g, order, name = lowering.geometry, lowering.windows.tap_order(), node.weights["weight"]
    N, dtype = g.groups * g.N, net.weight_type(name).dtype
    weight: str | Recipe = name
    if g.is_transposed and g.groups == 1:
        weight = Recipe.of(taps_in_order, (weight,), (N, g.C, len(order)), dtype, order=order)
    elif g.is_transposed:
        weight = Recipe.of(taps_of_groups, (weight,), (N, g.C, len(order)), dtype, order=order, groups=g.groups)
    shape = (N, len(order) * lowering.channels)
    spread = Recipe.of(spread_taps, (weight,), shape, dtype, channels=lowering.channels)
    return multiplied_weight(spread, shape, lowering.precision)


@recipe_op
def taps_of_groups(weight: Array, order: tuple[int, ...], groups: int) -> Array:
    """(C, N / groups, taps...) of a transposed convolution -> (N, C / groups, taps)."""
    grouped = weight.reshape(groups, len(weight) // groups, weight.shape[1], -1)[..., list(order)]
    return np.ascontiguousarray(grouped.swapaxes(1, 2)).reshape(-1, len(weight) // groups, len(order))


_SAME = Geometry(False, 64, 64, 1, (32, 32), (32, 32), (3, 3), (1, 1), (1, 1), (1, 1))


def instance_of(
    name: str, precision: str, dtypes: tuple[str, str], tile: MmaTile, ids: str = "", channels: int = 64
) -> Instance:
    """One instance serves all geometries: sizes are run-time values."""
    ids_and_status = (ids, StatusWord("ids", (32,), 1000)) if ids else None

    def launch(device: Device) -> KernelLaunch:
        geometry = replace(_SAME, C=channels)
        lowering = ImplicitGemmLowering(
            geometry, precision, dtypes, None, True, device.units, scale_of(device, precision), ids=ids_and_status
        )
        return lowering.launch(64, tile, *[Int64(0)] * 7)

    return Instance(name, launch)


INSTANCES = (
    instance_of("128 x 128 fp16", "fp16", ("float16", "float16"), TILES[0]),
    instance_of("128 x 64 bf16, rows in float32", "bf16", ("float32", "bfloat16"), TILES[1]),
    instance_of("128 x 64 fp32", "fp32", ("float32", "float32"), TILES[1]),
    instance_of("128 x 128 tf32", "tf32", ("float32", "float32"), TILES[0]),
    instance_of("128 x 32 fp16", "fp16", ("float16", "float16"), TILES[2]),
    instance_of("32 x 64 fp32, rows in float16", "fp32", ("float16", "float16"), TILES[3]),
    instance_of("128 x 32 fp16, unaligned rows", "fp16", ("float16", "float16"), TILES[2], channels=99),
    instance_of("32 x 64 bf16", "bf16", ("bfloat16", "float32"), TILES[3]),
)
