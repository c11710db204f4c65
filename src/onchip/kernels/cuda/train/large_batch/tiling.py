"""Tile sizes of a training step's gemms: the tiling with the lowest cost in a simple model of a Hopper SM.

They affect only the time of a step and its reduction order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from onchip.kernels.cuda.common.costs import TrainTilingCosts, costs_of
from onchip.plan.device import Device

CHUNK = 16  # K elements loaded together
WARPS = 8
STAGES, STAGE_CHUNKS = 3, 2  # as in train/large_batch/staged.cuh
STAGED_CUTS = ((4, 2), (2, 4), (2, 2))  # warps along M and N
_INSTRUCTIONS = {"fp32": 6, "tf32": 2, "bf16": 1, "fp16": 1}  # per 16 x 8 tile and chunk
_MIN_SLICE = 32  # chunks
_MIN_STAGED_SLICE = 8
_MAX_PARTS = 1 << 26  # floats of all slices' partial gradients


@dataclass(frozen=True)
class Tiling:
    R: int  # a warp's tile is 8 R x 8 R
    warps_m: int  # warps per block over M, N and K, as Warps of train/large_batch/launches.cuh
    warps_n: int
    split_k: int
    slices: int = 1  # split-K over blocks
    is_staged: bool = False  # operands staged in shared memory: train/large_batch/staged.cuh

    @property
    def warps(self) -> tuple[int, int, int]:
        return self.warps_m, self.warps_n, self.split_k

    @property
    def shared_bytes(self) -> int:
        """Staged operands, rows padded by 4 floats; otherwise the warps' tiles."""
        if self.is_staged:
            return STAGES * 4 * (STAGE_CHUNKS * CHUNK + 4) * 8 * self.R * (self.warps_m + self.warps_n)
        return WARPS * 8 * self.R * (8 * self.R + 4) * 4

    def tile_columns(self, columns: int) -> int:
        return -(-columns // (8 * self.R * self.warps_n))

    def blocks(self, rows: int, columns: int) -> int:
        """Blocks per slice."""
        return -(-rows // (8 * self.R * self.warps_m)) * self.tile_columns(columns)

    def slice_chunks(self, terms: int) -> int:
        """K chunks per slice of a reduction over `terms`."""
        unit = STAGE_CHUNKS if self.is_staged else 1
        return unit * -(-terms // (CHUNK * unit * self.slices))


def choose_tiling(
    sizes: Sequence[tuple[int, int]], terms: int, precision: str, device: Device, can_slice: bool = False
) -> Tiling:
    """Tiling of gemms with these (rows, columns), each with reduction `terms`, in one launch."""
    costs = costs_of(device).train_tiling
    return _choose(tuple(sizes), terms, precision, device.units, costs, can_slice)


def gemm_clocks(sizes: Sequence[tuple[int, int]], terms: int, precision: str, device: Device) -> float:
    """Estimated clocks of such a launch."""
    tiling, costs = choose_tiling(sizes, terms, precision, device), costs_of(device).train_tiling
    return _clocks(tiling, tuple(sizes), terms, precision, device.units, costs)


@functools.cache
def _choose(
    sizes: tuple[tuple[int, int], ...], terms: int, precision: str, units: int, costs: TrainTilingCosts, can_slice: bool
) -> Tiling:
    elements, chunks = sum(rows * columns for rows, columns in sizes), -(-terms // CHUNK)
    warp_layouts = [(m, n) for m, n in itertools.product((1, 2, 4, 8), repeat=2) if m * n <= WARPS]
    tilings = [Tiling(R, m, n, WARPS // (m * n)) for R in (4, 2) for m, n in warp_layouts]
    tilings += [Tiling(4, m, n, WARPS // (m * n), is_staged=True) for m, n in STAGED_CUTS]
    if can_slice:
        for tiling in tuple(tilings):
            least = _MIN_STAGED_SLICE if tiling.is_staged else _MIN_SLICE
            most = min(chunks // least, _MAX_PARTS // elements)
            blocks = sum(tiling.blocks(rows, columns) for rows, columns in sizes)
            counts = {waves * units // blocks for waves in (1, 2, 4)} | {2**i for i in range(1, 12)}
            tilings += [dataclasses.replace(tiling, slices=count) for count in sorted(counts) if 1 < count <= most]
    return min(tilings, key=lambda tiling: _clocks(tiling, sizes, terms, precision, units, costs))


def _clocks(
    tiling: Tiling, sizes: tuple[tuple[int, int], ...], terms: int, precision: str, units: int, costs: TrainTilingCosts
) -> float:
    blocks = tiling.slices * sum(tiling.blocks(rows, columns) for rows, columns in sizes)
    chunks = tiling.slice_chunks(terms)
    warp_chunks = -(-chunks // tiling.split_k)
    work = WARPS * warp_chunks * tiling.R * tiling.R / 2 * _INSTRUCTIONS[precision] * costs.mma_clocks
    loads = chunks * CHUNK * 4 * 8 * tiling.R * (tiling.warps_m + tiling.warps_n) / costs.l2_bytes_per_clock
    reads = WARPS * warp_chunks * CHUNK * 4 * 16 * tiling.R  # bytes
    waves, of_block = -(-blocks // units), costs.block_clocks + costs.split_k_clocks * tiling.split_k
    if tiling.is_staged:  # two blocks per SM
        waits = -(-blocks // (2 * units)) * (chunks / STAGE_CHUNKS * costs.stage_clocks + costs.launch_clocks)
        clocks = waits + waves * (max(work + reads / costs.shared_bytes_per_clock / 2, loads) + of_block)
    else:
        at_a_time = 2 if tiling.R == 2 else 1
        waits = -(-blocks // (units * at_a_time)) * warp_chunks * costs.chunk_clocks
        busy = waves * (max(work + reads / costs.l1_bytes_per_clock, loads) + of_block)
        clocks = costs.launch_clocks + max(waits, busy)
    if tiling.slices > 1:
        parts = 4 * (tiling.slices + 4) * sum(rows * columns for rows, columns in sizes)
        clocks += costs.launch_clocks + tiling.slices * costs.slice_clocks + parts / (units * costs.l2_bytes_per_clock)
    return clocks
