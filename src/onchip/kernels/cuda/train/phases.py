"""Host side of train/phases.cuh: a persistent kernel that counts clocks per phase, and the times of its phases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.common.arguments import State, Struct
from onchip.kernels.cuda.common.program import Instance, KernelLaunch
from onchip.kernels.training import StepPhase
from onchip.network.recipe import Array

SOURCE = Path(__file__).parent / "phases.cuh"
PHASES = (  # Phase of train/phases.cuh, after OUTSIDE
    "load weights", "load rows", "forward", "wait for activations", "outputs and loss", "wait for gradients",
    "gradients", "wait for other group", "wait for weights", "update", "store weights",
)  # fmt: skip
_POINTER_BYTES = 8


def with_phase_clocks(launch: KernelLaunch) -> KernelLaunch:
    """The launch of a persistent kernel, with the same results. It also adds to State("phase_clocks"), (blocks,
    1 + len(PHASES)) uint32, where block (x, y) of the grid is y * grid[0] + x."""
    (args,) = launch.arguments
    assert isinstance(args, Struct)
    pointers = ((0, State("phase_clocks")), *((_POINTER_BYTES + at, memory) for at, memory in args.pointers))
    program = replace(launch.program, options=(*launch.program.options, "-DPHASE_CLOCKS"))
    return replace(launch, program=program, arguments=(Struct(bytes(_POINTER_BYTES) + args.data, pointers),))


def counting_instance(instance: Instance) -> Instance:
    """The instance with phase clocks."""
    return Instance(f"{instance.name}, phase clocks", lambda device: with_phase_clocks(instance.launch(device)))


def step_phases(clocks: Array, us: float) -> tuple[StepPhase, ...]:
    """The phases of a step that takes `us`, from the phase clocks of a launch.

    A block's share of clocks in a phase is its share of the time. Blocks of networks that idled have none.
    """
    counted = clocks[clocks.any(axis=1), 1:].astype(np.float64)
    times = us * counted / counted.sum(axis=1, keepdims=True)
    phases = zip(PHASES, times.mean(axis=0).tolist(), times.max(axis=0).tolist(), strict=True)
    return tuple(StepPhase(name, mean, most) for name, mean, most in phases if most > 0)
