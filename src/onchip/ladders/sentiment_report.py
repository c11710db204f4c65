"""The report's rungs of the sentiment ladder on a GPU: from one kernel per layer to four pipelined streams.

The headers of cuda/sentiment_*.cu explain each kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from onchip.kernels.cuda.common.arguments import NOTHING, Input, Int64, Output, Scratch, Weight
from onchip.kernels.cuda.common.program import LaunchConfig, Program, Steps
from onchip.ladders.device import KERNELS, THREADS, DeviceRows, DeviceRun, cover
from onchip.ladders.frame import Rung
from onchip.ladders.launch_list import LaunchList, moved
from onchip.ladders.linear_cuda import NARROW, TILED, add_linear, add_relu, layers_cost
from onchip.ladders.sentiment_truth import SentimentTruth
from onchip.measure.truth import Verdict
from onchip.network.graph import Network
from onchip.network.recipe import Array, materialise
from onchip.plan.kernel import Cost
from onchip.runtime.cuda.gpu import Gpu

SENTENCES_PER_GPU = 1_024
ONE_NODE, FOUR_NODES = "4 GPUs, one node", "16 GPUs, 4 nodes"
COLUMNS = 16  # of the padded windows, and sentences in a group of joined ones
_LAYERS = KERNELS / "sentiment_layers.cu"
EMBED, PERMUTE, CONV1D, TAKE_MAX, CONCAT = (
    Program(_LAYERS, name) for name in ("embed", "permute", "conv1d", "take_max", "concat_four")
)


def reported(per_second: int, machine: str) -> tuple[Mapping[int, float], Mapping[int, str]]:
    """report_ms and report_on from the report's sentences per second, of several GPUs together."""
    return {SENTENCES_PER_GPU: 1e3 * SENTENCES_PER_GPU / per_second}, {SENTENCES_PER_GPU: machine}


