"""The decode ladder on a GPU: the kernels of the report, one idea per rung, then the engine's kernels.

The headers of cuda/*.cu explain each kernel. Rows are on the GPU before the clock starts, as in the report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import numpy as np

from onchip.kernels.cuda import KERNELS as ENGINE_KERNELS
from onchip.kernels.cuda.common.arguments import Argument, Input, Int64, Output, Scratch, Weight
from onchip.kernels.cuda.common.program import EVERY_CHIP, Budget, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.mlp.fused import MlpFusedKernel
from onchip.ladders.decode import weight_matrices
from onchip.ladders.device import KERNELS, THREADS, DeviceRows, DeviceRun, cover, grid_1d, rung_instances
from onchip.ladders.frame import Ladder, Rung, split_gemms
from onchip.ladders.ranks import SPLIT_RANK_RUNGS
from onchip.measure.truth import Truth, Verdict, relative_error
from onchip.network.graph import Network
from onchip.network.io import with_io
from onchip.network.recipe import Array
from onchip.plan.kernel import Cost, Job, Kernel
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.gpu import Gpu
from onchip.workloads import decode

DTYPES = {"fp32": "float32", "3xtf32": "float32", "fp16": "float16"}
FEW, MANY = decode.ROWS
_, W, _, D_OUT = decode.WIDTHS
WEIGHTS = ("w0", "w1", "w2")
_ALL_WEIGHTS = tuple(map(Weight, WEIGHTS))
HALF_LIMIT = 0.15  # the report's fp16 limit; its mean square limit, 0.005, follows from any error below 0.07
_HALF_ULPS = 4 * float(np.finfo(np.float16).eps)
_SAMPLE_ROWS = 16_384  # rows of the naive fp16 run, which is slow in NumPy


def _report(few: float | None = None, many: float | None = None) -> dict[int, float]:
    """The report's milliseconds, measured on a GeForce RTX 3080 Ti, for its two row counts."""
    return {B: ms for B, ms in ((FEW, few), (MANY, many)) if ms is not None}


