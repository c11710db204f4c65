"""What a training run did, for the profiler: which phase it was in when, and when its steps ran.

The clock is read where a phase or a chunk of epochs begins and ends, never within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from types import TracebackType
from typing import NamedTuple

from onchip.kernels.training import LaunchTime
from onchip.plan.plan import Plan
from onchip.runtime.nvtx_ranges import named_range

# On a GPU the host is in LAUNCH while it sends steps, and in STEPS while it waits for them.
PLAN, ROWS, LAUNCH, STEPS = "plan and build", "prepare rows", "launch steps", "steps"
EVALUATE, CHECKPOINT, CALLBACKS, RESULT = "evaluate", "checkpoints", "callbacks", "read weights"
TIME_LAUNCHES = "time launches"  # the profiler itself, once
MAX_SPANS = 100_000  # kept per run, of phases and of steps; totals count all

_NOTHING = nullcontext()


class PhaseSpan(NamedTuple):
    """The host was in this phase."""

    name: str
    begin_ns: int  # of time.perf_counter_ns
    end_ns: int


class StepSpan(NamedTuple):
    """Some steps of an epoch ran on the device, one after the other."""

    epoch: int  # from 1
    begin_ns: int
    end_ns: int
    steps: int


class TrainingRecorder:
    """The phases and steps of a run, or of several whose steps share launches. For one thread at a time."""

    def __init__(self) -> None:
        self.plan: Plan | None = None  # None: no training began
        self.network, self.chosen, self.networks, self.is_alone, self.steps_per_epoch = "", "", 0, True, 0
        self.begin_ns = self.end_ns = perf_counter_ns()
        self.phases: list[PhaseSpan] = []
        self.phase_ns: dict[str, int] = {}  # totals
        self.spans: list[StepSpan] = []
        self.epochs, self.steps, self.step_ns = 0, 0, 0  # epochs with a step; time of all steps on the device
        self.launches: tuple[LaunchTime, ...] | None = None  # of a step; None: not measured
        self._earlier_ns = 0
        self._chunk: tuple[int, Sequence[int], int] = 0, (), 0  # first epoch, steps of each order, when it was sent
        self._epoch = -1

    @property
    def run_ns(self) -> int:
        """The time of the run, until the end of its last phase."""
        return self.end_ns - self.begin_ns + self._earlier_ns

    def start(self, network: str, plan: Plan, chosen: str, networks: int, steps: int, is_alone: bool) -> None:
        """The training begins.

        network   the name of the trained one
        networks  trained in the same launches
        steps     per epoch
        is_alone  no other runs share the device
        """
        self.network, self.plan, self.chosen, self.networks = network, plan, chosen, networks
        self.steps_per_epoch, self.is_alone = steps, is_alone

    def phase(self, name: str) -> _Phase:
        return _Phase(self, name)

    def add(self, name: str, begin_ns: int) -> None:
        """A phase ends now."""
        self.end_ns = perf_counter_ns()
        self._keep(PhaseSpan(name, begin_ns, self.end_ns))

    def add_earlier(self, name: str, begin_ns: int, end_ns: int) -> None:
        """A phase before the recorder existed; the time between is not the run's."""
        self._earlier_ns += end_ns - begin_ns
        self._keep(PhaseSpan(name, begin_ns, end_ns))

    def _keep(self, span: PhaseSpan) -> None:
        self.phase_ns[span.name] = self.phase_ns.get(span.name, 0) + span.end_ns - span.begin_ns
        if len(self.phases) < MAX_SPANS:
            self.phases.append(span)

    def begin_chunk(self, epoch: int, steps: Sequence[int]) -> None:
        """Steps are sent to the device: of this epoch, from 0, and of the next ones."""
        self._chunk = epoch, steps, perf_counter_ns()

    def end_chunk(self, seconds: float, is_asynchronous: bool) -> None:
        """They took so long on the device, from when they were sent, or if it is the host until now."""
        epoch, steps, sent_ns = self._chunk
        duration = round(seconds * 1e9)
        begin = sent_ns if is_asynchronous else perf_counter_ns() - duration
        if self.spans:  # the device's clock and the host's differ slightly
            begin = max(begin, self.spans[-1].end_ns)
        done, whole = 0, sum(steps)
        for number, count in enumerate(steps, epoch):
            first, last = (begin + duration * at // whole for at in (done, done + count))
            if len(self.spans) < MAX_SPANS:
                self.spans.append(StepSpan(number + 1, first, last, count))
            done += count
            self.epochs += number != self._epoch
            self._epoch = number
        self.steps += whole
        self.step_ns += duration


class _Phase:
    """The host is in a phase while this context is open."""

    def __init__(self, recorder: TrainingRecorder, name: str) -> None:
        self._recorder, self._name, self._range = recorder, name, named_range(name)

    def __enter__(self) -> None:
        self._range.__enter__()
        self._begin_ns = perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.add(self._name, self._begin_ns)
        self._range.__exit__(kind, error, trace)


ON_NEW: list[Callable[[TrainingRecorder], None]] = []  # called with the recorder of each new run; none: nothing records


def new_recorder() -> TrainingRecorder | None:
    """A recorder for a run that begins; None if nothing records."""
    if not ON_NEW:
        return None
    recorder = TrainingRecorder()
    for notify in ON_NEW:
        notify(recorder)
    return recorder


def phase(recorder: TrainingRecorder | None, name: str) -> AbstractContextManager[None]:
    """Inside, the run is in this phase; phases must not nest."""
    return _NOTHING if recorder is None else recorder.phase(name)
