"""faces in torch on a GPU: as written, and with each transposed convolution as four convolutions (phases).

The latter is the fastest form we know: batch norm folded into the weights, no multiplication by inserted zeros, NHWC.
Large batches run in chunks: no slower, and one compilation serves all jobs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from onchip.bench.cases.gpu_host import Build as HostBuild
from onchip.bench.cases.gpu_host import LoadedHostJob
from onchip.bench.gpu_clock import Forward, Variants
from onchip.bench.peers.gpu import Allowance, Build, Call, Calls, GpuTask, compile_faster, torch_call
from onchip.bench.stage import TorchStage
from onchip.network.graph import Network
from onchip.plan.rewrites import fold_batchnorm, split_phases

Tensor = Any
COMPILE_S = 60.0  # seconds for torch.compile per benchmark
CHUNK = 8_192  # images
PHASES = "torch.compile, four phases"


def four_phases(net: Network) -> Network:
    return split_phases(fold_batchnorm(net)[0])[0]


def direct_calls(task: GpuTask, stage: TorchStage) -> dict[str, Call]:
    nhwc = stage.torch.channels_last
    return {"NHWC": torch_call(task, stage, memory_format=nhwc), "": torch_call(task, stage)}


def phase_calls(task: GpuTask, stage: TorchStage) -> dict[str, Call]:
    split = dataclasses.replace(task, net=four_phases(task.net))
    return {"four phases": torch_call(split, stage, memory_format=stage.torch.channels_last)}


def in_chunks(stage: TorchStage, call: Call, x: Tensor) -> Tensor:
    return call(x) if len(x) <= CHUNK else stage.torch.cat([call(chunk) for chunk in x.split(CHUNK)])


class Compiled:
    """torch.compile of a form; a compiled form is reused by later jobs with the same chunk size."""

    def __init__(self, allowance: Allowance, calls: Calls) -> None:
        self._allowance, self._calls = allowance, calls
        self._compiled: dict[tuple[str, str, int], tuple[str, Call]] = {}

    def get(self, task: GpuTask, stage: TorchStage) -> tuple[str, Call]:
        """The name of its variant, and a function of up to CHUNK images."""
        chunk = dataclasses.replace(task, x=task.x[:CHUNK])
        key = task.precision, task.io, len(chunk.x)
        if key not in self._compiled:
            self._compiled[key] = compile_faster(self._allowance, self._calls, chunk, stage)
        return self._compiled[key]

    def __call__(self, task: GpuTask, stage: TorchStage) -> Variants:
        name, run = self.get(task, stage)
        return {name: Forward(functools.partial(in_chunks, stage, run, task.x))}


def torch_eager(task: GpuTask, stage: TorchStage) -> Variants:
    calls = direct_calls(task, stage)
    return {
        name: Forward(functools.partial(in_chunks, stage, call, task.x), captures=False) for name, call in calls.items()
    }


def torch_graph(task: GpuTask, stage: TorchStage) -> Variants:
    calls = {**direct_calls(task, stage), **phase_calls(task, stage)}
    return {
        name: Forward(functools.partial(in_chunks, stage, call, task.x), eager=False) for name, call in calls.items()
    }


class FacesPeers:
    """The peers of one benchmark, which share a time allowance and compiled forms."""

    def __init__(self) -> None:
        allowance = Allowance(COMPILE_S)
        self._phases, self._direct = Compiled(allowance, phase_calls), Compiled(allowance, direct_calls)

    def on_gpu(self, B: int) -> dict[str, Build]:
        """Engine -> its builder, for B images. For few images, the slower form is not compiled: that takes long."""
        quick: dict[str, Build] = {"torch eager": torch_eager, "torch graph": torch_graph, PHASES: self._phases}
        return {**quick, "torch.compile": self._direct} if B > 1_000 else quick

    def to_host(self, net: Network) -> dict[str, HostBuild]:
        """net: with float images."""
        return {PHASES: functools.partial(self._to_host, net)}

    def _to_host(self, net: Network, host: LoadedHostJob, stage: TorchStage) -> tuple[Callable[[], object], str]:
        """Copies a chunk's images on a second stream while the next chunk is computed."""
        torch = stage.torch
        z, out = (torch.from_numpy(array) for array in (host.x, host.y))
        task = GpuTask(net, host.job.precision, "float16", z[:CHUNK].to(stage.device).half())
        name, run_chunk = self._phases.get(task, stage)
        finish = torch.compile(_to_pixels if host.y.dtype == "uint8" else _to_floats, dynamic=False)
        side = torch.cuda.Stream()

        def run() -> None:
            main = torch.cuda.current_stream()
            for i in range(0, len(z), CHUNK):
                y = finish(run_chunk(z[i : i + CHUNK].to(stage.device, non_blocking=True).half()))
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    out[i : i + CHUNK].copy_(y, non_blocking=True)
                    y.record_stream(side)
            side.synchronize()

        return run, f"{name}, chunks of {CHUNK} images"


def _to_floats(y: Tensor) -> Tensor:
    return y.float()


def _to_pixels(y: Tensor) -> Tensor:
    return ((y.float() + 1) / 2 * 255).clamp(0, 255).byte()
