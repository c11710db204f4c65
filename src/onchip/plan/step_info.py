"""What a plan does with B rows, one line per step: for a profiler to compare with its measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onchip.plan.plan import Plan


@dataclass(frozen=True)
class StepInfo:
    """A group of layers that one kernel runs, and its work on B rows."""

    label: str  # the kernel with its template arguments, as the plan prints it
    layers: tuple[str, ...]
    nbytes: int  # moved: rows, and the weights once
    flop: int
    floor_us: float
    estimate_us: float


def steps_of(plan: Plan, B: int) -> tuple[StepInfo, ...]:
    """The steps in execution order."""
    infos = []
    for group in plan.groups:
        label, cost, args = group.claim.label, group.claim.cost, (plan.device, plan.job.precision, B)
        times = cost.floor_us(*args), cost.estimate_us(*args)
        infos.append(StepInfo(label, plan.layers_of(group), cost.nbytes(B), cost.flop(B), *times))
    return tuple(infos)


def steps_of_chunks(plan: Plan, chunks: Sequence[int]) -> tuple[StepInfo, ...]:
    """The steps, each with its work on all chunks of a batch.

    chunks  rows of each
    """
    counts = Counter(chunks)
    infos = []
    for steps in zip(*(steps_of(plan, rows) for rows in counts), strict=True):
        counted = list(zip(steps, counts.values(), strict=True))
        infos.append(replace(
            steps[0], nbytes=sum(step.nbytes * count for step, count in counted),
            flop=sum(step.flop * count for step, count in counted),
            floor_us=sum(step.floor_us * count for step, count in counted),
            estimate_us=sum(step.estimate_us * count for step, count in counted),
        ))  # fmt: skip
    return tuple(infos)
