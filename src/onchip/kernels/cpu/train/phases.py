"""The time of each phase of a training step, per thread: every RECORD_EVERYth step, for a profile.

The compiled code adds to `times`, the address of (threads, SLOTS) int64. At address 0 it reads no clock.
"""

from __future__ import annotations

import numpy as np

from onchip.kernels.cpu.compiler.jit import compiled, ints_at
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.threading.atomics import nanoseconds
from onchip.kernels.training import StepPhase
from onchip.network.recipe import Array

RECORD_EVERY = 11  # so that the clocks take a small share; coprime to most numbers of steps per epoch
_FIRST = 2  # the first step that is recorded: the one before it touches its memory for the first time

# Slots: nanoseconds of each thread's tasks, in the loop over rows and in the one over weights;
FORWARD, LOSS, BACKWARD, BLOCK_GRADIENTS, GRADIENTS, ADD_BLOCKS, NORM, UPDATE = range(8)
# of the calling thread: both loops, and the steps; then how many steps there were.
ROWS_LOOP, WEIGHTS_LOOP, STEP, _STEPS = range(8, 12)
SLOTS = 16  # 128 bytes: no false sharing
_ROWS, _WEIGHTS = slice(FORWARD, GRADIENTS), slice(GRADIENTS, ROWS_LOOP)
_NAMES = ("forward", "loss", "backward", "gradients", "gradients", "add blocks", "norm", "update")


def new_times(threads: int) -> Array:
    return aligned_zeros(threads * SLOTS, np.int64).reshape(threads, SLOTS)


@compiled(inline=True)
def times_of_step(times: int) -> int:
    """`times` if the step that begins is recorded, else 0."""
    if times == 0:
        return 0
    slots = ints_at(times, SLOTS)
    slots[_STEPS] += 1
    return times if slots[_STEPS] % RECORD_EVERY == _FIRST else 0


@compiled(inline=True)
def clock(times: int) -> int:
    """Now; 0 without times."""
    return nanoseconds() if times != 0 else 0


@compiled(inline=True)
def lap(times: int, worker: int, slot: int, begin: int) -> int:
    """Add the time since `begin` to one of the worker's slots; returns now."""
    if times == 0:
        return 0
    now = nanoseconds()
    ints_at(times + worker * SLOTS * 8, SLOTS)[slot] += now - begin
    return now  # type: ignore[no-any-return]


def step_phases(times: Array) -> tuple[float, tuple[StepPhase, ...], tuple[float, ...]]:
    """The time of a step in us, its phases, and the share of it in which each thread ran tasks.

    A thread that runs no task waits. The phases add up to the step.
    """
    whole = int(times[0, STEP])
    if not whole:  # no step was recorded, or the system has no clock
        return 0.0, (), ()
    steps = (int(times[0, _STEPS]) + RECORD_EVERY - _FIRST) // RECORD_EVERY
    found = []
    for loop, slots, wall in (("rows", _ROWS, ROWS_LOOP), ("weights", _WEIGHTS, WEIGHTS_LOOP)):
        work = {f"{loop}: {name}": times[:, slots][:, i] for i, name in enumerate(_NAMES[slots])}
        waits = np.maximum(times[0, wall] - times[:, slots].sum(axis=1), 0)
        found += [*work.items(), (f"{loop}: wait", waits)]
    found.append(("between loops", np.maximum(times[:1, STEP] - times[:1, ROWS_LOOP] - times[:1, WEIGHTS_LOOP], 0)))
    scale = 1e3 * steps
    phases = (StepPhase(name, float(ns.mean()) / scale, float(ns.max()) / scale) for name, ns in found if ns.any())
    busy = times[:, : _WEIGHTS.stop].sum(axis=1) / whole
    return whole / scale, tuple(phases), tuple(busy.tolist())
