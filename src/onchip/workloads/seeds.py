"""A training job with many seeds: networks are trained together, and each is tested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onchip.errors import KernelError
from onchip.network.text import columns
from onchip.runtime.engine import compile
from onchip.train.given_network import shape_targets
from onchip.train.many import Run, fit_runs
from onchip.train.training_run import FitResult
from onchip.workloads.classify import Trained, fit_rows, score_outputs
from onchip.workloads.train_job import TrainJob


@dataclass(frozen=True, eq=False)
class SeedResults:
    """The result per seed; prints as a table."""

    seeds: tuple[int, ...]
    trained: tuple[Trained | KernelError, ...]  # KernelError: that run diverged

    @property
    def done(self) -> dict[int, Trained]:
        return {s: t for s, t in zip(self.seeds, self.trained, strict=True) if isinstance(t, Trained)}

    @property
    def best_seed(self) -> int:
        """The seed with the lowest validation loss or, without validation rows, training loss."""
        return min(self.done, key=lambda seed: best_loss(self.done[seed]))

    def scores(self) -> list[float]:
        """Test accuracies, or errors for regression, of the runs that did not diverge."""
        found = (t.accuracy if t.accuracy is not None else t.test_mse for t in self.done.values())
        return [score for score in found if score is not None]

    def __str__(self) -> str:
        rows = []
        for seed, trained in zip(self.seeds, self.trained, strict=True):
            if isinstance(trained, KernelError):
                rows.append([str(seed), "diverged", ""])
                continue
            shown = "" if trained.test_mse is None else f"{trained.test_mse:.6g}"
            shown = shown if trained.accuracy is None else f"{trained.accuracy:.2%}"
            rows.append([str(seed), f"{best_loss(trained):.4f}", shown])
        has_classes = any(trained.accuracy is not None for trained in self.done.values())
        return columns(["seed", "loss", "accuracy" if has_classes else "test error"], rows, right=range(3))


def best_loss(trained: Trained) -> float:
    """The loss of the best epoch: its validation loss if there is one."""
    best = trained.fit.history[trained.fit.best_epoch - 1]
    return best.loss if best.validation_loss is None else best.validation_loss


def train_seeds(
    job: TrainJob, count: int, *, device: str = "auto", threads: int | None = None,
    on_progress: Callable[[float], None] | None = None, spread: bool = False,
) -> SeedResults:  # fmt: skip
    """Train networks of `count` seeds, starting with the job's own, on the same rows, and test each.

    on_progress  called with the number of finished runs, including fractions of those in flight
    spread       over the ranks, each of which calls this
    """
    seeds = tuple(range(job.options.seed, job.options.seed + count))
    jobs = [job.seeded(seed) for seed in seeds]
    x_train, y_train = job.standard.apply(job.data.x_train, job.data.y_train)
    x_train, x_test = (fit_rows(x, job.net, job.data) for x in (x_train, job.data.x_test))
    y_train = shape_targets(y_train, job.net)
    runs = [Run(each.net, each.options) for each in jobs]
    results = fit_runs(runs, x_train, y_train, device=device, threads=threads, on_progress=on_progress, spread=spread)
    if all(isinstance(result, KernelError) for result in results):
        raise next(result for result in results if isinstance(result, KernelError))

    def tested(result: FitResult | KernelError) -> Trained | KernelError:
        if isinstance(result, KernelError):
            return result
        result = replace(result, network=job.standard.fold(result.network))
        y = compile(result.network, device, threads=threads)(x_test)
        return score_outputs(result, y, job.data.y_test, job.data.y_train, job.options.loss)

    return SeedResults(seeds, tuple(tested(result) for result in results))


def spread(scores: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return float(np.mean(scores)), float(np.std(scores))
