"""The backprop ladder on a GPU: full-batch epochs, from tiles that slide over the matrices to the engine.

The headers of cuda/backprop_*.cu explain each kernel. An epoch is timed with everything on the GPU, like the report's
later epochs; the fact "first epoch ms" includes the upload, like its first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from onchip.kernels.cuda.common.arguments import Argument, Output, State, Texture, UInt32
from onchip.kernels.cuda.common.program import EVERY_CHIP, KernelLaunch, LaunchConfig, Program
from onchip.ladders.backprop import CHECKED, EPOCHS, LR, MOMENTUM, run_options
from onchip.ladders.backprop_run import BackpropRun, FlatRun, Memory, StreamsRun
from onchip.ladders.device import THREADS, cover, grid_1d, rung_instances
from onchip.ladders.frame import Ladder, Rung
from onchip.ladders.training import (
    SPLIT,
    EngineRun,
    KernelRung,
    TrainingRows,
    float32,
    floor_ms,
    layer_widths,
    row_flop,
)
from onchip.measure.truth import TrainingTruth
from onchip.network.graph import Network
from onchip.plan.kernel import Cost
from onchip.runtime.cuda.gpu import Gpu
from onchip.train.loop import fit
from onchip.train.training_run import FitResult
from onchip.workloads import backprop

TILE = 16
GRID_ROWS, GRID_COLUMNS = 128, 8  # the largest grid, in tiles: it slides over larger matrices
SLICES = 32  # of the patterns, in backprop_atomics.cu
ERROR_BLOCKS = 128
Launches = tuple[KernelLaunch, ...]


@dataclass(frozen=True)
class Part:
    """B patterns; `index` is part of the names of their memory (backprop_run.Memory)."""

    index: int
    B: int


@dataclass(frozen=True)
class Shapes:
    widths: tuple[int, ...]
    count: int  # of all weights and biases
    B: int  # patterns of all parts
    parts: int

    @property
    def last(self) -> int:
        """The last layer."""
        return len(self.widths) - 2


class CudaRung(KernelRung):
    """A rung as the launches of a part of the patterns, and those after all parts."""

    parts: ClassVar[int] = 1
    run_type: ClassVar[type[BackpropRun]] = BackpropRun

    def part(self, shapes: Shapes, part: Part) -> Launches:
        raise NotImplementedError

    def tail(self, shapes: Shapes) -> Launches:
        """The error and the update."""
        raise NotImplementedError

    def split(self, B: int) -> list[int]:
        """Patterns of each part."""
        ends = [B * i // self.parts for i in range(self.parts + 1)]
        return [end - first for first, end in pairwise(ends) if end > first]

    def cost(self, net: Network, B: int) -> Cost:
        """Each kernel reads or writes each of its operands once. x: forward, gradient."""
        widths = layer_widths(net)
        values = 2 * widths[0] + self.cost_layers(widths[1:])
        return Cost(row_flop(widths), 4 * values, 4 * self.cost_weights(B) * weight_count(widths), launches=0)

    def cost_layers(self, widths: Sequence[int]) -> int:
        """Values that are read and written per pattern, of all layers' outputs and gradients."""
        raise NotImplementedError

    def cost_weights(self, B: int) -> int:
        """Passes over weights, gradients and velocities, together. Propagation reads the weights of the small layers:
        not counted."""
        raise NotImplementedError

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        widths = (backprop.PIXELS, *backprop.HIDDEN, backprop.CLASSES)
        rung, shapes = cls(), Shapes(widths, 1, TILE, 1)
        launches = (*rung.part(shapes, Part(0, TILE)), *rung.tail(shapes))
        return tuple(dict.fromkeys(launch.program for launch in launches))

    def prepare(self, net: Network, x: TrainingRows, threads: int) -> BackpropRun:
        gpu, sizes = Gpu.get(), self.split(len(x))
        memory = Memory(gpu, net, x, sizes)
        shapes = Shapes(memory.widths, memory.count, len(x), len(sizes))
        parts = [self.part(shapes, Part(i, size)) for i, size in enumerate(sizes)]
        return self.run_type(gpu, net, memory, parts, self.tail(shapes))


