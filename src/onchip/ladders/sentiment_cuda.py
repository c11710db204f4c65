"""The sentiment ladder on a GPU: the report's rungs, its two further ideas, then the engine.

The headers of cuda/sentiment_*.cu explain each kernel. Ids are on the GPU before the clock starts. 1,024 sentences are
what each of the report's 16 GPUs had of its 16,384.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numpy as np

from onchip.errors import PlanError
from onchip.kernels.cuda import KERNELS as ENGINE_KERNELS
from onchip.kernels.cuda.common.arguments import Int64, Scratch, Weight
from onchip.kernels.cuda.common.program import EVERY_CHIP, LaunchConfig, Program
from onchip.ladders.device import KERNELS, DeviceRows, rung_instances
from onchip.ladders.frame import Ladder, Rung
from onchip.ladders.launch_list import LaunchList, moved
from onchip.ladders.plan_run import PlanRun
from onchip.ladders.ranks import SPLIT_RANK_RUNGS
from onchip.ladders.sentiment_report import (
    COLUMNS,
    NO_FIGURE,
    SENTENCES_PER_GPU,
    CudaRung,
    FourStreams,
    GlobalSums,
    Im2colWmma,
    Naive,
    Pipelined,
    SharedTiles,
    Sizes,
    add_max,
)
from onchip.ladders.sentiment_truth import SentimentTruth
from onchip.measure.truth import Verdict
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.plan.kernel import Cost, Job
from onchip.plan.plan import Plan
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.gpu import Gpu
from onchip.workloads import sentiment

FOLDED = "fp16, folded"
REPORTED = Sizes(
    sentiment.LENGTH, sentiment.EMBEDDING, sentiment.CHANNELS, sentiment.KERNELS,
    (sentiment.CHANNELS * len(sentiment.KERNELS), *sentiment.HIDDEN, sentiment.CLASSES),
)  # fmt: skip


class JoinedSamples(FourStreams):
    name = "joined-samples"
    idea = "16 sentences side by side in the columns: no padding, and a loaded weight serves 16 sentences"
    why = "a loaded weight serves 16 sentences instead of one, and no column is padding"
    report_ms, report_on = NO_FIGURE  # an idea of the report, without a figure
    spread = Program(KERNELS / "sentiment_joined.cu", "spread_joined")
    max_registers = 168  # three blocks of 128 threads per SM

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return cls.spread, *(cls.joined(REPORTED.steps(K)) for K in REPORTED.kernels)

    @staticmethod
    def joined(steps: int) -> Program:
        return Program(KERNELS / "sentiment_joined.cu", f"matmul_joined<{steps}>")

    def convolve(self, run: LaunchList, sizes: Sizes, B: int, K: int, x: Scratch, y: Scratch) -> None:
        groups, rows, steps = -(-B // COLUMNS), sizes.E * K, sizes.steps(K)
        windows = run.scratch(groups * rows * COLUMNS * steps, itemsize=2)
        per_channel = LaunchConfig((sizes.E, groups, 1), (128, 1, 1), 0)
        run.add(self.spread, per_channel, x, windows, *map(Int64, (B, sizes.L, sizes.E, K)))
        grid = LaunchConfig((-(-sizes.C_out // 64), groups, 1), (128, 1, 1), 0)
        weights = Weight(f"conv{K}.weight"), windows, Weight(f"conv{K}.bias")
        run.add(self.joined(steps), grid, *weights, y, *map(Int64, (B, sizes.C_out, rows)))

    def cost_convolution(self, sizes: Sizes, K: int) -> tuple[int, int]:
        """x is read and written by the copy, then read; the windows are written and read, without padding."""
        return joined_cost(sizes, K, passes=3)


class OneIm2col(JoinedSamples):
    name = "one-im2col"
    idea = "all four convolutions in one im2col and one gemm: two launches instead of eight, no streams"
    why = "no copies, and the tail of one launch instead of four; the gemm's work is the same"

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return tuple(cls.of_all(kernel, REPORTED) for kernel in ("spread_all", "matmul_all"))

    @staticmethod
    def of_all(kernel: str, sizes: Sizes) -> Program:
        steps = ", ".join(str(sizes.steps(K)) for K in sizes.kernels)
        return Program(KERNELS / "sentiment_one_im2col.cu", f"{kernel}<{steps}>")

    def weights(self, net: Network, sizes: Sizes) -> dict[str, Array]:
        """Those of the four convolutions, one after the other, are "convs.weight" and "convs.bias"."""
        weights = super().weights(net, sizes)
        for role in ("weight", "bias"):
            parts = [weights.pop(f"conv{K}.{role}") for K in sizes.kernels]
            weights[f"convs.{role}"] = np.concatenate([part.ravel() for part in parts])
        return weights

    def convolutions(
        self, run: LaunchList, sizes: Sizes, B: int, x: Scratch, maxima: Sequence[Scratch]
    ) -> tuple[int, ...] | None:
        groups, steps = -(-B // COLUMNS), [sizes.steps(K) for K in sizes.kernels]
        columns = sum(K * n for K, n in zip(sizes.kernels, steps, strict=True))
        windows = run.scratch(groups * sizes.E * COLUMNS * columns, itemsize=2)
        y = run.scratch(B * sizes.C_out * sum(steps))
        spread, gemm = (self.of_all(kernel, sizes) for kernel in ("spread_all", "matmul_all"))
        per_channel = LaunchConfig((sizes.E, 4 * groups, 1), (128, 1, 1), 0)
        run.add(spread, per_channel, x, windows, *map(Int64, (B, sizes.L, sizes.E)))
        grid = LaunchConfig((-(-sizes.C_out // 64), 4 * groups, 1), (128, 1, 1), 0)
        weights = Weight("convs.weight"), windows, Weight("convs.bias")
        run.add(gemm, grid, *weights, y, *map(Int64, (B, sizes.L, sizes.E, sizes.C_out)))
        for K, largest in zip(sizes.kernels, maxima, strict=True):
            add_max(run, sizes, B, K, y, largest)
            y = moved(y, 4 * B * sizes.C_out * sizes.steps(K))
        return None

    def cost_convolution(self, sizes: Sizes, K: int) -> tuple[int, int]:
        """Nothing is copied."""
        return joined_cost(sizes, K, passes=1)


def joined_cost(sizes: Sizes, K: int, passes: int) -> tuple[int, int]:
    """Flop and bytes of a convolution; passes: over x."""
    rows, steps = sizes.E * K, sizes.steps(K)
    return 2 * sizes.C_out * rows * steps, 4 * (passes * sizes.L * sizes.E + sizes.C_out * steps) + 2 * 2 * rows * steps


# -- the engine ----------------------------------------------------------------------------------------------


class OnchipDirect(Rung[DeviceRows]):
    name = "onchip-direct"
    idea = "the engine without folding: convolutions as implicit gemms, no im2col; ReLU in the epilogue"
    why = "no windows are written or read, and ReLU needs no pass"
    precision, is_engine = "fp16", True
    without: ClassVar[tuple[str, ...]] = ("fold",)

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> PlanRun:
        plan = engine_plan(net, len(x), self.without)
        if not self.without and not plan.fold.startswith("folded"):
            raise PlanError("the engine does not fold on this GPU", got=plan.fold)
        return PlanRun(plan, x.on(Gpu.get(), "int32"), len(x))

    def verify(self, truth: Any, got: Array) -> Verdict:
        return cast(SentimentTruth, truth).verify_in("fp16", got)


class OnchipFolded(OnchipDirect):
    name = "onchip-folded"
    idea = "the engine: every token times every filter tap is a table, built once; a convolution is a sum of its rows"
    why = "250 thousand additions per sentence instead of 1.02 G multiply-adds"
    precision, without = FOLDED, ()


def engine_plan(net: Network, B: int, without: tuple[str, ...]) -> Plan:
    """The plan for the report's whole job, of which B rows are a part: tables must pay for it, not for B rows."""
    job = Job("fp16", max(B, sentiment.SENTENCES), without=without)
    return make_plan(net, Gpu.get().device, ENGINE_KERNELS, job)


