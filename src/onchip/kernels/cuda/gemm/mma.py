"""mma.sync GEMM: the host side of gemm/mma.cu. A Linear of any shape on the tensor cores of sm_80 and up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.chain import Chain, Dense, end_dtypes, forward_cost
from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.chain import FitsInBlock
from onchip.kernels.cuda.common.precision import PRECISIONS, round_up
from onchip.kernels.cuda.common.program import (
    ELEMENT_TYPES,
    EVERY_CHIP,
    Argument,
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
from onchip.kernels.cuda.common.weights import multiplied_weight, spread_taps
from onchip.kernels.cuda.gemm.simt import large_layer
from onchip.kernels.cuda.mma.mma_tile import PART, TILES, MmaTile, depth_of, scale_of, tiles_of, unit_of
from onchip.network.graph import Network
from onchip.network.layers import Elementwise
from onchip.network.recipe import Recipe, as_is
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
# Rate factor on sm_90a, by tf32 splits per weight; measured with up to 256 rows, where it competes with gemm_sm90.
HOPPER_SHARE = {1: 0.6, 2: 1.0}


@dataclass(frozen=True)
class MmaGemm:
    """y (M, N) = activation(x (M, K) w^T + bias), w (N, pitch), in fp32 (2, N, pitch)."""

    M: int
    N: int
    K: int
    precision: str
    dtypes: tuple[str, str] = ("float32", "float32")  # of x and y
    activation: Elementwise | None = None

    @property
    def pitch(self) -> int:
        """Row stride of w: K padded to whole 16-byte units."""
        return round_up(self.K, unit_of(self.precision))

    @property
    def alignment(self) -> int:
        """Alignment of rows of x in bytes, up to 16."""
        return math.gcd(self.K * DTYPE_BYTES[self.dtypes[0]], 16)

    @property
    def is_whole(self) -> bool:
        """Whether rows of x are whole 16-byte units."""
        return self.pitch == self.K and self.alignment == 16

    def work(self, units: int, scale: float, tile: MmaTile) -> float:
        """Estimated cost, in multiply-adds at the device's peak rate: whole waves of tiles."""
        waves = math.ceil(tile.count(self.M, self.N) / units)
        return waves * units * tile.work(round_up(self.K, depth_of(self.precision)), scale, self.is_whole)

    def tile(self, units: int, scale: float) -> MmaTile:
        """The tile with the least estimated cost. Results are bit-identical for all tiles."""
        return min(tiles_of(self.precision, self.is_whole), key=lambda tile: self.work(units, scale, tile))

    def rate(self, units: int, scale: float) -> float:
        """Estimated share of the device's peak rate."""
        return self.M * self.N * self.K / self.work(units, scale, self.tile(units, scale))

    def launch(self, tile: MmaTile, x: Argument, w: Argument, bias: Argument, y: Argument) -> KernelLaunch:
        """bias  (N) float32, or Int64(0): none"""
        x_type, y_type = (ELEMENT_TYPES[dtype] for dtype in self.dtypes)
        types = f"{PRECISIONS[self.precision].name}, {x_type}, {y_type}"
        tiling = f"{tile.template(self.precision, self.dtypes[0])}, {'true' if self.is_whole else 'false'}"
        program = Program(SOURCE, f"gemm_mma<{types}, {tiling}>")
        shared = tile.shared_bytes(self.precision, self.dtypes[0])
        config = LaunchConfig((tile.count(self.M, self.N), 1, 1), (tile.threads, 1, 1), shared)
        sizes = (Int64(self.M), Int64(self.N), Int64(self.K), Int64(self.pitch))
        arguments = (x, w, bias, y, *sizes, UInt32(self.alignment), *map(UInt32, activation_words(self.activation)))
        return KernelLaunch(program, config, arguments, tile.budget(self.precision))


