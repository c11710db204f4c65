"""Gemv and skinny GEMM: the host side of gemm/gemv.cu. A Linear over few rows, bound by reading its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.chain import end_dtypes, find_chain
from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import (
    ELEMENT_TYPES,
    EVERY_CHIP,
    NOTHING,
    Argument,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Output,
    Program,
    Steps,
    UInt32,
    Weight,
)
from onchip.kernels.cuda.gemm.residual import Residual, residuals
from onchip.kernels.cuda.gemm.simt import one_layer, weight_recipes
from onchip.kernels.cuda.mlp import tensor_core as mlp_tensor_core
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network
from onchip.network.layers import Elementwise
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
OVERLAPPING = ("sm_90a", "sm_100", "sm_120")  # support programmatic dependent launch
WARPS = 8
PIECE = 32  # elements of k per chunk, by mma
BLOCKS = 2  # resident per SM
FMA_COLUMNS, FMA_PIECES = 4, {1: 4, 4: 2, 8: 1}  # chunks of k in flight, by rows per block
MAX_ROWS = 128  # with more rows, other kernels read the weights fewer times
# mma, measured with M from 1 to 64, N and K from 128 to 4,096: wait of a warp for 16 rows of x, and the share of L2's
# peak bandwidth that all blocks reach. Prologue and epilogue are hidden: they overlap adjacent launches.
ROWS_US, CACHE_SHARE = 0.3, 0.29
# fma, measured likewise: time per row of a block, averaged over all SMs, and the part of it that is hidden.
FMA_ROW_US, FMA_HIDDEN_US = 0.0013, 1.2
MMA_RATE, FMA_RATE = 0.3, 0.4  # shares of the peak rates; estimated, not measured


@dataclass(frozen=True)
class FewProduct:
    """y (M, N) = activation(x (M, K) w^T + bias), w (N, K), for small M."""

    M: int
    N: int
    K: int
    precision: str  # a key of PRECISIONS
    dtypes: tuple[str, str] = ("float32", "float32")  # of x and y
    activation: Elementwise | None = None

    @property
    def by_mma(self) -> bool:
        return PRECISIONS[self.precision].per_word == 2 and self.K % 8 == 0

    @property
    def vector(self) -> int:
        """Elements of k per load of a lane, by fma."""
        return 4 if self.K % 4 == 0 else 1

    def tile(self, units: int) -> tuple[int, int]:
        """Rows and columns of a block. Twice the columns where the blocks exceed one wave."""
        if self.by_mma:
            return 16 if self.M <= 16 else 64, 8 if math.ceil(self.N / 8) <= BLOCKS * units else 16
        return next((rows for rows in FMA_PIECES if rows >= self.M), max(FMA_PIECES)), FMA_COLUMNS

    @property
    def resident(self) -> int:
        """Resident blocks per SM."""
        return 1 if self.by_mma and self.M > 16 else BLOCKS

    def count(self, units: int) -> int:
        rows, columns = self.tile(units)
        return math.ceil(self.M / rows) * math.ceil(self.N / columns)

    @property
    def order(self) -> str:
        piece, how = (PIECE, "in steps of 16 by mma") if self.by_mma else (32 * self.vector, "in lanes")
        return f"k {how}, {WARPS} warps by turns of {piece}"

    def min_us(self, device: Device) -> float:
        """Least time: weights once per row tile, rows once per column tile from L2; or the latency of reading rows."""
        rows, columns = self.tile(device.units)
        w_bytes = math.ceil(self.M / rows) * self.N * self.K * DTYPE_BYTES[PRECISIONS[self.precision].dtype]
        x_bytes = math.ceil(self.N / columns) * self.M * self.K * DTYPE_BYTES[self.dtypes[0]]
        bytes_us = (w_bytes + x_bytes) / (CACHE_SHARE * device.peak.cache_bandwidth) * 1e6
        if not self.by_mma:
            return max(bytes_us, self.count(device.units) * rows * FMA_ROW_US - FMA_HIDDEN_US)
        rounds = math.ceil(self.count(device.units) / (device.units * self.resident))
        turns = math.ceil(self.K / (WARPS * PIECE * self.pieces(rows, columns)))
        return max(bytes_us, rounds * turns * math.ceil(min(self.M, rows) / 16) * ROWS_US)

    @staticmethod
    def pieces(rows: int, columns: int) -> int:
        """Chunks of k in flight, by mma."""
        return (64 if rows == 16 else 32) // columns

    def rate(self, units: int) -> float:
        """Estimated share of the peak rate: counts empty rows of a block and SMs without a block."""
        rows, _ = self.tile(units)
        full = self.M / (math.ceil(self.M / rows) * rows)
        return (MMA_RATE if self.by_mma else FMA_RATE) * full * min(1.0, self.count(units) / units)

    def launch(
        self, device: Device, x: Argument, w: Argument, bias: Argument, y: Argument, other: Argument = NOTHING
    ) -> KernelLaunch:
        """bias  (N) float32, or Int64(0): none; other: residual (M, N) of y's type, or Int64(0)"""
        rows, columns = self.tile(device.units)
        given, made = (ELEMENT_TYPES[dtype] for dtype in self.dtypes)
        computed = PRECISIONS[self.precision]
        if self.by_mma:
            cut = f"{rows // 16}, {columns // 8}, {self.pieces(rows, columns)}"
            head = f"gemv_mma<{computed.name}, {given}, {made}, {cut}>"
        else:
            cut = f"{rows}, {columns}, {self.vector}, {FMA_PIECES[rows] if self.vector == 4 else 4}"
            head = f"gemv_fma<{given}, {ELEMENT_TYPES[computed.dtype]}, {made}, {cut}>"
        config = LaunchConfig(
            (self.count(device.units), 1, 1), (32 * WARPS, 1, 1), 0, overlaps=device.arch in OVERLAPPING
        )
        sizes = Int64(self.M), Int64(self.N), Int64(self.K)
        arguments = (x, w, bias, other, y, *sizes, *map(UInt32, activation_words(self.activation)))
        # float32 rows take twice the registers until they are rounded: the compiler spills a few words after sm_90.
        budget = Budget(min(255, 65536 // (256 * self.resident)), spill_bytes=16)
        return KernelLaunch(Program(SOURCE, head), config, arguments, budget)


# -- as a layer of a network -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewLowering:
    """A Linear and its activation as one launch."""

    product: FewProduct  # at B = 1
    has_bias: bool
    device: Device
    other: int | None = None  # input index of the residual

    def at(self, B: int) -> Steps:
        product = replace(self.product, M=B * self.product.M)
        if not product.M:
            return Steps(())
        bias: Argument = Weight("bias") if self.has_bias else Int64(0)
        other: Argument = Int64(0) if self.other is None else Input(self.other)
        return Steps((product.launch(self.device, Input(0), Weight("weight"), bias, Output(0), other),))


class Gemv:
    name = "gemv"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """One Linear with its activation and surrounding Casts, or with a residual Add, for jobs of few rows."""
        chain = find_chain(net, start, ACTIVATIONS, casts=True, most=1)
        if chain is None or mlp_tensor_core.why_not(net, chain, device, job):
            return
        if 0 < job.batch * chain.vectors <= MAX_ROWS:
            chain = one_layer(net, chain)
            for run in residuals(net, start, chain):
                yield _claim(net, run, device, job)


def _claim(net: Network, run: Residual, device: Device, job: Job) -> Claim:
    chain, cost = run.chain, run.cost(net)
    (layer,) = chain.layers
    recipes = weight_recipes(layer, job.precision)
    dtypes = end_dtypes(net, chain)
    product = FewProduct(chain.vectors, layer.D_out, layer.D_in, job.precision, dtypes, layer.activation)
    planned = replace(product, M=job.batch * chain.vectors)
    return Claim(
        kernel=Gemv.name,
        label=f"{Gemv.name}<{run.label}>",
        nodes=chain.nodes,
        cost=Cost(
            cost.row_flop,
            cost.row_bytes,
            sum(made.nbytes for made in recipes.values()),
            precision="" if product.by_mma else "fp32",
            rate=planned.rate(device.units),
            min_us=planned.min_us(device),
        ),
        why="few rows: as fast as weights are read",
        recipes=recipes,
        order=product.order,
        reads={net.by_name[chain.nodes[0]].inputs[0]: Use(is_read_often=True)},  # once per block
        facts=FewLowering(product, layer.bias is not None, device, run.other_input(net)),
    )


def _instance(name: str, M: int, N: int, K: int, precision: str, dtype: str = "float32") -> Instance:
    product, nothing = FewProduct(M, N, K, precision, (dtype, dtype)), Int64(0)
    return Instance(name, lambda device: product.launch(device, nothing, nothing, nothing, nothing))


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