# -- floor ---------------------------------------------------------------------------------------------------


def floor_ms(net: Network, B: int, precision: str) -> float:
    """The minimum flop and bytes; launches cost nothing here. Of engines that may fold: what their plan's groups do."""
    device = Gpu.get().device
    if precision in (FOLDED, "3xtf32"):
        split = Job("fp32", B)
        plan = engine_plan(net, B, ()) if precision == FOLDED else make_plan(net, device, ENGINE_KERNELS, split)
        costs = [dataclasses.replace(g.claim.cost, launches=0) for g in plan.groups]
        return sum(cost.floor_us(device, plan.job.precision, B) for cost in costs) / 1e3
    itemsize = 4 if precision == "fp32" else 2
    weights = sum(math.prod(weight.shape) for name, weight in net.weights.items() if name != "emb.weight")
    ends = net.input.row_bytes + net.output.row_bytes
    cost = Cost(sum(map(net.row_flop, net.nodes)), ends, weights * itemsize, launches=0)
    return cost.floor_us(device, precision, B) / 1e3


def inputs(B: int) -> DeviceRows:
    ids = np.random.default_rng(1).integers(0, sentiment.VOCABULARY, (B, sentiment.LENGTH), dtype=np.int32)
    return DeviceRows(ids)


RUNGS: tuple[type[CudaRung], ...] = (
    Naive, Im2colWmma, SharedTiles, GlobalSums, FourStreams, Pipelined, JoinedSamples, OneIm2col,
)  # fmt: skip
LADDER = Ladder(
    name="sentiment",
    title="sentences of 16 tokens by four convolutions and an MLP, on a GPU",
    rungs=(*RUNGS, OnchipDirect, OnchipFolded),
    network=sentiment.network,
    inputs=inputs,
    floor_ms=floor_ms,
    rows=SENTENCES_PER_GPU,
    truth=SentimentTruth,
    checked=40,  # two groups of joined sentences and a part of one; a float64 run takes a second per four sentences
    device="cuda",
    over_ranks=SPLIT_RANK_RUNGS,
)


# -- for make check-kernels --------------------------------------------------------------------------------


ARCHITECTURES = EVERY_CHIP
INSTANCES = rung_instances(RUNGS)
