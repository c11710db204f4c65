"""Hopper GEMM (TMA, wgmma, persistent, split-K): the host side of gemm/sm90.cu and mma/wgmma_tile.cuh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.chain import Dense, end_dtypes
from onchip.kernels.cuda.common.activation import act_name, activation_words
from onchip.kernels.cuda.common.arguments import (
    NOTHING,
    Argument,
    Input,
    Int64,
    Memory,
    Output,
    Scratch,
    TensorMap,
    UInt32,
    Weight,
)
from onchip.kernels.cuda.common.chain import FitsInBlock
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.precision import PRECISIONS, order_of, tensor_core_cost
from onchip.kernels.cuda.common.program import Instance, KernelLaunch, Program, Steps
from onchip.kernels.cuda.common.weights import multiplied_weight
from onchip.kernels.cuda.gemm.linear import FusedLinear, GemmKernel, residuals
from onchip.kernels.cuda.gemm.pad_rows import pad_rows, padded, padded_rows
from onchip.kernels.cuda.mma.wgmma_tile import ARCHITECTURES, LINE, MIN_WEIGHTS, PART, TMA_BYTES, WgmmaGemm
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network
from onchip.network.layers import Activation
from onchip.network.recipe import Recipe
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")


def launch_gemm(
    gemm: WgmmaGemm, units: int, x: Memory, w: Memory, bias: Argument, y: Argument, residual: Argument = NOTHING
) -> KernelLaunch:
    """bias  (N) float32 or NOTHING; residual: (M, N) of y's type or NOTHING"""
    tiling = gemm.tiling(units)
    box = (LINE // DTYPE_BYTES[gemm.dtypes[0]], tiling.x_tile_rows)
    rows = TensorMap(x, gemm.x_tma_dtype, (gemm.length or gemm.K, gemm.M), box, LINE)
    arguments = (
        rows, gemm.weight_map(w, tiling.tile), bias, residual, y,
        Int64(gemm.M), Int64(gemm.N), Int64(gemm.K), UInt32(tiling.x_tile_rows), UInt32(gemm.split_k),
        *map(UInt32, activation_words(gemm.activation)),
    )  # fmt: skip
    program = Program(SOURCE, f"gemm_sm90<{tiling.template}, {tiling.split}, {act_name(gemm.activation)}>")
    return KernelLaunch(program, tiling.config, arguments, tiling.budget)


# -- as a layer of a network -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmSm90Lowering:
    """A Linear and its activation as one launch; rows that TMA cannot address are zero-padded in a launch before it."""

    gemm: WgmmaGemm  # for one row of the batch
    K: int  # of the layer, unpadded
    units: int
    bias: Argument
    residual: Argument = NOTHING

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of x, unpadded."""
        return self.K * DTYPE_BYTES[self.gemm.dtypes[0]]

    @property
    def padded_bytes(self) -> int:
        """Bytes of a zero-padded row of x; 0 where no copy is needed."""
        return self.gemm.length * DTYPE_BYTES[self.gemm.dtypes[0]] if self.row_bytes % TMA_BYTES else 0

    def of_rows(self, B: int) -> WgmmaGemm:
        return replace(self.gemm, M=B * self.gemm.M)

    def at(self, B: int) -> Steps:
        gemm = self.of_rows(B)
        if not gemm.M:
            return Steps(())
        x: Memory = Scratch(0) if self.padded_bytes else Input(0)
        launch = launch_gemm(gemm, self.units, x, Weight("weight"), self.bias, Output(0), self.residual)
        if not self.padded_bytes:
            return Steps((launch,))
        padding = pad_rows(gemm.M, self.row_bytes, self.units, Input(0), x)
        return Steps((padding, launch), scratch_bytes=gemm.M * self.padded_bytes)


class GemmSm90Kernel(GemmKernel):
    name = "gemm_sm90"
    activations = (Activation,)  # act_name compiles those without a code

    def __init__(self, fits_in_block: FitsInBlock) -> None:
        self.fits_in_block = fits_in_block

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """Nothing on other chips: gemm_mma has the layers there, and a Refusal for each Linear would say no more."""
        return super().claims(net, start, device, job) if device.arch in ARCHITECTURES else iter(())

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """One Linear with its activation and surrounding Casts, or with a residual Add and the activation after it."""
        chain = self.find(net, start)
        if chain is None:
            return
        (layer,) = chain.layers
        if layer.D_in * layer.D_out < MIN_WEIGHTS and self.fits_in_block(net, chain, device, job):
            return
        for linear in residuals(net, start, chain):
            lowering = _lowering(net, linear, device, job)
            if why := lowering.gemm.why_not():
                yield Refusal(self.name, net.nodes[start].name, why)
            else:
                split_k = lowering.of_rows(job.batch).best_split_k(device.units)
                yield self._claim(net, linear, replace(lowering, gemm=replace(lowering.gemm, split_k=split_k)), job)

    def _claim(self, net: Network, linear: FusedLinear, lowering: GemmSm90Lowering, job: Job) -> Claim:
        gemm, units = lowering.of_rows(job.batch), lowering.units
        split = f"split-K {gemm.split_k}" if gemm.split_k > 1 else ""
        recipes = linear.recipes(_weight(linear.layer, job.precision))
        copied_bytes = lowering.gemm.M * (lowering.row_bytes + lowering.padded_bytes) if lowering.padded_bytes else 0
        return self.claim_linear(
            net, linear, lowering, label=f"{self.name}<{','.join(filter(None, (linear.label, split)))}>",
            cost=tensor_core_cost(
                job.precision, *linear.work(net), recipe_bytes(recipes), launches=2 if copied_bytes else 1,
                transposed_bytes=copied_bytes, rate=gemm.rate(units, overlaps=True), min_us=gemm.min_us(units),
            ),
            why="tensor cores, one tile per block", recipes=recipes,
            order=", ".join(filter(None, (order_of(job.precision, "wgmma", PART), split))),
        )  # fmt: skip


def _lowering(net: Network, linear: FusedLinear, device: Device, job: Job) -> GemmSm90Lowering:
    layer, dtypes = linear.layer, end_dtypes(net, linear.chain)
    K, length = (padded(layer.D_in, DTYPE_BYTES[dtype]) for dtype in (PRECISIONS[job.precision].dtype, dtypes[0]))
    gemm = WgmmaGemm(
        linear.chain.vectors, layer.D_out, K, job.precision, dtypes, layer.activation, length=length,
        costs=costs_of(device).wgmma_tile,
    )  # fmt: skip
    return GemmSm90Lowering(gemm, layer.D_in, device.units, linear.bias, linear.residual_input(net))


def _weight(layer: Dense, precision: str) -> Recipe:
    """w (tf32 splits, N, padded K) in the operand type."""
    shape = layer.D_out, padded(layer.D_in, DTYPE_BYTES[PRECISIONS[precision].dtype])
    rows = layer.weight if shape[1] == layer.D_in else Recipe.of(padded_rows, (layer.weight,), shape, K=shape[1])
    return multiplied_weight(rows, shape, precision)


def _instance(
    name: str, M: int, N: int, K: int, precision: str, dtypes: tuple[str, str] = ("float32",) * 2, split_k: int = 1
) -> Instance:
    gemm, unused = WgmmaGemm(M, N, K, precision, dtypes, split_k=split_k), Input(0)
    return Instance(name, lambda device: launch_gemm(gemm, device.units, unused, unused, NOTHING, NOTHING))


INSTANCES = (
    _instance("large fp16", 8192, 8192, 8192, "fp16", ("float16", "float16")),
    _instance("large bf16 to float32", 8192, 8192, 8192, "bf16", ("bfloat16", "float32")),
    _instance("large fp32", 8192, 8192, 8192, "fp32"),
    _instance("large tf32", 8192, 8192, 8192, "tf32"),
    _instance("large fp16, rows in float32", 8192, 8192, 8192, "fp16"),
    _instance("few rows fp16", 7, 4096, 4096, "fp16", ("float16", "float16")),
    _instance("few rows fp32", 7, 4096, 4096, "fp32"),
    _instance("few rows fp16, split-K", 7, 1024, 4096, "fp16", ("float16", "float16"), split_k=4),
    _instance("few rows fp32, split-K", 7, 1024, 4096, "fp32", split_k=4),
    _instance("64 rows fp16, split-K", 64, 4096, 4096, "fp16", ("float16", "float16"), split_k=4),
    _instance("64 rows tf32, split-K", 64, 4096, 4096, "tf32", split_k=4),
    _instance("many rows fp16, split-K", 8192, 1024, 4096, "fp16", ("float16", "float16"), split_k=4),
    _instance("many rows fp32, split-K", 8192, 1024, 4096, "fp32", split_k=4),
    _instance("few columns fp16", 65536, 10, 512, "fp16", ("float16", "float16")),
    _instance("few columns fp16, transposed", 65536, 64, 512, "fp16", ("float16", "float16")),
)
