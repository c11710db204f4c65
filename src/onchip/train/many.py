"""Many training runs over the same rows at once: folds of a cross-validation, settings of a grid, seeds.

Small networks leave most of a chip idle, and a second run fills it better than a second thread does: here every run has
one thread, and as many run side by side as there are threads. A run's bits are those of `fit` alone.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.errors import InputError, KernelError, ShapeError
from onchip.kernels.training import SharedData
from onchip.runtime.cpu import check_threads
from onchip.runtime.engine import check_rows
from onchip.spec.network import Network
from onchip.spec.recipe import Array
from onchip.train.options import TrainOptions
from onchip.train.training_run import REPORT_SECONDS, FitResult, TrainingRun, check_targets, prepare


@dataclass(frozen=True, eq=False)
class Run:
    """One run: a network, how it is trained, and which rows of the shared data it sees (None: all)."""

    net: Network
    options: TrainOptions
    rows: Array | None = None  # row numbers or a mask, as NumPy takes them


def fit_runs(
    runs: Sequence[Run],
    x: Array,
    y: Array,
    *,
    device: str = "auto",
    threads: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> list[FitResult | KernelError]:
    """Train every run on the rows x, shared by all of them; the results in the order of the runs.

    A run that diverges has its KernelError for a result; the others go on.

    x, y         as for fit; every network has the same input type and output, every loss the same kind of target
    on_progress  hears how many runs are done, with the shares of those under way
    """
    if not runs:
        return []
    first = runs[0].net
    x, y = check_rows(x, first.input), check_targets(first, len(x), y, runs[0].options.loss)
    for run in runs:
        if _data_of(run) != _data_of(runs[0]):
            expected = " ".join(_data_of(runs[0]))
            raise ShapeError(
                "the runs do not share their data", got=" ".join(_data_of(run)), expected=expected,
                hint="a call for each kind",
            )  # fmt: skip
    row_numbers = [None if run.rows is None else _row_numbers(run.rows, len(x)) for run in runs]
    shares, stop, shared = [0.0] * len(runs), False, SharedData()

    def work(i: int) -> FitResult | KernelError | None:
        run = runs[i]
        training = prepare(
            run.net, x, y, run.options, device=device, threads=threads, rows=row_numbers[i], shared=shared
        )
        while not training.is_done and not stop:
            training.advance()
            if training.is_epoch_done:
                try:
                    training.end_epoch()
                except KernelError as diverged:
                    shares[i] = 1.0
                    return diverged
            shares[i] = _share(training)
        return training.result() if training.is_done else None

    with concurrent.futures.ThreadPoolExecutor(check_threads(threads)) as pool:
        futures = [pool.submit(work, i) for i in range(len(runs))]
        try:
            waiting = set(futures)
            while waiting:
                done, waiting = concurrent.futures.wait(waiting, REPORT_SECONDS, concurrent.futures.FIRST_EXCEPTION)
                for future in done:
                    future.result()  # any other error of one run ends them all
                if on_progress is not None:
                    on_progress(sum(shares))
        except BaseException:
            stop = True
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [result for future in futures if (result := future.result()) is not None]


def _row_numbers(rows: Array, n: int) -> Array:
    """Row numbers from 0 on, checked and in an array of our own: the kernels read such rows unasked."""
    try:
        numbers: Array = np.arange(n)[np.array(rows)]
    except IndexError as error:
        got = str(error)
    else:
        if numbers.ndim == 1:
            return numbers
        got = f"an array of {numbers.ndim} axes"
    raise InputError(
        "no such rows to train on", got=got, expected=f"row numbers below {n}, or a mask of {n}",
        hint="splits of these rows",
    )  # fmt: skip


def _data_of(run: Run) -> tuple[str, str, str]:
    target = "classes" if run.options.loss == "cross_entropy" else "numbers"
    return str(run.net.input), str(run.net.output), target


def _share(training: TrainingRun) -> float:
    return 1.0 if training.is_done else (training.epoch + training.step / training.steps) / training.options.epochs
