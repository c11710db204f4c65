"""LSTM, GRU and RNN over few sequences: host side of recurrent/register_resident.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Int64, UInt32
from onchip.kernels.cuda.common.costs import H200, RecurrentResidentCosts, costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.recurrent.clusters import MAX_BLOCKS, MAX_THREADS, Clusters, max_blocks_of, max_threads_of
from onchip.kernels.cuda.recurrent.simt import RecurrentShape, gate_recipes, label_of, moved_bytes
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network
from onchip.network.layers import Recurrent
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
TERMS, MIN_SLICES, MAX_SLICES = 16, 4, 32  # K elements per lane; lanes per unit


@dataclass(frozen=True)
class RecurrentRegisterResidentLowering(RecurrentShape):
    """recurrent_register_resident(x, R, bias, first_h, first_c, y, N, S, D, H, units, blocks, backwards, output)"""

    units: int  # SMs
    max_blocks: int  # per cluster
    costs: RecurrentResidentCosts = field(default=H200.recurrent_resident, kw_only=True, repr=False)

    @property
    def slices(self) -> int:
        """Lanes that share a unit."""
        return max(MIN_SLICES, 1 << (math.ceil(self.H / TERMS) - 1).bit_length())

    @property
    def clusters(self) -> Clusters:
        return Clusters(self.H, self.slices, self.slices, self.S, self.D, self.units, self.max_blocks, self.costs)

    def at(self, B: int) -> Steps:
        N = B * self.sequences
        if not N:
            return Steps(())
        NS, blocks = self.clusters.sequences_for(N), self.clusters.blocks_for(N)
        threads = self.clusters.threads_of(blocks)
        template = f"{self.slices}, {math.ceil(self.H / (4 * self.slices))}, {NS}, {max_threads_of(threads)}"
        program = Program(SOURCE, f"recurrent_register_resident<{self.cell}, {ELEMENT_TYPES[self.dtype]}, {template}>")
        grid = math.ceil(N / NS) * self.D * blocks
        config = LaunchConfig((grid, 1, 1), (threads, 1, 1), 0, cluster=blocks)
        sizes = (UInt32(self.H), UInt32(math.ceil(self.H / blocks)), UInt32(blocks))
        arguments = (*self.arrays, Int64(N), Int64(self.S), UInt32(self.D), *sizes, *self.flags)
        budget = Budget(registers=min(255, 65536 // max_threads_of(threads)), spill_bytes=64)
        return Steps((KernelLaunch(program, config, arguments, budget),))


class RecurrentRegisterResidentKernel(CudaKernel):
    name = "recurrent_register_resident"
    layers = (Recurrent,)
    dtypes = ELEMENT_TYPES

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        shape = RecurrentShape.of(net, node)
        if shape.cell == "GruBefore":
            return
        lowering = RecurrentRegisterResidentLowering(
            **vars(shape), units=device.units, max_blocks=max_blocks_of(device),
            costs=costs_of(device).recurrent_resident,
        )  # fmt: skip
        if lowering.slices > MAX_SLICES or not lowering.clusters.fitting(MAX_THREADS):
            why = f"the recurrence of {shape.H:,} units exceeds the registers of a cluster on {device.arch}"
            yield Refusal(self.name, node.name, why)
            return
        recipes, flop = gate_recipes(net, node, shape), net.row_flop(node)
        N = job.batch * shape.sequences
        yield self.claim(
            net, node, lowering, label=label_of(self.name, node, shape), recipes=recipes,
            why=f"{shape.S} steps in one launch, the recurrence in registers",
            order=f"lanes in steps of {4 * lowering.slices}, then a tree",
            cost=Cost(
                flop, moved_bytes(net, node), recipe_bytes(recipes), precision="fp32",
                rate=flop * job.batch / (lowering.clusters.run_us(N) * 1e-6 * device.flops["fp32"]),
                min_us=lowering.clusters.wave_us(N), why_slow="steps depend on each other",
            ),
        )  # fmt: skip


def _instance(cell: str, dtype: str, H: int, B: int) -> Instance:
    def launch(device: Device) -> KernelLaunch:
        lowering = RecurrentRegisterResidentLowering(
            cell, dtype, 1, 64, 1, H, False, "sequence", cell == "GruAfter", (), device.units, MAX_BLOCKS
        )
        return lowering.at(B).launches[0]

    return Instance(f"{cell}, {dtype}, {H} units, {B} sequences", launch)


INSTANCES = (
    _instance("Lstm", "float32", 128, 1), _instance("Lstm", "float32", 128, 1 << 14),
    _instance("Lstm", "float16", 33, 64), _instance("Lstm", "float32", 64, 1 << 14),
    _instance("Lstm", "float32", 256, 1 << 14),
    _instance("GruAfter", "bfloat16", 48, 1 << 14), _instance("RnnTanh", "float32", 50, 7),
    _instance("RnnRelu", "float32", 16, 1),
)  # fmt: skip
