"""Why a group is estimated at more than twice its floor: one line, from its claim and the refusals at its node."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, by_reason

SLOW = 2.0  # times the floor


def slow_because(claim: Claim, device: Device, job: Job, refusals: Sequence[Refusal]) -> str:
    """What accounts for most of the time above the floor; "" if the estimate is near it. GPU kernels only."""
    cost, args = claim.cost, (device, job.precision, job.batch)
    floor_us, estimate_us = cost.floor_us(*args), cost.estimate_us(*args)
    if device.kind != "cuda" or estimate_us <= SLOW * floor_us:
        return ""
    launches_us = cost.launches * (device.graph_launch_us or device.launch_us)
    if launches_us >= estimate_us / 2:
        return f"{'the launch takes' if cost.launches == 1 else 'launches take'} {launches_us / estimate_us:.0%} of it"
    if cost.why_slow:
        return cost.why_slow
    compute = cost.flop(job.batch) / (cost.rate * device.flops[cost.precision or job.precision])
    memory = cost.nbytes(job.batch) / device.bandwidth
    transposed = cost.transposed_bytes * cost.rows(job.batch) / device.bandwidth
    if cost.min_us >= (max(compute, memory) + transposed) * 1e6:
        return "memory latency: each block loads and stores tile after tile"
    if transposed > max(compute, memory):
        return "a pass that transposes values"
    if memory > compute:
        return "data comes from memory; the floor assumes the cache"
    others = [f"{r.kernel} {r.why}" for r in by_reason(refusals) if claim.nodes and r.node == claim.nodes[0]]
    cores = "CUDA cores" if (cost.precision or job.precision) == "fp32" else "tensor cores"
    reasons = f"; {'; '.join(others)}" if others and cost.rate < 1 / SLOW else ""
    return f"{cores} at {cost.rate:.2g} of their sustained rate{reasons}"
