"""Tiles of mma.sync, as gemm/mma.cu and conv/implicit_gemm.cu make them: the host side of mma/mma_tile.cuh."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import Budget
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import H200, Device

PART = 32  # terms of a sum of float32
UNITS = 4  # of k, in a row of a slice: 16 bytes of w each
DEEP_BYTES = 16 << 10  # of a stage: of such large ones three are enough, and two blocks find room
REGISTERS = 65536  # of a multiprocessor
# What a tile takes besides its products, as if k were longer by so many numbers.
HEAD = 100
NARROW = 0.62  # of a rate, where rows are brought by pieces of less than 16 bytes
ROUNDED = 0.85  # of a rate, where numbers are rounded to tf32 between shared memory and the tensor cores
MOST_RATE = 0.75  # of any chip's


def unit_of(precision: str) -> int:
    """Numbers of k that lie in 16 bytes of w."""
    return 4 * PRECISIONS[precision].per_word


def depth_of(precision: str) -> int:
    """Of a slice."""
    return UNITS * unit_of(precision)


def scale_of(device: Device, precision: str) -> float:
    """By how much a tile's share of a device's rate is larger than its rate says, of an H200 in fp16.

    Assumed, not measured: that a multiprocessor of another chip issues and reads shared memory about as fast.
    """
    multiplied = "tf32" if precision == "fp32" else precision
    scale = H200.flops[multiplied] / H200.units / (device.flops[multiplied] / device.units)
    return scale * (ROUNDED if precision == "tf32" else 1.0)


@dataclass(frozen=True)
class MmaTile:
    """What a block makes of y, and the share of an H200's rate that it reaches where it is full."""

    BM: int
    BN: int
    warps: tuple[int, int]  # down and across
    rate: float

    @property
    def threads(self) -> int:
        return 32 * math.prod(self.warps)

    def count(self, M: int, N: int) -> int:
        return math.ceil(M / self.BM) * math.ceil(N / self.BN)

    def work(self, K: float, scale: float, is_whole: bool) -> float:
        """Products that would take as long at the device's rate. is_whole: rows are brought 16 bytes at a time."""
        rate = min(MOST_RATE, self.rate * scale) * (1.0 if is_whole else NARROW)
        return self.BM * self.BN * (K + HEAD) / rate

    def sums(self, precision: str) -> int:
        """Of a thread, with the totals that sums of fp32 are added to."""
        return self.BM * self.BN // self.threads * PRECISIONS[precision].parts

    def stage_bytes(self, precision: str, x_dtype: str) -> int:
        computed = PRECISIONS[precision]
        return self.BM * depth_of(precision) * DTYPE_BYTES[x_dtype] + computed.parts * self.BN * 16 * UNITS

    def stages(self, precision: str, x_dtype: str) -> int:
        return 3 if self.stage_bytes(precision, x_dtype) >= DEEP_BYTES else 4

    def shared_bytes(self, precision: str, x_dtype: str) -> int:
        return self.stages(precision, x_dtype) * self.stage_bytes(precision, x_dtype) + 4 * self.BN

    def template(self, precision: str, x_dtype: str) -> str:
        return f"{self.BM}, {self.BN}, {self.warps[0]}, {self.warps[1]}, {self.stages(precision, x_dtype)}"

    def budget(self, precision: str) -> Budget:
        sums = self.sums(precision)
        blocks = 2 if sums > 64 else 3 if sums > 32 else 4
        return Budget(min(255, REGISTERS // (self.threads * blocks) // 8 * 8))


# A warp that has 64 columns writes whole lines of 16 bits. The last one is for few rows. Few tiles, as each is compiled
# where it is wanted first. Rates are measured: 4,096 cubed takes 353 us in fp16, 736 in tf32 and 2,050 in fp32. Slices
# of 128 bytes are faster by a tenth, but of them chips with 100 KB of shared memory have room for one block.
TILES = (
    MmaTile(128, 128, (2, 2), 0.6), MmaTile(128, 64, (4, 1), 0.52), MmaTile(128, 32, (4, 1), 0.36),
    MmaTile(32, 64, (2, 2), 0.31),
)  # fmt: skip
NARROW_TILES = (TILES[0], TILES[2], TILES[3])
MOST_SUMS = 128  # of a thread


def tiles_of(precision: str, is_whole: bool = True) -> list[MmaTile]:
    """is_whole: rows are brought 16 bytes at a time; else copies take the time, and few tiles will do."""
    return [tile for tile in (TILES if is_whole else NARROW_TILES) if tile.sums(precision) <= MOST_SUMS]
