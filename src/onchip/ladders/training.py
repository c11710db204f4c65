"""Shared by the GPU rungs that train: rows and targets on the GPU, weights updated in place, timing with launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from onchip.kernels.cuda.common.arguments import Argument, UInt32
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, LaunchConfig, Program, Steps
from onchip.ladders.device import KERNELS, DeviceRun
from onchip.ladders.frame import Rung, split_gemms
from onchip.measure.truth import flat_run
from onchip.network.graph import Network
from onchip.network.layers import Linear
from onchip.network.recipe import Array, materialise
from onchip.plan.device import Device
from onchip.plan.kernel import Cost
from onchip.runtime.cuda.gpu import Buffer, BufferPart, Gpu

MEASURED_EPOCHS = 5  # per sample of the engine
SPLIT = "3xbf16"  # the precision of the engine's training in fp32


class TrainingRows:
    """Rows x (n, D_in) and targets y (n, ...), in training order; uploaded once, on first use, for all rungs."""

    def __init__(self, x: Array, y: Array) -> None:
        self.x, self.y = x, y
        self._buffers: dict[str, Buffer] = {}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice) -> TrainingRows:
        x = self.x[rows]
        return self if len(x) == len(self) else TrainingRows(x, self.y[rows])

    def on(self, gpu: Gpu, name: str) -> Buffer:
        """name: "x" or "y"; y as float32."""
        if name not in self._buffers:
            self._buffers[name] = gpu.upload(np.ascontiguousarray(getattr(self, name), np.float32))
        return self._buffers[name]


def batch_buffers(whole: Buffer, name: str, row_bytes: int, sizes: list[int]) -> dict[str, Buffer]:
    """The rows of each step: "x0", "x1", ..."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return {
        f"{name}{i}": BufferPart(whole, int(starts[i]) * row_bytes, size * row_bytes) for i, size in enumerate(sizes)
    }


class KernelRung(Rung[TrainingRows]):
    """A rung that trains with its own kernels."""

    max_registers: ClassVar[int] = 64  # per thread; four blocks of 256 threads then fit into an SM's 65,536

    def launch(
        self, file: str, kernel: str, config: LaunchConfig, *arguments: Argument, options: tuple[str, ...] = ()
    ) -> KernelLaunch:
        return KernelLaunch(Program(KERNELS / file, kernel, options), config, arguments, Budget(self.max_registers))


class TrainingRun(DeviceRun):
    """Training from given weights. Calling it returns losses and weights (flat_run); the output of `steps` is the loss
    of each step.

    A sample restores the weights, then measures the launches as the host enqueues them; a rung that `is_graph` is
    replayed from a CUDA graph.
    """

    def __init__(
        self, gpu: Gpu, steps: Steps, rows: Mapping[str, Buffer], initial: Mapping[str, Array],
        trained: Callable[[Mapping[str, Array]], Network], losses: int, is_graph: bool,
    ) -> None:  # fmt: skip
        """initial  float32 arrays by the name of their State
        trained  the network from the arrays after the run
        """
        self._initial, self._trained, self._is_graph = initial, trained, is_graph
        self._state = {name: gpu.upload(array) for name, array in initial.items()}
        super().__init__(gpu, steps, rows["x0"], rows, (losses,), "float32", self._state)

    def __call__(self) -> Array:
        self._restore()
        losses = super().__call__()
        arrays = {name: np.empty_like(array) for name, array in self._initial.items()}
        for name, array in arrays.items():
            self._gpu.download(self._state[name], array)
        return flat_run(losses, self._trained(arrays))

    def sample_ms(self) -> float:
        if self._is_graph:
            return super().sample_ms()
        self._restore()
        self._start.record()
        self._enqueue(self._gpu.stream)
        self._end.record()
        return self._end.ms_since(self._start)

    def _restore(self) -> None:
        with self._gpu:
            for name, array in self._initial.items():
                self._gpu.write(self._state[name], array, self._gpu.stream)
            self._gpu.synchronise()


class EngineRun:
    """Training by fit. A sample is the mean time of the epochs after the first."""

    def __init__(self, epochs: int, fit: Callable[[int], Any]) -> None:
        """epochs  of a checked run
        fit     epochs -> FitResult
        """
        self._epochs, self._fit = epochs, fit

    def __call__(self) -> Array:
        result = self._fit(self._epochs)
        return flat_run(result.losses, result.network)

    def sample_ms(self) -> float:
        return 1e3 * float(np.mean([epoch.seconds for epoch in self._fit(1 + MEASURED_EPOCHS).history[1:]]))


# -- networks ------------------------------------------------------------------------------------------------


def layer_arrays(net: Network) -> dict[str, Array]:
    """w0 (D_in, D_out), b0 (D_out,), w1, ...: float32, contiguous."""
    arrays = {}
    for i, names in enumerate(_layers(net)):
        arrays[f"w{i}"] = np.ascontiguousarray(materialise(names["weight"], net.weights).T, np.float32)
        arrays[f"b{i}"] = np.ascontiguousarray(materialise(names["bias"], net.weights), np.float32)
    return arrays


def layer_widths(net: Network) -> tuple[int, ...]:
    """D_in of the first layer, then D_out of each."""
    shapes = [net.weights[names["weight"]].shape for names in _layers(net)]
    return shapes[0][1], *(D_out for D_out, _ in shapes)


def row_flop(widths: Sequence[int]) -> int:
    """Of training: forward, gradients of the weights, and of all inputs but the first."""
    sizes = [D_in * D_out for D_in, D_out in pairwise(widths)]
    return 2 * (3 * sum(sizes) - sizes[0])


def network_of(net: Network, arrays: Mapping[str, Array]) -> Network:
    """The network with these weights (layer_arrays)."""
    weights = dict(net.weights)
    for i, names in enumerate(_layers(net)):
        weights[names["weight"]] = np.ascontiguousarray(arrays[f"w{i}"].T)
        weights[names["bias"]] = arrays[f"b{i}"]
    return net.replace(weights=weights)


def _layers(net: Network) -> list[Mapping[str, str]]:
    return [node.weights for node in net.nodes if isinstance(node.layer, Linear)]


def floor_ms(net: Network, B: int, precision: str, device: Device) -> float:
    """Of an epoch over B rows: the flop, or reading every pixel once, as a byte. Weights never leave the chip, launches
    cost nothing, and that a step needs the previous one is not counted.

    precision  SPLIT: fp32 values as three bf16 terms on tensor cores; where one operand is a pixel, three products
    """
    widths = layer_widths(net)
    flop, rate = split_gemms(row_flop(widths), precision)
    return Cost(row_flop=flop, row_bytes=widths[0], launches=0).floor_us(device, rate, B) / 1e3


def float32(value: float) -> UInt32:
    """The bits of a float parameter."""
    return UInt32(int(np.float32(value).view(np.uint32)))