def sliding(rows: int, columns: int, most_columns: int | None = None) -> LaunchConfig:
    """A block per tile, up to GRID_ROWS rows; all columns, or at most `most_columns`."""
    across, down = -(-columns // TILE), -(-rows // TILE)
    return LaunchConfig((min(across, most_columns or across), min(down, GRID_ROWS), 1), (THREADS, 1, 1), 0)


def weight_count(widths: Sequence[int]) -> int:
    """Weights and biases."""
    return sum((1 + K) * N for K, N in pairwise(widths))


def sizes_of(shapes: Shapes, part: Part, layer: int) -> tuple[UInt32, UInt32, UInt32]:
    """B, K, N"""
    return UInt32(part.B), UInt32(shapes.widths[layer]), UInt32(shapes.widths[layer + 1])


# -- the report ----------------------------------------------------------------------------------------------


class SlidingTiles(CudaRung):
    name = "sliding-tiles"
    idea = "gemms from 16 x 16 tiles; a grid of fixed size slides over the matrices; a copy per row of a matrix"
    targets: ClassVar[str] = "Global"

    def target_argument(self, shapes: Shapes, part: Part) -> Argument:
        return State(f"y{part.index}")

    def part(self, shapes: Shapes, part: Part) -> Launches:
        return *self.forward(shapes, part), *self.backward(shapes, part)

    def layer_input(self, part: Part, layer: int) -> State:
        return State(f"x{part.index}" if layer == 0 else f"h{part.index}.{layer - 1}")

    def forward(self, shapes: Shapes, part: Part) -> Launches:
        launches: list[KernelLaunch] = []
        p = part.index
        for layer in range(shapes.last + 1):
            config, sizes = sliding(part.B, shapes.widths[layer + 1]), sizes_of(shapes, part, layer)
            operands = (self.layer_input(part, layer), State(f"w{layer}"), State(f"b{layer}"))
            if layer < shapes.last:
                kernel = "feed_forward"
                results: tuple[Argument, ...] = (State(f"h{p}.{layer}"),)
            else:
                kernel = f"feed_output<{self.targets}>"
                results = (self.target_argument(shapes, part), State(f"error{p}"), State(f"dz{p}.{layer}"))
            launches.append(self.launch("backprop_tiles.cu", kernel, config, *operands, *results, *sizes))
        return tuple(launches)

    def backward(self, shapes: Shapes, part: Part) -> Launches:
        launches, p = [], part.index
        for layer in reversed(range(shapes.last + 1)):
            (K, N), sizes = shapes.widths[layer : layer + 2], sizes_of(shapes, part, layer)
            dz, x = State(f"dz{p}.{layer}"), self.layer_input(part, layer)
            launches.append(self.launch("backprop_tiles.cu", "gradient_tiles", sliding(K, N, GRID_COLUMNS), x, dz,
                                        State(f"g{p}.w{layer}"), State(f"g{p}.b{layer}"), *sizes))  # fmt: skip
            if layer > 0:
                launches.append(self.launch("backprop_tiles.cu", "propagate_tiles", sliding(part.B, K), dz,
                                            State(f"w{layer}"), x, State(f"dz{p}.{layer - 1}"), *sizes))  # fmt: skip
        return tuple(launches)

    def tail(self, shapes: Shapes) -> Launches:
        return *self.error(shapes), self.update(shapes)

    def cost_layers(self, widths: Sequence[int]) -> int:
        """Hidden: written, read by the next layer, its gradient and propagation; the gradient is written, read, and
        but for the first layer propagated. Output: target, error twice, gradient three times."""
        *hidden, D_out = widths
        return 6 * sum(hidden) + sum(hidden[1:]) + 6 * D_out

    def cost_weights(self, B: int) -> int:
        """Forward; the gradient is written and read; weights and velocities are read and written."""
        return 3 * self.parts + 4

    def error(self, shapes: Shapes) -> Launches:
        errors = UInt32(shapes.B * shapes.widths[-1])
        return (self.launch("backprop_tiles.cu", "sum_error", grid_1d(1), State("error"), Output(0), errors),)

    def update(self, shapes: Shapes) -> KernelLaunch:
        return self.launch("backprop_tiles.cu", "update_all", cover(shapes.count), State("w"), State("v"), State("g"),
                           float32(float(LR)), float32(float(MOMENTUM)), UInt32(shapes.count))  # fmt: skip


class Constant(SlidingTiles):
    name = "constant"
    idea = "eta and alpha in constant memory, which broadcasts them to a warp"
    why = "no change: kernel parameters are in constant memory, too"

    def update(self, shapes: Shapes) -> KernelLaunch:
        options = (f"-DETA={float(LR)!r}f", f"-DALPHA={float(MOMENTUM)!r}f")
        return self.launch("backprop_update.cu", "update_by_constants", cover(shapes.count), State("w"), State("v"),
                           State("g"), UInt32(shapes.parts), UInt32(shapes.count), options=options)  # fmt: skip


class TextureTargets(Constant):
    name = "texture"
    idea = "targets through a texture object"
    why = "no change: textures share the L1 cache with other loads, and each target is read once"
    targets = "Texture"

    def target_argument(self, shapes: Shapes, part: Part) -> Argument:
        return Texture(State(f"y{part.index}"), part.B * shapes.widths[-1])


class LdgTargets(Constant):
    name = "ldg"
    idea = "targets by __ldg: the same read-only cache, an ordinary pointer"
    why = "no change: one load instruction differs"
    targets = "ReadOnly"


class FlatUpload(LdgTargets):
    name = "flat-upload"
    idea = "all matrices in one array: one copy to the GPU"
    why = "one copy instead of one per row, in the first epoch only"
    run_type = FlatRun


class Atomics(FlatUpload):
    name = "atomics"
    idea = "both backward gemms in one kernel, patterns in slices; results added by atomics"
    why = "64 blocks instead of 2 compute the last layer's gradient, and both gemms share their loads of x and dz"
    nondeterministic = "the slices of the patterns add their gradients in the order in which blocks arrive"

    def backward(self, shapes: Shapes, part: Part) -> Launches:
        p = part.index
        launches = [self.clear(State(f"g{p}"), shapes.count)]
        for layer in reversed(range(shapes.last + 1)):
            (K, N), sizes = shapes.widths[layer : layer + 2], sizes_of(shapes, part, layer)
            if layer > 0:
                launches.append(self.clear(State(f"dz{p}.{layer - 1}"), part.B * K))
            tiles, slices = -(-K // TILE) * -(-N // TILE), min(-(-part.B // TILE), SLICES)
            launches.append(self.launch(
                "backprop_atomics.cu", f"backward_atomics<{str(layer > 0).lower()}>",
                LaunchConfig((tiles, slices, 1), (THREADS, 1, 1), 0), self.layer_input(part, layer),
                State(f"dz{p}.{layer}"), State(f"w{layer}"), State(f"g{p}.w{layer}"), State(f"g{p}.b{layer}"),
                State(f"dz{p}.{max(0, layer - 1)}"), *sizes,
            ))  # fmt: skip
        return tuple(launches)

    def cost_layers(self, widths: Sequence[int]) -> int:
        """A kernel less reads x and dz. Gradients of hidden layers are cleared, and each column of tiles of the next
        layer adds to them: a read and a write."""
        *hidden, D_out = widths
        gradients = sum(width * (2 + 2 * -(-after // TILE)) for width, after in pairwise(widths))
        return 3 * sum(hidden) + gradients + 5 * D_out

    def cost_weights(self, B: int) -> int:
        """Gradients are cleared, too, and each slice adds to them: a read and a write."""
        return sum(3 + 2 * min(-(-size // TILE), SLICES) for size in self.split(B)) + 4

    def clear(self, values: State | Output, count: int) -> KernelLaunch:
        return self.launch("backprop_atomics.cu", "clear_values", cover(count), values, UInt32(count))


class Streams(Atomics):
    name = "streams"
    idea = "three streams with their own patterns, gradients and asynchronous upload"
    why = "in the first epoch copies overlap with kernels; later, small kernels run side by side"
    parts, run_type = 3, StreamsRun


class Reduction(Streams):
    name = "reduction"
    idea = "the error by warp and block reductions: the report's last version"
    why = "128 blocks add the errors instead of one"
    report_ms = MappingProxyType({backprop.PATTERNS: 55.642})

    def error(self, shapes: Shapes) -> Launches:
        errors = shapes.B * shapes.widths[-1]
        config = grid_1d(min(-(-errors // THREADS), ERROR_BLOCKS))
        total = self.launch("backprop_error.cu", "reduce_error", config, State("error"), Output(0), UInt32(errors))
        return self.clear(Output(0), 2), total  # a double is two floats


# -- the engine ----------------------------------------------------------------------------------------------


class Onchip(Rung[TrainingRows]):
    name = "onchip"
    idea = "the engine: forward, backward and gradient of a tile of patterns in one kernel, in a fixed order"
    why = "tensor cores, patterns as bytes, and no atomics; the upper layers' activations stay in shared memory"
    precision, is_engine = SPLIT, True

    def prepare(self, net: Network, x: TrainingRows, threads: int) -> EngineRun:
        options = dataclasses.asdict(dataclasses.replace(backprop.TRAIN, batch_size=len(x)))

        def run(epochs: int) -> FitResult:
            return fit(net, x.x, x.y, device="cuda", **{**options, "epochs": epochs})

        return EngineRun(EPOCHS, run)


def inputs(B: int) -> TrainingRows:
    patterns, _ = backprop.patterns(B)
    return TrainingRows(patterns.x, patterns.y)


def truth(net: Network, rows: TrainingRows) -> TrainingTruth:
    options = run_options(backprop.Patterns(rows.x, rows.y))
    return TrainingTruth(net, rows.x, rows.y, [np.arange(len(rows))] * EPOCHS, options)


RUNGS: tuple[type[CudaRung], ...] = (
    SlidingTiles, Constant, TextureTargets, LdgTargets, FlatUpload, Atomics, Streams, Reduction,
)  # fmt: skip
LADDER = Ladder(
    name="backprop",
    title="an epoch of full-batch training (784-56-28-10, sigmoids, momentum), on a GPU",
    rungs=(*RUNGS, Onchip),
    network=backprop.network,
    inputs=inputs,
    floor_ms=lambda net, B, precision: floor_ms(net, B, precision, Gpu.get().device),
    rows=backprop.PATTERNS,
    truth=truth,
    checked=CHECKED,
    device="cuda",
)


# -- for make check-kernels --------------------------------------------------------------------------------


ARCHITECTURES = EVERY_CHIP
INSTANCES = rung_instances(RUNGS)
