"""What a plan does with B rows, one line per step: for a profiler to compare with its measurements."""

from __future__ import annotations

from dataclasses import dataclass

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
    for claim in (group.claim for group in plan.groups):
        cost, args = claim.cost, (plan.device, plan.job.precision, B)
        times = cost.floor_us(*args), cost.estimate_us(*args)
        infos.append(StepInfo(claim.label, claim.nodes, cost.nbytes(B), cost.flop(B), *times))
    return tuple(infos)