class CudaRung(Rung[DeviceRows]):
    """A rung with one kernel, called with x, the weights of the three layers and y."""

    file: ClassVar[str]
    kernel: ClassVar[str]
    tile: ClassVar[int]  # rows per block and iteration
    is_persistent: ClassVar[bool] = True  # as many blocks as the chip holds at a time; else one block per tile
    is_transposed: ClassVar[bool] = False  # the hidden layers' weights are (D_in, D_out)
    max_registers: ClassVar[int] = 128  # per thread; two blocks then fit into an SM's 65,536

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return (Program(KERNELS / cls.file, cls.kernel),)

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> DeviceRun:
        gpu, dtype, B = Gpu.get(), DTYPES[self.precision], len(x)
        w0, w1, w2 = (w.astype(dtype) for w in weight_matrices(net))
        hidden = (w0.T, w1.T) if self.is_transposed else (w0, w1)
        weights = {name: gpu.upload(np.ascontiguousarray(w)) for name, w in zip(WEIGHTS, (*hidden, w2), strict=True)}
        return DeviceRun(gpu, self.steps(gpu, B), x.on(gpu, dtype), weights, (B, D_OUT), dtype)

    def steps(self, gpu: Gpu, B: int) -> Steps:
        (program,) = self.programs()
        blocks = -(-B // self.tile)
        if self.is_persistent:
            blocks = min(blocks, gpu.device.units * gpu.load(program).blocks_per_sm(THREADS, 0))
        return Steps((self.launch(program, grid_1d(blocks), Input(0), *_ALL_WEIGHTS, Output(0), Int64(B)),))

    def launch(self, program: Program, config: LaunchConfig, *arguments: Argument) -> KernelLaunch:
        return KernelLaunch(program, config, arguments, Budget(self.max_registers))

    def cost(self, net: Network, B: int) -> Cost:
        """Hidden activations stay on chip."""
        return fused_cost(net, self.precision)

    def verify(self, truth: Any, got: Array) -> Verdict:
        return cast(DecodeTruth, truth).verify_in(self.precision, got)


class Separate(CudaRung):
    name = "separate"
    idea = "one kernel per operation: gemm, ReLU, gemm, ReLU, gemm"
    report_ms = _report(few=0.392, many=57.948)

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        signals, columns = decode.SIGNALS, decode.WIDTHS[0]
        names = (f"mat_mul<{signals}, {columns}, {W}>", f"mat_mul<{W}, {W}, {W}>", f"mat_mul<{W}, {W}, {D_OUT}>")
        return tuple(Program(KERNELS / "separate.cu", name) for name in (*names, "relu_each"))

    def steps(self, gpu: Gpu, B: int) -> Steps:
        *gemms, relu = self.programs()
        tensors = (Input(0), Scratch(0), Scratch(B * W * 4), Output(0))
        launches: list[KernelLaunch] = []
        for i, (program, w) in enumerate(zip(gemms, _ALL_WEIGHTS, strict=True)):
            is_last = i == len(gemms) - 1
            config = LaunchConfig((-(-B // 16), 1 if is_last else W // 16, 1), (16, 16, 1), 0)
            launches.append(self.launch(program, config, tensors[i], w, tensors[i + 1], Int64(B)))
            if not is_last:
                launches.append(self.launch(relu, cover(B * W), tensors[i + 1], Int64(B * W)))
        return Steps(tuple(launches), 2 * B * W * 4)

    def cost(self, net: Network, B: int) -> Cost:
        """A gemm writes the hidden activations, ReLU reads and writes them, and the next gemm reads them."""
        return hidden_passes(net, 4)


class FusedGlobal(CudaRung):
    name = "fused-global"
    idea = "one launch for the whole network; hidden activations go through global memory"
    why = "slower: four launches fewer, but a warp reads weights from 32 cache lines where it read 16 + 2"
    report_ms = _report(few=0.501, many=79.790)
    file, kernel, tile = "fused_global.cu", "fused_global", 4

    def steps(self, gpu: Gpu, B: int) -> Steps:
        (program,) = self.programs()
        hidden = (Scratch(0), Scratch(B * W * 4))
        arguments: tuple[Argument, ...] = (Input(0), *_ALL_WEIGHTS, *hidden, Output(0), Int64(B))
        return Steps((self.launch(program, grid_1d(-(-B // self.tile)), *arguments),), 2 * B * W * 4)

    def cost(self, net: Network, B: int) -> Cost:
        """The hidden activations are written and read."""
        return hidden_passes(net, 2)


class FusedShared(CudaRung):
    name = "fused-shared"
    idea = "hidden activations in shared memory, and the weights of one layer at a time"
    why = "multiply-adds read weights and hidden activations from shared memory, not through the L1 cache"
    report_ms = _report(few=0.188, many=28.650)
    file, kernel, tile, is_persistent = "shared_memory.cu", "fused_shared", 4, False


class WholeShared(CudaRung):
    name = "whole-shared"
    idea = "all weights in shared memory, loaded once per block; persistent blocks loop over rows"
    why = "weights are loaded once per block, not once per four rows"
    report_ms = _report(few=0.182, many=24.304)
    file, kernel, tile = "shared_memory.cu", "whole_shared", 4


class SharedRegisters(CudaRung):
    name = "shared-registers"
    idea = "the second layer's weights in registers, the others in shared memory"
    why = "the second layer reads only the row from shared memory, not the weight"
    report_ms = _report(few=0.134, many=11.959)
    file, kernel, tile = "shared_registers.cu", "shared_registers<false>", 4


class Shuffles(CudaRung):
    name = "shuffles"
    idea = "all threads share the last layer: a sixteenth of an output each, reduced by shuffles"
    why = "in the last layer no thread idles while one of sixteen sums 64 products"
    report_ms = _report(few=0.128, many=11.554)
    file, kernel, tile = "shared_registers.cu", "shared_registers<true>", 4


class Registers(CudaRung):
    name = "registers"
    idea = "the whole network in registers; two threads share each neuron's weights"
    why = "a multiply-add reads one value from shared memory, the row's; no weight is read twice"
    report_ms = _report(few=0.0923, many=8.632)
    file, kernel, tile = "registers.cu", "registers<float>", 2


class RegistersHalf(CudaRung):
    name = "registers-half"
    idea = "the same in fp16: half of the bytes"
    why = "half of the bytes, and twice the values per read; the arithmetic itself is not faster"
    report_ms = _report(few=0.0595, many=6.029)
    file, kernel, tile, precision = "registers.cu", "registers<f16>", 2, "fp16"


class Rotating(CudaRung):
    name = "rotating"
    idea = "32 rows per iteration, neighbouring neurons at different rows: fewer barriers and bank conflicts"
    why = "three barriers per 32 rows instead of three per two"
    report_ms = _report(few=0.0488, many=4.940)
    file, kernel, tile, precision = "rotating.cu", "rotating<2, 32, false, 2, false, false, 2>", 32, "fp16"


class Coalesced(CudaRung):
    name = "coalesced"
    idea = "weights transposed on the host: neighbouring threads read neighbouring elements"
    why = "a block starts sooner: a warp's loads of weights touch few cache lines"
    report_ms = _report(few=0.038, many=4.637)
    file, kernel, tile, precision = "rotating.cu", "rotating<2, 32, true, 2, false, false, 2>", 32, "fp16"
    is_transposed = True


class HiddenLoads(CudaRung):
    name = "hidden-loads"
    idea = "half of the threads compute the last layer while the others load the next rows"
    why = "fewer threads with more weights each exchange less in the last layer"
    report_ms = _report(few=0.0354, many=4.914)
    file, kernel, tile, precision = "rotating.cu", "rotating<2, 32, true, 4, true, false, 2>", 32, "fp16"
    is_transposed = True


class Occupancy(CudaRung):
    name = "occupancy"
    idea = "four threads share a neuron: fewer registers per thread, more warps per SM"
    why = "slower in the report: two shuffles per sum instead of one, where enough warps hid the latency"
    report_ms = _report(few=0.0471, many=5.226)
    file, kernel, tile, precision = "rotating.cu", "rotating<4, 16, true, 16, false, false, 3>", 16, "fp16"
    is_transposed, max_registers = True, 80


class BestFew(CudaRung):
    name = "best-few"
    idea = "for few rows: one block per tile, and the weights of all layers use the same registers"
    why = "registers for 36 weights instead of 70, so an SM holds twice as many blocks"
    report_ms = _report(few=0.0343)
    file, kernel, tile, precision = "rotating.cu", "rotating<2, 32, true, 32, false, true, 4>", 32, "fp16"
    is_transposed, is_persistent, max_registers = True, False, 64


class BestMany(CudaRung):
    name = "best-many"
    idea = "for many rows: eight weights of the last layer per thread, so three shuffles per output instead of five"
    why = "three shuffles per output instead of five, and a quarter of the iterations of the last layer"
    report_ms = _report(many=3.932)
    file, kernel, tile, precision = "rotating.cu", "rotating<2, 32, true, 8, false, false, 2>", 32, "fp16"
    is_transposed = True


# -- the engine ----------------------------------------------------------------------------------------------


class Engine(Rung[DeviceRows]):
    """The engine's kernels, as planned for this GPU."""

    is_engine = True
    kernels: ClassVar[Sequence[Kernel]] = ENGINE_KERNELS
    computes: ClassVar[str] = "fp32"  # the precision requested from the engine

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> DeviceRun:
        gpu, dtype, B = Gpu.get(), DTYPES[self.precision], len(x)
        plan = make_plan(with_io(net, dtype), gpu.device, self.kernels, Job(self.computes, B))
        (step,) = CudaBackend().bind(plan).groups  # one kernel runs the whole network
        return DeviceRun(gpu, step.lowering.at(B), x.on(gpu, dtype), step.weights, (B, D_OUT), dtype)

    def cost(self, net: Network, B: int) -> Cost:
        return fused_cost(net, self.precision)

    def verify(self, truth: Any, got: Array) -> Verdict:
        return cast(DecodeTruth, truth).verify_in(self.precision, got, accumulator="float32")


class SumsInRegisters(Engine):
    name = "sums-in-registers"
    idea = "true fp32 again: weights in shared memory, a register tile of accumulators per thread"
    why = "16 values read from shared memory serve 64 multiply-adds, and warps need no barrier"
    kernels = (MlpFusedKernel(),)


class Onchip(Engine):
    name = "onchip"
    idea = "the engine in fp32: tensor cores by 3xTF32, three tf32 gemms for one in fp32"
    why = "three tf32 gemms on tensor cores take less time than one in fp32 on CUDA cores"
    precision = "3xtf32"


class OnchipHalf(Engine):
    name = "onchip-fp16"
    idea = "the engine in fp16: tensor cores, fp32 accumulators, activations from layer to layer in registers"
    why = "one gemm instead of three, half of the bytes, and no trip through shared memory between layers"
    precision = computes = "fp16"


# -- reference and floor -------------------------------------------------------------------------------------


class DecodeTruth(Truth):
    """The float64 outputs, and the allowed error in each precision."""

    def __init__(self, net: Network, x: DeviceRows) -> None:
        super().__init__(net, x.host)
        self._net, self._x = net, x.host[:_SAMPLE_ROWS]
        self._allowed_half: dict[str, float] = {}  # by accumulator dtype

    def verify_in(self, precision: str, got: Array, accumulator: str = "float16") -> Verdict:
        """fp16: at most twice the error of a naive run with the same accumulators plus a few ulp, and HALF_LIMIT."""
        if DTYPES[precision] == "float32":
            return self.verify(got)
        if accumulator not in self._allowed_half:
            naive = relative_error(naive_half(self._net, self._x, accumulator), self.y[: len(self._x)])
            self._allowed_half[accumulator] = min(2 * naive + _HALF_ULPS, HALF_LIMIT)
        return Verdict(relative_error(got, self.y), self._allowed_half[accumulator])


def naive_half(net: Network, x: Array, accumulator: str) -> Array:
    """(B, 4) float16: fp16 products and activations, sequential sums; accumulator: its dtype."""
    weights = weight_matrices(net)
    rows = x.astype(np.float16)
    for layer, w in enumerate(weights):
        total = np.zeros((len(rows), len(w)), accumulator)
        rows32, w = rows.astype(np.float32), w.astype(np.float16).astype(np.float32)
        for k in range(w.shape[1]):
            total = (total + rows32[:, k : k + 1] * w[:, k]).astype(accumulator)  # added in float32, then rounded
        is_last = layer == len(weights) - 1
        rows = (total if is_last else np.where(total < 0, 0, total)).astype(np.float16)
    return rows


def fused_cost(net: Network, precision: str) -> Cost:
    """The minimum bytes and flop. Launches cost nothing here: a replayed graph hides most of their cost."""
    matrices, size = weight_matrices(net), np.dtype(DTYPES[precision]).itemsize
    weights, row_values = sum(w.size for w in matrices), matrices[0].shape[1] + len(matrices[-1])
    return Cost(split_gemms(2 * weights, precision)[0], row_values * size, fixed_bytes=weights * size, launches=0)


def hidden_passes(net: Network, passes: int) -> Cost:
    """The fp32 network with this many passes over the hidden activations, in global memory."""
    least, hidden = fused_cost(net, "fp32"), sum(len(w) for w in weight_matrices(net)[:-1])
    return dataclasses.replace(least, row_bytes=least.row_bytes + passes * hidden * 4)


def floor_ms(net: Network, B: int, precision: str) -> float:
    _, rate = split_gemms(0, precision)
    return fused_cost(net, precision).floor_us(Gpu.get().device, rate, B) / 1e3


RUNGS: tuple[type[CudaRung], ...] = (
    Separate, FusedGlobal, FusedShared, WholeShared, SharedRegisters, Shuffles, Registers, RegistersHalf,
    Rotating, Coalesced, HiddenLoads, Occupancy, BestFew, BestMany,
)  # fmt: skip
LADDER = Ladder(
    name="decode",
    title="a tiny decoder (72-64-64-4, ReLU) applied to every row, on a GPU",
    rungs=(*RUNGS, SumsInRegisters, Onchip, OnchipHalf),
    network=decode.network,
    inputs=lambda B: DeviceRows(decode.inputs(B)),
    floor_ms=floor_ms,
    rows=MANY,
    truth=DecodeTruth,
    device="cuda",
    over_ranks=SPLIT_RANK_RUNGS,
)


# -- for make check-kernels --------------------------------------------------------------------------------


ARCHITECTURES = EVERY_CHIP
INSTANCES = rung_instances(RUNGS)
