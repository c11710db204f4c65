"""Cases of training on a GPU: the time of an epoch in steady state, including shuffling.

onchip's time is that of an epoch of the public fit, from the second on. Peers keep rows and weights on the GPU and use
their fastest known form (peers/gpu_training.py). Every engine is checked by the loss curve of the first epoch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onchip.bench.cases.inference import PEER_SLACK
from onchip.bench.cases.training import TrainingCase
from onchip.bench.frame import ONCHIP, Case, Ready, UnavailableError
from onchip.bench.gpu_clock import HostClock
from onchip.bench.options import Options
from onchip.bench.peers.cpu import explained
from onchip.bench.stage import TorchStage, make_stage, repeat
from onchip.errors import DeviceError, KernelError, PlanError
from onchip.measure.pace import Pace
from onchip.measure.truth import TrainingTruth, Verdict
from onchip.network.recipe import Array
from onchip.train.loop import fit
from onchip.train.many import Run, fit_runs
from onchip.train.training_run import FitResult, Progress

PRECISIONS = ("fp32", "tf32", "bf16")
PEER_PRECISIONS = ("fp32", "tf32")  # peers keep float32 weights and round only for gemms, so they have no others
# What float64 computes in seconds: the first steps of an epoch, or with full batches the first epochs.
VERIFIED_STEPS, VERIFIED_ROWS, VERIFIED_EPOCHS = 256, 32_768, 3
NAIVE_RUNS = 8  # in float32, for the allowed error; with full batches one: three steps amplify nothing
# Added to twice the error of a naive float32 run: another reduction order; for gemms with 11 or 8 bits, their effect
# over 256 steps of 16 rows (a simulation was off by 0.012 on MNIST).
ROUNDING = {"fp32": 2**-17, "tf32": 2**-6, "bf16": 2**-5}
SAMPLE_S, MIN_EPOCHS, MAX_EPOCHS = 0.3, 4, 1_000  # per sample; onchip's first epoch is not timed
PACE = Pace(rounds=3, block_s=0, warm_up_s=0, pause_s=0, min_runs=1, max_runs=1)  # a sample is many epochs


@dataclass(frozen=True, eq=False)
class EpochJob:
    """A case: a training job whose epochs are timed, in one precision."""

    case: str
    training: TrainingCase
    truth: Callable[[], TrainingTruth]  # of its first steps; shared by all precisions

    @property
    def precision(self) -> str:
        return self.training.options.precision

    def verify(self, losses: Array, slack: float = 1.0) -> Verdict:
        """losses: of the first steps, or more."""
        verdict = self.truth().verify_losses(losses)
        return Verdict(verdict.error, slack * (verdict.allowed + ROUNDING[self.precision]))


@dataclass(frozen=True, eq=False)
class PeerRun:
    """A peer's training run."""

    run: Callable[[], object]  # enqueues some epochs on the GPU
    epochs: int  # their number
    wait: Callable[[], object]
    first_losses: Callable[[], Array]  # of the first steps from the initial weights, in fit's order
    setting: str = ""
    gpu_bytes: int = 0  # memory in use; 0: unknown


Build = Callable[[EpochJob, TorchStage], PeerRun]


def epoch_jobs(case: str, training: TrainingCase, precisions: Sequence[str] = PRECISIONS) -> list[EpochJob]:
    """One job in several precisions."""
    truth = functools.cache(functools.partial(_truth, training))
    jobs = []
    for precision in precisions:
        options = dataclasses.replace(training.options, precision=precision)
        jobs.append(EpochJob(case, dataclasses.replace(training, options=options), truth))
    return jobs


