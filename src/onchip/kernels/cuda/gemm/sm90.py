"""Hopper GEMM (TMA, wgmma, persistent, split-K): the host side of gemm/sm90.cu and mma/wgmma_tile.cuh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onchip.kernels.chain import Dense, end_dtypes, find_chain
from onchip.kernels.cuda.common.activation import act_name, activation_words
from onchip.kernels.cuda.common.precision import PRECISIONS, round_tf32
from onchip.kernels.cuda.common.program import (
    ELEMENT_TYPES,
    NOTHING,
    Argument,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Memory,
    Output,
    Program,
    Scratch,
    Steps,
    TensorMap,
    UInt32,
    Weight,
)
from onchip.kernels.cuda.gemm.pad_rows import CHUNK_BYTES, pad_rows, padded, padded_rows
from onchip.kernels.cuda.gemm.residual import Residual, residuals
from onchip.kernels.cuda.gemm.simt import narrow_weight, one_layer
from onchip.kernels.cuda.mlp import tensor_core as mlp_tensor_core
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network
from onchip.network.layers import Elementwise
from onchip.network.recipe import Array, Recipe, as_is, op_name, recipe_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = ("sm_90a",)
WARPGROUP, ROWS, LINE, PART = 128, 64, 128, 32  # as in mma/wgmma_tile.cuh
ALIGN_BYTES = 1024  # of a stage: the TMA swizzle needs it
SHARED_BYTES = 220 << 10  # for pipeline stages; biases and mbarriers take the rest of a block's limit
MAX_STAGES = 16
# Corrects the mean truncation error of an fp32 partial sum: the tensor cores truncate each of its 12 additions to
# float32 instead of rounding (mlp/packing.py). In a simulation, sums come out smaller by a relative 2.3e-7.
UNBIASED = 1 + 2.3e-7
MIN_WEIGHTS = 1 << 15  # per layer: fewer stay in shared memory (mlp/tensor_core.py)
BOX_ROWS = CHUNK_BYTES  # row alignment in bytes that TMA requires


@dataclass(frozen=True)
class Tile:
    """The tile of y that a block computes, and the expected share of the device's peak rate for a full tile."""

    BN: int
    warpgroups: int  # consumer warpgroups
    rate: float
    warpgroup_rows: int = ROWS  # rows per warpgroup; more than ROWS: a transposed tile (swapped wgmma operands)

    @property
    def height(self) -> int:
        return self.warpgroup_rows * self.warpgroups

    @property
    def is_turned(self) -> bool:
        return self.warpgroup_rows > ROWS

    def count(self, M: int, N: int) -> int:
        return math.ceil(M / self.height) * math.ceil(N / self.BN)

    def work(self, count: int, units: int, idle: float) -> float:
        """Relative cost per SM: waves of tiles times the cost of a tile.

        idle  prologue and epilogue of a tile, as extra elements of y
        """
        return math.ceil(count / units) * (self.height * self.BN / self.rate + idle)


