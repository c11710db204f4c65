"""What a step over a data set leaves for the next one: host side of gradient/step_counters.cu."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int64, c_uint32, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Input, Int64, Output, UInt32, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.dataset_run import CountedState, LoggedNumber, StepCounters, claim_counters
from onchip.network.graph import Network
from onchip.network.layers import Counted
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, MAX_LOGS, MAX_STATES, MAX_COUNTERS = 256, 32, 8, 4


class NumberLogStruct(CStruct):
    source, c_name = SOURCE, "NumberLog"
    _fields_ = (
        ("value", c_void_p), ("log", c_void_p), ("new_log", c_void_p), ("steps", c_int64), ("number_bytes", c_uint32),
        ("unused", c_uint32),
    )  # fmt: skip


class CounterStateStruct(CStruct):
    source, c_name = SOURCE, "CounterState"
    _fields_ = (
        ("counters", c_void_p), ("new_counters", c_void_p), ("per_step", c_int64 * MAX_COUNTERS),
        ("per_row", c_int64 * MAX_COUNTERS), ("count", c_uint32), ("unused", c_uint32),
    )  # fmt: skip


class StepEndStruct(CStruct):
    source, c_name = SOURCE, "StepEnd"
    _fields_ = (("log", NumberLogStruct * MAX_LOGS), ("state", CounterStateStruct * MAX_STATES))


@dataclass(frozen=True)
class StepCountersLowering:
    """step_counters(end, logs, states, position, B)"""

    step: StepCounters

    def at(self, B: int) -> Steps:
        logs = [
            NumberLogStruct.of(
                value=Input(each.value), log=Weight(each.log), new_log=Output(each.output), steps=each.steps,
                number_bytes=each.number_bytes, unused=0,
            )
            for each in self.step.logs
        ]  # fmt: skip
        states = [
            CounterStateStruct.of(
                counters=Weight(each.counters), new_counters=Output(each.output), per_step=each.per_step,
                per_row=each.per_row, count=len(each.per_step), unused=0,
            )
            for each in self.step.counters
        ]  # fmt: skip
        end = StepEndStruct.of(log=logs, state=states)
        position = Weight("position") if logs else NOTHING
        arguments = end, UInt32(len(logs)), UInt32(len(states)), position, Int64(B)
        return Steps((KernelLaunch(Program(SOURCE, "step_counters"), grid_1d(1, THREADS), arguments, Budget(40)),))


class StepCountersKernel(CudaKernel):
    name = "step_counters"
    layers = (Counted,)
    dtypes = DTYPE_BYTES

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        claim = claim_counters(self.name, net, start)
        if claim is None:
            return
        step = claim.facts
        assert isinstance(step, StepCounters)
        sizes = len(step.logs), len(step.counters), max((len(each.per_step) for each in step.counters), default=0)
        if any(size > most for size, most in zip(sizes, (MAX_LOGS, MAX_STATES, MAX_COUNTERS), strict=True)):
            why = f"at most {MAX_LOGS} logs and {MAX_STATES} states of {MAX_COUNTERS} counters"
            yield Refusal(self.name, net.nodes[start].name, why)
            return
        yield replace(claim, facts=StepCountersLowering(step))


INSTANCES = (
    instance(
        "a loss and a position",
        StepCountersLowering(
            StepCounters(2, (LoggedNumber(1, "log", 0, 1000, 4),), (CountedState("position", 1, (1, 0), (0, 1)),))
        ),
    ),
)
