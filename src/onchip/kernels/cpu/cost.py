"""The cost model of CPU kernels.

A core computes or waits for memory, in turn, so the times add up. Measured on two cores with 512-bit vectors
(benchmarks/results; tests/bench/test_estimates.py compares every estimate with them): a register tile sustains 0.73 of
a library's best gemm, the device's rate; values that pass through cache next to a gemm take twice the time of a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from onchip.plan.device import Device
from onchip.plan.kernel import Cost

TILE_SHARE = 0.73  # of the device's rate, by the register tile (tile.py)
_CACHE_COPIES = 2.0  # times of a copy, for values read and written in cache
_LAST_TILE = 0.125  # of a tile: how long cores wait for the slowest one


@dataclass(frozen=True)
class CoreCost(Cost):
    """The same floor; the estimate includes cache traffic and idle cores."""

    share: float = TILE_SHARE  # of the device's rate
    row_cache_bytes: int = 0  # read and written in cache, per row
    fixed_cache_bytes: int = 0  # the same, per launch
    rows_per_core: int = 0  # minimum per core: few rows leave cores idle; 0: cores share a row
    tile_rows: int = 0  # per task; 0: too few to wait for the last
    tile_bytes: int = 0  # read from memory again per tile after the first: weights larger than the cache
    tile_us: float = 0.0  # of one core, for its calls

    def estimate_us(self, device: Device, precision: str, B: int) -> float:
        cores = min(device.units, -(-B // self.rows_per_core)) if self.rows_per_core else device.units
        rows = min(self.tile_rows, -(-B // device.units))
        tiles = -(-B // rows) if rows else 1
        compute = self.row_flop * B / (self.share * device.flops[self.precision or precision])
        cached = _CACHE_COPIES * (self.row_cache_bytes * B + self.fixed_cache_bytes) / device.bandwidth
        core_us = (compute + cached) * 1e6 * device.units + self.tile_us * tiles  # of all cores together
        waited_us = _LAST_TILE * core_us / tiles if rows and cores > 1 else 0.0
        fetched = (self.row_bytes + self.transposed_bytes) * B + self.fixed_bytes + self.tile_bytes * (tiles - 1)
        return core_us / cores + waited_us + fetched / device.bandwidth * 1e6 + self.launches * device.launch_us
