"""faces in torch on a GPU: as written, and with each transposed convolution as four convolutions (phases).

The latter is the fastest form we know: batch norm folded into the weights, no multiplication by inserted zeros, NHWC.
Large batches run in chunks, which was no slower and needs one compilation for all jobs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from onchip.bench.cases.gpu_host import Build as HostBuild
from onchip.bench.cases.gpu_host import HostGiven
from onchip.bench.gpu_clock import Forward, Variants
from onchip.bench.peers.gpu import Allowance, Build, Call, Calls, GpuTask, compile_faster, torch_call
from onchip.bench.stage import TorchStage
from onchip.network.graph import Network
from onchip.plan.rewrites import fold_batchnorm, split_phases

Tensor = Any
COMPILE_S = 60.0  # seconds for torch.compile per benchmark
PIECE = 8_192  # images per chunk
PHASES = "torch.compile, four phases"


def four_phases(net: Network) -> Network:
    return split_phases(fold_batchnorm(net)[0])[0]


def plain_calls(task: GpuTask, stage: TorchStage) -> dict[str, Call]:
    last = stage.torch.channels_last
    return {"channels last": torch_call(task, stage, memory_format=last), "": torch_call(task, stage)}


def phase_calls(task: GpuTask, stage: TorchStage) -> dict[str, Call]:
    split = dataclasses.replace(task, net=four_phases(task.net))
    return {"four phases": torch_call(split, stage, memory_format=stage.torch.channels_last)}


def in_chunks(stage: TorchStage, call: Call, x: Tensor) -> Tensor:
    return call(x) if len(x) <= PIECE else stage.torch.cat([call(part) for part in x.split(PIECE)])


class Compiled:
    """torch.compile of a form; a compiled form is reused by later jobs with the same chunk size."""

    def __init__(self, allowance: Allowance, calls: Calls) -> None:
        self._allowance, self._calls = allowance, calls
        self._made: dict[tuple[str, str, int], tuple[str, Call]] = {}

    def get(self, task: GpuTask, stage: TorchStage) -> tuple[str, Call]:
        """The name of its variant, and a function of up to PIECE images."""
        part = dataclasses.replace(task, x=task.x[:PIECE])
        key = task.precision, task.io, len(part.x)
        if key not in self._made:
            self._made[key] = compile_faster(self._allowance, self._calls, part, stage)
        return self._made[key]

    def __call__(self, task: GpuTask, stage: TorchStage) -> Variants:
        name, run = self.get(task, stage)
        return {name: Forward(functools.partial(in_chunks, stage, run, task.x))}


def torch_eager(task: GpuTask, stage: TorchStage) -> Variants:
    calls = plain_calls(task, stage)
    return {
        name: Forward(functools.partial(in_chunks, stage, call, task.x), captures=False) for name, call in calls.items()
    }


def torch_graph(task: GpuTask, stage: TorchStage) -> Variants:
    calls = {**plain_calls(task, stage), **phase_calls(task, stage)}
    return {
        name: Forward(functools.partial(in_chunks, stage, call, task.x), eager=False) for name, call in calls.items()
    }


class FacesPeers:
    """The peers of one benchmark, which share a time allowance and compiled forms."""

    def __init__(self) -> None:
        allowance = Allowance(COMPILE_S)
        self._phases, self._plain = Compiled(allowance, phase_calls), Compiled(allowance, plain_calls)

    def on_gpu(self, B: int) -> dict[str, Build]:
        """Engine -> its builder, for B images. With few images, the slower form is not compiled: that takes long."""
        quick: dict[str, Build] = {"torch eager": torch_eager, "torch graph": torch_graph, PHASES: self._phases}
        return {**quick, "torch.compile": self._plain} if B > 1_000 else quick

    def to_host(self, net: Network) -> dict[str, HostBuild]:
        """net: with float images."""
        return {PHASES: functools.partial(self._to_host, net)}

    def _to_host(self, net: Network, given: HostGiven, stage: TorchStage) -> tuple[Callable[[], object], str]:
        """Copies a chunk's images on a second stream while the next chunk is computed."""
        torch = stage.torch
        z, out = (torch.from_numpy(array) for array in (given.x, given.y))
        task = GpuTask(net, given.job.precision, "float16", z[:PIECE].to(stage.device).half())
        name, make = self._phases.get(task, stage)
        finish = torch.compile(_to_pixels if given.y.dtype == "uint8" else _to_floats, dynamic=False)
        side = torch.cuda.Stream()

        def run() -> None:
            main = torch.cuda.current_stream()
            for i in range(0, len(z), PIECE):
                y = finish(make(z[i : i + PIECE].to(stage.device, non_blocking=True).half()))
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    out[i : i + PIECE].copy_(y, non_blocking=True)
                    y.record_stream(side)
            side.synchronize()

        return run, f"{name}, {PIECE} images at a time"


def _to_floats(y: Tensor) -> Tensor:
    return y.float()


def _to_pixels(y: Tensor) -> Tensor:
    return ((y.float() + 1) / 2 * 255).clamp(0, 255).byte()
