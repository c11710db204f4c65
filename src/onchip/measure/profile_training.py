"""Where the time of a training goes: its phases, its steps and epochs, and the estimate beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from onchip.kernels.training import LaunchTime
from onchip.network.text import fitted_columns, plural
from onchip.plan.plan import format_us
from onchip.train.recording import TrainingRecorder

WRONG = 1.5  # an estimate is reported if it is off by more: estimates choose the kernels
_SHOWN = 5e-4  # share of the run from which on a phase has a line


@dataclass(frozen=True)
class PhaseTime:
    """A phase over all runs, on the host's clock."""

    name: str
    total_us: float
    share: float  # of the runs' time


@dataclass(frozen=True)
class TrainingProfile:
    """Runs of the same network with the same kernel, on the same device."""

    network: str
    chosen: str  # the device, and why
    kernel: str  # that runs the whole step, or how many groups of layers the step has
    batch: int
    networks: int  # trained
    runs: int  # networks that share launches are one run
    epochs: int  # of all runs, as are the steps
    steps: int
    run_us: float  # time of all runs; those in parallel add up
    busy: float  # share of it in which steps ran on the device
    step_us: float  # mean; of the networks that share launches
    step_p95_us: float  # of the means of chunks of steps, as the clock is not read at every step
    epoch_us: float  # mean time of the steps of a whole epoch; 0 without one
    epoch_p95_us: float
    estimate_us: float  # of a step, by the plan
    is_comparable: bool  # to the estimate: each run had the device for itself, and trained one network
    phases: tuple[PhaseTime, ...]  # those with the most time first
    launches: tuple[LaunchTime, ...] = ()  # of a step, on a GPU one at a time; of the first run
    is_by_layers: bool = False  # no kernel runs the whole step; its launches are not timed

    @property
    def text(self) -> str:
        return self.fitted(1 << 30)

    def fitted(self, width: int) -> str:
        """The table of phases, and the times of steps, in lines of at most `width` characters."""
        head = f"training {self.network} on {self.chosen}: {plural(self.networks, 'network')}, "
        lines = [
            head + f"{plural(self.epochs, 'epoch')}, {plural(self.steps, 'step')}, batch {self.batch:,}, {self.kernel}"
        ]
        other = self.run_us - sum(phase.total_us for phase in self.phases)
        phases = [*self.phases, PhaseTime("other", other, other / self.run_us if self.run_us else 0.0)]
        rows = [[p.name, format_us(p.total_us), f"{p.share:.1%}"] for p in phases if p.share >= _SHOWN]
        lines.append(fitted_columns(["phase", "total", "share"], rows, width, right=(1, 2)))
        if self.steps:
            epoch = f"; an epoch's steps {format_us(self.epoch_us)}, p95 {format_us(self.epoch_p95_us)}"
            lines += [
                f"a step takes {format_us(self.step_us)}, p95 {format_us(self.step_p95_us)}"
                + (epoch if self.epoch_us else ""),
                f"steps run for {self.busy:.0%} of {format_us(self.run_us)}; estimate {format_us(self.estimate_us)} "
                "per step",
            ]  # fmt: skip
        on_gpu = self.chosen.startswith("cuda")
        if on_gpu and self.launches:
            whole = sum(launch.us for launch in self.launches) or 1.0
            head_of_step = ["kernel", "launches per step", "time per step", "share", "estimate"]
            cells = [
                [e.kernel, f"{e.count:.3g}", format_us(e.us), f"{e.us / whole:.1%}",
                 format_us(e.estimate_us) if self.is_comparable else ""]
                for e in self.launches
            ]  # fmt: skip
            lines.append(fitted_columns(head_of_step, cells, width, right=(1, 2, 3, 4)))
        elif on_gpu and not self.is_by_layers:
            lines.append("the launches of a step were not timed: no memory for a copy of the state")
        for launch in self.launches:
            if launch.phases:
                lines.append(_phase_table(launch, "block" if on_gpu else "thread", width))
            if launch.profiled_us:
                longer = launch.profiled_us / max(launch.us, 1e-9) - 1
                lines.append(f"phases are of a further launch that counts clocks: {longer:+.1%} time per step")
            if launch.threads:
                used, mean = ", ".join(f"{share:.0%}" for share in launch.threads), np.mean(launch.threads)
                busiest = f"busiest: {max(launch.threads) / mean:.2f}x the mean"
                lines.append(f"time in tasks per thread, of the steps' time: {used}; {busiest}")
        return "\n".join(lines + self._wrong_estimates())

    def _wrong_estimates(self) -> list[str]:
        """A line for the step, and for each of several kernels, whose estimate is off."""
        if not self.is_comparable:
            return []
        times = [(f"a step of {self.kernel}", self.step_us, self.estimate_us)]
        if len(self.launches) > 1:
            times += [(launch.kernel, launch.us, launch.estimate_us) for launch in self.launches]
        ratios = [(what, us / max(estimate, 1e-9)) for what, us, estimate in times if us > 1]
        wrong = [(what, ratio) for what, ratio in ratios if not 1 / WRONG < ratio < WRONG]
        return [f"estimate: {what} takes {ratio:.1f}x its estimate" for what, ratio in wrong]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _phase_table(launch: LaunchTime, worker: str, width: int) -> str:
    """The phases of a step inside a kernel, in the order in which they run."""
    whole = sum(phase.us for phase in launch.phases) or 1.0
    cells = [[p.name, format_us(p.us), f"{p.us / whole:.1%}", format_us(p.most_us)] for p in launch.phases]
    head = [f"phase in {launch.kernel}", "time per step", "share", f"longest {worker}"]
    return fitted_columns(head, cells, width, right=(1, 2, 3))


