"""lenet: LeNet-5 trained on MNIST to 99 %, several seeds; the time of a seed is the time to that accuracy."""

from __future__ import annotations

import functools
from collections.abc import Callable

from onchip.bench.cases.training import TrainingCase, onchip_accuracy
from onchip.bench.frame import ONCHIP, Case, Ready
from onchip.bench.options import Options
from onchip.bench.peers.torch_training import autograd_forms, torch_accuracy
from onchip.bench.report.results import ACCURACY
from onchip.measure.pace import Pace
from onchip.network.graph import Network
from onchip.workloads import digits, lenet
from onchip.workloads.dataset import Dataset

SEEDS = 5


def _network(seed: int) -> Network:
    return lenet.network(seed=seed)


def cases(options: Options, data: Dataset | None = None) -> list[Case]:
    """`data` is for tests; by default MNIST: other data would say nothing about 99 %."""
    data, row_shape = data or digits.load_data("mnist"), _network(0).input.row_shape
    x, x_test = (rows.reshape(-1, *row_shape) for rows in (data.x_train, data.x_test))
    job = TrainingCase(_network, x, data.y_train, lenet.TRAIN, options.threads, options.device, "MNIST")
    test = (x_test, data.y_test, SEEDS)
    engines: dict[str, Callable[[], Ready]] = {ONCHIP: functools.partial(onchip_accuracy, job, *test)}
    if options.peers and options.device == "cpu":
        for peer, forms in autograd_forms(job).items():
            engines[peer] = functools.partial(torch_accuracy, job, peer, forms, *test)
    return [
        Case("training", f"lenet5 on MNIST, {job.options.epochs} epochs, {SEEDS} seeds", engine, prepare, work=1,
             unit=ACCURACY, parts=SEEDS, floor_ms=job.floor_ms, threads=options.threads,
             pace=Pace(rounds=1, warm_up_s=0, min_runs=1, max_runs=1))
        for engine, prepare in engines.items()
    ]  # fmt: skip