NO_FIGURE: tuple[Mapping[int, float], Mapping[int, str]] = {}, {}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a network as workloads.sentiment builds it, with four convolutions."""

    L: int  # tokens per sentence
    E: int  # width of the embedding: C of the convolutions
    C_out: int
    kernels: tuple[int, ...]
    widths: tuple[int, ...]  # of the Linears: 4 * C_out, hidden widths, classes

    @classmethod
    def of(cls, net: Network) -> Sizes:
        kernels = tuple(int(node.name[4:]) for node in net.nodes if node.layer.kind == "Conv1d")
        C_out, E, _ = net.weights[f"conv{kernels[0]}.weight"].shape
        linears = [net.weights[f"{node.name}.weight"].shape for node in net.nodes if node.layer.kind == "Linear"]
        (L,) = net.input.row_shape
        return cls(L, E, C_out, kernels, (linears[0][1], *(shape[0] for shape in linears)))

    def steps(self, K: int) -> int:
        """Outputs per channel of the convolution of width K."""
        return self.L - K + 1


class CudaRung(Rung[DeviceRows]):
    """A rung with its own convolutions; the other layers are the same in all rungs."""

    precision = "fp16"  # of the convolutions: fp16 operands, fp32 accumulators; the rest is fp32
    max_registers: ClassVar[int] = 64
    parts: ClassVar[int] = 1  # launches per gemm

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        """The kernels that this rung adds, for the report's sizes."""
        return ()

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> DeviceRun:
        gpu, sizes, B = Gpu.get(), Sizes.of(net), len(x)
        weights = {name: gpu.upload(w) for name, w in self.weights(net, sizes).items()}
        shape = (B, sizes.widths[-1])
        return DeviceRun(gpu, self.steps(sizes, B), x.on(gpu, "int32"), weights, shape, "float32")

    def weights(self, net: Network, sizes: Sizes) -> dict[str, Array]:
        """All weights as float32, those of the convolutions in this rung's precision."""
        dtype = "float32" if self.precision == "fp32" else "float16"
        convolutions = {f"conv{K}.weight" for K in sizes.kernels}
        return {
            name: materialise(name, net.weights).astype(dtype if name in convolutions else "float32", copy=False)
            for name in net.weights
        }

    def steps(self, sizes: Sizes, B: int) -> Steps:
        run = LaunchList()
        tokens, width = B * sizes.L, Int64(sizes.E)
        grid = LaunchConfig((tokens, -(-sizes.E // THREADS), 1), (THREADS, 1, 1), 0)
        embedded, x = run.scratch(tokens * sizes.E), run.scratch(tokens * sizes.E)
        run.add(EMBED, grid, Input(0), Weight("emb.weight"), embedded, width)
        run.add(PERMUTE, grid, embedded, x, Int64(sizes.L), width)
        maxima = [run.scratch(B * sizes.C_out) for _ in sizes.kernels]
        ends = self.convolutions(run, sizes, B, x, maxima)
        count, features = B * sizes.C_out, run.scratch(B * sizes.widths[0])
        run.add(CONCAT, cover(count), *maxima, features, Int64(count), Int64(sizes.C_out), after=ends)
        last = len(sizes.widths) - 1
        for i in range(1, last + 1):
            D_in, D_out = sizes.widths[i - 1 : i + 1]
            y = Output(0) if i == last else run.scratch(B * D_out)
            add_linear(run, NARROW if i == last else TILED, features, f"fc{i}", y, (B, D_out, D_in))
            if isinstance(y, Scratch):
                add_relu(run, y, B * D_out)
                features = y
        return run.steps()

    def convolutions(
        self, run: LaunchList, sizes: Sizes, B: int, x: Scratch, maxima: Sequence[Scratch]
    ) -> tuple[int, ...] | None:
        """Add the launches from x (B, E, L) to the maxima over time, (B, C_out) each.

        Returns the launches that the next one waits for; None: the last.
        """
        for K, largest in zip(sizes.kernels, maxima, strict=True):
            y = run.scratch(B * sizes.C_out * sizes.steps(K))
            self.convolve(run, sizes, B, K, x, y)
            add_max(run, sizes, B, K, y, largest)
        return None

    def cost(self, net: Network, B: int) -> Cost:
        """Each kernel reads or writes each of its operands once, each launch its weights."""
        sizes, itemsize = Sizes.of(net), 4 if self.precision == "fp32" else 2
        linears = layers_cost(sizes.widths)
        each = [self.cost_convolution(sizes, K) for K in sizes.kernels]
        filters = sum(sizes.C_out * sizes.E * K for K in sizes.kernels)
        # Embed and Permute read and write; so do ReLU and, with a value per channel, the maximum and Concat.
        outputs = sizes.C_out * sum(map(sizes.steps, sizes.kernels))
        values = sizes.L * (1 + 4 * sizes.E) + 3 * sizes.widths[0] + 3 * outputs
        return Cost(
            linears.row_flop + sum(flop for flop, _ in each),
            linears.row_bytes + 4 * values + sum(nbytes for _, nbytes in each),
            linears.fixed_bytes + itemsize * self.parts * filters,
            launches=0,
        )

    def cost_convolution(self, sizes: Sizes, K: int) -> tuple[int, int]:
        """Flop and bytes per sentence of one convolution, from x (E, L) to y (C_out, L - K + 1)."""
        raise NotImplementedError

    def convolve(self, run: LaunchList, sizes: Sizes, B: int, K: int, x: Scratch, y: Scratch) -> None:
        """Add one convolution: x (B, E, L) -> y (B, C_out, L - K + 1)."""
        raise NotImplementedError

    def verify(self, truth: Any, got: Array) -> Verdict:
        return cast(SentimentTruth, truth).verify_in("fp32" if self.precision == "fp32" else "fp16 convolutions", got)


def add_max(run: LaunchList, sizes: Sizes, B: int, K: int, y: Scratch, largest: Scratch) -> None:
    """Add ReLU and the maximum over time: y (B, C_out, L - K + 1), overwritten -> largest (B, C_out)."""
    sequences = B * sizes.C_out
    add_relu(run, y, sequences * sizes.steps(K))
    counts = Int64(sequences), Int64(sizes.steps(K))
    run.add(TAKE_MAX, cover(sequences), y, largest, *counts)


class Naive(CudaRung):
    name = "naive"
    idea = "one kernel per layer; a thread per output of a convolution, 2 loads per multiply-add"
    report_ms, report_on = reported(686, ONE_NODE)
    precision, max_rows = "fp32", 128

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return EMBED, PERMUTE, CONV1D, TAKE_MAX, CONCAT

    def convolve(self, run: LaunchList, sizes: Sizes, B: int, K: int, x: Scratch, y: Scratch) -> None:
        grid = LaunchConfig((B, -(-sizes.C_out * sizes.steps(K) // THREADS), 1), (THREADS, 1, 1), 0)
        weight, bias = Weight(f"conv{K}.weight"), Weight(f"conv{K}.bias")
        run.add(CONV1D, grid, x, weight, bias, y, *map(Int64, (sizes.L, sizes.E, K, sizes.C_out)))

    def cost_convolution(self, sizes: Sizes, K: int) -> tuple[int, int]:
        outputs = sizes.C_out * sizes.steps(K)
        return 2 * outputs * sizes.E * K, 4 * (sizes.L * sizes.E + outputs)


class Im2colWmma(CudaRung):
    name = "im2col-wmma"
    idea = "every window a column, padded to 16; a gemm per sentence on tensor cores, fragments from global memory"
    why = "tensor cores multiply; but windows are written and read, and a loaded weight still serves one sentence"
    report_ms, report_on = reported(4_710, ONE_NODE)
    warps: ClassVar[int] = 16  # per block, 16 channels each
    gemm = Program(KERNELS / "sentiment_wmma.cu", "matmul_wmma")
    spread = Program(KERNELS / "sentiment_wmma.cu", "spread_input")

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return cls.spread, cls.gemm

    def convolve(self, run: LaunchList, sizes: Sizes, B: int, K: int, x: Scratch, y: Scratch) -> None:
        windows = run.scratch(B * sizes.E * K * COLUMNS, itemsize=2)
        self.add_spread(run, sizes, B, K, x, windows)
        self.add_gemm(run, sizes, B, K, windows, y)

    def add_spread(
        self, run: LaunchList, sizes: Sizes, B: int, K: int, x: Scratch, windows: Scratch,
        after: tuple[int, ...] | None = None,
    ) -> int:  # fmt: skip
        """x (B, E, L) -> windows (B, E * K, 16) float16"""
        grid = cover(B * sizes.E * K * COLUMNS // 2)
        return run.add(self.spread, grid, x, windows, *map(Int64, (B, sizes.L, sizes.E, K)), after=after)

    def add_gemm(
        self, run: LaunchList, sizes: Sizes, B: int, K: int, windows: Scratch, y: Scratch,
        after: tuple[int, ...] | None = None,
    ) -> int:  # fmt: skip
        """windows (B, E * K, 16) -> y (B, C_out, L - K + 1)"""
        weights = Weight(f"conv{K}.weight"), windows, Weight(f"conv{K}.bias")
        counts = map(Int64, (sizes.C_out, sizes.E * K, sizes.steps(K)))
        return run.add(self.gemm, self.grid(sizes, B), *weights, y, *counts, after=after)

    def cost_convolution(self, sizes: Sizes, K: int) -> tuple[int, int]:
        """Of 16 columns; the windows are written and read, in fp16."""
        rows, outputs = sizes.E * K, sizes.C_out * sizes.steps(K)
        nbytes = 4 * sizes.L * sizes.E + 2 * 2 * rows * COLUMNS + 4 * outputs
        return 2 * sizes.C_out * rows * COLUMNS, nbytes

    def grid(self, sizes: Sizes, B: int) -> LaunchConfig:
        return LaunchConfig((B, -(-sizes.C_out // (16 * self.warps)), 1), (32 * self.warps, 1, 1), 0)


class SharedTiles(Im2colWmma):
    name = "shared-tiles"
    idea = "tiles of weights and windows in shared memory: a block loads its windows once, not once per warp"
    why = "windows are loaded once per block; slower where the L1 cache keeps them: no weight is used twice in a block"
    report_ms, report_on = reported(9_622, ONE_NODE)
    gemm = Program(KERNELS / "sentiment_tiles.cu", "matmul_tiles<16, 1, false>")

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return (cls.gemm,)

    def padded(self, run: LaunchList, sizes: Sizes, B: int) -> Scratch | Int64:
        """Where the padded sums are stored between the tensor cores and y."""
        return NOTHING  # in shared memory

    def add_gemm(
        self, run: LaunchList, sizes: Sizes, B: int, K: int, windows: Scratch, y: Scratch,
        after: tuple[int, ...] | None = None,
    ) -> int:  # fmt: skip
        weights = Weight(f"conv{K}.weight"), windows, Weight(f"conv{K}.bias")
        counts = map(Int64, (sizes.C_out, sizes.E * K, sizes.steps(K)))
        padded = self.padded(run, sizes, B)
        return run.add(self.gemm, self.grid(sizes, B), *weights, padded, y, *counts, after=after)


class GlobalSums(SharedTiles):
    name = "global-sums"
    idea = "padded sums through global memory, blocks of 32 warps, 32 registers per thread: 100 % occupancy"
    why = "more warps per SM hide more latency; it moves more bytes, not fewer"
    report_ms, report_on = reported(36_542, FOUR_NODES)
    warps, max_registers = 32, 48  # 32 where an SM has slots for two such blocks
    gemm = Program(KERNELS / "sentiment_tiles.cu", "matmul_tiles<32, 2, true>")

    def padded(self, run: LaunchList, sizes: Sizes, B: int) -> Scratch | Int64:
        return run.scratch(B * sizes.C_out * COLUMNS)

    def cost_convolution(self, sizes: Sizes, K: int) -> tuple[int, int]:
        """The padded sums are written and read."""
        flop, nbytes = super().cost_convolution(sizes, K)
        return flop, nbytes + 2 * 4 * sizes.C_out * COLUMNS


class FourStreams(GlobalSums):
    name = "four-streams"
    idea = "a stream per filter size, each with its own copy of the permuted input"
    why = "the tail of one convolution overlaps with the next; the copies are extra work"
    report_ms, report_on = NO_FIGURE  # none for this step alone
    copy = Program(KERNELS / "sentiment_tiles.cu", "copy_quads")

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return (cls.copy,)

    def convolutions(
        self, run: LaunchList, sizes: Sizes, B: int, x: Scratch, maxima: Sequence[Scratch]
    ) -> tuple[int, ...] | None:
        permuted, quads, ends = run.last, B * sizes.L * sizes.E // 4, list[int]()
        for K, largest in zip(sizes.kernels, maxima, strict=True):
            own, y = run.scratch(B * sizes.L * sizes.E), run.scratch(B * sizes.C_out * sizes.steps(K))
            run.add(self.copy, cover(quads), x, own, Int64(quads), after=(permuted,))
            self.convolve(run, sizes, B, K, own, y)
            add_max(run, sizes, B, K, y, largest)
            ends.append(run.last)
        return tuple(ends)

    def cost_convolution(self, sizes: Sizes, K: int) -> tuple[int, int]:
        """The copy reads and writes x."""
        flop, nbytes = super().cost_convolution(sizes, K)
        return flop, nbytes + 2 * 4 * sizes.L * sizes.E


class Pipelined(FourStreams):
    name = "pipelined"
    idea = "each convolution in four launches: the windows of the next sentences are written during a gemm"
    why = "writing windows waits for memory, a gemm for L2 and tensor cores: they run at the same time"
    report_ms, report_on = reported(37_060, FOUR_NODES)
    parts = 4

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return ()

    def convolve(self, run: LaunchList, sizes: Sizes, B: int, K: int, x: Scratch, y: Scratch) -> None:
        windows, part = run.scratch(B * sizes.E * K * COLUMNS, itemsize=2), -(-B // self.parts)
        before, multiplied = run.last, list[int]()
        for first in range(0, B, part):
            size = min(part, B - first)
            of_x, of_y = (
                moved(a, 4 * first * n) for a, n in ((x, sizes.E * sizes.L), (y, sizes.C_out * sizes.steps(K)))
            )
            columns = moved(windows, 2 * first * sizes.E * K * COLUMNS)
            before = self.add_spread(run, sizes, size, K, of_x, columns, after=(before,))
            multiplied = [self.add_gemm(run, sizes, size, K, columns, of_y, after=(before, *multiplied))]
