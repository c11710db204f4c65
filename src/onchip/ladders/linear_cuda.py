"""The Linear layers of sentiment on a GPU: the report's two kernels, then the engine's.

cuda/linear.cu explains the kernels. In the report they take the time that the convolutions leave, below 5 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from onchip.kernels.cuda import KERNELS as ENGINE_KERNELS
from onchip.kernels.cuda.common.arguments import Input, Int64, Memory, Output, Weight
from onchip.kernels.cuda.common.program import EVERY_CHIP, LaunchConfig, Program, Steps
from onchip.ladders.device import KERNELS, THREADS, DeviceRows, DeviceRun, cover, rung_instances
from onchip.ladders.frame import Ladder, Rung, split_gemms
from onchip.ladders.launch_list import LaunchList
from onchip.ladders.plan_run import PlanRun
from onchip.ladders.sentiment_truth import REPORT_LIMIT
from onchip.ladders.training import layer_widths
from onchip.measure.truth import Truth, Verdict, relative_error
from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.network.layers import Linear
from onchip.network.recipe import Array, materialise
from onchip.plan.kernel import Cost, Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.gpu import Gpu
from onchip.workloads import sentiment

WIDTHS = (sentiment.CHANNELS * len(sentiment.KERNELS), *sentiment.HIDDEN, sentiment.CLASSES)
NARROW = Program(KERNELS / "linear.cu", "linear_narrow<16>")
TILED = Program(KERNELS / "linear.cu", "linear_tiled<64, 16, 4>")
RELU = Program(KERNELS / "sentiment_layers.cu", "relu")
_TILE = {NARROW: 16, TILED: 64}  # rows and columns of y per block of 256 threads


def add_linear(run: LaunchList, program: Program, x: Memory, name: str, y: Memory, sizes: tuple[int, int, int]) -> None:
    """Add y = x w' + bias by NARROW or TILED. sizes: rows, D_out, D_in"""
    B, D_out, D_in = sizes
    tile = _TILE[program]
    config = LaunchConfig((-(-B // tile), -(-D_out // tile), 1), (THREADS, 1, 1), 0)
    weights = Weight(f"{name}.weight"), Weight(f"{name}.bias")
    run.add(program, config, x, *weights, y, Int64(B), Int64(D_out), Int64(D_in))


def add_relu(run: LaunchList, y: Memory, count: int) -> None:
    run.add(RELU, cover(count), y, Int64(count))


def layers_cost(widths: Sequence[int], relu_passes: int = 2, products: int = 1) -> Cost:
    """Each layer reads its input and writes its output; ReLU of the hidden layers reads and writes them.

    products  gemms for one in fp32
    """
    sizes = [D_in * D_out for D_in, D_out in pairwise(widths)]
    values = widths[0] + (2 + relu_passes) * sum(widths[1:-1]) + widths[-1]
    return Cost(2 * products * sum(sizes), 4 * values, 4 * (sum(sizes) + sum(widths[1:])), launches=0)


class CudaRung(Rung[DeviceRows]):
    """A rung with one kernel for every Linear but the last, and a kernel for each ReLU."""

    kernel: ClassVar[Program]
    max_registers: ClassVar[int] = 64

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return (cls.kernel,)

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> DeviceRun:
        gpu = Gpu.get()
        names = {node.name: node.weights for node in net.nodes if isinstance(node.layer, Linear)}
        weights = {
            f"{name}.{role}": gpu.upload(materialise(weight, net.weights))
            for name, roles in names.items() for role, weight in roles.items()
        }  # fmt: skip
        shapes = {name: net.weights[roles["weight"]].shape for name, roles in names.items()}
        y_shape = (len(x), *net.output.row_shape)
        return DeviceRun(gpu, self.steps(shapes, len(x)), x.on(gpu, "float32"), weights, y_shape, "float32")

    def steps(self, shapes: dict[str, tuple[int, ...]], B: int) -> Steps:
        """shapes  (D_out, D_in) of each layer, by name, in order"""
        run, last = LaunchList(), list(shapes)[-1]
        x: Memory = Input(0)
        for name, (D_out, D_in) in shapes.items():
            y: Memory = Output(0) if name == last else run.scratch(B * D_out)
            add_linear(run, NARROW if name == last else self.kernel, x, name, y, (B, D_out, D_in))
            if name != last:
                add_relu(run, y, B * D_out)
            x = y
        return run.steps()

    def cost(self, net: Network, B: int) -> Cost:
        return layers_cost(layer_widths(net))

    def verify(self, truth: Any, got: Array) -> Verdict:
        """By the report's limit: its sums of up to 4,096 terms have one accumulator."""
        return Verdict(relative_error(got, truth.y), REPORT_LIMIT)


class Narrow(CudaRung):
    name = "narrow"
    idea = "16 x 16 tiles in shared memory, one output per thread: two values read per multiply-add"
    kernel = NARROW

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return NARROW, RELU


class Tiled(CudaRung):
    name = "tiled"
    idea = "64 x 64 tiles, 4 x 4 outputs per thread in registers, 16-byte loads; the last layer as before"
    why = "two 16-byte reads from shared memory serve 16 multiply-adds; before, each took two reads"
    kernel, max_registers = TILED, 80  # three blocks of 256 threads per SM; four spill on some chips


class Onchip(Rung[DeviceRows]):
    name = "onchip"
    idea = "the engine in fp32: tensor cores by 3xTF32, bias and ReLU in the epilogue"
    why = "three TF32 gemms on tensor cores take less time than one in fp32 on CUDA cores; no pass for ReLU"
    precision, is_engine = "3xtf32", True

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> PlanRun:
        gpu = Gpu.get()
        plan = make_plan(net, gpu.device, ENGINE_KERNELS, Job("fp32", len(x)))
        return PlanRun(plan, x.on(gpu, "float32"), len(x))

    def cost(self, net: Network, B: int) -> Cost:
        return layers_cost(layer_widths(net), relu_passes=0, products=3)


def floor_ms(net: Network, B: int, precision: str) -> float:
    """The minimum flop and bytes, without launches; 3xTF32 does three products for one."""
    flop, rate = split_gemms(sum(map(net.row_flop, net.nodes)), precision)
    ends = net.input.row_bytes + net.output.row_bytes
    cost = Cost(flop, ends, net.weight_bytes, launches=0)
    return cost.floor_us(Gpu.get().device, rate, B) / 1e3


def network() -> Network:
    return mlp(*WIDTHS, name="linear")


def inputs(B: int) -> DeviceRows:
    """As maxima over ReLUs are: no value is negative."""
    return DeviceRows(np.abs(np.random.default_rng(1).standard_normal((B, WIDTHS[0]), dtype=np.float32)))


RUNGS: tuple[type[CudaRung], ...] = (Narrow, Tiled)
LADDER = Ladder(
    name="linear",
    title="the Linear layers of sentiment (4096-2048-1024-512-2, ReLU), on a GPU",
    rungs=(*RUNGS, Onchip),
    network=network,
    inputs=inputs,
    floor_ms=floor_ms,
    rows=1_024,
    truth=lambda net, x: Truth(net, x.host),
    device="cuda",
)


# -- for make check-kernels --------------------------------------------------------------------------------


ARCHITECTURES = EVERY_CHIP
INSTANCES = rung_instances(RUNGS)
