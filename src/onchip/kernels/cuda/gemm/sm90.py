"""Host side of gemm/sm90.cu: a Linear of many weights, at Hopper's tensor cores."""

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
    NOTHING,
    NUMBERS,
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
from onchip.kernels.cuda.gemm.pad_rows import PIECE_BYTES, pad_rows, padded, padded_rows
from onchip.kernels.cuda.gemm.residual import Residual, residuals
from onchip.kernels.cuda.gemm.simt import narrow_weight, one_layer
from onchip.kernels.cuda.mlp import tensor_core as mlp_tensor
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network
from onchip.network.layers import Elementwise
from onchip.network.recipe import Array, Recipe, as_is, op_name, recipe_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal, Use

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = ("sm_90a",)
TEAM, ROWS, LINE, PART = 128, 64, 128, 32  # as the .cuh file has them
ALIGN_BYTES = 1024  # of a stage
SHARED_BYTES = 220 << 10  # for stages: biases and signals take the rest of what a block may have
MOST_STAGES = 16
# What a part's sum lacks on average: each of its 12 additions is cut off where float32 ends, not rounded (see
# mlp/packing.py). A simulation of that has sums smaller by 2.3e-7 of themselves.
UNBIASED = 1 + 2.3e-7
LEAST_WEIGHTS = 1 << 15  # of a layer: fewer fit in a multiprocessor, and are read there (mlp/tensor_core.py)
BOX_ROWS = PIECE_BYTES  # at a multiple of which rows must begin


@dataclass(frozen=True)
class Tile:
    """What a block makes of y, and the share of the device's rate that it should reach where all of it is wanted."""

    BN: int
    teams: int
    rate: float
    team_rows: int = ROWS  # more: it is turned

    @property
    def height(self) -> int:
        return self.team_rows * self.teams

    @property
    def is_turned(self) -> bool:
        return self.team_rows > ROWS

    def count(self, M: int, N: int) -> int:
        return math.ceil(M / self.height) * math.ceil(N / self.BN)

    def work(self, count: int, units: int, idle: float) -> float:
        """Of a multiprocessor, as it takes time: rounds of tiles.

        idle  numbers of y that would be made before a tile's first product and behind its last
        """
        return math.ceil(count / units) * (self.height * self.BN / self.rate + idle)


TILES = (
    Tile(256, 2, 1.0), Tile(128, 2, 0.85), Tile(64, 2, 0.5), Tile(32, 2, 0.3), Tile(64, 1, 0.43), Tile(32, 1, 0.35),
    Tile(64, 2, 0.85, 128),
)  # fmt: skip
# As much of that is reached by rows of float32, by precision: three products of tf32 share what it takes to split them.
THROUGH_REGISTERS = {"fp32": 1.3, "bf16": 0.85, "fp16": 0.85}
# Of a tile, by the sums that a thread has of each number; rows that go through registers leave room for 128 at most.
MOST_COLUMNS = {1: 256, 2: 128, 3: 64}
# Products that a multiprocessor would make in 0.8 us, which it takes to begin and to end a tile: those of 64 x 32 took
# 1.1 us with one slice of k, and 3.4 us with nine.
IDLE_PRODUCTS = {"fp16": 3.0e6, "bf16": 3.0e6, "tf32": 1.5e6, "fp32": 0.5e6}
CLUSTER_TILES = Tile(32, 1, 0.35), Tile(64, 1, 0.43), Tile(128, 1, 0.5)  # the wide ones of rows that are read directly
MOST_PARTS, LEAST_SLICES = 8, 4  # of a sum; of a part
WORTH_PARTS = 0.95  # of the time in one part
# As measured with up to 256 rows and 128 to 4,096 columns and terms: what a block takes where all multiprocessors have
# one (what comes before its first slice and behind its last is hidden: the next launch has begun); a slice, and of it
# each column, or each byte; the sums of a cluster, each column and each part; and how much longer a slice takes where a
# multiprocessor has two blocks.
CROWD_US, SLICE_US, COLUMN_US, BYTES_A_US = 1.0, 0.106, 0.00085, 98_000
TOGETHER_COLUMN_US, TOGETHER_PART_US, SHARED_UNIT = 0.025, 0.2, 1.4
# Estimates: how much longer a slice takes whose rows go through registers; a number of w in one part, and in two.
SLOWER_SLICE = {1: 1.4, 2: 2.2}
STORED_BYTES_A_US = 2.9e6  # of y, all multiprocessors together: L2 takes 23 lines a ns
# Instructions for one of an activation's flop, and how many a multiprocessor begins: 3.1 us for GELU of 128 x 256.
INSTRUCTIONS, INSTRUCTIONS_A_US = 0.75, 128 * 1755


