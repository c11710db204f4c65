"""Host side of mlp/pair.cu: two layers too large for shared memory, in one launch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.chain import end_dtypes, find_chain, forward_cost
from onchip.kernels.cuda.common.activation import activation_words, cpp_name
from onchip.kernels.cuda.common.arguments import (
    NOTHING,
    Argument,
    Input,
    Int64,
    Memory,
    Output,
    TensorMap,
    UInt32,
    Weight,
)
from onchip.kernels.cuda.common.chain import ChainKernel, unsupported_dtype
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.common.weights import multiplied_weight
from onchip.kernels.cuda.mlp.tensor_core import fits_in_block
from onchip.kernels.cuda.mma.wgmma_tile import ALIGN_BYTES, TMA_BYTES
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network
from onchip.network.layers import Elementwise
from onchip.network.recipe import Recipe, as_is
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = ("sm_90a",)
WARPGROUP, WARPGROUPS, ROWS, LINE = 128, 2, 64, 128  # same as in the .cu file
HEIGHT = WARPGROUPS * ROWS  # rows per block
STAGE_BYTES, MAX_STAGES = 4 * ROWS * LINE, 6
SHARED_BYTES = 225 << 10  # for x and the stages; mbarriers and biases use the rest of the block's limit
COLUMNS = 64, 128, 256  # columns of y per block: the accumulator widths


@dataclass(frozen=True)
class Pair:
    """y (M, N) = g(f(x (M, K) u^T + a) w^T + b), u (H, K), w (N, H)."""

    M: int
    K: int
    H: int
    N: int
    precision: str  # key of PRECISIONS: fp16 or bf16
    y_dtype: str  # dtype of y; x has the precision's dtype
    activations: tuple[Elementwise | None, Elementwise | None] = (None, None)

    @property
    def dtype(self) -> str:
        return PRECISIONS[self.precision].dtype

    @property
    def columns(self) -> int:
        return next((columns for columns in COLUMNS if columns >= self.N), 0)

    @property
    def chunks(self) -> int:
        return math.ceil(self.H / ROWS)

    @property
    def x_bytes(self) -> int:
        """Shared memory for a block's rows of x."""
        return math.ceil(self.K * DTYPE_BYTES[self.dtype] / LINE) * HEIGHT * LINE

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, (SHARED_BYTES - ALIGN_BYTES - self.x_bytes) // STAGE_BYTES)

    def why_not(self) -> str:
        if DTYPE_BYTES[self.dtype] != 2:
            return f"multiplies float16 and bfloat16, not {self.dtype}"
        if not self.columns:
            return f"needs D_out of at most {COLUMNS[-1]}, got {self.N}"
        for what, count in (("x", self.K), ("hidden units", self.H)):
            if not count or count * DTYPE_BYTES[self.dtype] % TMA_BYTES:
                return f"TMA needs rows of {what} in multiples of {TMA_BYTES} B, got {count} elements"
        u_stages = math.ceil(self.x_bytes / (HEIGHT * LINE) / 4)  # stages of u per chunk
        if self.stages < u_stages + 2:
            return f"does not fit: {HEIGHT} rows of {self.K} and {u_stages + 2} stages of weights in {SHARED_BYTES:,} B"
        return ""

    def min_us(self, device: Device) -> float:
        costs = costs_of(device).mlp_pair
        waves, slices = math.ceil(math.ceil(self.M / HEIGHT) / device.units), self.x_bytes // (HEIGHT * LINE)
        return waves * (costs.block_us + self.chunks * (slices * costs.slice_us + self.columns * costs.column_us))

    def launch(self, x: Memory, u: Memory, w: Memory, a: Argument, b: Argument, y: Argument) -> KernelLaunch:
        """a, b: float32 biases, or NOTHING."""
        depth = LINE // DTYPE_BYTES[self.dtype]
        x_tile_rows = min(self.M, HEIGHT)
        arguments = (
            TensorMap(x, self.dtype, (self.K, self.M), (depth, x_tile_rows), LINE),
            TensorMap(u, self.dtype, (self.K, self.H), (depth, ROWS), LINE),
            TensorMap(w, self.dtype, (self.H, self.N), (depth, self.columns), LINE),
            a, b, y, Int64(self.M), *map(UInt32, (self.K, self.H, self.N, x_tile_rows)),
            *map(UInt32, activation_words(self.activations[1])),
        )  # fmt: skip
        config = LaunchConfig(
            (math.ceil(self.M / HEIGHT), 1, 1), (WARPGROUP * (WARPGROUPS + 1), 1, 1),
            ALIGN_BYTES + self.x_bytes + self.stages * STAGE_BYTES, overlaps=True,
        )  # fmt: skip
        head = f"{PRECISIONS[self.precision].name}, {ELEMENT_TYPES[self.y_dtype]}, {self.columns}, {self.stages}"
        program = Program(SOURCE, f"mlp_pair<{head}, {cpp_name(self.activations[0])}>")
        return KernelLaunch(program, config, arguments, Budget(65536 // (WARPGROUP * (WARPGROUPS + 1)) // 8 * 8))


# -- claims on a network -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MlpPairLowering:
    """Two Linears and their activations, lowered to one launch."""

    pair: Pair  # with M for a batch of 1
    has_bias: tuple[bool, bool]

    def at(self, B: int) -> Steps:
        pair = replace(self.pair, M=B * self.pair.M)
        if not pair.M:
            return Steps(())
        a, b = (Weight(name) if is_present else NOTHING for name, is_present in zip("ab", self.has_bias, strict=True))
        return Steps((pair.launch(Input(0), Weight("u"), Weight("w"), a, b, Output(0)),))


class MlpPairKernel(ChainKernel):
    name = "mlp_pair"
    precisions = ("fp16", "bf16")
    architectures = ARCHITECTURES

    def applies(self, net: Network, start: int) -> bool:
        chain = find_chain(net, start, ACTIVATIONS, casts=True, most=2)
        return chain is not None and len(chain.layers) == 2 and not chain.normaliser

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """Claim two 16-bit Linears with their activations, if their weights are too large for mlp_tensor_core."""
        chain = find_chain(net, start, ACTIVATIONS, casts=True, most=2)
        assert chain is not None
        x_dtype, y_dtype = end_dtypes(net, chain)
        if x_dtype != PRECISIONS[job.precision].dtype or unsupported_dtype(net, chain):
            return
        if fits_in_block(net, chain, device, job):
            return
        first, second = chain.layers
        activations = first.activation, second.activation
        pair = Pair(chain.vectors, first.D_in, first.D_out, second.D_out, job.precision, y_dtype, activations)
        if why := pair.why_not():
            yield Refusal(self.name, net.nodes[start].name, why)
            return
        recipes = {
            "u": multiplied_weight(first.weight, (pair.H, pair.K), job.precision),
            "w": multiplied_weight(second.weight, (pair.N, pair.H), job.precision),
        }
        for name, layer in zip("ab", chain.layers, strict=True):
            if layer.bias is not None:
                recipes[name] = Recipe.of(as_is, (layer.bias,), (layer.D_out,))
        cost, min_us = forward_cost(net, chain), replace(pair, M=job.batch * pair.M).min_us(device)
        yield self.claim_chain(
            net, chain, MlpPairLowering(pair, (first.bias is not None, second.bias is not None)), recipes=recipes,
            cost=replace(cost, fixed_bytes=recipe_bytes(recipes), min_us=min_us), why="hidden activations stay on chip",
            fast_bytes=pair.x_bytes + pair.stages * STAGE_BYTES,
            order="k in steps of 16 by wgmma, then hidden units likewise",
        )  # fmt: skip


def _instance(name: str, K: int, H: int, N: int, precision: str, y_dtype: str) -> Instance:
    pair, unused = Pair(4096, K, H, N, precision, y_dtype), Input(0)
    return Instance(name, lambda device: pair.launch(unused, unused, unused, *[NOTHING] * 3))


INSTANCES = (
    _instance("256-1024-256 fp16", 256, 1024, 256, "fp16", "float16"),
    _instance("384-512-256 bf16", 384, 512, 256, "bf16", "bfloat16"),
    _instance("narrow bf16 to float32", 72, 2048, 64, "bf16", "float32"),
)