@dataclass(frozen=True)
class GemmMmaLowering:
    """A Linear and its activation as one launch."""

    gemm: MmaGemm  # at B = 1
    has_bias: bool
    units: int
    scale: float  # scale_of of mma/mma_tile.py

    def at(self, B: int) -> Steps:
        gemm = replace(self.gemm, M=B * self.gemm.M)
        if not gemm.M:
            return Steps(())
        bias: Argument = Weight("bias") if self.has_bias else Int64(0)
        tile = gemm.tile(self.units, self.scale)
        return Steps((gemm.launch(tile, Input(0), Weight("weight"), bias, Output(0)),))


class GemmMma:
    name = "gemm_mma"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def __init__(self, fits_in_block: FitsInBlock) -> None:
        self.fits_in_block = fits_in_block

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """One Linear with its activation and surrounding Casts, where it does not fit in a block."""
        chain = large_layer(net, start, device, job, self.fits_in_block)
        if isinstance(chain, Chain):
            yield _claim(net, chain, device, job)


def _claim(net: Network, chain: Chain, device: Device, job: Job) -> Claim:
    (layer,), computed, cost = chain.layers, PRECISIONS[job.precision], forward_cost(net, chain)
    gemm = MmaGemm(chain.vectors, layer.D_out, layer.D_in, job.precision, end_dtypes(net, chain), layer.activation)
    recipes, is_split, M = _recipes(net, layer, gemm), computed.splits > 1, max(1, job.batch * gemm.M)
    share = HOPPER_SHARE[computed.splits] if device.arch == "sm_90a" else 1.0
    return Claim(
        kernel=GemmMma.name,
        label=f"{GemmMma.name}<{chain.label}>",
        nodes=chain.nodes,
        cost=Cost(
            cost.row_flop * (3 if is_split else 1),  # 3xTF32
            cost.row_bytes,
            sum(recipe.nbytes for recipe in recipes.values()),
            precision="tf32" if is_split else "",
            rate=share * replace(gemm, M=M).rate(device.units, scale_of(device, job.precision)),
        ),
        why="tensor cores, one tile per block",
        recipes=recipes,
        order=f"k in steps of {computed.step} by mma" + (f", partial sums of {PART}" if is_split else ""),
        reads={net.by_name[chain.nodes[0]].inputs[0]: Use(is_read_often=True)},  # once per column of tiles
        facts=GemmMmaLowering(gemm, layer.bias is not None, device.units, scale_of(device, job.precision)),
    )


def _recipes(net: Network, layer: Dense, gemm: MmaGemm) -> dict[str, Recipe]:
    weight: str | Recipe = layer.weight
    shape = (gemm.N, gemm.pitch)
    if gemm.pitch != gemm.K:
        dtype = net.weight_type(layer.weight).dtype
        weight = Recipe.of(spread_taps, (weight,), shape, dtype, channels=gemm.pitch)
    recipes = {"weight": multiplied_weight(weight, shape, gemm.precision)}
    if layer.bias is not None:
        recipes["bias"] = Recipe.of(as_is, (layer.bias,), (layer.D_out,))
    return recipes


def _instance(name: str, precision: str, dtypes: tuple[str, str], tile: MmaTile, K: int = 4096) -> Instance:
    gemm, nothing = MmaGemm(4096, 4096, K, precision, dtypes), Int64(0)
    return Instance(name, lambda device: gemm.launch(tile, nothing, nothing, nothing, nothing))


INSTANCES = (
    _instance("128 x 128 fp16", "fp16", ("float16", "float16"), TILES[0]),
    _instance("128 x 128 bf16, rows in float32", "bf16", ("float32", "float32"), TILES[0]),
    _instance("128 x 128 tf32", "tf32", ("float32", "float32"), TILES[0]),
    _instance("128 x 64 fp32", "fp32", ("float32", "float32"), TILES[1]),
    _instance("128 x 32 bf16, rows in float16", "bf16", ("float16", "bfloat16"), TILES[2]),
    _instance("32 x 64 fp32", "fp32", ("float32", "float32"), TILES[3]),
    _instance("128 x 128 bf16, unaligned rows", "bf16", ("bfloat16", "float32"), TILES[0], 4095),
)
