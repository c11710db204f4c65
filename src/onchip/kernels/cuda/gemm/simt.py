"""GEMM on CUDA cores: the host side of gemm/simt.cu. A Linear of any shape, without compiling per layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Int64, UInt32
from onchip.kernels.cuda.common.chain import FitsInBlock
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program
from onchip.kernels.cuda.gemm.linear import (
    FusedLinear,
    GemmKernel,
    LinearGemm,
    LinearLowering,
    large_layer,
    plain_weight,
)
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
PART = 128  # elements of k per partial sum
MAX_NARROW = 32  # rows or columns up to which narrow tiles are considered


@dataclass(frozen=True)
class Tile:
    """The tile of y that a block computes."""

    BM: int
    BN: int
    per_thread: tuple[int, int]  # rows and columns per thread

    def work(self, device: Device) -> float:
        """Relative cost of a block."""
        return self.BM * self.BN / costs_of(device).gemm_simt.tile_shares[self.BM, self.BN]

    def suits(self, M: int, N: int) -> bool:
        """Whether to consider this tile: narrow ones read more, so only where a square one would be mostly empty."""
        return self.BM == self.BN or (M if self.BM < self.BN else N) <= MAX_NARROW

    def count(self, M: int, N: int) -> int:
        return math.ceil(M / self.BM) * math.ceil(N / self.BN)


# First: large GEMMs; third: few rows; fourth: few columns.
FMA_TILES = Tile(128, 128, (8, 8)), Tile(64, 64, (4, 4)), Tile(16, 64, (4, 4)), Tile(256, 16, (4, 4))
EXACT = ("fp32", "tf32")  # precisions that true fp32 on CUDA cores satisfies


@dataclass(frozen=True)
class SimtGemm(LinearGemm):
    """w is (N, K). Precision "fp64": float32 operands with float64 accumulators."""

    def tile(self, device: Device) -> Tile:
        """The tile with the least estimated cost: waves of blocks times the cost of a block."""
        if self.precision == "fp64":
            return FMA_TILES[1]  # 8 x 8 float64 accumulators do not fit in registers
        tiles = [tile for tile in FMA_TILES if tile.suits(self.M, self.N)]
        return min(tiles, key=lambda tile: self.waves(tile, device) * tile.work(device))

    def waves(self, tile: Tile, device: Device) -> int:
        return math.ceil(tile.count(self.M, self.N) / device.units)

    def rate(self, device: Device) -> float:
        """Estimated share of the peak rate, given partial tiles and idle SMs in the last wave."""
        tile = self.tile(device)
        return self.M * self.N / (self.waves(tile, device) * device.units * tile.work(device))

    def launch(self, device: Device, *arrays: Argument) -> KernelLaunch:
        """arrays: x, w, bias (N) float32 or NOTHING, y"""
        tile = self.tile(device)
        TM, TN = tile.per_thread
        threads = tile.BM // TM * (tile.BN // TN)
        x_type, y_type = (ELEMENT_TYPES[dtype] for dtype in self.dtypes)
        types = f"{'double' if self.precision == 'fp64' else 'float'}, {x_type}, {y_type}"
        is_long = "true" if self.K > PART else "false"
        program = Program(SOURCE, f"gemm_simt<{types}, {tile.BM}, {tile.BN}, {TM}, {TN}, {is_long}>")
        config = LaunchConfig((tile.count(self.M, self.N), 1, 1), (threads, 1, 1), 0)
        sizes = (Int64(self.M), Int64(self.N), Int64(self.K))
        arguments = (*arrays, *sizes, *map(UInt32, activation_words(self.activation)))
        # With two blocks per SM and 8 x 8 accumulators per thread, GPUs before sm_90 spill some registers.
        budget = Budget(min(255, 65536 // (threads * (1 if self.K > PART else 2)) // 8 * 8), spill_bytes=64)
        return KernelLaunch(program, config, arguments, budget)


class GemmSimtKernel(GemmKernel):
    name = "gemm_simt"
    order = f"k in order, partial sums of {PART}"

    def __init__(self, fits_in_block: FitsInBlock) -> None:
        self.fits_in_block = fits_in_block

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """One Linear with its activation and surrounding Casts, where it does not fit in a block."""
        found = large_layer(net, start, device, job, self.fits_in_block)
        if isinstance(found, str):
            yield Refusal(self.name, net.nodes[start].name, found)
        elif found is not None and job.precision in EXACT:
            linear = FusedLinear(found)
            gemm = SimtGemm.of(net, linear, "fp32")
            recipes = linear.recipes(plain_weight(linear.layer, "fp32"))
            rate = replace(gemm, M=max(1, job.batch * gemm.M)).rate(device)
            yield self.claim_linear(
                net, linear, LinearLowering(gemm, linear.arrays(net), device), recipes=recipes,
                cost=Cost(*linear.work(net), recipe_bytes(recipes), precision="fp32", rate=rate),
                why="weights exceed the shared memory of a block",
            )  # fmt: skip


def _instance(
    name: str, M: int, N: int, K: int, precision: str = "fp32", dtypes: tuple[str, str] = ("float32", "float32")
) -> Instance:
    gemm = SimtGemm(M, N, K, precision, dtypes)
    return Instance(name, lambda device: gemm.launch(device, *[NOTHING] * 4))


INSTANCES = (
    _instance("large fp32", 4096, 4096, 512),
    _instance("long sums fp32", 4096, 4096, 4096),
    _instance("middling fp32", 512, 512, 512),
    _instance("few rows fp32", 7, 4096, 4096),
    _instance("few columns fp32, rows in fp16", 65536, 10, 512, dtypes=("float16", "bfloat16")),
    _instance("long sums in double precision", 4096, 4096, 4096, precision="fp64"),
)