def _truth(training: TrainingCase) -> TrainingTruth:
    size = training.options.batch_size
    few = dataclasses.replace(training, options=dataclasses.replace(training.options, epochs=VERIFIED_EPOCHS))
    full = size >= len(training.x)
    steps = VERIFIED_EPOCHS if full else min(VERIFIED_STEPS, -(-VERIFIED_ROWS // size), -(-len(training.x) // size))
    batches, runs = few.batches(0)[:steps], 1 if full else NAIVE_RUNS
    return TrainingTruth(training.net(0), training.x, training.y, batches, training.options, runs)


def training_cases(
    workload: str, jobs: Sequence[EpochJob], options: Options, peers: Mapping[str, Build] | None = None
) -> list[Case]:
    """onchip and, on request, every peer, job by job.

    peers  engine -> its builder
    """
    index = int(options.device.partition(":")[2] or 0)
    cases = []
    for job in jobs:
        engines: dict[str, Callable[[], Ready]] = {ONCHIP: functools.partial(ours, job)}
        if options.peers and job.precision in PEER_PRECISIONS:
            engines |= {name: functools.partial(peer, job, name, build, index) for name, build in (peers or {}).items()}
        floor_ms = _floor_ms(job.training)
        cases += [
            Case(workload, job.case, name, prepare, work=1, unit="epochs/s", precision=job.precision,
                 floor_ms=floor_ms, pace=PACE)
            for name, prepare in engines.items()
        ]  # fmt: skip
    return cases


def _floor_ms(training: TrainingCase) -> float | None:
    """Of an epoch."""
    try:
        return training.floor_ms() / training.options.epochs
    except (DeviceError, PlanError):  # onchip raises it when it is prepared
        return None


# -- onchip ------------------------------------------------------------------------------------------------


class SteadyFit:
    """A fit of `epochs` epochs; a sample is the time of one of them, from the second on, by the host's clock."""

    def __init__(self, training: TrainingCase, epochs: int) -> None:
        self._training, self._epochs = training, epochs

    def __call__(self) -> float:
        return self.sample_ms()

    def sample_ms(self) -> float:
        done: list[tuple[float, float]] = []  # (epochs so far, fractional; time)

        def on_progress(progress: Progress) -> None:
            done.append((progress.epoch - 1 + progress.step / progress.steps, time.perf_counter()))

        run_fit(self._training, self._epochs, on_progress)
        return steady_ms(done)


def steady_ms(done: Sequence[tuple[float, float]]) -> float:
    """The time of an epoch in steady state, from pairs (epochs done, seconds) in order.

    Several epochs may complete at once and be reported back to back, so the clock starts at the longest wait.
    """
    waits = {
        now: later[1] - now[1] for now, later in itertools.pairwise(done) if 1 <= now[0] <= max(1, done[-1][0] / 2)
    }
    begin, end = max(waits, key=lambda stamp: waits[stamp]), done[-1]
    return (end[1] - begin[1]) * 1e3 / (end[0] - begin[0])


def run_fit(training: TrainingCase, epochs: int, on_progress: Callable[[Progress], None] | None = None) -> FitResult:
    options: dict[str, Any] = {**dataclasses.asdict(training.options), "epochs": epochs}
    return fit(training.net(0), training.x, training.y, device=training.device, on_progress=on_progress, **options)


def ours(job: EpochJob) -> Ready:
    full = job.training.options.batch_size >= len(job.training.x)
    try:
        first = run_fit(job.training, max(2, VERIFIED_EPOCHS if full else 1))
    except (DeviceError, PlanError) as refused:
        raise UnavailableError(f"no kernel for {job.case}, {job.precision}: {refused.what}") from None
    epochs = max(MIN_EPOCHS, epochs_of(min(epoch.seconds for epoch in first.history)))
    kernel = ", ".join(dict.fromkeys(group.claim.label for group in first.plan.groups))
    setting = job.training.setting(f"{epochs} epochs of fit", kernel)
    clock = SteadyFit(job.training, epochs)
    return Ready(clock, lambda: job.verify(first.losses), setting, extra=memory(first.gpu_bytes))


# -- many networks -----------------------------------------------------------------------------------------


def together_case(workload: str, job: EpochJob, count: int) -> Case:
    """An epoch of `count` networks trained together; the time is that of all of them."""
    floor_ms = _floor_ms(job.training)
    return Case(
        workload, f"{job.case}, {count} networks", ONCHIP, functools.partial(ours_together, job, count), work=count,
        unit="epochs/s", precision=job.precision, floor_ms=floor_ms and count * floor_ms, pace=PACE,
    )  # fmt: skip


class SteadyRuns:
    """`count` fits trained together; a sample is the time of an epoch of all of them, from the second on."""

    def __init__(self, training: TrainingCase, count: int, epochs: int) -> None:
        self._training, self._count, self._epochs = training, count, epochs

    def __call__(self) -> float:
        return self.sample_ms()

    def sample_ms(self) -> float:
        results = run_together(self._training, self._count, self._epochs)
        return max(1e3 * sum(epoch.seconds for epoch in r.history[1:]) / (len(r.history) - 1) for r in results)


def run_together(training: TrainingCase, count: int, epochs: int) -> list[FitResult]:
    options = dataclasses.replace(training.options, epochs=epochs)
    runs = [Run(training.net(seed), dataclasses.replace(options, seed=seed)) for seed in range(count)]
    results = []
    for result in fit_runs(runs, training.x, training.y, device=training.device):
        if isinstance(result, KernelError):  # the run diverged
            raise result
        results.append(result)
    return results


def ours_together(job: EpochJob, count: int) -> Ready:
    try:
        first = run_together(job.training, count, 2)
    except (DeviceError, PlanError) as refused:
        raise UnavailableError(f"no kernel for {job.case}, {job.precision}: {refused.what}") from None
    epochs = max(MIN_EPOCHS, epochs_of(min(epoch.seconds for epoch in first[0].history)))
    setting = job.training.setting(f"{epochs} epochs of fit_runs", first[0].plan.groups[0].claim.label)
    clock, gpu_bytes = SteadyRuns(job.training, count, epochs), sum(result.gpu_bytes for result in first)
    return Ready(clock, lambda: job.verify(first[0].losses), setting, extra=memory(gpu_bytes))


def epochs_of(seconds: float) -> int:
    """Epochs per sample, if one takes `seconds`."""
    return max(1, min(MAX_EPOCHS, math.ceil(SAMPLE_S / max(seconds, 1e-9))))


# -- peers -------------------------------------------------------------------------------------------------


def peer(job: EpochJob, name: str, build: Build, index: int) -> Ready:
    stage = make_stage(index)
    if not isinstance(stage, TorchStage):
        raise UnavailableError("torch for CUDA is not installed")
    with explained(name):
        peer_run = build(job, stage)
        losses = peer_run.first_losses()
        once = HostClock(peer_run.run, lambda _: peer_run.wait(), 1)
        calls = epochs_of(min(once.sample_ms() for _ in range(2)) / 1e3)
    run = functools.partial(repeat, peer_run.run, calls)
    setting = job.training.setting(f"{calls * peer_run.epochs} epochs in a row", peer_run.setting)
    clock = HostClock(run, lambda _: peer_run.wait(), calls * peer_run.epochs)
    return Ready(clock, lambda: job.verify(losses, PEER_SLACK), setting, extra=memory(peer_run.gpu_bytes))


def memory(nbytes: int) -> dict[str, float]:
    """The memory as a row's extra property."""
    return {"GPU MB": round(nbytes / 1e6, 1)} if nbytes else {}