def summarise_trainings(recorded: Sequence[TrainingRecorder]) -> tuple[TrainingProfile, ...]:
    """One profile per network, device, kernel and batch; the runs must have begun to train."""
    groups: dict[tuple[str, ...], list[TrainingRecorder]] = {}
    for run in recorded:
        plan = run.plan
        if plan is not None:
            how = plan.whole_step and plan.whole_step.how
            key = run.network, run.chosen, str(plan.job), str(how), *(group.claim.label for group in plan.groups)
            groups.setdefault(key, []).append(run)
    return tuple(_summarise(runs) for runs in groups.values())


def _summarise(runs: Sequence[TrainingRecorder]) -> TrainingProfile:
    plan = runs[0].plan
    assert plan is not None
    run_ns, step_ns = sum(run.run_ns for run in runs), sum(run.step_ns for run in runs)
    steps, totals, epochs_us = sum(run.steps for run in runs), dict[str, int](), list[float]()
    for run in runs:
        epochs_us += _epoch_times(run)
        for name, ns in run.phase_ns.items():
            totals[name] = totals.get(name, 0) + ns
    chunks_us = [(span.end_ns - span.begin_ns) / 1e3 / span.steps for run in runs for span in run.spans]
    is_by_layers = plan.whole_step is None
    labels = [group.claim.label for group in plan.groups]
    kernel = f"{plural(len(labels), 'group')} of layers" if is_by_layers else ", ".join(labels)
    phases = [PhaseTime(name, ns / 1e3, ns / max(1, run_ns)) for name, ns in totals.items()]
    return TrainingProfile(
        runs[0].network, runs[0].chosen, kernel, plan.job.batch,
        sum(run.networks for run in runs), len(runs), sum(run.epochs for run in runs), steps, run_ns / 1e3,
        step_ns / max(1, run_ns), step_ns / 1e3 / max(1, steps), _p95(chunks_us),
        sum(epochs_us) / max(1, len(epochs_us)), _p95(epochs_us), plan.estimate_us,
        all(run.is_alone and run.networks == 1 for run in runs), tuple(sorted(phases, key=lambda p: -p.total_us)),
        tuple(sorted(runs[0].launches or (), key=lambda launch: -launch.us)), is_by_layers,
    )  # fmt: skip


def _epoch_times(run: TrainingRecorder) -> list[float]:
    """Microseconds of the steps of each whole epoch."""
    times, steps = dict[int, float](), dict[int, int]()
    for span in run.spans:
        times[span.epoch] = times.get(span.epoch, 0.0) + (span.end_ns - span.begin_ns) / 1e3
        steps[span.epoch] = steps.get(span.epoch, 0) + span.steps
    return [us for epoch, us in times.items() if steps[epoch] >= run.steps_per_epoch]


def _p95(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95)) if values else 0.0
