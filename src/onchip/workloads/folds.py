"""Cross-validation on texts: N networks, each tested on the texts of one fold and trained on the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.network.recipe import Array
from onchip.train.options import TrainOptions
from onchip.train.training_run import Progress
from onchip.workloads.classify import train_and_test
from onchip.workloads.seeds import spread
from onchip.workloads.table_data import Source
from onchip.workloads.text_job import KIM, TextData, job_of, read_texts, shape_named, text_options
from onchip.workloads.train_job import TrainJob


@dataclass(frozen=True)
class Fold:
    fold: int  # from 1
    accuracy: float
    f1: float
    test_rows: int
    epochs: int  # trained
    best_epoch: int  # by the validation loss: its weights are tested
    vocabulary: int
    length: int
    seconds: float


@dataclass(frozen=True)
class FoldResults:
    folds: tuple[Fold, ...]

    @property
    def accuracy(self) -> tuple[float, float]:
        """Mean and standard deviation over the folds."""
        return spread([fold.accuracy for fold in self.folds])


def folds_of(n: int, folds: int, seed: int) -> list[Array]:
    """The texts of each fold: `numpy.array_split(numpy.random.default_rng(seed).permutation(n), folds)`, ascending."""
    if isinstance(folds, bool) or not isinstance(folds, int) or not 2 <= folds <= n:
        expected = f"2 to {n:,}, the number of texts"
        raise InputError("bad number of folds", got=str(folds), expected=expected, hint="--folds 10")
    return [np.sort(part) for part in np.array_split(np.random.default_rng(seed).permutation(n), folds)]


def fold_job(data: TextData, test: Array, options: TrainOptions, network: str = KIM) -> TrainJob:
    """The job of one fold, whose vocabulary is that of the texts of the others."""
    is_train = np.ones(len(data.train.texts), bool)
    is_train[test] = False
    parts = replace(data, train=data.train.rows(np.flatnonzero(is_train)), test=data.train.rows(test))
    return job_of(parts, options, shape_named(network))


def cross_validate(
    source: Source,
    given: Mapping[str, Any],
    folds: int,
    network: str = KIM,
    *,
    device: str = "auto",
    threads: int | None = None,
    on_start: Callable[[TextData, TrainOptions], None] | None = None,
    on_progress: Callable[[int, Progress], None] | None = None,
    on_fold: Callable[[Fold], None] | None = None,
) -> FoldResults:
    """Train and test a network for each fold of the texts in --data.

    on_start  called before the first fold, on_progress with the number of finished folds, on_fold after each fold
    """
    options, data = text_options(given), read_texts(source)
    if data.test is not None or data.validation is not None or source.test_share is not None:
        got = f"{source.test_data or source.data}" if source.test_share is None else f"--test-share {source.test_share}"
        raise InputError(
            "folds have their own test rows",
            got=f"a test set: {got}",
            expected="texts without sets",
            hint="omit --folds",
        )
    parts, done = folds_of(len(data.train.texts), folds, options.seed), list[Fold]()
    if on_start is not None:
        on_start(data, options)
    for test in parts:
        job = fold_job(data, test, options, network)

        def report(p: Progress) -> None:
            if on_progress is not None:
                on_progress(len(done), p)

        trained = train_and_test(job.net, job.data, options, device=device, threads=threads, on_progress=report)
        assert trained.accuracy is not None
        assert trained.f1 is not None
        length = job.net.input.row_size
        done.append(Fold(
            len(done) + 1, trained.accuracy, trained.f1, len(test), len(trained.fit.history), trained.fit.best_epoch,
            len(job.net.meaning.words), length, trained.fit.seconds,
        ))  # fmt: skip
        if on_fold is not None:
            on_fold(done[-1])
    return FoldResults(tuple(done))


def results_document(results: FoldResults) -> dict[str, Any]:
    mean, deviation = results.accuracy
    return {"accuracy": mean, "deviation": deviation, "folds": [asdict(fold) for fold in results.folds]}