TILES = (
    Tile(256, 2, 1.0), Tile(128, 2, 0.85), Tile(64, 2, 0.5), Tile(32, 2, 0.3), Tile(64, 1, 0.43), Tile(32, 1, 0.35),
    Tile(64, 2, 0.85, 128),
)  # fmt: skip
# Rate factor of float32 rows that go through registers, by precision: in 3xTF32 three wgmma share the cost of a split.
THROUGH_REGISTERS = {"fp32": 1.3, "bf16": 0.85, "fp16": 0.85}
# Most columns of a tile, by accumulators per output; rows that go through registers leave registers for 128 at most.
MAX_COLUMNS = {1: 256, 2: 128, 3: 64}
# Multiply-adds of an SM in 0.8 us, the prologue and epilogue of a tile: 64 x 32 tiles took 1.1 us with one slice of k
# and 3.4 us with nine.
IDLE_PRODUCTS = {"fp16": 3.0e6, "bf16": 3.0e6, "tf32": 1.5e6, "fp32": 0.5e6}
CLUSTER_TILES = Tile(32, 1, 0.35), Tile(64, 1, 0.43), Tile(128, 1, 0.5)  # split-K; the wide ones for direct x only
MAX_PARTS, MIN_SLICES = 8, 4  # split-K: parts, slices per part
WORTH_PARTS = 0.95  # split-K must take at most this share of the time without it
# Measured with M up to 256, N and K from 128 to 4,096: time of a block where every SM has one (prologue and epilogue
# are hidden: they overlap adjacent launches); of a slice, plus per column, or per byte; of the cluster reduction, per
# column and per part; and the slowdown of a slice with two blocks per SM.
CROWD_US, SLICE_US, COLUMN_US, BYTES_PER_US = 1.0, 0.106, 0.00085, 98_000
TOGETHER_COLUMN_US, TOGETHER_PART_US, SHARED_UNIT = 0.025, 0.2, 1.4
# Estimated slowdown of a slice whose rows go through registers, by the tf32 parts of w.
SLOWER_SLICE = {1: 1.4, 2: 2.2}
STORED_BYTES_PER_US = 2.9e6  # of y, over all SMs: L2 takes 23 lines per ns
# Instructions per flop of an activation, and issued per us and SM: 3.1 us for GELU of 128 x 256.
INSTRUCTIONS, INSTRUCTIONS_PER_US = 0.75, 128 * 1755


def parts_have_slices(slices: int, parts: int) -> bool:
    """Whether the last split-K part has a slice: all others have slices / parts, rounded up."""
    return (parts - 1) * math.ceil(slices / parts) < slices


