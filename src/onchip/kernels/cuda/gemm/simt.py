"""GEMM on CUDA cores: the host side of gemm/simt.cu. A Linear of any shape, without compiling per layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.chain import Chain, Dense, end_dtypes, find_chain, forward_cost
from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.chain import FitsInBlock, chain_refusal
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import (
    ELEMENT_TYPES,
    EVERY_CHIP,
    Argument,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Output,
    Program,
    Steps,
    UInt32,
    Weight,
)
from onchip.kernels.cuda.common.weights import narrow_weight
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network
from onchip.network.layers import Elementwise, Linear
from onchip.network.recipe import Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
PART = 128  # elements of k per partial sum
MAX_NARROW = 32  # rows or columns up to which narrow tiles are considered


@dataclass(frozen=True)
class Tile:
    """The tile of y that a block computes, and the expected share of the device's peak rate for a full tile."""

    BM: int
    BN: int
    per_thread: tuple[int, int]  # rows and columns per thread
    rate: float

    @property
    def work(self) -> float:
        """Relative cost of a block."""
        return self.BM * self.BN / self.rate

    def suits(self, M: int, N: int) -> bool:
        """Whether to consider this tile: narrow ones read more, so only where a square one would be mostly empty."""
        return self.BM == self.BN or (M if self.BM < self.BN else N) <= MAX_NARROW

    def count(self, M: int, N: int) -> int:
        return math.ceil(M / self.BM) * math.ceil(N / self.BN)


# First: large GEMMs; third: few rows; fourth: few columns.
FMA_TILES = (
    Tile(128, 128, (8, 8), 0.75), Tile(64, 64, (4, 4), 0.5), Tile(16, 64, (4, 4), 0.17), Tile(256, 16, (4, 4), 0.35),
)  # fmt: skip
EXACT = ("fp32", "tf32")  # precisions that true fp32 on CUDA cores satisfies


