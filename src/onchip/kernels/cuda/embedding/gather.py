"""Embedding, Embedding with a sum or mean over its ids, and TokenConv: host side of embedding/gather.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.chain import is_closed
from onchip.kernels.cuda.common.arguments import NOTHING, Input, Int64, Output, StatusWord, UInt32, Weight
from onchip.kernels.cuda.common.dtypes import FLOATS, IDS
from onchip.kernels.cuda.common.fast_divide import divider
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps, grid_1d
from onchip.network.graph import Network, Node
from onchip.network.layers import Embedding, GlobalMean, GlobalSum, TokenConv
from onchip.network.layers.base import row_axis
from onchip.network.recipe import Recipe, as_is
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
WORDS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}
HALF = {"fp16": "float16", "bf16": "bfloat16"}  # table dtypes, keyed by precision
THREADS, PART, BLOCKS_PER_SM = 256, 16, 5  # PART: ids per partial sum
THREADS_PER_SUM = (1, 4, 16)  # compiled variants


@dataclass(frozen=True)
class GatherLowering:
    """gather(ids, table, y, status, count, V, row_words, lane_bits)"""

    ids: StatusWord
    ids_dtype: str
    row_bytes: int  # per table row
    units: int

    @property
    def word_bytes(self) -> int:
        return math.gcd(self.row_bytes, max(WORDS))

    @property
    def program(self) -> Program:
        return Program(SOURCE, f"gather<{IDS[self.ids_dtype]}, {WORDS[self.word_bytes]}>")

    @property
    def lane_bits(self) -> int:
        """log2 of the threads per row: one per word, up to a block."""
        return min(self.row_bytes // self.word_bytes - 1, THREADS - 1).bit_length()

    def at(self, B: int) -> Steps:
        count = B * math.prod(self.ids.row_shape)
        config = _capped_grid(count << self.lane_bits, self.units)
        sizes = Int64(count), Int64(self.ids.limit), Int64(self.row_bytes // self.word_bytes), UInt32(self.lane_bits)
        arguments = (Input(0), Weight("table"), Output(0), self.ids, *sizes)
        return Steps((KernelLaunch(self.program, config, arguments, Budget(registers=48)),))


@dataclass(frozen=True)
class GatherSumLowering:
    """gather_sum(ids, table, y, status, B, S, V, words, divisor)"""

    ids: StatusWord
    ids_dtype: str
    dtype: str
    E: int
    is_mean: bool

    @property
    def vector(self) -> int:
        """Adjacent channels per thread."""
        return 4 if self.E % 4 == 0 and self.dtype != "float64" else 1

    @property
    def threads_per_sum(self) -> int:
        """Threads that share a sum: one per chunk of PART ids, up to the largest variant."""
        chunks = math.ceil(math.prod(self.ids.row_shape) / PART)
        return next((threads for threads in THREADS_PER_SUM if chunks <= threads), THREADS_PER_SUM[-1])

    def at(self, B: int) -> Steps:
        if not B:
            return Steps(())
        S, words, G = math.prod(self.ids.row_shape), self.E // self.vector, self.threads_per_sum
        types = f"{IDS[self.ids_dtype]}, {FLOATS[self.dtype]}, {self.vector}, {G}"
        program = Program(SOURCE, f"gather_sum<{types}>")
        sizes = Int64(B), Int64(S), Int64(self.ids.limit), divider(words), UInt32(S if self.is_mean else 1)
        arguments = (Input(0), Weight("table"), Output(0), self.ids, *sizes)
        config = grid_1d(-(-B * words * G // THREADS), THREADS)
        return Steps((KernelLaunch(program, config, arguments, Budget(registers=128)),))


@dataclass(frozen=True)
class TokenConvLowering:
    """token_conv(ids, table, bias, y, status, B, S, V, K, C, P, stride, before)"""

    ids: StatusWord
    dtypes: tuple[str, str, str]  # of ids, the table and y
    K: int
    C: int
    P: int
    stride: int
    before: int
    has_bias: bool
    units: int

    @property
    def program(self) -> Program:
        ids, table, y = self.dtypes
        return Program(SOURCE, f"token_conv<{IDS[ids]}, {FLOATS[table]}, {FLOATS[y]}>")

    def at(self, B: int) -> Steps:
        bias = Weight("bias") if self.has_bias else NOTHING
        sizes = Int64(B), Int64(*self.ids.row_shape), Int64(self.ids.limit)
        window = (UInt32(n) for n in (self.K, self.C, self.P, self.stride, self.before))
        arguments = (Input(0), Weight("table"), bias, Output(0), self.ids, *sizes, *window)
        config = _capped_grid(B * self.C, self.units)
        return Steps((KernelLaunch(self.program, config, arguments, Budget(registers=56, spill_bytes=16)),))


def _capped_grid(threads: int, units: int) -> LaunchConfig:
    return grid_1d(min(-(-threads // THREADS), units * BLOCKS_PER_SM))


class GatherKernel(CudaKernel):
    name = "gather"
    layers = (Embedding, TokenConv)
    dtypes = IDS

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        y = net.types[node.name]
        if isinstance(node.layer, TokenConv) and y.dtype not in FLOATS:
            yield Refusal(self.name, node.name, f"sums {', '.join(FLOATS)}, not {y.dtype}")
        elif isinstance(node.layer, TokenConv):
            yield self._token_conv(net, node, node.layer, device, job)
        else:
            yield self._embedding(net, node, device)
            reader = net.nodes[start + 1] if start + 1 < len(net.nodes) else node
            if y.dtype in FLOATS and _can_fuse_sum(net, node, reader):
                yield self._sum(net, node, reader)

    def _embedding(self, net: Network, node: Node, device: Device) -> Claim:
        ids, y = net.types[node.inputs[0]], net.types[node.name]
        V, E = net.weights[node.weights["weight"]].shape
        status = StatusWord(node.inputs[0], ids.row_shape, V)
        return self.claim(
            net, node, GatherLowering(status, ids.dtype, E * DTYPE_BYTES[y.dtype], device.units),
            label=f"{self.name}<{V},{E}>", cost=Cost(0, ids.row_bytes + 2 * y.row_bytes),
            recipes={"table": Recipe.of(as_is, (node.weights["weight"],), (V, E), y.dtype)},
        )  # fmt: skip

    def _sum(self, net: Network, node: Node, reader: Node) -> Claim:
        ids, rows = net.types[node.inputs[0]], net.types[node.name]
        V, E = net.weights[node.weights["weight"]].shape
        status, is_mean = StatusWord(node.inputs[0], ids.row_shape, V), isinstance(reader.layer, GlobalMean)
        return self.claim(
            net, node, GatherSumLowering(status, ids.dtype, rows.dtype, E, is_mean),
            label=f"{self.name}<{V},{E},{reader.layer.kind}>", nodes=(node.name, reader.name),
            cost=Cost(net.row_flop(reader), ids.row_bytes + rows.row_bytes + net.types[reader.name].row_bytes),
            why="rows are summed as they are looked up", order=f"ids in order, partial sums of {PART}",
            recipes={"table": Recipe.of(as_is, (node.weights["weight"],), (V, E), rows.dtype)},
        )  # fmt: skip

    def _token_conv(self, net: Network, node: Node, layer: TokenConv, device: Device, job: Job) -> Claim:
        ids, y = net.types[node.inputs[0]], net.types[node.name]
        V, K, C = net.weights[node.weights["weight"]].shape
        P = int(y.shape[-1])
        stored = y.dtype if y.dtype == "float64" else HALF.get(job.tables, y.dtype)
        recipes = {"table": Recipe.of(as_is, (node.weights["weight"],), (V, K, C), stored)}
        if "bias" in node.weights:
            recipes["bias"] = Recipe.of(as_is, (node.weights["bias"],), (C,), y.dtype)
        lowering = TokenConvLowering(
            StatusWord(node.inputs[0], ids.row_shape, V), (ids.dtype, stored, y.dtype), K, C, P, layer.stride,
            layer.pads[0], "bias" in recipes, device.units,
        )  # fmt: skip
        return self.claim(
            net, node, lowering, label=f"{self.name}<{V},{K},{C}>", order="taps in order", recipes=recipes,
            cost=Cost(net.row_flop(node), ids.row_bytes + y.row_bytes + K * y.row_size * DTYPE_BYTES[stored]),
        )  # fmt: skip


def _can_fuse_sum(net: Network, node: Node, reader: Node) -> bool:
    """Whether `reader` is the only reader of the look-up and reduces all ids of a batch row by mean or sum."""
    layer, rows = reader.layer, net.types[node.name]
    if (
        not isinstance(layer, GlobalMean | GlobalSum)
        or reader.inputs != (node.name,)
        or not is_closed(net, [node, reader])
    ):
        return False
    return {row_axis(axis, rows) for axis in layer.axes} == {*range(1, len(rows.shape) - 1)}


def _rows(ids: str, row_bytes: int) -> Instance:
    lowering = GatherLowering(StatusWord("ids", (16,), 1000), ids, row_bytes, 132)
    return instance(f"{ids}, rows of {row_bytes} B", lowering, B=1 << 16)


def _window(*dtypes: str) -> Instance:
    lowering = TokenConvLowering(
        StatusWord("ids", (16,), 1000), (dtypes[0], dtypes[1], dtypes[2]), 3, 64, 14, 1, 0, True, 132
    )
    return instance(f"token_conv, {', '.join(dtypes)}", lowering, B=1 << 16)


def _summed(ids: str, dtype: str, E: int, S: int = 50) -> Instance:
    lowering = GatherSumLowering(StatusWord("ids", (S,), 1000), ids, dtype, E, True)
    return instance(f"gather_sum, {S} {ids}, {dtype}, rows of {E}", lowering, B=4096)


INSTANCES = (
    _rows("int32", 1024), _rows("int64", 1024), _rows("int32", 40), _rows("int32", 12), _rows("int32", 6),
    _rows("int32", 3), _window("int32", "float32", "float32"), _window("int64", "float16", "float32"),
    _window("int32", "bfloat16", "bfloat16"), _window("int32", "float64", "float64"),
    _summed("int64", "float32", 64), _summed("int32", "float16", 3, 16), _summed("int32", "float64", 8, 300),
)  # fmt: skip
