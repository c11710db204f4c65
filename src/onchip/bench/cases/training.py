"""Cases of training: a job for onchip and torch, with the same reference. onchip goes through the public fit.

Every engine starts from the same weights and trains on the same batches in the same order, so the first steps must
agree with float64, and accuracies can be compared seed by seed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from onchip.bench.frame import Ready
from onchip.errors import KernelError
from onchip.kernels.training import bytes_of
from onchip.measure.truth import TrainingTruth, Verdict, flat_run
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.training import TrainingStep
from onchip.plan.kernel import Job
from onchip.runtime.engine import compile
from onchip.runtime.placement import plan
from onchip.train.loop import fit
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from onchip.train.order import epoch_order
from onchip.train.step import step_of
from onchip.train.training_run import FitResult

CHECKED_STEPS, CHECKED_ROWS = 16, 8_192
PIXELS, FLOATS = "uint8 pixels", "float rows"  # of a case: a GPU stores bytes as bytes, so the kind of rows matters


@dataclass(frozen=True, eq=False)
class TrainingCase:
    """A training job. `net` returns the untrained network of a seed; options.epochs is the length of a run."""

    net: Callable[[int], Network]
    x: Array
    y: Array
    options: TrainOptions
    threads: int
    device: str = "cpu"
    data: str = ""  # description of the rows, for the setting

    @property
    def device_threads(self) -> int | None:
        """The threads argument of fit: only for the CPU."""
        return self.threads if self.device == "cpu" else None

    @property
    def steps(self) -> int:
        """Of a run."""
        return self.options.epochs * -(-len(self.x) // self.options.batch_size)

    def floor_ms(self) -> float:
        """Of a run."""
        return self.steps * self.step_floor_ms()

    def step_floor_ms(self) -> float:
        batch = min(self.options.batch_size, len(self.x))
        as_bytes = bytes_of(self.x) if self.device != "cpu" else None  # a GPU stores bytes as bytes: less to read
        scale = as_bytes[1] if as_bytes else 0.0
        how = TrainingStep(self.options.loss, self.options.step_optimiser, byte_scale=scale)
        step = step_of(self.net(0), how)
        return plan(step, self.device, Job(self.options.precision, batch)).floor_us / 1e3

    def seeded(self, seed: int) -> TrainOptions:
        return dataclasses.replace(self.options, seed=seed)

    def batches(self, seed: int) -> list[Array]:
        """The rows of every step of a run."""
        n, size = len(self.x), self.options.batch_size
        orders = [
            epoch_order(n, seed, epoch) if self.options.shuffle else np.arange(n)
            for epoch in range(self.options.epochs)
        ]
        return [order[i : i + size] for order in orders for i in range(0, n, size)]

    @functools.cached_property
    def few(self) -> TrainingCase:
        """The same on the first rows, for at least two steps: every engine is checked on it."""
        n = min(len(self.x), CHECKED_STEPS * self.options.batch_size, CHECKED_ROWS)
        epochs = 1 if n > self.options.batch_size else 2
        return dataclasses.replace(
            self, x=self.x[:n], y=self.y[:n], options=dataclasses.replace(self.options, epochs=epochs)
        )

    @functools.cached_property
    def truth(self) -> TrainingTruth:
        return TrainingTruth(self.net(0), self.x, self.y, self.batches(0), self.options)

    def verify(self, losses: Iterable[float], net: Network, slack: float = 1.0) -> Verdict:
        verdict = self.truth.verify(flat_run(losses, net))
        return Verdict(verdict.error, slack * verdict.allowed)

    def setting(self, *notes: str) -> str:
        return ", ".join(filter(None, [self.data, *notes]))


def standardised(x: Array) -> Array:
    """Float rows as commonly used: mean 0 and standard deviation 1 over all values, so no longer bytes."""
    mean, deviation = (np.float32(moment(dtype=np.float64)) for moment in (x.mean, x.std))
    rows: Array = (x - mean) / deviation
    return rows


def with_floats(job: TrainingCase) -> TrainingCase:
    """The same job over standardised rows."""
    return dataclasses.replace(job, x=standardised(job.x), data=f"{job.data}, standardised")


def onchip_run(job: TrainingCase) -> Ready:
    return Ready(lambda: _fit(job), lambda: _check_fit(job.few), job.setting())


def _fit(job: TrainingCase) -> FitResult:
    return fit(job.net(0), job.x, job.y, device=job.device, threads=job.device_threads,
               **dataclasses.asdict(job.seeded(0)))  # fmt: skip


def _check_fit(job: TrainingCase) -> Verdict:
    result = _fit(job)
    return job.verify(result.losses, result.network)


def onchip_accuracy(job: TrainingCase, x_test: Array, y_test: Array, seeds: int) -> Ready:
    """All seeds trained together; the scores are their test accuracies in percent."""
    scores: list[float] = []

    def run() -> None:
        runs = [Run(job.net(seed), job.seeded(seed)) for seed in range(seeds)]
        for result in fit_runs(runs, job.x, job.y, device=job.device, threads=job.device_threads):
            if isinstance(result, KernelError):  # the run diverged
                raise result
            engine = compile(result.network, job.device, threads=job.device_threads)
            scores.append(percent(engine(x_test), y_test))

    setting = job.setting("all seeds together")
    return Ready(run, lambda: _check_fit(job.few), setting, lambda: scores)


def percent(y: Array, classes: Array) -> float:
    return 100.0 * float(np.mean(y.argmax(axis=1) == classes))
