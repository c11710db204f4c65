"""Training runs on the CPU whose steps a kernel runs whole."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from onchip.kernels.cpu import TRAINING
from onchip.kernels.cpu.threading.threads import load_helpers, queue_helpers
from onchip.kernels.training import Epochs, LaunchTime, SharedData, Trained
from onchip.network.recipe import Array, Evaluated, materialise
from onchip.plan.plan import Plan
from onchip.runtime.backend import NetworkRun


class CpuRuns:
    """A single run: several runs are several of these. The host is the device: `end` does the training."""

    is_asynchronous = False

    def __init__(
        self, plan: Plan, runs: Sequence[NetworkRun], x: Array, y: Array, shared: SharedData, threads: int
    ) -> None:
        """x (n, ...) float32; y (n,) int64 classes or (n, D_out) float32 targets; neither is copied."""
        (group,), (run,) = plan.groups, runs
        kernel = next(kernel for kernel in TRAINING if kernel.name == group.claim.kernel)
        kernel.queue_steps()
        queue_helpers(threads)
        load_helpers(threads)
        derived: Evaluated = {}
        weights = {name: materialise(each, run.network.weights, derived) for name, each in group.claim.recipes.items()}
        rows = x.reshape(len(x), -1), y, run.row_weights
        at_once = threads if shared.runs == 1 else None
        self.steps = kernel.bind_steps(group.claim, run.how, plan.job.batch, weights, *rows, at_once, shared.ranks)
        self._label, self._epochs, self.seconds = group.claim.label, list[Epochs](), 0.0

    def make_ready(self) -> None:
        self.steps.train(Epochs((np.zeros(0, np.int64),), np.zeros((1, 0))))

    def begin(self, epochs: Sequence[Epochs | None]) -> None:
        self._epochs = [each for each in epochs if each is not None]

    def end(self) -> list[Trained]:
        begin = time.perf_counter()
        trained = [result for epochs in self._epochs for result in self.steps.train(epochs)]
        self.seconds = time.perf_counter() - begin
        return [trained]

    def evaluate(self, run: int, order: Array) -> tuple[float, int]:
        return self.steps.evaluate(order)

    def weights(self, run: int) -> dict[str, Array]:
        return self.steps.weights()

    def moments(self, run: int) -> dict[str, Array]:
        return self.steps.moments()

    def write(self, run: int, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        self.steps.write(weights, state)

    def gpu_bytes(self, run: int) -> int:
        return 0

    def time_steps(self) -> None:
        self.steps.time_steps()

    def launch_times(self) -> tuple[LaunchTime, ...]:
        return self.steps.launch_times(self._label)