@dataclass(frozen=True)
class Tiling:
    """Tile, split-K mode and launch configuration of a GEMM."""

    template: str  # leading template arguments
    split: str  # split-K mode: NONE, ALONE, TOGETHER (enum Split of mma/wgmma_tile.cuh)
    tile: Tile
    config: LaunchConfig
    box_rows: int  # rows per TMA tile of x

    @property
    def budget(self) -> Budget:
        blocks = 2 if self.split == "TOGETHER" else 1  # per SM
        return Budget(65536 // (blocks * self.config.block[0]) // 8 * 8, spill_bytes=4)


@dataclass(frozen=True)
class GemmSm90Lowering:
    """y (M, N) = activation(x (M, K) w^T + bias), w (tf32 parts, N, K)."""

    M: int
    N: int
    K: int
    precision: str  # a key of PRECISIONS
    dtypes: tuple[str, str] = ("float32", "float32")  # of x and y
    activation: Elementwise | None = None
    parts: int = 1  # split-K
    phases: int = 1  # GEMMs of this shape, each with its own slices of w (conv/sm90.py)
    length: int = 0  # row length of x, where w is zero-padded past it; 0: K

    def count(self, tile: Tile) -> int:
        return self.phases * tile.count(self.M, self.N)

    @property
    def is_direct(self) -> bool:
        """Whether wgmma reads x from shared memory: x has the multiplied type, or TMA rounds it to tf32."""
        return self.precision != "fp32" and self.dtypes[0] == PRECISIONS[self.precision].dtype

    @property
    def read_as(self) -> str:
        """The TMA type of x."""
        return "tfloat32" if self.precision == "tf32" else self.dtypes[0]

    @property
    def turns(self) -> bool:
        """Whether transposed tiles are possible: 16-bit y in 16-byte vectors, one accumulator per output."""
        return self.is_direct and self.parts == 1 and DTYPE_BYTES[self.dtypes[1]] == 2 and self.N % 8 == 0

    def why_not(self) -> str:
        if not self.is_direct and self.dtypes[0] != "float32":
            return f"multiplies {PRECISIONS[self.precision].dtype} or float32, not {self.dtypes[0]}"
        for what, K, dtype in (
            ("x", self.length or self.K, self.dtypes[0]),
            ("w", self.K, PRECISIONS[self.precision].dtype),
        ):
            if not K or K * DTYPE_BYTES[dtype] % BOX_ROWS:
                return f"moves rows of multiples of {BOX_ROWS} B, and {K} numbers of {what} are none"
        return ""

    @property
    def slices(self) -> int:
        return math.ceil(self.K * DTYPE_BYTES[PRECISIONS[self.precision].dtype] / LINE)

    def splits_well(self, units: int) -> int:
        """The split-K factor with the least estimated time; 1: no split."""
        alone = replace(self, parts=1)
        best, min_us = 1, WORTH_PARTS * alone.min_us(units)
        parts = 2
        while parts <= MAX_PARTS and self.slices >= parts * MIN_SLICES:
            split = replace(self, parts=parts)
            if parts_have_slices(self.slices, parts) and split.cut(units)[1] == "TOGETHER":
                us = split.min_us(units)
                best, min_us = (parts, us) if us < min_us else (best, min_us)
            parts *= 2
        return best

    @property
    def _cluster_tiles(self) -> tuple[Tile, ...]:
        return CLUSTER_TILES if self.is_direct else CLUSTER_TILES[:1]

    def cut(self, units: int) -> tuple[Tile, str]:
        """The tile with the least estimated cost, and the split-K mode."""
        if self.parts > 1:
            for tile in self._cluster_tiles:
                # Two blocks per SM fit with the narrowest tile; larger clusters would wait for each other.
                most = 2 * units if self.parts == 2 and tile is self._cluster_tiles[0] else units
                if self.parts * self.count(tile) <= most:
                    return tile, "TOGETHER"
        sums = PRECISIONS[self.precision].parts + (self.parts > 1)  # accumulators per output
        most = MAX_COLUMNS[sums] if self.is_direct else min(MAX_COLUMNS[sums], MAX_COLUMNS[2])
        tiles = [tile for tile in TILES if most >= tile.BN and (self.turns or not tile.is_turned)]
        return min(tiles, key=lambda tile: self._work(tile, units)), "NONE" if self.parts == 1 else "ALONE"

    @property
    def _idle(self) -> float:
        return IDLE_PRODUCTS[self.precision] * self.phases / self.K

    def _work(self, tile: Tile, units: int) -> float:
        return tile.work(self.count(tile), units, self._idle)

    def rate(self, units: int, hides_begin: bool = False) -> float:
        """Estimated share of the peak rate: counts tile overhang and idle SMs in the last wave.

        hides_begin  the first prologue and last epilogue overlap adjacent launches
        """
        tile, split = self.cut(units)
        blocks = self.parts if split == "TOGETHER" else 1  # per tile
        pace = 1.0 if self.is_direct else THROUGH_REGISTERS[self.precision]
        work = self._work(tile, units) - (self._idle if hides_begin else 0.0)
        return pace * blocks * self.phases * self.M * self.N / (units * work)

    def min_us(self, units: int) -> float:
        """Least time: the slices of a block in sequence, the cluster reduction, the activation, the stores of y."""
        tile, split = self.cut(units)
        precision = PRECISIONS[self.precision]
        is_together = split == "TOGETHER"
        blocks = self.count(tile) * (self.parts if is_together else 1)
        x_bytes = min(self.M, tile.height) * LINE * DTYPE_BYTES[self.dtypes[0]] // DTYPE_BYTES[precision.dtype]
        slice_bytes = x_bytes + precision.parts * tile.BN * LINE
        slower = 1.0 if self.is_direct else SLOWER_SLICE[precision.parts]
        slice_us = max(slower * (SLICE_US + COLUMN_US * tile.BN), slice_bytes / BYTES_PER_US)
        us = CROWD_US * min(1.0, blocks / units)
        if is_together:
            us += TOGETHER_COLUMN_US * tile.BN + TOGETHER_PART_US * self.parts
            us += math.ceil(self.slices / self.parts) * slice_us * (SHARED_UNIT if blocks > units else 1.0)
        else:
            us += math.ceil(blocks / units) * self.slices * slice_us
        if self.activation is not None and self.activation.flop_each > 2:
            numbers = math.ceil(blocks / units) * tile.height * tile.BN  # outputs per SM
            us += numbers * INSTRUCTIONS * self.activation.flop_each / INSTRUCTIONS_PER_US
        return us + self.phases * self.M * self.N * DTYPE_BYTES[self.dtypes[1]] / STORED_BYTES_PER_US

    def tiling(self, units: int) -> Tiling:
        tile, split = self.cut(units)
        precision = PRECISIONS[self.precision]
        x_boxes = DTYPE_BYTES[self.dtypes[0]] // DTYPE_BYTES[precision.dtype]  # TMA tiles of x per tile of w
        stage_bytes = (x_boxes * tile.height + precision.parts * tile.BN) * LINE
        is_together = split == "TOGETHER"
        extra = ALIGN_BYTES + (4 * tile.height * (tile.BN + 8) if is_together else 0)  # partial sums of split-K
        extra += tile.height * LINE if tile.is_turned else 0  # staging buffer of the epilogue
        room = SHARED_BYTES // 2 if is_together else SHARED_BYTES  # the next kernel's blocks get the other half
        stages = min(MAX_STAGES, (room - extra) // stage_bytes)
        given, made = (ELEMENT_TYPES[dtype] for dtype in self.dtypes)
        template = f"{precision.name}, {given}, {made}, {tile.warpgroup_rows}, {tile.BN}, {tile.warpgroups}, {stages}"
        count = self.count(tile)
        config = LaunchConfig(
            (count * self.parts if is_together else min(units, count), 1, 1), (WARPGROUP * (tile.warpgroups + 1), 1, 1),
            stages * stage_bytes + extra, overlaps=True, cluster=self.parts if is_together else 1,
        )  # fmt: skip
        return Tiling(template, split, tile, config, min(self.M, tile.height))

    def weight_map(self, w: Memory, tile: Tile) -> TensorMap:
        """TMA descriptor of w (tf32 parts, N, K)."""
        precision = PRECISIONS[self.precision]
        box = (LINE // DTYPE_BYTES[precision.dtype], tile.BN, 1)
        return TensorMap(w, precision.dtype, (self.K, self.N, precision.parts), box, LINE)

    def launch(
        self, units: int, x: Memory, w: Memory, bias: Argument, y: Argument, other: Argument = NOTHING
    ) -> KernelLaunch:
        """bias  (N) float32, or Int64(0): none; other: residual (M, N) of y's type, or Int64(0)"""
        tiling = self.tiling(units)
        box = (LINE // DTYPE_BYTES[self.dtypes[0]], tiling.box_rows)
        rows = TensorMap(x, self.read_as, (self.length or self.K, self.M), box, LINE)
        arguments = (
            rows, self.weight_map(w, tiling.tile), bias, other, y,
            Int64(self.M), Int64(self.N), Int64(self.K), UInt32(tiling.box_rows), UInt32(self.parts),
            *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        program = Program(SOURCE, f"gemm_sm90<{tiling.template}, {tiling.split}, {act_name(self.activation)}>")
        return KernelLaunch(program, tiling.config, arguments, tiling.budget)


# -- as a layer of a network -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WgmmaLowering:
    """A Linear and its activation as one launch; rows that TMA cannot address are zero-padded in a launch before it."""

    N: int
    K: int  # of the layer, unpadded
    vectors: int  # rows of x per row of the batch
    precision: str
    dtypes: tuple[str, str]
    activation: Elementwise | None
    has_bias: bool
    units: int
    parts: int = 1
    other: int | None = None  # input index of the residual

    @property
    def row_bytes(self) -> int:
        """Of x, unpadded."""
        return self.K * DTYPE_BYTES[self.dtypes[0]]

    @property
    def copied_bytes(self) -> int:
        """Of a zero-padded row of x; 0 where no copy is needed."""
        x_bytes = DTYPE_BYTES[self.dtypes[0]]
        return padded(self.K, x_bytes) * x_bytes if self.row_bytes % BOX_ROWS else 0

    def product(self, B: int) -> GemmSm90Lowering:
        M, K = B * self.vectors, padded(self.K, DTYPE_BYTES[PRECISIONS[self.precision].dtype])
        length = padded(self.K, DTYPE_BYTES[self.dtypes[0]])
        return GemmSm90Lowering(M, self.N, K, self.precision, self.dtypes, self.activation, self.parts, length=length)

    def at(self, B: int) -> Steps:
        product = self.product(B)
        if not product.M:
            return Steps(())
        bias: Argument = Weight("bias") if self.has_bias else Int64(0)
        other: Argument = Int64(0) if self.other is None else Input(self.other)
        if not self.copied_bytes:
            return Steps((product.launch(self.units, Input(0), Weight("weight"), bias, Output(0), other),))
        return Steps(
            (
                pad_rows(product.M, self.row_bytes, self.units, Input(0), Scratch(0)),
                product.launch(self.units, Scratch(0), Weight("weight"), bias, Output(0), other),
            ),
            scratch_bytes=product.M * self.copied_bytes,
        )


class GemmSm90:
    name = "gemm_sm90"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    @property
    def makes(self) -> Mapping[str, float]:
        """Recipes of recipes/recipes.cu, each a pass over memory."""
        return dict.fromkeys(map(op_name, (split_weight, tf32_weight)), 1.0)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """One Linear with its activation and surrounding Casts, or with a residual Add and the activation after it."""
        chain = find_chain(net, start, ACTIVATIONS, casts=True, most=1)
        if chain is None or device.arch not in ARCHITECTURES or mlp_tensor_core.why_not(net, chain, device, job):
            return
        chain = one_layer(net, chain)
        (layer,) = chain.layers
        is_small = layer.D_in * layer.D_out < MIN_WEIGHTS
        if is_small and not isinstance(mlp_tensor_core.make_lowering(net, chain, device, job), str):
            return
        for run in residuals(net, start, chain):
            lowering = WgmmaLowering(
                layer.D_out, layer.D_in, chain.vectors, job.precision, end_dtypes(net, run.chain),
                run.chain.layers[0].activation, layer.bias is not None, device.units, other=run.other_input(net),
            )  # fmt: skip
            if why := lowering.product(1).why_not():
                yield Refusal(self.name, net.nodes[start].name, why)
            else:
                parts = lowering.product(max(1, job.batch)).splits_well(device.units)
                yield _claim(net, run, replace(lowering, parts=parts), job)


def _claim(net: Network, run: Residual, lowering: WgmmaLowering, job: Job) -> Claim:
    chain, cost = run.chain, run.cost(net)
    recipes = weight_recipes(chain.layers[0], job.precision)
    parts = PRECISIONS[job.precision].parts
    label = f"{run.label},{lowering.parts} parts" if lowering.parts > 1 else run.label
    order = f"k in steps of {PRECISIONS[job.precision].step} by wgmma"
    order += f", parts of {PART}" if parts > 1 else ""
    order += f", {lowering.parts} parts" if lowering.parts > 1 else ""
    copied = lowering.vectors * (lowering.row_bytes + lowering.copied_bytes) if lowering.copied_bytes else 0
    return Claim(
        kernel=GemmSm90.name,
        label=f"{GemmSm90.name}<{label}>",
        nodes=chain.nodes,
        cost=Cost(
            cost.row_flop * (3 if parts > 1 else 1),  # 3xTF32
            cost.row_bytes,
            sum(made.nbytes for made in recipes.values()),
            launches=2 if copied else 1,
            transposed_bytes=copied,
            precision="tf32" if parts > 1 else "",
            rate=lowering.product(max(1, job.batch)).rate(lowering.units, hides_begin=True),
            min_us=lowering.product(max(1, job.batch)).min_us(lowering.units),
        ),
        why="tensor cores, a tile a block",
        recipes=recipes,
        order=order,
        reads={net.by_name[chain.nodes[0]].inputs[0]: Use(is_read_often=True)},  # once per column of tiles
        facts=lowering,
    )


def weight_recipes(layer: Dense, precision: str) -> dict[str, Recipe]:
    """w (tf32 parts, N, padded K) in the multiplied type; the bias in float32."""
    shape = layer.D_out, padded(layer.D_in, DTYPE_BYTES[PRECISIONS[precision].dtype])
    rows = layer.weight if shape[1] == layer.D_in else Recipe.of(padded_rows, (layer.weight,), shape, K=shape[1])
    recipes = {"weight": multiplied_weight(rows, shape, precision)}
    if layer.bias is not None:
        recipes["bias"] = Recipe.of(as_is, (layer.bias,), (layer.D_out,))
    return recipes


def multiplied_weight(weight: str | Recipe, shape: tuple[int, int], precision: str) -> Recipe:
    """A weight (N, K) in the multiplied type; in fp32 (2, N, K)."""
    computed = PRECISIONS[precision]
    op = {"fp32": split_weight, "tf32": tf32_weight, "fp16": narrow_weight, "bf16": as_is}[precision]
    return Recipe.of(op, (weight,), (2, *shape) if computed.parts == 2 else shape, computed.dtype)


@recipe_op
def split_weight(weight: Array) -> Array:
    """3xTF32 split (2, N, K): two tf32 whose sum is the weight times UNBIASED, which offsets the truncation of sums."""
    wide = np.ascontiguousarray(weight, np.float32)
    upper = round_tf32(wide)
    with np.errstate(invalid="ignore"):
        lower = wide * np.float32(UNBIASED) - upper.astype(np.float64)
        return np.stack([upper, round_tf32(lower.astype(np.float32))])


@recipe_op
def tf32_weight(weight: Array) -> Array:
    """Rounded to tf32; the tensor cores would truncate."""
    return round_tf32(np.ascontiguousarray(weight, np.float32))


def _instance(
    name: str, M: int, N: int, K: int, precision: str, dtypes: tuple[str, str] = ("float32", "float32"), parts: int = 1
) -> Instance:
    product, nothing = GemmSm90Lowering(M, N, K, precision, dtypes, parts=parts), Input(0)
    return Instance(name, lambda device: product.launch(device.units, nothing, nothing, Int64(0), Int64(0)))


INSTANCES = (
    _instance("large fp16", 8192, 8192, 8192, "fp16", ("float16", "float16")),
    _instance("large bf16 to float32", 8192, 8192, 8192, "bf16", ("bfloat16", "float32")),
    _instance("large fp32", 8192, 8192, 8192, "fp32"),
    _instance("large tf32", 8192, 8192, 8192, "tf32"),
    _instance("large fp16, rows in float32", 8192, 8192, 8192, "fp16"),
    _instance("few rows fp16", 7, 4096, 4096, "fp16", ("float16", "float16")),
    _instance("few rows fp32", 7, 4096, 4096, "fp32"),
    _instance("few rows fp16, in parts", 7, 1024, 4096, "fp16", ("float16", "float16"), parts=4),
    _instance("few rows fp32, in parts", 7, 1024, 4096, "fp32", parts=4),
    _instance("64 rows fp16, in parts", 64, 4096, 4096, "fp16", ("float16", "float16"), parts=4),
    _instance("64 rows tf32, in parts", 64, 4096, 4096, "tf32", parts=4),
    _instance("many rows fp16, in parts", 8192, 1024, 4096, "fp16", ("float16", "float16"), parts=4),
    _instance("many rows fp32, in parts", 8192, 1024, 4096, "fp32", parts=4),
    _instance("few columns fp16", 65536, 10, 512, "fp16", ("float16", "float16")),
    _instance("few columns fp16, turned", 65536, 64, 512, "fp16", ("float16", "float16")),
)
