"""A bound plan that records its calls, for the profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onchip.runtime.backend import Bound
from onchip.runtime.cpu.backend import CpuBound

if TYPE_CHECKING:
    from onchip.runtime.spans import Recorder


def recorded(bound: Bound, recorder: Recorder) -> Bound:
    """The same plan on the same device, with the same weights: its calls append to `recorder`."""
    if isinstance(bound, CpuBound):
        from onchip.runtime.cpu.recorded import RecordedCpu

        return RecordedCpu(bound, recorder)
    from onchip.runtime.cuda.backend import CudaBound

    if not isinstance(bound, CudaBound):
        return bound  # a plan for training runs no rows
    from onchip.runtime.cuda.timed_plan import TimedPlan

    return TimedPlan(bound, recorder)
