"""Compile the kernels of a network into the cache ahead of its first use, such as when an image is built."""

from __future__ import annotations

from typing import cast

from onchip.kernels.cuda.common.program import Lowering
from onchip.network.graph import Network
from onchip.plan.device import KNOWN
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.runtime.cuda.nvrtc import compile_program
from onchip.runtime.engine import compile
from onchip.runtime.io.row_sources import random_inputs
from onchip.runtime.placement import plan_and_reason


def warm(net: Network, device: str = "auto", precision: str = "fp32", batch: int = 1) -> str:
    """Compile what calls with one row and with `batch` rows need; returns the device.

    device  "auto", "cpu" or "cuda" of this machine: the network also runs. Or a GPU to plan for, such as "h200": needs
            no GPU, and compiles all kernels but those that compute weights
    """
    if device.lower() in KNOWN:
        plan, name = plan_and_reason(net, device, Job(precision, batch))
        compile_kernels(plan, {1, batch})
        return name
    engine = compile(net, device, precision, batch_hint=batch)
    for B in sorted({1, batch}):
        engine(*(source.read(0, B) for source in random_inputs(net, B, seed=0)))
    return engine.chosen


def compile_kernels(plan: Plan, batches: set[int]) -> int:
    """Compile every CUDA kernel that the plan launches for these batches; returns how many there are."""
    claims = [group.claim for group in plan.groups if group.claim.kernel and not group.claim.is_view]
    lowerings = [cast(Lowering, claim.facts) for claim in claims]
    programs = {launch.program for lowering in lowerings for B in batches for launch in lowering.at(B).launches}
    for program in programs:
        compile_program(program, plan.device.arch)
    return len(programs)
