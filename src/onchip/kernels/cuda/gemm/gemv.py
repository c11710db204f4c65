"""Gemv and skinny GEMM: the host side of gemm/gemv.cu. A Linear over few rows, bound by reading its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Int64, UInt32
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import OVERLAPPING, Budget, Instance, KernelLaunch, LaunchConfig, Program
from onchip.kernels.cuda.gemm.linear import GemmKernel, LinearGemm, LinearLowering, plain_weight, residuals
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job

SOURCE = Path(__file__).with_suffix(".cu")
WARPS = 8
CHUNK = 32  # elements of k per chunk (mma)
BLOCKS = 2  # resident per SM
FMA_COLUMNS, FMA_CHUNKS = 4, {1: 4, 4: 2, 8: 1}  # chunks of k in flight, by rows per block
MAX_ROWS = 128  # with more rows, other kernels read the weights fewer times


@dataclass(frozen=True)
class SkinnyGemm(LinearGemm):
    """Small M; w is (N, K)."""

    @property
    def by_mma(self) -> bool:
        return PRECISIONS[self.precision].per_word == 2 and self.K % 8 == 0

    @property
    def vector(self) -> int:
        """Elements of k per load of a lane (fma)."""
        return 4 if self.K % 4 == 0 else 1

    def tile(self, units: int) -> tuple[int, int]:
        """Rows and columns per block; twice the columns where there is more than one wave of blocks."""
        if self.by_mma:
            return 16 if self.M <= 16 else 64, 8 if math.ceil(self.N / 8) <= BLOCKS * units else 16
        return next((rows for rows in FMA_CHUNKS if rows >= self.M), max(FMA_CHUNKS)), FMA_COLUMNS

    @property
    def resident(self) -> int:
        """Resident blocks per SM."""
        return 1 if self.by_mma and self.M > 16 else BLOCKS

    def count(self, units: int) -> int:
        rows, columns = self.tile(units)
        return math.ceil(self.M / rows) * math.ceil(self.N / columns)

    @property
    def order(self) -> str:
        chunk, how = (CHUNK, "in steps of 16 by mma") if self.by_mma else (32 * self.vector, "in lanes")
        return f"k {how}, {WARPS} warps interleaved by {chunk}"

    def min_us(self, device: Device) -> float:
        """Least time: weights once per row tile, rows once per column tile from L2; or the latency of reading rows."""
        (rows, columns), costs = self.tile(device.units), costs_of(device).gemv
        w_bytes = math.ceil(self.M / rows) * self.N * self.K * DTYPE_BYTES[PRECISIONS[self.precision].dtype]
        x_bytes = math.ceil(self.N / columns) * self.M * self.K * DTYPE_BYTES[self.dtypes[0]]
        bytes_us = (w_bytes + x_bytes) / (costs.cache_share * device.peak.cache_bandwidth) * 1e6
        if not self.by_mma:
            return max(bytes_us, self.count(device.units) * rows * costs.fma_row_us - costs.fma_hidden_us)
        waves = math.ceil(self.count(device.units) / (device.units * self.resident))
        iterations = math.ceil(self.K / (WARPS * CHUNK * self.chunks(rows, columns)))
        return max(bytes_us, waves * iterations * math.ceil(min(self.M, rows) / 16) * costs.rows_us)

    @staticmethod
    def chunks(rows: int, columns: int) -> int:
        """Chunks of k in flight (mma)."""
        return (64 if rows == 16 else 32) // columns

    def rate(self, device: Device) -> float:
        """Estimated share of the peak rate, given the unused rows of blocks and the idle SMs."""
        (rows, _), costs, units = self.tile(device.units), costs_of(device).gemv, device.units
        full = self.M / (math.ceil(self.M / rows) * rows)
        return (costs.mma_share if self.by_mma else costs.fma_share) * full * min(1.0, self.count(units) / units)

    def launch(self, device: Device, *arrays: Argument) -> KernelLaunch:
        """arrays: x, w, bias (N) float32 or NOTHING, residual (M, N) of y's type or NOTHING, y"""
        rows, columns = self.tile(device.units)
        x_type, y_type = (ELEMENT_TYPES[dtype] for dtype in self.dtypes)
        computed = PRECISIONS[self.precision]
        if self.by_mma:
            tiling = f"{rows // 16}, {columns // 8}, {self.chunks(rows, columns)}"
            expression = f"gemv_mma<{computed.name}, {x_type}, {y_type}, {tiling}>"
        else:
            tiling = f"{rows}, {columns}, {self.vector}, {FMA_CHUNKS[rows] if self.vector == 4 else 4}"
            expression = f"gemv_fma<{x_type}, {ELEMENT_TYPES[computed.dtype]}, {y_type}, {tiling}>"
        config = LaunchConfig(
            (self.count(device.units), 1, 1), (32 * WARPS, 1, 1), 0, overlaps=device.arch in OVERLAPPING
        )
        sizes = Int64(self.M), Int64(self.N), Int64(self.K)
        arguments = (*arrays, *sizes, *map(UInt32, activation_words(self.activation)))
        # float32 rows take twice the registers until they are rounded: on GPUs after sm_90 the compiler spills a few.
        budget = Budget(min(255, 65536 // (256 * self.resident)), spill_bytes=16)
        return KernelLaunch(Program(SOURCE, expression), config, arguments, budget)


class GemvKernel(GemmKernel):
    name = "gemv"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        """One Linear with its activation and surrounding Casts, or with a residual Add, for jobs of few rows."""
        chain = self.find(net, start)
        if chain is None or not 0 < job.batch * chain.vectors <= MAX_ROWS:
            return
        for linear in residuals(net, start, chain):
            gemm = SkinnyGemm.of(net, linear, job.precision)
            planned = replace(gemm, M=job.batch * gemm.M)
            recipes = linear.recipes(plain_weight(linear.layer, job.precision))
            yield self.claim_linear(
                net, linear, LinearLowering(gemm, linear.arrays(net, linear.residual_input(net)), device),
                recipes=recipes, order=gemm.order, why="few rows: bound by reading the weights",
                cost=Cost(
                    *linear.work(net), recipe_bytes(recipes), precision="" if gemm.by_mma else "fp32",
                    rate=planned.rate(device), min_us=planned.min_us(device),
                ),
            )  # fmt: skip


def _instance(name: str, M: int, N: int, K: int, precision: str, dtype: str = "float32") -> Instance:
    gemm = SkinnyGemm(M, N, K, precision, (dtype, dtype))
    return Instance(name, lambda device: gemm.launch(device, *[NOTHING] * 5))


INSTANCES = (
    _instance("one row fp16", 1, 4096, 4096, "fp16", "float16"),
    _instance("one row fp32", 1, 4096, 4096, "fp32"),
    _instance("8 rows fp32", 8, 4096, 4096, "fp32"),
    _instance("8 rows of odd length fp32", 8, 4096, 4095, "fp32"),
    _instance("few columns bf16, rows in fp32", 16, 512, 1024, "bf16"),
    _instance("64 rows fp16", 64, 1024, 1024, "fp16", "float16"),
    _instance("64 rows fp16, in fp32", 64, 4096, 1024, "fp16"),
    _instance("rows of odd length fp16", 3, 512, 77, "fp16", "float16"),
)
