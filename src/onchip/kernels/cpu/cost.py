"""The cost model of CPU kernels, and the constants that it was fitted with.

A core computes or waits for memory, in turn, so the times add up. All were fitted on two cores with 512-bit vectors;
tests/bench/test_estimates.py compares estimates with the result files.
"""

from __future__ import annotations

from dataclasses import dataclass

from onchip.plan.device import Device
from onchip.plan.fitted import fitted
from onchip.plan.kernel import Cost

_CORE = "one core at 2.5 GHz with 512-bit vectors"
_NUMPY = "two cores: Concat and Add 3, Embedding 4, Permute 4 to 7, TokenConv 3 to 6"
_NUMPY_SUMS = (
    "two cores: convolutions 6 to 14, transposed ones 11 to 40, pools 20 to 40, GlobalMean 36, GlobalMax 100, Linear "
    "15 to 300"
)


@dataclass(frozen=True, eq=False)
class CpuCosts:
    """A share is of the device's rate, a library's best gemm (plan/device.py); a factor multiplies a time."""

    tile_share: float = fitted(0.73, "by the register tile (microkernels/tile.py)", "cpu-x86_64-2/decode.json")
    train_share: float = fitted(0.58, "in training: short sums, transposed rows", "cpu-x86_64-2/digits.json")
    cache_copies_factor: float = fitted(2.0, "time of a copy, next to a gemm in cache", "cpu-x86_64-2/decode.json")
    last_tile_share: float = fitted(0.125, "of a tile: how long cores wait for the slowest one", "estimated")
    conv_call_us: float = fitted(
        0.5, "per operation: reading its table row and starting loops", "cpu-x86_64-2/imported.json"
    )
    matrix_us: float = fitted(0.2, "of a matmul, per row block of a matrix, besides the gemm", _CORE)
    line_us: float = fitted(0.015, "of a matmul, per copied line", _CORE)
    softmax_us: float = fitted(0.003, "of attention, per softmax element", _CORE)
    gather_bytes: int = fitted(12, "copied in the time of gathering one element", "estimated")
    numpy_launch_factor: int = fitted(50, "of a compiled kernel's launch: NumPy calls per row or block", "estimated")
    numpy_factor: int = fitted(4, "of all cores' time, by one thread of NumPy", _NUMPY)
    numpy_sum_factor: int = fitted(20, "the same: short sums and maxima", _NUMPY_SUMS)
    numpy_gather_factor: int = fitted(200, "the same: LinearResize gathers every element", "two cores: 260")


CPU = CpuCosts()  # of all CPUs: shares and factors are relative to the rates of each


@dataclass(frozen=True)
class CoreCost(Cost):
    """The same floor; the estimate includes cache traffic and idle cores."""

    share: float = CPU.tile_share  # of the device's rate
    row_cache_bytes: int = 0  # read and written in cache, per row
    fixed_cache_bytes: int = 0  # the same, per launch
    rows_per_core: int = 0  # minimum per core: few rows leave cores idle; 0: cores share a row
    tile_rows: int = 0  # per task; 0: too few to wait for the last
    tile_bytes: int = 0  # read from memory again per tile after the first: weights larger than the cache
    tile_us: float = 0.0  # of one core, for its calls

    def estimate_us(self, device: Device, precision: str, B: int) -> float:
        B = self.rows(B)
        cores = min(device.units, -(-B // self.rows_per_core)) if self.rows_per_core else device.units
        rows = min(self.tile_rows, -(-B // device.units))
        tiles = -(-B // rows) if rows else 1
        compute = self.row_flop * B / (self.share * device.flops[self.precision or precision])
        cached = CPU.cache_copies_factor * (self.row_cache_bytes * B + self.fixed_cache_bytes) / device.bandwidth
        core_us = (compute + cached) * 1e6 * device.units + self.tile_us * tiles  # of all cores together
        waited_us = CPU.last_tile_share * core_us / tiles if rows and cores > 1 else 0.0
        fetched = (self.row_bytes + self.transposed_bytes) * B + self.fixed_bytes + self.tile_bytes * (tiles - 1)
        return core_us / cores + waited_us + fetched / device.bandwidth * 1e6 + self.launches * device.launch_us
