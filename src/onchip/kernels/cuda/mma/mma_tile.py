"""mma.sync tiles of gemm/mma.cu and conv/implicit_gemm.cu: the host side of mma/mma_tile.cuh."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onchip.kernels.cuda.common.costs import MmaTileCosts, costs_of
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import Budget
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import H200, Device

PART = 32  # elements of k per fp32 partial sum
UNITS = 4  # per row of a slice: 16 bytes of w each
DEEP_BYTES = 16 << 10  # of stages this large, three are enough, so that two blocks fit on an SM
REGISTERS = 65536  # per SM


def unit_of(precision: str) -> int:
    """Elements of k in 16 bytes of w."""
    return 4 * PRECISIONS[precision].per_word


def depth_of(precision: str) -> int:
    """Elements of k per slice."""
    return UNITS * unit_of(precision)


def scale_of(device: Device, precision: str) -> float:
    """Factor from a tile's share of the H200's fp16 rate to its share of this device's rate in this precision.

    Assumed, not measured: SMs of other GPUs issue instructions and read shared memory about as fast.
    """
    multiplied = "tf32" if precision == "fp32" else precision
    scale = H200.flops[multiplied] / H200.units / (device.flops[multiplied] / device.units)
    return scale * (costs_of(device).mma_tile.rounded_factor if precision == "tf32" else 1.0)


@dataclass(frozen=True)
class MmaTile:
    """The tile of y that a block computes."""

    BM: int
    BN: int
    warps: tuple[int, int]  # along M and N

    @property
    def threads(self) -> int:
        return 32 * math.prod(self.warps)

    def count(self, M: int, N: int) -> int:
        return math.ceil(M / self.BM) * math.ceil(N / self.BN)

    def work(self, K: float, scale: float, is_whole: bool, costs: MmaTileCosts) -> float:
        """Estimated cost of a tile, in multiply-adds at the peak rate. is_whole: rows are copied 16 bytes at a time."""
        share = min(costs.max_share, costs.tile_shares[self.BM, self.BN] * scale)
        return self.BM * self.BN * (K + costs.overhead_elements) / (share * (1.0 if is_whole else costs.narrow_factor))

    def accumulators(self, precision: str) -> int:
        """Accumulators per thread, including the totals of fp32."""
        return self.BM * self.BN // self.threads * PRECISIONS[precision].splits

    def stage_bytes(self, precision: str, x_dtype: str) -> int:
        computed = PRECISIONS[precision]
        return self.BM * depth_of(precision) * DTYPE_BYTES[x_dtype] + computed.splits * self.BN * 16 * UNITS

    def stages(self, precision: str, x_dtype: str) -> int:
        return 3 if self.stage_bytes(precision, x_dtype) >= DEEP_BYTES else 4

    def shared_bytes(self, precision: str, x_dtype: str) -> int:
        return self.stages(precision, x_dtype) * self.stage_bytes(precision, x_dtype) + 4 * self.BN

    def template(self, precision: str, x_dtype: str) -> str:
        return f"{self.BM}, {self.BN}, {self.warps[0]}, {self.warps[1]}, {self.stages(precision, x_dtype)}"

    def budget(self, precision: str) -> Budget:
        accumulators = self.accumulators(precision)
        blocks = 2 if accumulators > 64 else 3 if accumulators > 32 else 4
        return Budget(min(255, REGISTERS // (self.threads * blocks) // 8 * 8))


# Few tiles, as each is compiled on first use. A warp with 64 columns of 16 bits stores whole 128-byte lines. The last
# tile is for few rows. Slices of 128 bytes are 10 % faster, but then only one block fits on GPUs with 100 KB of shared
# memory.
TILES = (MmaTile(128, 128, (2, 2)), MmaTile(128, 64, (4, 1)), MmaTile(128, 32, (4, 1)), MmaTile(32, 64, (2, 2)))
NARROW_TILES = (TILES[0], TILES[2], TILES[3])
MAX_ACCUMULATORS = 128  # accumulators per thread


def tiles_of(precision: str, is_whole: bool = True) -> list[MmaTile]:
    """The candidate tiles. is_whole: rows are copied 16 bytes at a time; else copies dominate: fewer tiles suffice."""
    return [tile for tile in (TILES if is_whole else NARROW_TILES) if tile.accumulators(precision) <= MAX_ACCUMULATORS]
