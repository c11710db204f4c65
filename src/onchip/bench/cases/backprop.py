"""backprop: epochs of full-batch training of 784-56-28-10, on MNIST if available, else on random patterns.

Two cases each: with pixels, which a GPU stores as bytes, and with the same pixels standardised.
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
    result: list[Case] = []
    peers = make_training_peers()
    for n in options.rows or (backprop.PATTERNS,):
        pixels = training_case(n, options)
        for kind, job in ((PIXELS, pixels), (FLOATS, with_floats(pixels))):
            case = f"epoch of {n} patterns, {kind}"
            if options.device != "cpu":
                result += training_cases("backprop", epoch_jobs(case, job), options, peers)
            else:
                result += _cpu_cases(case, job, options)
    return result


def _cpu_cases(case: str, job: TrainingCase, options: Options) -> list[Case]:
    engines: dict[str, Callable[[], Ready]] = {ONCHIP: functools.partial(onchip_run, job)}
    if options.peers:
        engines |= torch_runs(job)
    return [
        Case("backprop", case, name, prepare, work=1, unit="epochs/s", parts=job.steps,
             floor_ms=job.step_floor_ms, threads=options.threads, pace=PACE)
        for name, prepare in engines.items()
    ]  # fmt: skip


def training_case(n: int, options: Options) -> TrainingCase:
    patterns, data = backprop.patterns(n)
    train = dataclasses.replace(backprop.TRAIN, batch_size=n, epochs=EPOCHS)
    return TrainingCase(_network, patterns.x, patterns.y, train, options.threads, options.device, data)


def _network(seed: int) -> Network:
    return backprop.network(seed=seed)
