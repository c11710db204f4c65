"""Clusters of blocks whose registers hold recurrent weights: their sizes, sequences and times."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onchip.kernels.cuda.common.costs import RecurrentResidentCosts
from onchip.plan.device import Device

WITHOUT_CLUSTERS = ("sm_80", "sm_86", "sm_89")
THREADS, MAX_THREADS, MAX_BLOCKS = 256, 512, 8  # per block: preferred, at most; blocks per cluster
MAX_SEQUENCES = {THREADS: 8, MAX_THREADS: 4}  # per cluster


def max_blocks_of(device: Device) -> int:
    """Per cluster."""
    return 1 if device.arch in WITHOUT_CLUSTERS else MAX_BLOCKS


def max_threads_of(threads: int) -> int:
    """The thread count that the block is compiled for."""
    return THREADS if threads <= THREADS else MAX_THREADS


@dataclass(frozen=True)
class Clusters:
    """Clusters of a recurrence whose units are split into groups; each group belongs to `lanes` adjacent lanes."""

    groups: int
    lanes: int
    max_sequences: int  # per group
    S: int
    D: int
    units: int  # SMs
    max_blocks: int  # per cluster
    costs: RecurrentResidentCosts

    def threads_of(self, blocks: int) -> int:
        return math.ceil(math.ceil(self.groups / blocks) * self.lanes / 32) * 32

    def fitting(self, threads: int) -> list[int]:
        """Cluster sizes at which a block has at most this many threads, so its recurrent weights fit in registers."""
        counts = [1 << i for i in range(self.max_blocks.bit_length())]
        return [count for count in counts if self.threads_of(count) <= threads]

    def blocks_for(self, N: int) -> int:
        """Blocks per cluster: one, which exchanges nothing; else few sequences run faster on small blocks, many on few
        blocks. The choice changes no bit."""
        small, large = self.fitting(THREADS), self.fitting(MAX_THREADS)
        return small[0] if large[0] > 1 and small and N * self.D * small[0] <= self.units else large[0]

    def sequences_for(self, N: int) -> int:
        """Sequences per cluster: one, or enough that all clusters fit in one wave at one block per SM."""
        blocks = self.blocks_for(N)
        most = min(MAX_SEQUENCES[max_threads_of(self.threads_of(blocks))], self.max_sequences)
        wanted = math.ceil(N * self.D / max(1, self.units // blocks))
        return min(most, 1 << (max(1, wanted) - 1).bit_length())

    def wave_us(self, N: int) -> float:
        """Time of one wave of clusters, all steps."""
        step_us = self.costs.step_us[max_threads_of(self.threads_of(self.blocks_for(N)))]
        return self.S * (step_us + self.costs.sequence_us * self.sequences_for(N))

    def run_us(self, N: int) -> float:
        at_a_time = max(1, self.units // self.blocks_for(N))
        return math.ceil(math.ceil(N / self.sequences_for(N)) * self.D / at_a_time) * self.wave_us(N)
