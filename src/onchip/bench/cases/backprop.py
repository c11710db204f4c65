"""backprop: epochs of full-batch training of 784-56-28-10, on MNIST if available, else on random patterns.

Patterns are pixels, which a GPU keeps as bytes, and the same ones standardised.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from onchip.bench.cases.gpu_training import epoch_jobs, training_cases
from onchip.bench.cases.training import FLOATS, PIXELS, TrainingCase, onchip_run, with_floats
from onchip.bench.frame import ONCHIP, Case, Ready
from onchip.bench.options import Options
from onchip.bench.peers.gpu_training import make_training_peers
from onchip.bench.peers.torch_training import torch_runs
from onchip.measure.pace import Pace
from onchip.network.graph import Network
from onchip.workloads import backprop

EPOCHS = 3  # per run; the reported time is that of one
PACE = Pace(rounds=6, block_s=1.0)  # a run takes about a second: more blocks, for a dozen samples


def cases(options: Options) -> list[Case]:
    made: list[Case] = []
    peers = make_training_peers()
    for n in options.rows or (backprop.PATTERNS,):
        pixels = make_lesson(n, options)
        for kind, lesson in ((PIXELS, pixels), (FLOATS, with_floats(pixels))):
            case = f"epoch of {n} patterns, {kind}"
            if options.device != "cpu":
                made += training_cases("backprop", epoch_jobs(case, lesson), options, peers)
            else:
                made += _cpu_cases(case, lesson, options)
    return made


def _cpu_cases(case: str, lesson: TrainingCase, options: Options) -> list[Case]:
    engines: dict[str, Callable[[], Ready]] = {ONCHIP: functools.partial(onchip_run, lesson)}
    if options.peers:
        engines |= torch_runs(lesson)
    return [
        Case("backprop", case, name, prepare, work=1, unit="epochs/s", parts=lesson.steps,
             floor_ms=lesson.step_floor_ms, threads=options.threads, pace=PACE)
        for name, prepare in engines.items()
    ]  # fmt: skip


def make_lesson(n: int, options: Options) -> TrainingCase:
    patterns, data = backprop.patterns(n)
    train = dataclasses.replace(backprop.TRAIN, batch_size=n, epochs=EPOCHS)
    return TrainingCase(_network, patterns.x, patterns.y, train, options.threads, options.device, data)


def _network(seed: int) -> Network:
    return backprop.network(seed=seed)
