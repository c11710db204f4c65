"""LSTM, GRU and RNN of few sequences on a GPU: the host's side of recurrent_held.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.mlp_packing import PRECISIONS
from onchip.kernels.cuda.program import (
    EVERY_CHIP,
    NUMBERS,
    Budget,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Program,
    Steps,
    UInt32,
)
from onchip.kernels.cuda.recurrent import RecurrentShape, gate_recipes, moved_bytes
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal
from onchip.spec.layers import Recurrent
from onchip.spec.network import Network

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
WITHOUT_CLUSTERS = ("sm_80", "sm_86", "sm_89")
TERMS, LEAST_SLICES, MOST_SLICES = 16, 4, 32  # of a lane's sum; lanes of a unit
THREADS, MOST_THREADS, MOST_BLOCKS = 256, 512, 8  # wanted, and at most, of a block; blocks of a cluster
MOST_SEQUENCES = {THREADS: 8, MOST_THREADS: 4}  # of a cluster
# Measured on an H200, LSTM of 128 units: a step of one sequence, and the share of the device's rate of 512 of them.
STEP_US, RATE = 0.95, 0.22


@dataclass(frozen=True)
class HeldLowering(RecurrentShape):
    """recurrent_held(x, R, bias, first_h, first_c, y, N, S, D, H, units, blocks, backwards, output)"""

    units: int  # multiprocessors

    @property
    def slices(self) -> int:
        """Lanes that share a unit."""
        return max(LEAST_SLICES, 1 << (math.ceil(self.H / TERMS) - 1).bit_length())

    @property
    def blocks(self) -> int:
        """Of a cluster: as few as leave a block with so many threads."""
        return next((n for n in (1, 2, 4) if self.threads_of(n) <= THREADS), MOST_BLOCKS)

    def threads_of(self, blocks: int) -> int:
        return math.ceil(math.ceil(self.H / blocks) * self.slices / 32) * 32

    @property
    def most_threads(self) -> int:
        return THREADS if self.threads_of(self.blocks) <= THREADS else MOST_THREADS

    @property
    def fits(self) -> bool:
        """Whether its recurrence does, in registers."""
        return self.slices <= MOST_SLICES and self.threads_of(self.blocks) <= MOST_THREADS

    def sequences_for(self, N: int) -> int:
        """Of a cluster: one, or as many as let all clusters run at a time, a block on a multiprocessor."""
        most = min(MOST_SEQUENCES[self.most_threads], self.slices)
        wanted = math.ceil(N * self.D / max(1, self.units // self.blocks))
        return min(most, 1 << (max(1, wanted) - 1).bit_length())

    def at(self, B: int) -> Steps:
        N = B * self.sequences
        if not N:
            return Steps(())
        NS, blocks = self.sequences_for(N), self.blocks
        pieces = math.ceil(self.H / (4 * self.slices))
        sizes = f"{self.slices}, {pieces}, {NS}, {self.most_threads}"
        program = Program(SOURCE, f"recurrent_held<{self.cell}, {NUMBERS[self.dtype]}, {sizes}>")
        grid = math.ceil(N / NS) * self.D * blocks
        config = LaunchConfig((grid, 1, 1), (self.threads_of(blocks), 1, 1), 0, cluster=blocks)
        numbers = (UInt32(self.H), UInt32(math.ceil(self.H / blocks)), UInt32(blocks))
        arguments = (*self.arrays, Int64(N), Int64(self.S), UInt32(self.D), *numbers, *self.how)
        budget = Budget(registers=65536 // self.most_threads, spill_bytes=64)
        return Steps((KernelLaunch(program, config, arguments, budget),))


class RecurrentHeld:
    name = "recurrent_held"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)  # it computes in float32

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer = node.layer
        if job.is_training or not isinstance(layer, Recurrent) or device.arch not in ARCHITECTURES:
            return
        shape = RecurrentShape.of(net, node)
        if shape.dtype not in NUMBERS or shape.cell == "GruBefore":
            return
        lowering = HeldLowering(**vars(shape), units=device.units)
        if not lowering.fits or (lowering.blocks > 1 and device.arch in WITHOUT_CLUSTERS):
            held = f"holds the recurrence of {shape.H:,} units in registers of no cluster of {device.arch}"
            yield Refusal(self.name, node.name, held)
            return
        recipes = gate_recipes(net, node, shape)
        yield Claim(
            self.name, f"{self.name}<{layer.kind},{shape.H}>", (node.name,),
            Price(
                net.row_flop(node), moved_bytes(net, node), sum(recipe.nbytes for recipe in recipes.values()),
                precision="fp32", rate=RATE, least_us=shape.S * STEP_US, why_slow="steps wait for each other",
            ),
            f"{shape.S} steps in one launch, the recurrence in registers", recipes,
            order=f"lanes in steps of {4 * lowering.slices}, then a tree", facts=lowering,
        )  # fmt: skip


def _instance(cell: str, dtype: str, H: int, B: int) -> Instance:
    def launch(device: Device) -> KernelLaunch:
        made = HeldLowering(cell, dtype, 1, 64, 1, H, False, "sequence", cell == "GruAfter", (), device.units)
        return made.at(B).launches[0]

    return Instance(f"{cell}, {dtype}, {H} units, {B} sequences", launch)


INSTANCES = (
    _instance("Lstm", "float32", 128, 1), _instance("Lstm", "float32", 128, 1 << 14),
    _instance("Lstm", "float16", 33, 64), _instance("Lstm", "float32", 64, 1 << 14),
    _instance("Lstm", "float32", 256, 1 << 14),
    _instance("GruAfter", "bfloat16", 48, 1 << 14), _instance("RnnTanh", "float32", 50, 7),
    _instance("RnnRelu", "float32", 16, 1),
)  # fmt: skip
