"""Host side of train/large_batch/rows.cu: which layers it supports, and its shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from onchip.kernels.cuda.common.precision import round_up
from onchip.kernels.cuda.common.program import Budget, Program
from onchip.kernels.cuda.train.large_batch.bytes import SPLITS

SOURCE = Path(__file__).parent / "rows.cu"
ROWS, WARPS, MAX_WIDTHS = 128, 8, 4  # as in train/large_batch/rows.cu
MAX_WIDTH, MAX_OUTPUTS = 64, 32
BLOCKS = 2  # per SM
MIN_ROWS = 32  # per SM
BUDGET = Budget(registers=128)


@dataclass(frozen=True)
class RowsPass:
    """Layers after the first of a network with these layer widths."""

    widths: tuple[int, ...]  # all layers, including the first
    precision: str

    def fits(self, fast_bytes: int) -> bool:
        """Whether the kernel supports them with this much shared memory per block."""
        if not 2 <= len(self.widths) <= MAX_WIDTHS or max(self.widths) > MAX_WIDTH or self.widths[-1] > MAX_OUTPUTS:
            return False
        return self.shared_bytes <= fast_bytes

    @property
    def shared_bytes(self) -> int:
        vectors = sum(_vectors(D + 1, N) + _vectors(N, D) for D, N in pairwise(self.widths))
        sums = sum(_sums(D, N) for D, N in pairwise(self.widths))
        rows = ROWS * sum(round_up(W + 1, 16) + 8 for W in self.widths)
        return 16 * SPLITS[self.precision] * vectors + 4 * (sums + rows)

    def blocks(self, batch: int, units: int) -> int:
        return min(-(-batch // ROWS), BLOCKS * units)

    def program(self, loss: int, layer_specs: str) -> Program:
        """layer_specs: of all layers, from train/layer.py"""
        return Program(SOURCE, f"train_rows<{SPLITS[self.precision]}, {loss}, {layer_specs}>")


def _vectors(K: int, N: int) -> int:
    """16 B chunks of one split term of weights (K, N)."""
    return round_up(K, 16) // 8 * round_up(N, 8)


def _sums(D: int, N: int) -> int:
    """Floats of a layer's gradients: GradientTiles of train/large_batch/rows.cu."""
    m_tiles, n_tiles = -(-N // 16), -(-(D + 1) // 8)
    warps_n = min(WARPS // m_tiles, n_tiles)
    return WARPS // (m_tiles * warps_n) * m_tiles * n_tiles * 128
