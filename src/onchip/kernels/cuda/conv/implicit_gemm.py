"""Host side of conv/implicit_gemm.cu: NHWC convolution by mma.sync, on every architecture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from ctypes import c_int32, c_uint32
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.arguments import (
    NOTHING,
    Argument,
    Input,
    Int64,
    Output,
    StatusWord,
    Struct,
    UInt32,
    Weight,
)
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES, IDS
from onchip.kernels.cuda.common.fast_divide import Divider, divider
from onchip.kernels.cuda.common.precision import PRECISIONS, order_of, round_up
from onchip.kernels.cuda.common.program import Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.common.weights import multiplied_weight, spread_taps
from onchip.kernels.cuda.conv.direct import MAX_OFFSET, Geometry, bias_recipe, by_axis, geometry_of
from onchip.kernels.cuda.conv.fusion import TAPS, ConvKernel, ConvLowering, ConvRun, find_conv, find_runs
from onchip.kernels.cuda.conv.sm90 import taps_in_order
from onchip.kernels.cuda.conv.windows import MAX_PHASES, Windows
from onchip.kernels.cuda.mma.mma_tile import PART, TILES, MmaTile, depth_of, scale_of, tiles_of, unit_of
from onchip.network.graph import Network, Node
from onchip.network.recipe import Array, Recipe, rearranging_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.plan import values_read

SOURCE = Path(__file__).with_suffix(".cu")
MIN_COLUMNS = 8  # of y per group: with fewer, most of a tile is padding
MAX_PIXELS = 1 << 23  # per image: pixel offsets of a tile of 128 positions, one per image, fit in 31 bits


class PhaseStruct(CStruct):
    source, c_name = SOURCE, "Phase"
    _fields_ = (("by_taps", Divider), ("taps_before", c_uint32), ("begin", c_int32), ("positions", c_int32))


class WindowsStruct(CStruct):
    source, c_name = SOURCE, "Windows"
    _fields_ = (
        ("H", c_int32), ("W", c_int32), ("C", c_int32), ("channels", c_int32), ("channels_out", c_int32),
        ("lines_out", c_int32), ("columns_out", c_int32), ("stride_h", c_int32), ("stride_w", c_int32),
        ("before_h", c_int32), ("before_w", c_int32), ("dilation_h", c_int32), ("dilation_w", c_int32),
        ("alignment", c_int32), ("phases_h", c_int32), ("taps_w", c_uint32), ("row_units", c_uint32),
        ("by_units", Divider), ("by_positions", Divider), ("by_line", Divider), ("by_groups", Divider),
        ("by_phases", Divider), ("by_phases_w", Divider), ("down", PhaseStruct * MAX_PHASES),
        ("right", PhaseStruct * MAX_PHASES),
    )  # fmt: skip


@dataclass(frozen=True)
class ImplicitGemmLowering(ConvLowering):
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
        scale = self.scale * self._window_factor
        return waves * self.units * tile.work(depth, scale, self.is_whole, self.costs.mma_tile)

    @property
    def _window_factor(self) -> float:
        """Rate relative to a gemm with contiguous rows."""
        if DTYPE_BYTES[PRECISIONS[self.precision].dtype] != 2:
            return 1.0
        costs = self.costs.implicit_gemm
        return costs.window_factor if DTYPE_BYTES[self.dtypes[0]] == 2 else costs.float32_factor

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
        sources: tuple[Argument, Argument, Argument] = (Input(0), NOTHING, NOTHING)
        if self.ids is not None:
            sources = Weight("table"), Input(0), self.ids[1]
        x, ids, status = sources
        residual = NOTHING if self.residual is None else Input(self.residual)
        return Steps((self.launch(B, self.tile(B), x, ids, Weight("weight"), self.bias, residual, Output(0), status),))

    def launch(self, B: int, tile: MmaTile, *arrays: Argument) -> KernelLaunch:
        """conv_implicit_gemm(x, ids, w, bias, residual, y, status, V, M, N, windows, activation)"""
        ids, rows = ("void", 0) if self.ids is None else (IDS[self.ids[0]], self.ids[1].limit)
        x_type, y_type = (ELEMENT_TYPES[dtype] for dtype in self.dtypes)
        sizes = Int64(rows), Int64(self.positions(B)), Int64(self.geometry.N)
        arguments = (*arrays, *sizes, self._windows(), *map(UInt32, activation_words(self.activation)))
        head = f"{PRECISIONS[self.precision].name}, {x_type}, {y_type}, {ids}"
        tiled = f"{tile.template(self.precision, self.dtypes[0])}, {'true' if self.is_whole else 'false'}"
        program = Program(SOURCE, f"conv_implicit_gemm<{head}, {tiled}>")
        shared = tile.shared_bytes(self.precision, self.dtypes[0])
        config = LaunchConfig((self.tile_count(B, tile), 1, 1), (tile.threads, 1, 1), shared)
        return KernelLaunch(program, config, arguments, tile.budget(self.precision))

    def _windows(self) -> Struct:
        g, windows = self.geometry, self.windows
        (H, W), (HO, WO), (down, right) = g.sides_in, g.sides_out, windows.phases
        units = self.channels // self.unit
        phases_down, phases_right = (
            [
                PhaseStruct.of(
                    by_taps=divider(phase.taps), taps_before=taps_before, begin=begin, positions=phase.outputs
                )
                for phase, taps_before, begin in windows.along(axis)
            ]
            for axis in (0, 1)
        )
        return WindowsStruct.of(
            H=H, W=W, C=g.C, channels=g.groups * g.C, channels_out=g.groups * g.N, lines_out=HO, columns_out=WO,
            **by_axis(stride=windows.stride, before=windows.before, dilation=g.dilation), alignment=self.alignment,
            phases_h=len(down), taps_w=sum(phase.taps for phase in right), row_units=sum(windows.taps()) * units,
            by_units=divider(units), by_positions=divider(math.prod(windows.positions)),
            by_line=divider(windows.positions[1]), by_groups=divider(g.groups), by_phases=divider(windows.count),
            by_phases_w=divider(len(right)), down=phases_down, right=phases_right,
        )  # fmt: skip

    def cost(self, net: Network, run: ConvRun, recipes: Mapping[str, Recipe], job: Job, extra_bytes: int = 0) -> Cost:
        min_us = self.costs.implicit_gemm.launch_us
        return run.cost(net, self.precision, recipes, self.rate(job.batch), min_us, extra_bytes)


class ConvImplicitGemmKernel(ConvKernel):
    name = "conv_implicit_gemm"

    def applies(self, net: Network, start: int) -> bool:
        run = find_conv(net, start)
        return run is not None and geometry_of(net, run.conv).N >= MIN_COLUMNS

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """A convolution with the Casts, residual and activation around it; then shorter fusions."""
        for run in find_runs(net, start, PRECISIONS[job.precision].dtype):
            lowering = ImplicitGemmLowering.of(
                net, run, geometry_of(net, run.conv), device, job, scale=scale_of(device, job.precision),
                residual=run.residual_input,
            )  # fmt: skip
            if why := lowering.why_not():
                yield Refusal(self.name, run.conv.name, why)
                return
            recipes = {"weight": tap_weight(net, run.conv, lowering), **bias_recipe(net, run.conv)}
            claim = self.claim_run(
                net, run, lowering, cost=lowering.cost(net, run, recipes, job),
                why="tensor cores, one tile of positions per block", recipes=recipes,
                order=order_of(job.precision, "mma", PART, TAPS),
            )  # fmt: skip
            assert values_read(net, claim)[lowering.residual or 0] == (run.residual or run.input_name)
            yield claim


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


@rearranging_op
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
        return lowering.launch(64, tile, *[NOTHING] * 7)

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