def parts_have_slices(slices: int, parts: int) -> bool:
    """Whether the last part of a sum has a slice: all before it have the same number of them, rounded up."""
    return (parts - 1) * math.ceil(slices / parts) < slices


@dataclass(frozen=True)
class Tiling:
    """How a product is cut."""

    template: str  # the first arguments of the kernel's template
    split: str  # how the parts of a sum are made: NONE, ALONE, TOGETHER
    tile: Tile
    config: LaunchConfig
    box_rows: int  # of x

    @property
    def budget(self) -> Budget:
        blocks = 2 if self.split == "TOGETHER" else 1  # of a multiprocessor
        return Budget(65536 // (blocks * self.config.block[0]) // 8 * 8, spill_bytes=4)


@dataclass(frozen=True)
class WgmmaProduct:
    """y (M, N) = activation(x (M, K) w^T + bias), w (parts, N, K)."""

    M: int
    N: int
    K: int
    precision: str  # of PRECISIONS
    dtypes: tuple[str, str] = ("float32", "float32")  # of x and y
    activation: Elementwise | None = None
    parts: int = 1  # of a sum along k
    phases: int = 1  # as many products of these sizes, each of its own slices of w (conv/sm90.py)
    length: int = 0  # of a row of x, where w has zeros behind as many numbers; 0: K

    def count(self, tile: Tile) -> int:
        return self.phases * tile.count(self.M, self.N)

    @property
    def is_direct(self) -> bool:
        """Whether x is whon the tensor cores multiply, or is rounded to it on its way to them: no register between."""
        return self.precision != "fp32" and self.dtypes[0] == PRECISIONS[self.precision].dtype

    @property
    def read_as(self) -> str:
        """x, as boxes of it are brought."""
        return "tfloat32" if self.precision == "tf32" else self.dtypes[0]

    @property
    def turns(self) -> bool:
        """Whether what is made can be turned: pieces of 16 B of y, from sums that a thread has one of."""
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
        """Parts of a sum with which few rows should be done first; 1 where there are many."""
        alone = replace(self, parts=1)
        best, least_us = 1, WORTH_PARTS * alone.least_us(units)
        parts = 2
        while parts <= MOST_PARTS and self.slices >= parts * LEAST_SLICES:
            split = replace(self, parts=parts)
            if parts_have_slices(self.slices, parts) and split.cut(units)[1] == "TOGETHER":
                us = split.least_us(units)
                best, least_us = (parts, us) if us < least_us else (best, least_us)
            parts *= 2
        return best

    @property
    def _cluster_tiles(self) -> tuple[Tile, ...]:
        return CLUSTER_TILES if self.is_direct else CLUSTER_TILES[:1]

    def cut(self, units: int) -> tuple[Tile, str]:
        """The tiles that should be done first, and how the parts of a sum are made."""
        if self.parts > 1:
            for tile in self._cluster_tiles:
                # Two blocks of the narrowest tile find room; clusters of more blocks then wait for each other.
                most = 2 * units if self.parts == 2 and tile is self._cluster_tiles[0] else units
                if self.parts * self.count(tile) <= most:
                    return tile, "TOGETHER"
        sums = PRECISIONS[self.precision].parts + (self.parts > 1)  # that a thread has of each number
        most = MOST_COLUMNS[sums] if self.is_direct else min(MOST_COLUMNS[sums], MOST_COLUMNS[2])
        tiles = [tile for tile in TILES if most >= tile.BN and (self.turns or not tile.is_turned)]
        return min(tiles, key=lambda tile: self._work(tile, units)), "NONE" if self.parts == 1 else "ALONE"

    @property
    def _idle(self) -> float:
        return IDLE_PRODUCTS[self.precision] * self.phases / self.K

    def _work(self, tile: Tile, units: int) -> float:
        return tile.work(self.count(tile), units, self._idle)

    def rate(self, units: int, hides_begin: bool = False) -> float:
        """Share of the device's rate: what is made beside y, and multiprocessors that have nothing left to do.

        hides_begin  the first tile's begin and the last one's end: another launch is under way then
        """
        tile, split = self.cut(units)
        blocks = self.parts if split == "TOGETHER" else 1  # of a tile
        pace = 1.0 if self.is_direct else THROUGH_REGISTERS[self.precision]
        work = self._work(tile, units) - (self._idle if hides_begin else 0.0)
        return pace * blocks * self.phases * self.M * self.N / (units * work)

    def least_us(self, units: int) -> float:
        """Of slices, one after the other, however few rows there are; and of what is made, on its way out."""
        tile, split = self.cut(units)
        precision = PRECISIONS[self.precision]
        is_together = split == "TOGETHER"
        blocks = self.count(tile) * (self.parts if is_together else 1)
        x_bytes = min(self.M, tile.height) * LINE * DTYPE_BYTES[self.dtypes[0]] // DTYPE_BYTES[precision.dtype]
        slice_bytes = x_bytes + precision.parts * tile.BN * LINE
        slower = 1.0 if self.is_direct else SLOWER_SLICE[precision.parts]
        slice_us = max(slower * (SLICE_US + COLUMN_US * tile.BN), slice_bytes / BYTES_A_US)
        us = CROWD_US * min(1.0, blocks / units)
        if is_together:
            us += TOGETHER_COLUMN_US * tile.BN + TOGETHER_PART_US * self.parts
            us += math.ceil(self.slices / self.parts) * slice_us * (SHARED_UNIT if blocks > units else 1.0)
        else:
            us += math.ceil(blocks / units) * self.slices * slice_us
        if self.activation is not None and self.activation.flop_each > 2:
            numbers = math.ceil(blocks / units) * tile.height * tile.BN  # of a multiprocessor
            us += numbers * INSTRUCTIONS * self.activation.flop_each / INSTRUCTIONS_A_US
        return us + self.phases * self.M * self.N * DTYPE_BYTES[self.dtypes[1]] / STORED_BYTES_A_US

    def tiling(self, units: int) -> Tiling:
        tile, split = self.cut(units)
        precision = PRECISIONS[self.precision]
        x_boxes = DTYPE_BYTES[self.dtypes[0]] // DTYPE_BYTES[precision.dtype]  # as many numbers as one of w has
        stage_bytes = (x_boxes * tile.height + precision.parts * tile.BN) * LINE
        is_together = split == "TOGETHER"
        extra = ALIGN_BYTES + (4 * tile.height * (tile.BN + 8) if is_together else 0)  # sums, in different banks
        extra += tile.height * LINE if tile.is_turned else 0  # its way out
        room = SHARED_BYTES // 2 if is_together else SHARED_BYTES  # the next kernel's blocks have the other half
        stages = min(MOST_STAGES, (room - extra) // stage_bytes)
        given, made = (NUMBERS[dtype] for dtype in self.dtypes)
        template = f"{precision.name}, {given}, {made}, {tile.team_rows}, {tile.BN}, {tile.teams}, {stages}"
        count = self.count(tile)
        config = LaunchConfig(
            (count * self.parts if is_together else min(units, count), 1, 1), (TEAM * (tile.teams + 1), 1, 1),
            stages * stage_bytes + extra, overlaps=True, cluster=self.parts if is_together else 1,
        )  # fmt: skip
        return Tiling(template, split, tile, config, min(self.M, tile.height))

    def weight_map(self, w: Memory, tile: Tile) -> TensorMap:
        """Boxes of w (parts, N, K)."""
        precision = PRECISIONS[self.precision]
        box = (LINE // DTYPE_BYTES[precision.dtype], tile.BN, 1)
        return TensorMap(w, precision.dtype, (self.K, self.N, precision.parts), box, LINE)

    def launch(
        self, units: int, x: Memory, w: Memory, bias: Argument, y: Argument, other: Argument = NOTHING
    ) -> KernelLaunch:
        """bias  of N float32, or Int64(0): none; other: of M N numbers as y's"""
        tiling = self.tiling(units)
        box = (LINE // DTYPE_BYTES[self.dtypes[0]], tiling.box_rows)
        rows = TensorMap(x, self.read_as, (self.length or self.K, self.M), box, LINE)
        arguments = (
            rows, self.weight_map(w, tiling.tile), bias, other, y,
            Int64(self.M), Int64(self.N), Int64(self.K), UInt32(tiling.box_rows), UInt32(self.parts),
            *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        program = Program(SOURCE, f"product_wgmma<{tiling.template}, {tiling.split}, {act_name(self.activation)}>")
        return KernelLaunch(program, tiling.config, arguments, tiling.budget)


# -- as a layer of a network -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WgmmaLowering:
    """A Linear and its activation as one launch; rows that boxes cannot begin at are copied to others before."""

    N: int
    K: int  # as the layer has it
    vectors: int  # of a row of the batch
    precision: str
    dtypes: tuple[str, str]
    activation: Elementwise | None
    has_bias: bool
    units: int
    parts: int = 1
    other: int | None = None  # which of the inputs is added

    @property
    def row_bytes(self) -> int:
        """Of x, as it is given."""
        return self.K * DTYPE_BYTES[self.dtypes[0]]

    @property
    def copied_bytes(self) -> int:
        """Of a row of x with zeros behind it; 0 where it is read as it lies."""
        x_bytes = DTYPE_BYTES[self.dtypes[0]]
        return padded(self.K, x_bytes) * x_bytes if self.row_bytes % BOX_ROWS else 0

    def product(self, B: int) -> WgmmaProduct:
        M, K = B * self.vectors, padded(self.K, DTYPE_BYTES[PRECISIONS[self.precision].dtype])
        length = padded(self.K, DTYPE_BYTES[self.dtypes[0]])
        return WgmmaProduct(M, self.N, K, self.precision, self.dtypes, self.activation, self.parts, length=length)

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


class ProductWgmma:
    name = "product_wgmma"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    @property
    def makes(self) -> Mapping[str, float]:
        """By recipes/recipes.cu: passes over memory."""
        return dict.fromkeys(map(op_name, (split_weight, tf32_weight)), 1.0)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """One Linear, with its activation and the Casts around it, or with an Add and the activation behind that."""
        chain = find_chain(net, start, ACTIVATIONS, casts=True, most=1)
        if chain is None or device.arch not in ARCHITECTURES or mlp_tensor.why_not(net, chain, device, job):
            return
        chain = one_layer(net, chain)
        (layer,) = chain.layers
        is_small = layer.D_in * layer.D_out < LEAST_WEIGHTS
        if is_small and not isinstance(mlp_tensor.make_lowering(net, chain, device, job), str):
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
    chain, price = run.chain, run.price(net)
    recipes = weight_recipes(chain.layers[0], job.precision)
    parts = PRECISIONS[job.precision].parts
    label = f"{run.label},{lowering.parts} parts" if lowering.parts > 1 else run.label
    order = f"k in steps of {PRECISIONS[job.precision].step} by wgmma"
    order += f", parts of {PART}" if parts > 1 else ""
    order += f", {lowering.parts} parts" if lowering.parts > 1 else ""
    copied = lowering.vectors * (lowering.row_bytes + lowering.copied_bytes) if lowering.copied_bytes else 0
    return Claim(
        kernel=ProductWgmma.name,
        label=f"{ProductWgmma.name}<{label}>",
        nodes=chain.nodes,
        price=Price(
            price.row_flop * (3 if parts > 1 else 1),  # three products of tf32 for one of fp32
            price.row_bytes,
            sum(made.nbytes for made in recipes.values()),
            launches=2 if copied else 1,
            turned_bytes=copied,
            precision="tf32" if parts > 1 else "",
            rate=lowering.product(max(1, job.batch)).rate(lowering.units, hides_begin=True),
            least_us=lowering.product(max(1, job.batch)).least_us(lowering.units),
        ),
        why="tensor cores, a tile a block",
        recipes=recipes,
        order=order,
        reads={net.by_name[chain.nodes[0]].inputs[0]: Use(is_read_often=True)},  # by every column of tiles
        facts=lowering,
    )


def weight_recipes(layer: Dense, precision: str) -> dict[str, Recipe]:
    """w (parts, N, K and zeros) in whon the tensor cores multiply; the bias in float32."""
    shape = layer.D_out, padded(layer.D_in, DTYPE_BYTES[PRECISIONS[precision].dtype])
    rows = layer.weight if shape[1] == layer.D_in else Recipe.of(padded_rows, (layer.weight,), shape, K=shape[1])
    recipes = {"weight": multiplied_weight(rows, shape, precision)}
    if layer.bias is not None:
        recipes["bias"] = Recipe.of(as_is, (layer.bias,), (layer.D_out,))
    return recipes


def multiplied_weight(weight: str | Recipe, shape: tuple[int, int], precision: str) -> Recipe:
    """A weight (N, K) as the tensor cores multiply it; of fp32 (2, N, K)."""
    computed = PRECISIONS[precision]
    op = {"fp32": split_weight, "tf32": tf32_weight, "fp16": narrow_weight, "bf16": as_is}[precision]
    return Recipe.of(op, (weight,), (2, *shape) if computed.parts == 2 else shape, computed.dtype)


@recipe_op
def split_weight(weight: Array) -> Array:
    """(2, N, K): two tf32 whose sum is the weight, and by so much more as the tensor cores cut off of a part's sum."""
    wide = np.ascontiguousarray(weight, np.float32)
    upper = round_tf32(wide)
    with np.errstate(invalid="ignore"):
        lower = wide * np.float32(UNBIASED) - upper.astype(np.float64)
        return np.stack([upper, round_tf32(lower.astype(np.float32))])


@recipe_op
def tf32_weight(weight: Array) -> Array:
    """Rounded: the tensor cores would cut off what is too much."""
    return round_tf32(np.ascontiguousarray(weight, np.float32))


def _instance(
    name: str, M: int, N: int, K: int, precision: str, dtypes: tuple[str, str] = ("float32", "float32"), parts: int = 1
) -> Instance:
    product, nothing = WgmmaProduct(M, N, K, precision, dtypes, parts=parts), Input(0)
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
