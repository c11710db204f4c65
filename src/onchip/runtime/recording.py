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
    from onchip.runtime.cuda.activities import begin_activities
    from onchip.runtime.cuda.cupti import CuptiError
    from onchip.runtime.cuda.timed_plan import TimedPlan
    from onchip.runtime.cuda.traced_plan import TracedPlan

    try:
        activities = begin_activities(bound.gpu)
    except CuptiError as error:
        recorder.clock = _events(error)
        return TimedPlan(bound, recorder)
    recorder.clock = activities.clock
    return TracedPlan(bound, recorder, activities)


def clock_of_profiles() -> str:
    """What measures the times of a profile on a GPU, unless another profiler runs."""
    from onchip.runtime.cuda.cupti import CuptiError, load_cupti

    try:
        return f"CUPTI {load_cupti().version}"
    except CuptiError as error:
        return _events(error)


def _events(why: Exception) -> str:
    return f"CUDA events, one launch at a time: {why}"
