"""The digits ladder on a GPU: an epoch of SGD, from one kernel per operation to a graph of fused kernels.

The headers of cuda/digits_*.cu explain each kernel. Rows are on the GPU, in the order of the first epoch
(train/order.py), before the clock starts; a launch gets the addresses of its batch. Weights are updated in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, ClassVar, cast

import numpy as np

from onchip.kernels.cuda.common.arguments import Argument, Output, State, UInt32
from onchip.kernels.cuda.common.program import EVERY_CHIP, KernelLaunch
from onchip.ladders.device import THREADS, cover, grid_1d, rung_instances
from onchip.ladders.digits_rung import CudaRung, Launches, Step, rate_of, tiles
from onchip.ladders.digits_truth import DigitsTruth, run_options
from onchip.ladders.frame import Ladder, Rung
from onchip.ladders.training import SPLIT, EngineRun, TrainingRows, floor_ms
from onchip.measure.truth import Verdict
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.runtime.cuda.gpu import Gpu
from onchip.train.loop import fit
from onchip.train.order import epoch_order
from onchip.train.training_run import FitResult
from onchip.workloads import digits

ROWS = 60_000
CHECKED = 1_024  # rows: 16 steps


# -- the report ----------------------------------------------------------------------------------------------


class Separate(CudaRung):
    name = "separate"
    idea = "one kernel per layer and operation: gemm, ReLU, softmax, loss, each gradient, each update"
    cost_passes = 11, 11

    def forward(self, step: Step, layer: int) -> Launches:
        N, (B, *_) = step.widths[layer + 1], step.sizes(layer)
        gemm = self.launch(
            "digits_separate.cu", "linear", tiles(step.B, N), step.x(layer), State(f"w{layer}"), State(f"b{layer}"),
            step.a(layer), *step.sizes(layer),
        )  # fmt: skip
        if layer < step.last:
            activation = self.launch("digits_separate.cu", "apply_relu", cover(step.B * N), step.a(layer),
                                     UInt32(step.B * N))  # fmt: skip
        else:
            activation = self.launch("digits_separate.cu", "softmax_row", cover(step.B), step.a(layer), B, UInt32(N))
        return gemm, activation

    def loss(self, step: Step) -> Launches:
        B, _, N = step.sizes(step.last)
        count = step.B * step.widths[-1]
        loss = self.launch("digits_separate.cu", "cross_entropy_by_shuffles", grid_1d(1), step.a(step.last), step.y,
                           Output(0), UInt32(step.index), B, N)  # fmt: skip
        return loss, self.output_gradient(step, count)

    def output_gradient(self, step: Step, count: int) -> KernelLaunch:
        return self.launch("digits_separate.cu", "cross_entropy_softmax_grad", cover(count), step.a(step.last), step.y,
                           step.dz(step.last), UInt32(count))  # fmt: skip

    def propagate(self, step: Step, layer: int) -> Launches:
        K = step.widths[layer]
        gemm = self.launch("digits_separate.cu", "propagate", tiles(step.B, K), step.dz(layer), State(f"w{layer}"),
                           step.dz(layer - 1), *step.sizes(layer))  # fmt: skip
        mask = self.launch("digits_separate.cu", "mask_by_relu", cover(step.B * K), step.dz(layer - 1),
                           step.a(layer - 1), UInt32(step.B * K))  # fmt: skip
        return gemm, mask

    def update(self, step: Step, layer: int) -> Launches:
        (K, N), (B, _, columns) = step.widths[layer : layer + 2], step.sizes(layer)
        weights = self.launch("digits_separate.cu", "update_weights", tiles(K, N), step.x(layer), step.dz(layer),
                              State(f"w{layer}"), rate_of(step), *step.sizes(layer))  # fmt: skip
        bias = self.launch("digits_separate.cu", "update_bias", cover(N), step.dz(layer), State(f"b{layer}"),
                           rate_of(step), B, columns)  # fmt: skip
        return weights, bias


class Fused(Separate):
    name = "fused"
    idea = "forward + ReLU, forward + softmax and gradient + mask in one kernel each"
    why = "five launches fewer per step, and no passes over activations that only apply ReLU, softmax or a mask"
    cost_passes = 7, 9
    file: ClassVar[str] = "digits_fused.cu"
    kernels: ClassVar[str] = "{}"  # a kernel's name expression from its name
    threads: ClassVar[int] = THREADS
    directives: ClassVar[tuple[str, ...]] = ()

    def fused(self, kernel: str, rows: int, columns: int, *arguments: Argument) -> KernelLaunch:
        config = tiles(rows, columns, self.threads)
        return self.launch(self.file, self.kernels.format(kernel), config, *arguments, options=self.directives)

    def forward(self, step: Step, layer: int) -> Launches:
        return (self.forward_by("forward_relu" if layer < step.last else "forward_softmax", step, layer),)

    def forward_by(self, kernel: str, step: Step, layer: int) -> KernelLaunch:
        return self.fused(kernel, step.B, step.widths[layer + 1], step.x(layer), State(f"w{layer}"),
                          State(f"b{layer}"), step.a(layer), *step.sizes(layer))  # fmt: skip

    def propagate(self, step: Step, layer: int) -> Launches:
        return (self.propagate_by("z_grad", step, layer),)

    def propagate_by(self, kernel: str, step: Step, layer: int) -> KernelLaunch:
        return self.fused(kernel, step.B, step.widths[layer], step.dz(layer), State(f"w{layer}"), step.a(layer - 1),
                          step.dz(layer - 1), *step.sizes(layer))  # fmt: skip


class Tiled(Fused):
    name = "tiled"
    idea = "gemms from 16 x 16 tiles in shared memory"
    why = "a value in shared memory serves 16 threads; slower where the L1 cache does so: blocks wait for each tile"
    file, kernels = "digits_tiled.cu", "{}<0>"

    def update(self, step: Step, layer: int) -> Launches:
        K, N = step.widths[layer : layer + 2]
        weights = self.fused("update_weights", K, N, step.x(layer), step.dz(layer), State(f"w{layer}"), rate_of(step),
                             *step.sizes(layer))  # fmt: skip
        return weights, *super().update(step, layer)[1:]


class Padded1(Tiled):
    name = "padded-1"
    idea = "a float of padding per row of a tile: no bank conflicts in the one read by columns"
    why = "z_grad reads a column in one access instead of eight; no other read had conflicts"
    kernels = "{}<1>"


class Padded2(Padded1):
    name = "padded-2"
    idea = "two floats: no bank conflicts either, because a half-warp has 16 rows"
    why = "no change: there were no conflicts left"
    kernels = "{}<2>"


class Padded4(Padded2):
    name = "padded-4"
    idea = "four floats: rows 16-byte aligned, 2-way conflicts"
    why = "slower than padded-2, if at all: z_grad reads a column in two accesses"
    kernels = "{}<4>"


class Padded8(Padded4):
    name = "padded-8"
    idea = "eight floats, the report's choice: 4-way conflicts"
    why = "slower than padded-4, if at all: four accesses per column, but fewer than the eight without padding"
    kernels = "{}<8>"


class SequentialLoss(Padded8):
    name = "sequential-loss"
    idea = "cross-entropy with a thread per row, terms in order, probabilities clamped at 1e-6; before: by shuffles"
    why = "hardly any change: the loss is one block in both; the clamp avoids NaN where a probability is 0"

    def loss(self, step: Step) -> Launches:
        B, _, N = step.sizes(step.last)
        loss = self.launch("digits_loss.cu", "cross_entropy_sequential", grid_1d(1), step.a(step.last), step.y,
                           Output(0), UInt32(step.index), B, N)  # fmt: skip
        return loss, *super().loss(step)[1:]


class AtomicBias(SequentialLoss):
    name = "atomic-bias"
    idea = "weights and bias updated in one kernel, the bias by atomicAdd"
    why = "three launches fewer per step"
    cost_passes = 6, 8
    nondeterministic = "atomicAdd adds the gradients of a bias in the order in which threads arrive"

    def update(self, step: Step, layer: int) -> Launches:
        return (self.update_by("update_layer", step, layer),)

    def update_by(self, kernel: str, step: Step, layer: int) -> KernelLaunch:
        K, N = step.widths[layer : layer + 2]
        return self.fused(kernel, K, N, step.x(layer), step.dz(layer), State(f"w{layer}"), State(f"b{layer}"),
                          rate_of(step), *step.sizes(layer))  # fmt: skip


class Restrict(AtomicBias):
    name = "restrict"
    idea = "__restrict__: no operand aliases another"
    why = "no change: loads may use the read-only path, but there is nothing to reorder"
    directives: ClassVar[tuple[str, ...]] = ("-DRESTRICT=__restrict__",)


class Unrolled(Restrict):
    name = "unrolled"
    idea = "the 16 multiply-adds of a tile unrolled"
    why = "no loop counter, constant addresses, and loads ahead of the multiply-adds"
    directives: ClassVar[tuple[str, ...]] = (*Restrict.directives, "-DUNROLL=16")


class RegisterCap(Unrolled):
    name = "register-cap"
    idea = "at most 64 registers per thread: the report's last version"
    why = "no change: no kernel needs 64 registers"
    report_ms = MappingProxyType({ROWS: 218.0})
    directives: ClassVar[tuple[str, ...]] = (*Unrolled.directives, "-DMIN_BLOCKS=4")


# -- the report's plans --------------------------------------------------------------------------------------


class OnlineSoftmax(RegisterCap):
    name = "online-softmax"
    idea = "softmax as its own kernel, a warp per row, in one pass"
    why = "slower, if at all: a launch and a pass more, to save one barrier in rows of ten values"
    cost_passes = 6, 10
    report_ms = MappingProxyType({})

    def forward(self, step: Step, layer: int) -> Launches:
        if layer < step.last:
            return super().forward(step, layer)
        return self.forward_by("forward", step, layer), self.softmax(step)

    def softmax(self, step: Step) -> KernelLaunch:
        B, _, N = step.sizes(step.last)
        return self.launch("digits_loss.cu", "online_softmax", cover(32 * step.B), step.a(step.last), B, N)


class TensorCores(OnlineSoftmax):
    name = "tensor-cores"
    idea = "fp16 operands, fp32 accumulators: mma.sync"
    why = "a tile of multiply-adds is eight instructions; it is still loaded, and now converted, first"
    file, kernels, threads, directives = "digits_tensor_core.cu", "{}", 128, ()
    precision = "fp16"

    def forward(self, step: Step, layer: int) -> Launches:
        if layer < step.last:
            return (self.forward_by("forward_half<true>", step, layer),)
        return self.forward_by("forward_half<false>", step, layer), self.softmax(step)

    def propagate(self, step: Step, layer: int) -> Launches:
        return (self.propagate_by("z_grad_half", step, layer),)

    def update(self, step: Step, layer: int) -> Launches:
        return (self.update_by("update_layer_half", step, layer),)


class VectorLoads(OnlineSoftmax):
    name = "vector-loads"
    idea = "fp32 again: float4 loads, operands transposed in shared memory; biases without atomics"
    why = "one load instruction for four floats, and two shared-memory reads for four multiply-adds"
    file, kernels, threads, directives = "digits_vectors.cu", "{}", 64, ()
    nondeterministic = ""

    def forward(self, step: Step, layer: int) -> Launches:
        if layer < step.last:
            return (self.forward_by("forward_vectors<true>", step, layer),)
        return self.forward_by("forward_vectors<false>", step, layer), self.softmax(step)

    def propagate(self, step: Step, layer: int) -> Launches:
        return (self.propagate_by("z_grad_vectors", step, layer),)

    def update(self, step: Step, layer: int) -> Launches:
        return (self.update_by("update_vectors", step, layer),)


class Graph(VectorLoads):
    name = "graph"
    idea = "softmax and its gradient fused into the last gemm; an epoch is one CUDA graph; updates run concurrently"
    why = "one call launches an epoch; the loss and the updates run beside the chain of the other kernels"
    cost_passes = 6, 7
    is_graph = True

    def forward(self, step: Step, layer: int) -> Launches:
        if layer < step.last:
            return super().forward(step, layer)
        return (
            self.fused("forward_softmax_grad", step.B, step.widths[-1], step.x(layer), State(f"w{layer}"),
                       State(f"b{layer}"), step.y, step.a(layer), step.dz(layer), *step.sizes(layer)),
        )  # fmt: skip

    def loss(self, step: Step) -> Launches:
        return super().loss(step)[:1]

    def epoch(self, steps: Sequence[Step]) -> Launches:
        """Main branch: forward, propagate, update the first layer. The loss and each other update are branches."""
        launches: list[KernelLaunch] = []
        ends: dict[str, int] = {}  # the last launch of each branch

        def add(branch: str, launch: KernelLaunch, *after: int) -> int:
            waits = {*after, *([ends[branch]] if branch in ends else [])}
            launches.append(dataclasses.replace(launch, after=tuple(sorted(waits))))
            ends[branch] = len(launches) - 1
            return ends[branch]

        for step in steps:
            layers = range(step.last + 1)
            main = [launch for layer in layers for launch in self.forward(step, layer)]
            branches = {len(main) - 1: ("loss", self.loss(step)[0])}  # by the launch of `main` that each waits for
            for layer in reversed(layers[1:]):
                main += self.propagate(step, layer)
                branches[len(main) - 1] = (f"update {layer}", self.update(step, layer)[0])
            main += self.update(step, 0)
            previous: tuple[int, ...] = tuple(ends.values())  # a step begins when all branches are done
            for i, launch in enumerate(main):
                at = add("main", launch, *previous)
                if i - 1 in branches:  # after the next launch of `main`, so that each branch keeps its stream
                    add(*branches[i - 1], *previous)
                previous = (at,)
        return tuple(launches)


# -- the engine ----------------------------------------------------------------------------------------------


class Onchip(Rung[TrainingRows]):
    name = "onchip"
    idea = "the engine: one persistent kernel, weights stay on the chip, layers exchange activations through L2"
    why = "weights are not loaded again in each step, and no launch separates two layers"
    precision, is_engine = SPLIT, True

    def prepare(self, net: Network, x: TrainingRows, threads: int) -> EngineRun:
        options, classes = dataclasses.asdict(run_options()), x.y.argmax(axis=1)

        def run(epochs: int) -> FitResult:
            return fit(net, x.x, classes, device="cuda", **{**options, "epochs": epochs})

        return EngineRun(1, run)

    def verify(self, truth: Any, got: Array) -> Verdict:
        return cast(DigitsTruth, truth).verify_in(self.precision, got)


def inputs(B: int) -> TrainingRows:
    """B rows of MNIST, repeated if it has fewer, or random ones, in the order of fit's first epoch."""
    if digits.find_mnist() is not None:
        data = digits.load_data("mnist")
        rows = np.arange(B) % len(data.x_train)
        x, classes = data.x_train[rows], data.y_train[rows]
    else:  # pixels, of which four of five are zero: about as large as MNIST's
        rng = np.random.default_rng(0)
        x = rng.random((B, 784), dtype=np.float32) * (rng.random((B, 784), dtype=np.float32) < 0.2)
        classes = rng.integers(0, digits.CLASSES, B)
    order = epoch_order(B, digits.TRAIN.seed, 0)
    return TrainingRows(x[order], np.eye(digits.CLASSES, dtype=np.float32)[classes[order]])


RUNGS: tuple[type[CudaRung], ...] = (
    Separate, Fused, Tiled, Padded1, Padded2, Padded4, Padded8, SequentialLoss, AtomicBias, Restrict, Unrolled,
    RegisterCap, OnlineSoftmax, TensorCores, VectorLoads, Graph,
)  # fmt: skip
LADDER = Ladder(
    name="digits",
    title="an epoch of training (784-320-160-10, ReLU, cross-entropy, SGD, batch 64), on a GPU",
    rungs=(*RUNGS, Onchip),
    network=digits.network,
    inputs=inputs,
    floor_ms=lambda net, B, precision: floor_ms(net, B, precision, Gpu.get().device),
    rows=ROWS,
    truth=DigitsTruth,
    checked=CHECKED,
    device="cuda",
)


# -- for make check-kernels --------------------------------------------------------------------------------


ARCHITECTURES = EVERY_CHIP
INSTANCES = rung_instances(RUNGS)
