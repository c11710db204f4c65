"""Host side of train/large_batch/stream.cu: which layers it supports, and its shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from onchip.kernels.cuda.common.costs import H200, TrainStreamCosts
from onchip.kernels.cuda.common.precision import round_up
from onchip.kernels.cuda.common.program import Budget, Program
from onchip.kernels.cuda.train.large_batch.bytes import SPLITS
from onchip.kernels.cuda.train.large_batch.rows import MAX_OUTPUTS, MAX_WIDTHS

SOURCE = Path(__file__).parent / "stream.cu"
WARPS, TILE_ROWS, MAX_TILES = 16, 16, 2  # per block, as in train/large_batch/stream.cu
OUT_PITCH = 36
THREADS = 32 * WARPS
BUDGET = Budget(registers=128, spill_bytes=40)  # loop invariants spill: 40 bytes on sm_100, 20 on sm_90a
_MMAS = {1: 1, 2: 3, 3: 6}  # bf16 mmas per fp32 mma, by bf16 splits


@dataclass(frozen=True)
class StreamPass:
    """Layers after the first of a network with these layer widths, for this batch size."""

    widths: tuple[int, ...]  # all layers, including the first
    precision: str
    batch: int
    units: int
    fast_bytes: int
    costs: TrainStreamCosts = field(default=H200.train_stream, kw_only=True, repr=False)

    @property
    def fits(self) -> bool:
        """Whether the kernel supports them."""
        if not 2 <= len(self.widths) <= MAX_WIDTHS or self.widths[-1] > MAX_OUTPUTS:
            return False
        return self._bytes(1) <= self.fast_bytes

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows per block: the fewest waves, then the fewest rows."""
        fitting = [n for n in range(1, MAX_TILES + 1) if self._bytes(n) <= self.fast_bytes]
        return min(fitting, key=lambda n: (self._rounds(n), n))

    def _rounds(self, tiles: int) -> int:
        return -(-self.batch // (TILE_ROWS * tiles * self.units))

    @property
    def rows(self) -> int:
        return TILE_ROWS * self.tiles

    @property
    def blocks(self) -> int:
        return min(-(-round_up(self.batch, 32) // self.rows), self.units)

    @property
    def shared_bytes(self) -> int:
        return self._bytes(self.tiles)

    def _bytes(self, tiles: int) -> int:
        """SharedLayout::bytes of train/large_batch/stream.cu."""
        splits, rows, (D, N) = SPLITS[self.precision], TILE_ROWS * tiles, self.widths[-2:]
        pitches = [8 * (_steps(width + 1) | 1) for width in self.widths[:-1]]  # words per bf16 row; half a float row
        words = rows * (splits * (sum(pitches) + 8 * (_steps(N) | 1)) + 2 * sum(pitches) + OUT_PITCH)
        last = 16 * _steps(N) * (16 * _steps(D + 1) + 4)
        sums = min(_steps(D + 1), WARPS) * rows * (round_up(8 * -(-N // 8) - 8, 16) + 8)
        return 4 * (words + last + sums)

    @property
    def clocks(self) -> float:
        weights, costs = sum(D * N for D, N in pairwise(self.widths)), self.costs
        mmas = 2 * weights / (8 * 16) * self.tiles * _MMAS[SPLITS[self.precision]]
        tile = 2 * 4 * weights / costs.bytes_per_clock + mmas * costs.mma_clocks + costs.tile_clocks
        return self._rounds(self.tiles) * tile

    def program(self, loss: int, layer_specs: str) -> Program:
        """layer_specs: of all layers, from train/layer.py"""
        return Program(SOURCE, f"train_stream<{SPLITS[self.precision]}, {self.tiles}, {loss}, {layer_specs}>")


def _steps(k_size: int) -> int:
    return -(-k_size // 16)
