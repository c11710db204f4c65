"""The gradients of the gates of LSTM, GRU and RNN over few sequences: host side of recurrent/gradient_resident.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Int64, UInt32
from onchip.kernels.cuda.common.costs import H200, RecurrentGradResidentCosts, costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.recurrent.clusters import MAX_BLOCKS, MAX_THREADS, Clusters, max_blocks_of, max_threads_of
from onchip.kernels.cuda.recurrent.gradient import RecurrentGradShape, grad_label, recipes_of
from onchip.kernels.cuda.recurrent.simt import OUTPUTS, moved_bytes
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network
from onchip.network.layers import RecurrentGrad
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
WARP_K, MAX_UNITS, MAX_WEIGHTS = 128, 4, 64  # K elements of a warp's CHUNK; units per warp, weights per lane at most


@dataclass(frozen=True)
class RecurrentGradResidentLowering(RecurrentGradShape):
    """recurrent_grad_resident(arrays, N, S, D, H, blocks, backwards, of_last, index)"""

    units: int  # SMs
    max_blocks: int  # per cluster
    costs: RecurrentGradResidentCosts = field(default=H200.recurrent_grad_resident, kw_only=True, repr=False)

    @property
    def chunks(self) -> int:
        """Of 4 K elements per lane."""
        return math.ceil(self.gates * self.H / WARP_K)

    @property
    def warp_units(self) -> int:
        """Units per warp; 0 if a lane's registers cannot hold the weights to one unit."""
        fitting = MAX_WEIGHTS // (4 * self.chunks)
        return min(MAX_UNITS, 1 << fitting.bit_length() >> 1)

    @property
    def clusters(self) -> Clusters:
        U = self.warp_units
        return Clusters(-(-self.H // U), 32, 32 // U, self.S, self.D, self.units, self.max_blocks, self.costs)

    @property
    def fits(self) -> bool:
        return self.warp_units > 0 and bool(self.clusters.fitting(MAX_THREADS))

    @property
    def cells_us(self) -> float:
        return self.S * self.costs.cell_us if self.cell == "Lstm" else 0.0

    def at(self, B: int) -> Steps:
        N = B * self.sequences
        if not N:
            return Steps(())
        NS, blocks = self.clusters.sequences_for(N), self.clusters.blocks_for(N)
        threads = self.clusters.threads_of(blocks)
        template = f"{self.chunks}, {self.warp_units}, {NS}, {max_threads_of(threads)}"
        program = Program(SOURCE, f"recurrent_grad_resident<{self.cell}, {ELEMENT_TYPES[self.dtype]}, {template}>")
        config = LaunchConfig((math.ceil(N / NS) * self.D * blocks, 1, 1), (threads, 1, 1), 0, cluster=blocks)
        sizes = (Int64(N), Int64(self.S), UInt32(self.D), UInt32(self.H), UInt32(blocks))
        flags = (UInt32(self.is_reverse), UInt32(OUTPUTS.index(self.output)), UInt32(self.index))
        budget = Budget(registers=min(255, 65536 // max_threads_of(threads)), spill_bytes=64)
        return Steps((KernelLaunch(program, config, (self.arrays, *sizes, *flags), budget),), self.scratch_bytes(N))


class RecurrentGradResidentKernel(CudaKernel):
    name = "recurrent_grad_resident"
    layers = (RecurrentGrad,)
    dtypes = ELEMENT_TYPES

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        shape = RecurrentGradShape.of(net, node)
        if shape.cell == "GruBefore":
            yield Refusal(self.name, node.name, "a reset before the product needs a second exchange per step")
            return
        lowering = RecurrentGradResidentLowering(
            **vars(shape), units=device.units, max_blocks=max_blocks_of(device),
            costs=costs_of(device).recurrent_grad_resident,
        )  # fmt: skip
        if not lowering.fits:
            why = f"the recurrence of {shape.H:,} units exceeds the registers of a cluster on {device.arch}"
            yield Refusal(self.name, node.name, why)
            return
        recipes, flop = recipes_of(net, node), net.row_flop(node)
        clusters, N = lowering.clusters, job.batch * shape.sequences
        run_us, wave_us = (us + lowering.cells_us for us in (clusters.run_us(N), clusters.wave_us(N)))
        yield self.claim(
            net, node, lowering, label=grad_label(self.name, node, shape), recipes=recipes,
            why=f"{shape.S} steps in one launch, the recurrence in registers",
            order=f"lanes in steps of {WARP_K}, then a tree",
            cost=Cost(
                flop, moved_bytes(net, node), recipe_bytes(recipes), precision="fp32",
                rate=flop * job.batch / (run_us * 1e-6 * device.flops["fp32"]),
                min_us=wave_us, why_slow="steps depend on each other",
            ),
        )  # fmt: skip


def _instance(cell: str, dtype: str, H: int, B: int) -> Instance:
    def launch(device: Device) -> KernelLaunch:
        lowering = RecurrentGradResidentLowering(
            cell, dtype, (0, 1, 2, 3), 1, 64, 1, H, False, "sequence", 0, cell == "GruAfter", device.units, MAX_BLOCKS
        )
        return lowering.at(B).launches[0]

    return Instance(f"{cell}, {dtype}, {H} units, {B} sequences", launch)


INSTANCES = (
    _instance("Lstm", "float32", 128, 64), _instance("Lstm", "float32", 128, 1),
    _instance("Lstm", "float32", 128, 1 << 14), _instance("Lstm", "float32", 64, 1 << 14),
    _instance("Lstm", "float16", 33, 64), _instance("Lstm", "float32", 256, 1 << 14),
    _instance("GruAfter", "float32", 128, 64), _instance("GruAfter", "bfloat16", 48, 1 << 14),
    _instance("GruAfter", "float32", 256, 1 << 14), _instance("RnnTanh", "float32", 50, 7),
    _instance("RnnTanh", "float32", 512, 1 << 14), _instance("RnnRelu", "float32", 16, 1),
)  # fmt: skip
