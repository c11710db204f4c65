"""Batched GEMM by mma.sync: the host side of gemm/batched_mma.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Input
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.precision import PRECISIONS, tensor_core_cost
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.gemm.batched import (
    MAX_AXES,
    MAX_BLOCKS,
    SMALL,
    MatMulShape,
    Operand,
    label_of,
    moved_bytes,
    operands_of,
)
from onchip.network.graph import Network
from onchip.network.layers import MatMul
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Use

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 128


@dataclass(frozen=True)
class MatMulMmaLowering(MatMulShape):
    """matmul_mma(a, b, y, count, M, N, K, batch)"""

    precision: str

    @property
    def side(self) -> int:
        return SMALL if max(self.sizes[:2]) <= SMALL else 2 * SMALL

    @property
    def is_whole(self) -> bool:
        """Whether rows divide into aligned vectors of four elements."""
        _, N, K = self.sizes
        return N % 4 == 0 and K % 4 == 0

    def rate(self, B: int, device: Device) -> float:
        """Estimated share of the peak rate: counts tile overhang and idle SMs in the last wave."""
        M, N, _ = self.sizes
        tiles = self.tiles(B, self.side)
        full = self.count(B) * M * N / (tiles * self.side**2)
        share, units = costs_of(device).matmul.mma_shares[self.precision], device.units
        return share * full * tiles / (math.ceil(tiles / units) * units)

    def at(self, B: int) -> Steps:
        tiles = self.tiles(B, self.side)
        if not tiles:
            return Steps(())
        head = f"{PRECISIONS[self.precision].name}, {ELEMENT_TYPES[self.dtype]}, {self.side}"
        program = Program(SOURCE, f"matmul_mma<{head}, {'true' if self.is_whole else 'false'}>")
        config = grid_1d(min(tiles, MAX_BLOCKS), THREADS)
        return Steps((KernelLaunch(program, config, self.arguments(B), Budget(registers=255)),))


class MatMulMmaKernel(CudaKernel):
    name = "matmul_mma"
    layers = (MatMul,)
    dtypes = ELEMENT_TYPES

    def applies(self, net: Network, start: int) -> bool:
        y = net.types[net.nodes[start].name]
        return len(y.row_shape) - 2 < MAX_AXES and y.row_size > 0

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        node = net.nodes[start]
        gemm, recipes = operands_of(net, node)
        lowering = MatMulMmaLowering(**vars(gemm), precision=job.precision)
        yield self.claim(
            net, node, lowering, label=label_of(self.name, gemm), why="tensor cores, one tile per block",
            recipes=recipes, order=f"k in steps of {PRECISIONS[job.precision].step} by mma, partial sums of 32",
            reads={name: Use(is_read_often=True) for name in node.inputs},
            cost=tensor_core_cost(
                job.precision, net.row_flop(node), *moved_bytes(net, node, recipes),
                rate=lowering.rate(job.batch, device),
            ),
        )  # fmt: skip


def _instance(precision: str, dtype: str, side: int, K: int = 64) -> Instance:
    a, b = Operand(Input(0), (4, side, K)), Operand(Input(1), (4, K, side))
    lowering = MatMulMmaLowering(dtype, a, b, (4,), precision)
    return instance(f"{precision} on {dtype}, {side} x {side} x {K}", lowering)


INSTANCES = (
    _instance("fp32", "float32", 64), _instance("fp32", "float32", 32), _instance("tf32", "float32", 64),
    _instance("fp16", "float16", 64), _instance("bf16", "bfloat16", 32), _instance("fp32", "float32", 64, 63),
    _instance("fp16", "float16", 64, 63),
)  # fmt: skip
