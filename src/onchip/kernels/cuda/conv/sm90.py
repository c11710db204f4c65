"""Host side of conv/sm90.cu: NHWC convolution and transposed convolution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.arguments import (
    NOTHING,
    Argument,
    Input,
    Int64,
    Memory,
    Output,
    UInt32,
    Weight,
    WindowMap,
)
from onchip.kernels.cuda.common.precision import PRECISIONS, order_of
from onchip.kernels.cuda.common.program import Instance, KernelLaunch, Program, Steps
from onchip.kernels.cuda.common.weights import multiplied_weight, spread_taps
from onchip.kernels.cuda.conv.direct import Geometry, bias_recipe, geometry_of
from onchip.kernels.cuda.conv.fusion import TAPS, ConvKernel, ConvLowering, ConvRun, find_conv, find_runs
from onchip.kernels.cuda.conv.sm90_images import ImageConv, image_conv
from onchip.kernels.cuda.conv.windows import Windows
from onchip.kernels.cuda.mma.wgmma_tile import ARCHITECTURES, LINE, PART, TMA_BYTES, WgmmaGemm, split_has_slices
from onchip.network.graph import Network, Node
from onchip.network.layers.conv import conv_groups
from onchip.network.recipe import Array, Recipe, rearranging_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.plan import values_read

SOURCE = Path(__file__).with_suffix(".cu")
MIN_CHANNELS = 16  # of x and y: with fewer, most of a tile is padding


@dataclass(frozen=True)
class ConvSm90Lowering(ConvLowering):
    residual: int | None = None  # input index of the residual
    split_k: int = 1

    @property
    def windows(self) -> Windows:
        return Windows(self.geometry)

    @property
    def depth(self) -> int:
        """Elements of k per slice."""
        return LINE // DTYPE_BYTES[PRECISIONS[self.precision].dtype]

    @property
    def slice_taps(self) -> int:
        """Taps per slice of k: several if 16-bit pixels have few channels."""
        if DTYPE_BYTES[self.dtypes[0]] != 2:
            return 1
        return max(1, self.depth // max(MIN_CHANNELS, 1 << (self.geometry.C - 1).bit_length()))

    @property
    def chunks(self) -> int:
        """Chunks of channels per tap, a slice of k each; 1 if a slice has several taps."""
        return math.ceil(self.geometry.C / self.depth)

    @property
    def channels(self) -> int:
        """Channels per tap, padded to whole TMA tiles."""
        return self.chunks * self.depth // self.slice_taps

    @property
    def slices(self) -> list[int]:
        """Slices of k per phase."""
        return [math.ceil(taps / self.slice_taps) * self.chunks for taps in self.windows.taps()]

    @cached_property
    def images(self) -> ImageConv | None:
        """The same convolution by conv/sm90_images.cu (same weights, same bits), or None if it does not apply."""
        dtypes_used = {*self.dtypes, PRECISIONS[self.precision].dtype}
        if len(dtypes_used) > 1 or DTYPE_BYTES[self.dtypes[0]] != 2 or self.geometry.N % 8:
            return None
        if self.split_k > 1 or self.slice_taps > 1:
            return None
        layout, has_residual = (self.chunks, self.channels, self.windows.tap_order()), self.residual is not None
        costs = self.costs.conv_sm90
        return image_conv(self.geometry, self.precision, self.activation, *layout, has_residual, costs)

    def uses_images(self, B: int) -> bool:
        """Whether conv/sm90_images.cu is estimated to be faster."""
        return self.images is not None and self.images.clocks(B, self.units, self.costs.conv_sm90) < self.clocks(B)

    @property
    def fmas(self) -> int:
        """Multiply-adds per image, padded channels and positions included."""
        return self.geometry.N * math.prod(self.windows.positions) * sum(self.windows.taps()) * self.channels

    def clocks(self, B: int) -> float:
        """Clocks of an SM, comparable with conv/sm90_images.py."""
        unit = 128 * 64 * 64  # multiply-adds
        return B * self.fmas / unit * self.costs.conv_sm90.unit_clocks / (self.units * self.rate(B))

    def rate(self, B: int, overlaps: bool = False) -> float:
        """Share of the device's gemm rate."""
        factor = self.costs.conv_sm90.window_factor if DTYPE_BYTES[self.dtypes[0]] == 2 else 1.0
        return self.gemm(B).rate(self.units, overlaps) * factor

    def gemm(self, B: int) -> WgmmaGemm:
        """The gemm: a row per output position of a phase."""
        windows = self.windows
        return WgmmaGemm(
            B * math.prod(windows.positions), self.geometry.N, sum(windows.taps()) * self.channels,
            self.precision, self.dtypes, self.activation, self.split_k, windows.count, costs=self.costs.wgmma_tile,
        )  # fmt: skip

    def best_split_k(self, B: int) -> int:
        """Split-K factor that occupies all SMs when there are few positions."""
        split_k = self._longest(B).best_split_k(self.units)
        while not all(split_has_slices(count, split_k) for count in self.slices):
            split_k //= 2
        return split_k

    def _longest(self, B: int) -> WgmmaGemm:
        """The gemm of the phase with the most taps, which bounds the time of few positions."""
        return replace(self.gemm(B), K=max(self.slices) * self.depth)

    def min_us(self, B: int) -> float:
        """Time of one tile, for few positions; 0 if SMs have several tiles, where the rate decides."""
        longest = self._longest(B)
        return longest.min_us(self.units) if longest.count(longest.choose_tile(self.units)[0]) <= self.units else 0.0

    def why_not(self) -> str:
        if why := self.windows.why_not():
            return why
        C = self.geometry.C
        if not self.gemm(1).is_direct and self.dtypes[0] != "float32":
            return f"multiplies {PRECISIONS[self.precision].dtype} or float32, not {self.dtypes[0]}"
        if C * DTYPE_BYTES[self.dtypes[0]] % TMA_BYTES:
            return f"TMA needs channels in multiples of {TMA_BYTES} B, got {C} in {self.dtypes[0]}"
        return ""

    def at(self, B: int) -> Steps:
        if B == 0:
            return Steps(())
        x, w, y = Input(0), Weight("weight"), Output(0)
        residual = None if self.residual is None else Input(self.residual)
        if self.images is not None and self.uses_images(B):
            return Steps((self.images.launch(B, self.units, x, w, self.bias, residual, y),))
        return Steps((self.launch(B, x, w, self.bias, residual or NOTHING, y),))

    def launch(self, B: int, x: Memory, w: Memory, bias: Argument, residual: Argument, y: Argument) -> KernelLaunch:
        """conv_sm90(x, w, bias, residual, y, M, N, x_tile_rows, split_k, windows, activation)"""
        g, windows, gemm = self.geometry, self.windows, self.gemm(B)
        tiling, (H, W) = gemm.tiling(self.units), g.sides_in
        line = LINE // self.slice_taps
        pixels = WindowMap(
            x, gemm.x_tma_dtype, (g.C, W, H, B), line // DTYPE_BYTES[self.dtypes[0]], tiling.x_tile_rows,
            _wh(windows.before), _wh(windows.after), _wh(windows.stride), line,
        )  # fmt: skip
        arguments = (
            pixels, gemm.weight_map(w, tiling.tile), bias, residual, y, Int64(gemm.M), Int64(gemm.N),
            UInt32(tiling.x_tile_rows), UInt32(self.split_k), windows.packed(self.chunks, self.channels),
            *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        program = Program(SOURCE, f"conv_sm90<{tiling.template}, {tiling.split}, {self.slice_taps}>")
        return KernelLaunch(program, tiling.config, arguments, tiling.budget)


def _wh(pair: tuple[int, int]) -> tuple[int, int]:
    """(H, W) -> (W, H)."""
    return pair[1], pair[0]


class ConvSm90Kernel(ConvKernel):
    name = "conv_sm90"
    architectures = ARCHITECTURES

    def applies(self, net: Network, start: int) -> bool:
        run = find_conv(net, start)
        if run is None:
            return False
        geometry = _dense(geometry_of(net, run.conv))
        return min(geometry.N, geometry.C) >= MIN_CHANNELS

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """A convolution with the Casts, residual and activation around it; then shorter fusions."""
        for run in find_runs(net, start, PRECISIONS[job.precision].dtype):
            geometry = _dense(geometry_of(net, run.conv))
            lowering = ConvSm90Lowering.of(net, run, geometry, device, job, residual=run.residual_input)
            if why := lowering.why_not():
                yield Refusal(self.name, run.conv.name, why)
                return
            yield self._claim(net, run, replace(lowering, split_k=lowering.best_split_k(job.batch)), job)

    def _claim(self, net: Network, run: ConvRun, lowering: ConvSm90Lowering, job: Job) -> Claim:
        batch, recipes = job.batch, _recipes(net, run.conv, lowering)
        split = f",split-K {lowering.split_k}" if lowering.split_k > 1 else ""
        order = order_of(job.precision, "wgmma", PART, TAPS) + (f", split-K {lowering.split_k}" if split else "")
        flop, skipped_flop = net.row_flop(run.conv), 0
        by_images = lowering.images is not None and lowering.uses_images(batch)
        rate = lowering.rate(batch, overlaps=not by_images)
        rate *= min(1.0, flop / (2 * lowering.fmas))
        if lowering.images is not None and by_images:
            skipped_flop = max(0, flop - lowering.images.row_flop)
            image_clocks = lowering.images.clocks(batch, lowering.units, lowering.costs.conv_sm90)
            rate *= lowering.clocks(batch) / image_clocks * (1 - skipped_flop / flop)
        cost = run.cost(net, job.precision, recipes, rate, 0.0 if by_images else lowering.min_us(batch))
        claim = self.claim_run(
            net, run, lowering, label=f"{self.name}<{run.label(net)}{split}>",
            cost=replace(cost, row_flop=cost.row_flop - skipped_flop),
            why=f"tensor cores, one tile of {'images' if by_images else 'positions'} per block",
            recipes=recipes, order=order,
        )  # fmt: skip
        assert values_read(net, claim)[lowering.residual or 0] == (run.residual or run.input_name)
        return claim


def _recipes(net: Network, node: Node, lowering: ConvSm90Lowering) -> dict[str, Recipe]:
    g, channels, order = lowering.geometry, lowering.channels, lowering.windows.tap_order()
    name = node.weights["weight"]
    shape, dtype, groups = (g.N, len(order) * channels), net.weight_type(name).dtype, conv_groups(node.layer)
    weight: str | Recipe = name
    if groups > 1:
        first, second, *taps = net.weights[name].shape
        weight = Recipe.of(ungrouped, (weight,), (first, second * groups, *taps), dtype, groups=groups)
    if g.is_transposed:
        weight = Recipe.of(taps_in_order, (weight,), (g.N, g.C, len(order)), dtype, order=order)
    spread = Recipe.of(spread_taps, (weight,), shape, dtype, channels=channels)
    return {"weight": multiplied_weight(spread, shape, lowering.precision), **bias_recipe(net, node)}


def _dense(g: Geometry) -> Geometry:
    """The dense equivalent of a grouped convolution, with zeros in w."""
    return replace(g, C=g.C * g.groups, N=g.N * g.groups, groups=1)


@rearranging_op
def ungrouped(weight: Array, groups: int) -> Array:
    """(N, C / groups, taps...), or transposed (C, N / groups, taps...), -> block-diagonal with all channels."""
    rows, columns = len(weight) // groups, weight.shape[1]
    dense = np.zeros((len(weight), columns * groups, *weight.shape[2:]), weight.dtype)
    for i in range(groups):
        dense[i * rows : (i + 1) * rows, i * columns : (i + 1) * columns] = weight[i * rows : (i + 1) * rows]
    return dense


@rearranging_op
def taps_in_order(weight: Array, order: tuple[int, ...]) -> Array:
    """(C, N, taps...) of a transposed convolution -> (N, C, taps)."""
    return np.ascontiguousarray(weight.reshape(*weight.shape[:2], -1)[..., list(order)].swapaxes(0, 1))


_SAME = Geometry(False, 64, 64, 1, (32, 32), (32, 32), (3, 3), (1, 1), (1, 1), (1, 1))
_FEW = replace(_SAME, C=16, N=16)
_UPSAMPLE = Geometry(True, 256, 256, 1, (32, 32), (64, 64), (4, 4), (2, 2), (1, 1), (1, 1))


def _instance(
    name: str, precision: str, dtype: str, B: int = 1024, split_k: int = 1, geometry: Geometry = _SAME
) -> Instance:
    def launch(device: Device) -> KernelLaunch:
        lowering = ConvSm90Lowering(geometry, precision, (dtype, dtype), None, True, device.units, 1, split_k)
        return lowering.launch(B, Input(0), Input(0), *[NOTHING] * 3)

    return Instance(name, launch)


INSTANCES = (
    _instance("64 channels fp16", "fp16", "float16"),
    _instance("16 channels fp16", "fp16", "float16", geometry=_FEW),
    _instance("32 channels bf16", "bf16", "bfloat16", geometry=replace(_FEW, C=32, N=128)),
    _instance("few rows of 32 channels fp16, split-K", "fp16", "float16", 1, 2, replace(_FEW, C=32)),
    _instance("many rows of 32 channels fp16, split-K", "fp16", "float16", split_k=2, geometry=replace(_FEW, C=32)),
    _instance("64 channels bf16, in float32", "bf16", "float32"),
    _instance("64 channels fp32", "fp32", "float32"),
    _instance("64 channels tf32", "tf32", "float32"),
    _instance("transposed, 256 channels fp16", "fp16", "float16", geometry=_UPSAMPLE),
    _instance("transposed, 256 channels fp32", "fp32", "float32", geometry=_UPSAMPLE),
    _instance("transposed, 256 channels fp16, split-K", "fp16", "float16", split_k=2, geometry=_UPSAMPLE),
    _instance("few rows fp16, split-K", "fp16", "float16", 1, 2),
    _instance("few rows fp32, split-K", "fp32", "float32", 1, 2),
    _instance("many rows fp16, split-K", "fp16", "float16", split_k=2),
    _instance("many rows fp32, split-K", "fp32", "float32", split_k=2),
)
