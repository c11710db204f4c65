"""Tile sizes of a training step's gemms: the cheapest candidate of a simple cost model.

The constants are assumptions about a Hopper SM, good enough to rank. They affect the time of a step and its reduction
order, nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

CHUNK = 16  # K elements loaded together
WARPS = 8
STAGES, STAGE_CHUNKS = 3, 2  # as in train/large_batch/staged.cuh
STAGED_CUTS = ((4, 2), (2, 4), (2, 2))  # warps along M and N
_INSTRUCTIONS = {"fp32": 6, "tf32": 2, "bf16": 1, "fp16": 1}  # per 16 x 8 tile and chunk
_CLOCKS_AN_INSTRUCTION = 1.7  # per SM
_CLOCKS_PER_CHUNK = 300  # latency of a warp's next operands
_START_CLOCKS = 1500  # per launch: first loads, split-K sums, last stores
_BLOCK_CLOCKS = 300  # per further block
_BYTES_PER_CLOCK = 48  # from L2, per SM
_NEAR_BYTES_PER_CLOCK = 32  # from L1, in parts of rows
_SHARED_BYTES_PER_CLOCK = 128
_STAGE_CLOCKS = 120  # barrier and first loads of a stage
_SLICE_CLOCKS = 60  # per slice in the launch that adds them up, eight at a time
_MIN_SLICE = 32  # chunks
_MIN_STAGED_SLICE = 8
_MAX_PARTS = 1 << 26  # floats of all slices' partial gradients


@dataclass(frozen=True)
class Tiling:
    R: int  # a warp's tile is 8 R x 8 R
    down: int  # warps per block, as Warps of train/large_batch/launches.cuh
    across: int
    deep: int
    slices: int = 1  # split-K over blocks
    is_staged: bool = False  # operands staged in shared memory: train/large_batch/staged.cuh

    @property
    def warps(self) -> tuple[int, int, int]:
        return self.down, self.across, self.deep

    @property
    def shared_bytes(self) -> int:
        """Staged operands, rows padded by 4 floats; otherwise the warps' tiles."""
        if self.is_staged:
            return STAGES * 4 * (STAGE_CHUNKS * CHUNK + 4) * 8 * self.R * (self.down + self.across)
        return WARPS * 8 * self.R * (8 * self.R + 4) * 4

    def blocks_across(self, columns: int) -> int:
        return -(-columns // (8 * self.R * self.across))

    def blocks(self, rows: int, columns: int) -> int:
        """Blocks per slice."""
        return -(-rows // (8 * self.R * self.down)) * self.blocks_across(columns)

    def slice_chunks(self, terms: int) -> int:
        """K chunks per slice of a reduction over `terms`."""
        unit = STAGE_CHUNKS if self.is_staged else 1
        return unit * -(-terms // (CHUNK * unit * self.slices))


def choose_tiling(
    sizes: Sequence[tuple[int, int]], terms: int, precision: str, units: int, can_slice: bool = False
) -> Tiling:
    """Tiling of gemms with these (rows, columns), each with reduction `terms`, in one launch."""
    return _choose(tuple(sizes), terms, precision, units, can_slice)


def product_clocks(sizes: Sequence[tuple[int, int]], terms: int, precision: str, units: int) -> float:
    """Estimated clocks of such a launch."""
    return _clocks(choose_tiling(sizes, terms, precision, units), tuple(sizes), terms, precision, units)


@functools.cache
def _choose(sizes: tuple[tuple[int, int], ...], terms: int, precision: str, units: int, can_slice: bool) -> Tiling:
    numbers, chunks = sum(rows * columns for rows, columns in sizes), -(-terms // CHUNK)
    cuts = [(down, across) for down, across in itertools.product((1, 2, 4, 8), repeat=2) if down * across <= WARPS]
    ways = [Tiling(R, down, across, WARPS // (down * across)) for R in (4, 2) for down, across in cuts]
    ways += [Tiling(4, down, across, WARPS // (down * across), is_staged=True) for down, across in STAGED_CUTS]
    if can_slice:
        for way in tuple(ways):
            least = _MIN_STAGED_SLICE if way.is_staged else _MIN_SLICE
            most = min(chunks // least, _MAX_PARTS // numbers)
            blocks = sum(way.blocks(rows, columns) for rows, columns in sizes)
            counts = {waves * units // blocks for waves in (1, 2, 4)} | {2**i for i in range(1, 12)}
            ways += [dataclasses.replace(way, slices=count) for count in sorted(counts) if 1 < count <= most]
    return min(ways, key=lambda way: _clocks(way, sizes, terms, precision, units))


def _clocks(way: Tiling, sizes: tuple[tuple[int, int], ...], terms: int, precision: str, units: int) -> float:
    blocks = way.slices * sum(way.blocks(rows, columns) for rows, columns in sizes)
    a_slice = way.slice_chunks(terms)
    a_warp = -(-a_slice // way.deep)
    work = WARPS * a_warp * way.R * way.R / 2 * _INSTRUCTIONS[precision] * _CLOCKS_AN_INSTRUCTION
    loads = a_slice * CHUNK * 4 * 8 * way.R * (way.down + way.across) / _BYTES_PER_CLOCK
    reads = WARPS * a_warp * CHUNK * 4 * 16 * way.R  # bytes
    waves, of_block = -(-blocks // units), _BLOCK_CLOCKS + 60 * way.deep
    if way.is_staged:  # two blocks per SM
        waits = -(-blocks // (2 * units)) * (a_slice / STAGE_CHUNKS * _STAGE_CLOCKS + _START_CLOCKS)
        clocks = waits + waves * (max(work + reads / _SHARED_BYTES_PER_CLOCK / 2, loads) + of_block)
    else:
        at_a_time = 2 if way.R == 2 else 1
        waits = -(-blocks // (units * at_a_time)) * a_warp * _CLOCKS_PER_CHUNK
        clocks = _START_CLOCKS + max(waits, waves * (max(work + reads / _NEAR_BYTES_PER_CLOCK, loads) + of_block))
    if way.slices > 1:
        parts = 4 * (way.slices + 4) * sum(rows * columns for rows, columns in sizes)
        clocks += _START_CLOCKS + way.slices * _SLICE_CLOCKS + parts / (units * _BYTES_PER_CLOCK)
    return clocks
