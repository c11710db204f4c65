"""digits: training steps and inference of 784-320-160-10, on MNIST where it is, else on random pixels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from onchip.bench.frame import ONCHIP, Case, Ready
from onchip.bench.inference import Rows, inference_cases
from onchip.bench.options import Options
from onchip.bench.peers import subject_of
from onchip.bench.results import ACCURACY
from onchip.bench.training import Lesson, onchip_accuracy, onchip_epoch, torch_accuracy, torch_epoch
from onchip.ladders.measure import Pace
from onchip.plan.kernel import Job
from onchip.runtime.engine import plan
from onchip.spec.network import Network
from onchip.spec.recipe import Array
from onchip.workloads import digits

TRAIN_ROWS, TEST_ROWS, PIXELS = 60_000, 10_000, 784
SEEDS = 3
EPOCH_PACE = Pace(rounds=5, block_s=2.0)  # an epoch takes a second or two: more rounds, so that there are ten samples


@functools.cache
def _data() -> digits.Dataset:
    """MNIST if it is here, else random data of its shape: the same work, nothing to learn."""
    return digits.load_data("mnist") if digits.find_mnist() is not None else random_data(TRAIN_ROWS, TEST_ROWS)


def random_data(train: int, test: int) -> digits.Dataset:
    rng = np.random.default_rng(0)
    x = rng.random((train + test, PIXELS), dtype=np.float32)
    y = rng.integers(0, digits.CLASSES, train + test)
    return digits.Dataset("random data", "made", 28, x[:train], y[:train], x[train:], y[train:])


def cases(options: Options, data: digits.Dataset | None = None) -> list[Case]:
    """`data` is for tests; a user's is found."""
    if options.accuracy and data is None:
        digits.load_data("mnist")  # accuracy on random pixels means nothing: say now that MNIST is missing
    data = data or _data()
    label = "MNIST" if data.name == "mnist" else data.name
    lesson = Lesson(_network, data.x_train, data.y_train, data.x_test, data.y_test, digits.LR, digits.BATCH_SIZE,
                    options.threads, options.device)  # fmt: skip
    made = _step_cases(lesson, label, options)
    jobs = [
        Rows(f"infer, {B} rows", B, functools.partial(_rows, data.x_test, B), label)
        for B in options.rows or (len(data.x_test),)
    ]
    made += inference_cases("digits", subject_of(_network(0)), jobs, options)
    if options.accuracy:
        made += _accuracy_cases(lesson, label, options)
    return made


def _network(seed: int) -> Network:
    return digits.network(PIXELS, seed=seed)


def _rows(x: Array, B: int) -> Array:
    """B rows of x, again from the front where there are not so many."""
    return np.ascontiguousarray(x[np.arange(B) % len(x)])


def _step_cases(lesson: Lesson, label: str, options: Options) -> list[Case]:
    """Whole epochs through the public fit; the time told is that of a step."""
    engines: dict[str, Callable[[], Ready]] = {ONCHIP: functools.partial(onchip_epoch, lesson)}
    if options.peers:
        engines["torch eager"] = functools.partial(torch_epoch, lesson, compiled=False)
        engines["torch.compile"] = functools.partial(torch_epoch, lesson, compiled=True)
    return [
        Case("digits", f"step, batch {lesson.batch_size}", name, _labelled(prepare, label), work=1, unit="steps/s",
             parts=lesson.steps, floor_ms=_floor_ms(lesson), threads=options.threads, pace=EPOCH_PACE)
        for name, prepare in engines.items()
    ]  # fmt: skip


def _accuracy_cases(lesson: Lesson, label: str, options: Options) -> list[Case]:
    engines: dict[str, Callable[[], Ready]] = {ONCHIP: functools.partial(onchip_accuracy, lesson, digits.EPOCHS)}
    if options.peers:
        engines["torch eager"] = functools.partial(torch_accuracy, lesson, digits.EPOCHS)
    pace = Pace(rounds=SEEDS, warm_up_s=0, min_runs=1, max_runs=1)
    return [
        Case("digits", f"{digits.EPOCHS} epochs, {SEEDS} seeds", name, _labelled(prepare, label), work=1, unit=ACCURACY,
             floor_ms=_floor_ms(lesson) * lesson.steps * digits.EPOCHS, threads=options.threads, pace=pace)
        for name, prepare in engines.items()
    ]  # fmt: skip


def _floor_ms(lesson: Lesson) -> float:
    return plan(_network(0), lesson.device, Job(batch=lesson.batch_size, loss="cross_entropy")).floor_us / 1e3


def _labelled(prepare: Callable[[], Ready], label: str) -> Callable[[], Ready]:
    """The data's name in front of the setting: it belongs into the row."""

    def labelled() -> Ready:
        ready = prepare()
        return Ready(ready.run, ready.check, ", ".join(filter(None, [label, ready.setting])), ready.score)

    return labelled