@dataclass(frozen=True)
class SimtGemm:
    """y (M, N) = activation(x (M, K) w^T + bias), w (N, K)."""

    M: int
    N: int
    K: int
    precision: str  # "fp32", or "fp64": float32 operands with float64 accumulators
    dtypes: tuple[str, str] = ("float32", "float32")  # of x and y
    activation: Elementwise | None = None

    def tile(self, units: int) -> Tile:
        """The tile with the least estimated cost: waves of blocks times the cost of a block."""
        if self.precision == "fp64":
            return FMA_TILES[1]  # 8 x 8 float64 accumulators do not fit in registers
        tiles = [tile for tile in FMA_TILES if tile.suits(self.M, self.N)]
        return min(tiles, key=lambda tile: math.ceil(tile.count(self.M, self.N) / units) * tile.work)

    def rate(self, units: int) -> float:
        """Estimated share of the peak rate, given partial tiles and idle SMs in the last wave."""
        tile = self.tile(units)
        return self.M * self.N / (math.ceil(tile.count(self.M, self.N) / units) * units * tile.work)

    def launch(self, units: int, x: Argument, w: Argument, bias: Argument, y: Argument) -> KernelLaunch:
        """bias  (N) float32, or Int64(0): none"""
        tile = self.tile(units)
        TM, TN = tile.per_thread
        threads = tile.BM // TM * (tile.BN // TN)
        x_type, y_type = (ELEMENT_TYPES[dtype] for dtype in self.dtypes)
        types = f"{'double' if self.precision == 'fp64' else 'float'}, {x_type}, {y_type}"
        is_long = "true" if self.K > PART else "false"
        program = Program(SOURCE, f"gemm_simt<{types}, {tile.BM}, {tile.BN}, {TM}, {TN}, {is_long}>")
        config = LaunchConfig((tile.count(self.M, self.N), 1, 1), (threads, 1, 1), 0)
        sizes = (Int64(self.M), Int64(self.N), Int64(self.K))
        arguments = (x, w, bias, y, *sizes, *map(UInt32, activation_words(self.activation)))
        # With two blocks per SM and 8 x 8 accumulators per thread, GPUs before sm_90 spill some registers.
        budget = Budget(min(255, 65536 // (threads * (1 if self.K > PART else 2)) // 8 * 8), spill_bytes=64)
        return KernelLaunch(program, config, arguments, budget)


# -- as a layer of a network -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmSimtLowering:
    """A Linear and its activation as one launch."""

    gemm: SimtGemm  # at B = 1
    has_bias: bool
    units: int

    def at(self, B: int) -> Steps:
        gemm = replace(self.gemm, M=B * self.gemm.M)
        if not gemm.M:
            return Steps(())
        bias: Argument = Weight("bias") if self.has_bias else Int64(0)
        return Steps((gemm.launch(self.units, Input(0), Weight("weight"), bias, Output(0)),))


class GemmSimt:
    name = "gemm_simt"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def __init__(self, fits_in_block: FitsInBlock) -> None:
        self.fits_in_block = fits_in_block

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """One Linear with its activation and surrounding Casts; conv_direct claims those in float64."""
        if isinstance(net.nodes[start].layer, Linear) and net.types[net.nodes[start].name].dtype == "float64":
            return
        found = large_layer(net, start, device, job, self.fits_in_block)
        if isinstance(found, str):
            yield Refusal(self.name, net.nodes[start].name, found)
        elif found is not None and job.precision in EXACT:
            yield _claim(net, found, device, job)


def large_layer(net: Network, start: int, device: Device, job: Job, fits_in_block: FitsInBlock) -> Chain | str | None:
    """The Linear at `start` with its activation and surrounding Casts, where it does not fit in a block.

    None: no such layer, or it fits. A string: the reason for a refusal.
    """
    chain = find_chain(net, start, ACTIVATIONS, casts=True, most=1)
    if chain is None:
        return None
    one = one_layer(net, chain)
    if not (why_not := chain_refusal(net, chain, device, job)):
        return None if fits_in_block(net, one, device, job) else one
    # An end or the weights may be float64: retry without the Casts; recipes round the weights.
    linear = find_chain(net, start, ACTIVATIONS, most=1)
    can_run = device.arch in ARCHITECTURES and not job.is_training
    if linear is not None and can_run and set(end_dtypes(net, one := one_layer(net, linear))) <= ELEMENT_TYPES.keys():
        return one
    return why_not


def one_layer(net: Network, chain: Chain) -> Chain:
    """The first layer of the chain, without its softmax or other normaliser."""
    chain = chain.first(1)
    if not chain.normaliser:
        return chain
    end = next(i for i, name in enumerate(chain.nodes) if net.by_name[name].layer.kind == chain.normaliser)
    return replace(chain, nodes=chain.nodes[:end], normaliser="", ends=(end,))


def _claim(net: Network, chain: Chain, device: Device, job: Job) -> Claim:
    (layer,) = chain.layers
    recipes = weight_recipes(layer, "fp32")
    cost = forward_cost(net, chain)
    gemm = SimtGemm(chain.vectors, layer.D_out, layer.D_in, "fp32", end_dtypes(net, chain), layer.activation)
    return Claim(
        kernel=GemmSimt.name,
        label=f"{GemmSimt.name}<{chain.label}>",
        nodes=chain.nodes,
        cost=Cost(
            cost.row_flop,
            cost.row_bytes,
            sum(recipe.nbytes for recipe in recipes.values()),
            precision="fp32",
            rate=replace(gemm, M=max(1, job.batch * gemm.M)).rate(device.units),
        ),
        why="weights exceed the shared memory of a block",
        recipes=recipes,
        order=f"k in order, partial sums of {PART}",
        reads={net.by_name[chain.nodes[0]].inputs[0]: Use(is_read_often=True)},  # once per column of tiles
        facts=GemmSimtLowering(gemm, layer.bias is not None, device.units),
    )


def weight_recipes(layer: Dense, precision: str) -> dict[str, Recipe]:
    """w (N, K) in the type of the precision; the bias in float32."""
    op, dtype = narrow_weight if precision == "fp16" else as_is, PRECISIONS[precision].dtype
    recipes = {"weight": Recipe.of(op, (layer.weight,), (layer.D_out, layer.D_in), dtype)}
    if layer.bias is not None:
        recipes["bias"] = Recipe.of(as_is, (layer.bias,), (layer.D_out,))
    return recipes


def _instance(
    name: str, M: int, N: int, K: int, precision: str = "fp32", dtypes: tuple[str, str] = ("float32", "float32")
) -> Instance:
    gemm, nothing = SimtGemm(M, N, K, precision, dtypes), Int64(0)
    return Instance(name, lambda device: gemm.launch(device.units, nothing, nothing, nothing, nothing))


INSTANCES = (
    _instance("large fp32", 4096, 4096, 512),
    _instance("long sums fp32", 4096, 4096, 4096),
    _instance("middling fp32", 512, 512, 512),
    _instance("few rows fp32", 7, 4096, 4096),
    _instance("few columns fp32, rows in fp16", 65536, 10, 512, dtypes=("float16", "bfloat16")),
    _instance("long sums in double precision", 4096, 4096, 4096, precision="fp64"),
)
