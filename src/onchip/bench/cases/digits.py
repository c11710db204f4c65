"""digits: training of 784-320-160-10, on MNIST if available, else on random pixels.

A CPU measures a training step and inference, a GPU an epoch. Rows are pixels, which a GPU keeps as bytes; two batch
sizes also use standardised float rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from onchip.bench.cases.gpu_training import epoch_jobs, together_case, training_cases
from onchip.bench.cases.inference import Rows, inference_cases
from onchip.bench.cases.training import FLOATS, PIXELS, TrainingCase, onchip_accuracy, onchip_run, with_floats
from onchip.bench.frame import ONCHIP, Case, Ready
from onchip.bench.options import Options
from onchip.bench.peers.cpu import subject_of
from onchip.bench.peers.gpu_training import make_training_peers, torch_eager
from onchip.bench.peers.torch_training import torch_accuracy, torch_forms, torch_runs
from onchip.bench.report.results import ACCURACY
from onchip.measure.pace import Pace
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.workloads import digits
from onchip.workloads.dataset import Dataset

TRAIN_ROWS, TEST_ROWS, WIDTH = 60_000, 10_000, 784
BATCHES = (16, 64, 256, 1_024, 4_096)
FLOAT_BATCHES = (digits.TRAIN.batch_size, 1_024)  # also trained over float rows
SEEDS = 10
NETWORKS = 8  # trained together
EPOCH_PACE = Pace(rounds=5, block_s=1.0)  # an epoch takes about a second: two per block, ten samples in all
# The other batch sizes get fewer steps and less time: all of them take a minute or two.
STEPS, STEPS_PACE = 500, Pace(rounds=5, block_s=0.4)


@functools.cache
def _data() -> Dataset:
    """MNIST if available, else random data of its shape: the same work, nothing to learn."""
    return digits.load_data("mnist") if digits.find_mnist() is not None else random_data(TRAIN_ROWS, TEST_ROWS)


def random_data(train: int, test: int) -> Dataset:
    """Bytes, four of five of them 0, whose positions depend on the class: training is as stable as on digits."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, digits.CLASSES, train + test)
    share = (256 * rng.random((digits.CLASSES, WIDTH), dtype=np.float32) ** 4).astype(np.uint8)  # of nonzero pixels
    x: Array = rng.integers(0, 256, (train + test, WIDTH), dtype=np.uint8)
    x *= rng.integers(0, 256, x.shape, dtype=np.uint8) < share[y]
    pixels = x.astype(np.float32) / np.float32(255)
    return Dataset("random data", "made", 28, pixels[:train], y[:train], pixels[train:], y[train:])


def cases(options: Options, data: Dataset | None = None) -> list[Case]:
    """`data` is for tests; by default MNIST or random data."""
    if options.accuracy and data is None:
        digits.load_data("mnist")  # accuracy on random pixels means nothing: raise now if MNIST is missing
    data = data or _data()
    label = "MNIST" if data.name == "mnist" else data.name
    if options.device != "cpu":
        accuracy = _accuracy_cases(data, label, options) if options.accuracy else []
        return [*gpu_epochs(data, label, options), *accuracy]
    result: list[Case] = []
    for size in options.batches or BATCHES:
        job = _training_case(data, label, size, options)
        result += _step_cases(PIXELS, job, options)
        if size in FLOAT_BATCHES:
            result += _step_cases(FLOATS, with_floats(job), options)
    jobs = [
        Rows(f"infer, {B} rows", B, functools.partial(_rows, data.x_test, B), label)
        for B in options.rows or (len(data.x_test),)
    ]
    result += inference_cases("digits", subject_of(_network(0)), jobs, options)
    if options.accuracy:
        result += _accuracy_cases(data, label, options)
    return result


def _network(seed: int) -> Network:
    return digits.network(WIDTH, seed=seed)


def _rows(x: Array, B: int) -> Array:
    """B rows of x, repeated from the start if x is shorter."""
    return np.ascontiguousarray(x[np.arange(B) % len(x)])


def _training_case(data: Dataset, label: str, size: int, options: Options) -> TrainingCase:
    """An epoch in batches of `size` rows; at most STEPS of them, except for the workload's batch size."""
    n = len(data.x_train) if size == digits.TRAIN.batch_size else min(len(data.x_train), STEPS * size)
    train = dataclasses.replace(digits.TRAIN, batch_size=size, epochs=1)
    return TrainingCase(_network, data.x_train[:n], data.y_train[:n], train, options.threads, options.device, label)


def gpu_epochs(data: Dataset, label: str, options: Options) -> list[Case]:
    """Epochs of every batch size in every precision; for the workload's batch size also of many networks."""
    peers, default_size = make_training_peers(), digits.TRAIN.batch_size
    result: list[Case] = []
    for size in options.batches or BATCHES:
        train = dataclasses.replace(digits.TRAIN, batch_size=size, epochs=1)
        training = TrainingCase(_network, data.x_train, data.y_train, train, options.threads, options.device, label)
        kinds = {PIXELS: training} | ({FLOATS: with_floats(training)} if size in FLOAT_BATCHES else {})
        for kind, training_case in kinds.items():
            for job in epoch_jobs(f"epoch, batch {size}, {kind}", training_case):
                # At the other sizes torch's graph was slower than JAX on an H200, and each size takes long to compile.
                chosen = {"jax": peers["jax"]} if size != default_size else peers
                if size == default_size and job.precision == "fp32" and kind == PIXELS:
                    chosen = {**peers, "torch eager": torch_eager}
                result += training_cases("digits", [job], options, chosen)
                result += [together_case("digits", job, NETWORKS)] if size == default_size and kind == PIXELS else []
    return result


def _step_cases(kind: str, training: TrainingCase, options: Options) -> list[Case]:
    """Whole epochs through the public fit; the reported time is that of a step."""
    size = training.options.batch_size
    engines: dict[str, Callable[[], Ready]] = {ONCHIP: functools.partial(onchip_run, training)}
    if options.peers:
        engines |= torch_runs(training)
    return [
        Case("digits", f"step, batch {size}, {kind}", name, prepare, work=1, unit="steps/s", parts=training.steps,
             floor_ms=training.step_floor_ms, threads=options.threads,
             pace=EPOCH_PACE if size == digits.TRAIN.batch_size else STEPS_PACE)
        for name, prepare in engines.items()
    ]  # fmt: skip


def _accuracy_cases(data: Dataset, label: str, options: Options) -> list[Case]:
    """All seeds in one run; the reported time is that of one seed."""
    training = TrainingCase(_network, data.x_train, data.y_train, digits.TRAIN, options.threads, options.device, label)
    test = (data.x_test, data.y_test, SEEDS)
    engines: dict[str, Callable[[], Ready]] = {ONCHIP: functools.partial(onchip_accuracy, training, *test)}
    if options.peers and options.device == "cpu":
        engines["torch by hand"] = functools.partial(
            torch_accuracy, training, "torch by hand", torch_forms(training)["torch by hand"], *test
        )
    return [
        Case("digits", f"{digits.EPOCHS} epochs, {SEEDS} seeds", name, prepare, work=1, unit=ACCURACY, parts=SEEDS,
             floor_ms=training.floor_ms, threads=options.threads,
             pace=Pace(rounds=1, warm_up_s=0, min_runs=1, max_runs=1))
        for name, prepare in engines.items()
    ]  # fmt: skip
