"""Plan a network: apply the rewrites that pay, then find the cheapest cover of the result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from onchip.errors import DeviceError, PlanError
from onchip.network.graph import Network
from onchip.network.text import size_text
from onchip.plan.cover import cover
from onchip.plan.device import Device
from onchip.plan.kernel import Job, Kernel
from onchip.plan.plan import Plan, format_us
from onchip.plan.rewrites import ESTIMATED, narrow_values, rewrite

MAX_LAYERS = 1 << 14  # planning takes a second or two at this size
_MANY_ROWS = 1 << 40  # more than any job


def make_plan(
    net: Network, device: Device, kernels: Sequence[Kernel], job: Job | None = None, *, whole: bool = True
) -> Plan:
    """Rewrite the network, then cover it with kernel claims at the lowest cost. Computes no weight, touches no device.

    whole  a layer that no kernel claims is a PlanError; if False, the plan lists it without a kernel, with its floor
    """
    job = job or Job()
    if len(net.nodes) > MAX_LAYERS:
        got, expected = f"{len(net.nodes):,}", f"at most {MAX_LAYERS:,}"
        raise PlanError("the network has too many layers", got=got, expected=expected, hint="a network of fewer layers")
    _check_precision(job.precision, device, kernels)
    if net.state:  # a step of training: rewrites are made for weights that stay as they are
        return cover(net, device, kernels, job, (), whole)

    @functools.cache
    def without(*names: str) -> tuple[Network, tuple[str, ...]]:
        version, notes = rewrite(net, (*job.without, *names))
        if "narrow" not in names:
            version, more = narrow_values(version, job.precision)
            notes = (*notes, *more)
        return version, notes

    def plan_without(*names: str) -> Plan | PlanError:
        version, notes = without(*names)
        try:
            return cover(version, device, kernels, job, notes, whole)
        except PlanError as refused:
            return refused

    notes = without()[1]
    return _choose(plan_without, [name for name in (*ESTIMATED, "narrow") if notes and without(name)[1] != notes])


def _check_precision(precision: str, device: Device, kernels: Sequence[Kernel]) -> None:
    """Refuse a precision that the device or all of its kernels lack: every kernel would refuse every layer."""
    hint = f"precision {next(iter(device.flops))}"
    if precision not in device.flops:
        expected = ", ".join(device.flops)
        raise DeviceError(f"{device.name} does not compute in {precision}", got=precision, expected=expected, hint=hint)
    supported = {each for kernel in kernels if kernel.device_kind == device.kind for each in kernel.precisions}
    if supported and precision not in supported:
        expected = ", ".join(each for each in device.flops if each in supported)
        raise PlanError(
            f"no kernel of {device.name} computes in {precision}", got=precision, expected=expected, hint=hint
        )


def _choose(plan_without: Callable[..., Plan | PlanError], used: Sequence[str]) -> Plan:
    """The plan with the rewrites that pay: each in turn is left out if the plan is faster without it.

    used  the rewrites that can be estimated and that apply here
    """
    best, left_out = plan_without(), list[str]()
    answers: dict[str, tuple[bool, str]] = {}
    for name in used:
        other = plan_without(*left_out, name)
        if isinstance(best, PlanError):
            pays, why = isinstance(other, PlanError), best.what
        elif name in ("last", "narrow", "parallel"):  # the same work in another order or dtype: nothing to report
            pays, why = isinstance(other, PlanError) or best.estimate_us < other.estimate_us, ""
        else:
            pays, why = _pays(best, other, has_tables=name == "tables")
        if why and not (pays and isinstance(best, PlanError)):
            answers[name] = pays, why
        if not pays:
            best = other
            left_out.append(name)
    if isinstance(best, PlanError):
        refused = plan_without("tables") if "tables" in used else best
        raise refused if isinstance(refused, PlanError) else best
    return _with_reasons(best, answers)


def _with_reasons(plan: Plan, answers: dict[str, tuple[bool, str]]) -> Plan:
    """The plan, with why each rewrite was applied or left out."""
    lines = []
    for name, (pays, why) in answers.items():
        if name == "tables":
            plan = replace(plan, fold=f"{'' if pays else 'not '}folded: {why}")
        elif not pays:
            lines.append(f"left out {name}: {why}")
    return replace(plan, left_out=tuple(lines))


def _pays(full: Plan, other: Plan | PlanError, has_tables: bool) -> tuple[bool, str]:
    """Whether a rewrite lowers the job's total time, including that to build weights; and the rows it needs.

    It adds work once and saves work per row, so it pays off for enough rows.

    full, other  the plans with and without the rewrite
    has_tables   it derives tables: their whole build time counts. Other weights are repacked in any case: only the
                 flop to derive them counts, minus the time of a launch, as estimates are no more exact than that
    """
    if isinstance(other, PlanError):
        return True, other.what
    device, job = full.device, full.job
    needed = full.network.weight_bytes
    if 0 < device.memory_bytes // 2 < needed and needed > other.network.weight_bytes:  # 0: unknown
        share = f"{size_text(needed)} of the {size_text(device.memory_bytes)} that {device.name} has"
        return False, f"all weights would take {share}, more than half"
    flop = full.rewrite_flop - other.rewrite_flop
    used = {name for node in other.network.nodes for name in node.weights.values()}
    derived = {name for node in full.network.nodes for name in node.weights.values()} - used
    derived_bytes = full.stored_bytes(derived)
    build_us = max(0.0, full.build_us - other.build_us)
    counted_us = build_us if has_tables else max(0.0, flop / device.flops["fp32"] * 1e6 - device.launch_us)

    def gain_us(B: int) -> float:
        return other.estimate_at(B) - full.estimate_at(B) - counted_us

    what = "tables" if any(node.layer.has_tables for node in full.network.nodes) else "weights"
    cost = f"{what} of {size_text(derived_bytes)} take {flop:,} flop ({format_us(build_us)}) to build"
    most = max(job.batch, _MANY_ROWS)
    if gain_us(most) < 0:
        return False, f"{cost}, and the time per row would not drop" if flop else "the time per row would not drop"
    low, high = (0, job.batch) if gain_us(job.batch) >= 0 else (job.batch, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gain_us(middle) >= 0 else (middle, high)
    return high <= job.batch, f"{cost}, which pays off at {high:,} rows or more; this job has {job.batch:,}"
