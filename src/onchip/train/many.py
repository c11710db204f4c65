"""Many training runs over the same rows at once: folds of a cross-validation, grid settings, seeds.

Small networks leave most of a chip idle; a second run uses it better than a second thread. On a CPU each run has one
thread, and as many runs execute in parallel as there are threads. On a GPU similar runs share launches. Results are
bit-identical to `fit`.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.errors import InputError, KernelError, OnchipError, ShapeError
from onchip.kernels.training import SharedData
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.plan.plan_json import plan_to_json
from onchip.runtime.cpu.backend import check_threads
from onchip.runtime.distributed.ranks import OneRank, Ranks, find_ranks
from onchip.train.options import TrainOptions
from onchip.train.recording import EVALUATE, PLAN, RESULT, new_recorder, phase
from onchip.train.row_weights import check_sample_weight
from onchip.train.spread import all_results, plan_device, share_of
from onchip.train.targets import check_targets
from onchip.train.together import start_runs
from onchip.train.training_data import rows_of
from onchip.train.training_run import (
    REPORT_SECONDS,
    FitResult,
    PlannedRun,
    TrainingRun,
    plan_run,
)


@dataclass(frozen=True, eq=False)
class Run:
    """One run: a network, its options and its rows of the shared data (None: all)."""

    net: Network
    options: TrainOptions
    rows: Array | None = None  # row indices or a mask


def fit_runs(
    runs: Sequence[Run],
    x: Array,
    y: Array,
    *,
    sample_weight: Any = None,
    device: str = "auto",
    threads: int | None = None,
    on_progress: Callable[[float], None] | None = None,
    spread: bool = False,
) -> list[FitResult | KernelError]:
    """Train every run on the shared rows x; return the results in the order of the runs.

    The result of a run that diverges is its KernelError; the others continue.

    x, y         as in fit, and sample_weight; all networks have the same input and output types, all losses the same
                 kind of target
    on_progress  called with the number of finished runs, including fractions of those in flight
    spread       under mpiexec: every rank calls this, trains some of the runs and receives all results
    """
    if not runs:
        return []
    first = runs[0].net
    rows = rows_of(x, first)
    assert isinstance(rows, np.ndarray), "networks of one input"
    x, y = rows, check_targets(first, len(rows), y, runs[0].options.loss)
    for run in runs:
        if _data_of(run) != _data_of(runs[0]):
            expected = " ".join(_data_of(runs[0]))
            raise ShapeError(
                "the runs need different data", got=" ".join(_data_of(run)), expected=expected,
                hint="one call per kind of data",
            )  # fmt: skip
    weights = check_sample_weight(sample_weight, len(x))
    shared, shares, stop = SharedData(len(runs)), [0.0] * len(runs), False
    plan_ns: dict[int, tuple[int, int]] = {}  # by run, begin and end of its planning
    ranks: Ranks = find_ranks() if spread else OneRank()

    def plan(i: int, text: str = "") -> PlannedRun:
        run, begin = runs[i], time.perf_counter_ns()
        indices = None if run.rows is None else _row_indices(run.rows, len(x))
        planned_run = plan_run(
            run.net, x, y, run.options, shared, device=device, threads=threads, sample_weight=weights, rows=indices,
            text=text,
        )  # fmt: skip
        plan_ns[i] = begin, time.perf_counter_ns()
        return planned_run

    planned = [plan(i) for i in range(len(runs))] if ranks.rank == 0 else []
    texts = ranks.broadcast([plan_to_json(run.plan) for run in planned] if ranks.size > 1 else [])
    if ranks.size > 1:
        device, threads = plan_device(texts[0], ranks, device, threads)
        planned = [plan(i, text) for i, text in enumerate(texts)]
    local = share_of(ranks, len(runs))

    def train(indices: Sequence[int]) -> dict[int, FitResult | KernelError]:
        """Train these runs until all are done; finished runs leave the group."""
        recorder = new_recorder()
        if recorder is not None:
            for i in indices:
                recorder.add_earlier(PLAN, *plan_ns[i])
        together = start_runs([planned[i] for i in indices], x, y, shared, recorder)
        results: dict[int, FitResult | KernelError] = {}
        while any(together.runs) and not stop:
            together.advance()
            for at, (i, run) in enumerate(zip(indices, together.runs, strict=True)):
                if run is None:
                    continue
                try:
                    if run.is_epoch_done:
                        with phase(recorder, EVALUATE):
                            run.end_epoch()
                except KernelError as diverged:
                    results[i] = diverged
                else:
                    if run.is_done:
                        with phase(recorder, RESULT):
                            results[i] = run.result()
                shares[i] = 1.0 if i in results else _share(run)
                if i in results:
                    together.runs[at] = None
        return results

    def train_local() -> dict[int, FitResult | KernelError]:
        nonlocal stop
        results: dict[int, FitResult | KernelError] = {}
        with concurrent.futures.ThreadPoolExecutor(check_threads(threads)) as pool:
            waiting = {pool.submit(train, indices) for indices in _launch_groups(planned, local)}
            try:
                while waiting:
                    done, waiting = concurrent.futures.wait(waiting, REPORT_SECONDS, concurrent.futures.FIRST_EXCEPTION)
                    for future in done:
                        results |= future.result()  # any other error of one run ends them all
                    if on_progress is not None:  # progress of other ranks is unknown: assume the same rate
                        on_progress(sum(shares) * len(runs) / max(1, len(local)))
            except BaseException:
                stop = True
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return results

    outcome: dict[int, FitResult | KernelError] | OnchipError
    try:
        outcome = train_local()
    except OnchipError as error:
        outcome = error
    results = all_results(ranks, outcome, planned)
    ranks.leave()
    return [results[i] for i in range(len(runs))]


def _launch_groups(planned: Sequence[PlannedRun], local: Sequence[int]) -> list[list[int]]:
    """Group this rank's run indices by what can be trained in the same launches."""
    similar: list[list[int]] = []
    for i in local:
        run = planned[i]
        for others in similar:
            if run.is_like(planned[others[0]]):
                others.append(i)
                break
        else:
            similar.append([i])
    groups = []
    for indices in similar:
        while indices:
            size = planned[indices[0]].runs_at_once(len(indices))
            groups.append(indices[:size])
            indices = indices[size:]
    return groups


def _row_indices(rows: Array, n: int) -> Array:
    """Check row indices and copy them as values from 0: the kernels read these rows without bounds checks."""
    try:
        indices: Array = np.arange(n)[np.array(rows)]
    except IndexError as error:
        got = str(error)
    else:
        if indices.ndim == 1:
            return indices
        got = f"an array of {indices.ndim} axes"
    raise InputError(
        "bad rows to train on", got=got, expected=f"row indices below {n}, or a mask of length {n}",
        hint="use splits of these rows",
    )  # fmt: skip


def _data_of(run: Run) -> tuple[str, str, str]:
    targets = {"cross_entropy": "classes", "bce_with_logits": "target values from 0 to 1"}
    target = targets.get(run.options.loss, "target values")
    return str(run.net.input), str(run.net.output), target


def _share(training: TrainingRun) -> float:
    return (training.epoch + training.step / training.steps) / training.options.epochs
