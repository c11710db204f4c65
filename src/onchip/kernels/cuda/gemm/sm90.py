"""Hopper GEMM (TMA, wgmma, persistent, split-K): the host side of gemm/sm90.cu and mma/wgmma_tile.cuh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.chain import Dense, end_dtypes, find_chain
from onchip.kernels.cuda.common.activation import act_name, activation_words
from onchip.kernels.cuda.common.chain import FitsInBlock, chain_refusal
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import (
    NOTHING,
    Argument,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    Memory,
    Output,
    Program,
    Scratch,
    Steps,
    TensorMap,
    UInt32,
    Weight,
)
from onchip.kernels.cuda.common.weights import multiplied_weight
from onchip.kernels.cuda.gemm.pad_rows import pad_rows, padded, padded_rows
from onchip.kernels.cuda.gemm.residual import Residual, residuals
from onchip.kernels.cuda.gemm.simt import one_layer
from onchip.kernels.cuda.mma.wgmma_tile import ARCHITECTURES, LINE, MIN_WEIGHTS, PART, TMA_BYTES, WgmmaGemm
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network
from onchip.network.layers import Elementwise
from onchip.network.recipe import Recipe, as_is
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use

SOURCE = Path(__file__).with_suffix(".cu")


def launch_gemm(
    gemm: WgmmaGemm, units: int, x: Memory, w: Memory, bias: Argument, y: Argument, residual: Argument = NOTHING
) -> KernelLaunch:
    """bias  (N) float32, or Int64(0): none; residual: (M, N) of y's type, or Int64(0)"""
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

    N: int
    K: int  # of the layer, unpadded
    vectors: int  # rows of x per row of the batch
    precision: str
    dtypes: tuple[str, str]
    activation: Elementwise | None
    has_bias: bool
    units: int
    split_k: int = 1
    residual: int | None = None  # input index of the residual

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of x, unpadded."""
        return self.K * DTYPE_BYTES[self.dtypes[0]]

    @property
    def padded_bytes(self) -> int:
        """Bytes of a zero-padded row of x; 0 where no copy is needed."""
        x_bytes = DTYPE_BYTES[self.dtypes[0]]
        return padded(self.K, x_bytes) * x_bytes if self.row_bytes % TMA_BYTES else 0

    def gemm(self, B: int) -> WgmmaGemm:
        M, K = B * self.vectors, padded(self.K, DTYPE_BYTES[PRECISIONS[self.precision].dtype])
        length = padded(self.K, DTYPE_BYTES[self.dtypes[0]])
        return WgmmaGemm(M, self.N, K, self.precision, self.dtypes, self.activation, self.split_k, length=length)

    def at(self, B: int) -> Steps:
        gemm = self.gemm(B)
        if not gemm.M:
            return Steps(())
        bias: Argument = Weight("bias") if self.has_bias else Int64(0)
        residual: Argument = Int64(0) if self.residual is None else Input(self.residual)
        if not self.padded_bytes:
            return Steps((launch_gemm(gemm, self.units, Input(0), Weight("weight"), bias, Output(0), residual),))
        return Steps(
            (
                pad_rows(gemm.M, self.row_bytes, self.units, Input(0), Scratch(0)),
                launch_gemm(gemm, self.units, Scratch(0), Weight("weight"), bias, Output(0), residual),
            ),
            scratch_bytes=gemm.M * self.padded_bytes,
        )


class GemmSm90:
    name = "gemm_sm90"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def __init__(self, fits_in_block: FitsInBlock) -> None:
        self.fits_in_block = fits_in_block

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """One Linear with its activation and surrounding Casts, or with a residual Add and the activation after it."""
        chain = find_chain(net, start, ACTIVATIONS, casts=True, most=1)
        if chain is None or device.arch not in ARCHITECTURES or chain_refusal(net, chain, device, job):
            return
        chain = one_layer(net, chain)
        (layer,) = chain.layers
        is_small = layer.D_in * layer.D_out < MIN_WEIGHTS
        if is_small and self.fits_in_block(net, chain, device, job):
            return
        for linear in residuals(net, start, chain):
            lowering = GemmSm90Lowering(
                layer.D_out, layer.D_in, chain.vectors, job.precision, end_dtypes(net, linear.chain),
                linear.chain.layers[0].activation, layer.bias is not None, device.units,
                residual=linear.residual_input(net),
            )  # fmt: skip
            if why := lowering.gemm(1).why_not():
                yield Refusal(self.name, net.nodes[start].name, why)
            else:
                split_k = lowering.gemm(max(1, job.batch)).best_split_k(device.units)
                yield _claim(net, linear, replace(lowering, split_k=split_k), job)


def _claim(net: Network, linear: Residual, lowering: GemmSm90Lowering, job: Job) -> Claim:
    chain, cost = linear.chain, linear.cost(net)
    recipes = weight_recipes(chain.layers[0], job.precision)
    splits = PRECISIONS[job.precision].splits
    label = f"{linear.label},split-K {lowering.split_k}" if lowering.split_k > 1 else linear.label
    order = f"k in steps of {PRECISIONS[job.precision].step} by wgmma"
    order += f", partial sums of {PART}" if splits > 1 else ""
    order += f", split-K {lowering.split_k}" if lowering.split_k > 1 else ""
    copied_bytes = lowering.vectors * (lowering.row_bytes + lowering.padded_bytes) if lowering.padded_bytes else 0
    return Claim(
        kernel=GemmSm90.name,
        label=f"{GemmSm90.name}<{label}>",
        nodes=chain.nodes,
        cost=Cost(
            cost.row_flop * (3 if splits > 1 else 1),  # 3xTF32
            cost.row_bytes,
            sum(recipe.nbytes for recipe in recipes.values()),
            launches=2 if copied_bytes else 1,
            transposed_bytes=copied_bytes,
            precision="tf32" if splits > 1 else "",
            rate=lowering.gemm(max(1, job.batch)).rate(lowering.units, overlaps=True),
            min_us=lowering.gemm(max(1, job.batch)).min_us(lowering.units),
        ),
        why="tensor cores, one tile per block",
        recipes=recipes,
        order=order,
        reads={net.by_name[chain.nodes[0]].inputs[0]: Use(is_read_often=True)},  # once per column of tiles
        facts=lowering,
    )


def weight_recipes(layer: Dense, precision: str) -> dict[str, Recipe]:
    """w (tf32 splits, N, padded K) in the operand type; the bias in float32."""
    shape = layer.D_out, padded(layer.D_in, DTYPE_BYTES[PRECISIONS[precision].dtype])
    rows = layer.weight if shape[1] == layer.D_in else Recipe.of(padded_rows, (layer.weight,), shape, K=shape[1])
    recipes = {"weight": multiplied_weight(rows, shape, precision)}
    if layer.bias is not None:
        recipes["bias"] = Recipe.of(as_is, (layer.bias,), (layer.D_out,))
    return recipes


def _instance(
    name: str, M: int, N: int, K: int, precision: str, dtypes: tuple[str, str] = ("float32",) * 2, split_k: int = 1
) -> Instance:
    gemm, nothing = WgmmaGemm(M, N, K, precision, dtypes, split_k=split_k), Input(0)
    return Instance(name, lambda device: launch_gemm(gemm, device.units, nothing, nothing, Int64(0), Int64(0)))


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
