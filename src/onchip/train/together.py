"""Runs trained concurrently, chunk by chunk.

The GPU trains the next chunk while the host processes the results of the last one: for a small network, both take
about equally long.
"""

from __future__ import annotations

from collections.abc import Sequence

from onchip.kernels.training import Epochs, SharedData
from onchip.plan.gradient.step import target_names
from onchip.runtime.backend import BoundRuns
from onchip.train.recording import LAUNCH, PLAN, ROWS, STEPS, TIME_LAUNCHES, TrainingRecorder, phase
from onchip.train.rows import Rows, by_name
from onchip.train.trainer import Trainer
from onchip.train.training_run import PlannedRun, TrainingRun


def start_runs(
    planned: Sequence[PlannedRun], x: Rows, y: Rows, shared: SharedData, recorder: TrainingRecorder | None = None
) -> ConcurrentRuns:
    """Prepare runs that train together; x and y are already checked."""
    first = planned[0]
    names = target_names(first.net, first.how)
    rows, of_outputs = by_name(x, tuple(first.net.inputs), "input"), by_name(y, tuple(names), "output")
    targets = {names[output]: array for output, array in of_outputs.items()}
    with phase(recorder, ROWS if first.plan.whole_step else PLAN):
        runs = [run.network_run for run in planned]
        bound = first.backend.bind_runs(first.plan, runs, rows, targets, shared, first.evaluation)
    trainers = [Trainer(bound, i) for i in range(len(planned))]
    with phase(recorder, PLAN):
        bound.make_ready()
        for run, trainer in zip(planned, trainers, strict=True):
            if len(run.held):
                trainer.evaluate(run.train[:0])  # no rows: compiles before timing starts
    training = [TrainingRun(run, trainer) for run, trainer in zip(planned, trainers, strict=True)]
    if recorder is not None:
        is_alone = shared.runs == 1 and shared.ranks is None
        one = training[0]
        recorder.start(one.net.name, one.plan, one.chosen, len(training), one.steps, is_alone)
        bound.time_steps()
    return ConcurrentRuns(bound, training, recorder)


class ConcurrentRuns:
    """Training runs that train together."""

    def __init__(self, bound: BoundRuns, runs: Sequence[TrainingRun], recorder: TrainingRecorder | None = None) -> None:
        self.bound, self._recorder = bound, recorder
        self.runs: list[TrainingRun | None] = list(runs)  # the caller sets finished runs to None
        # Validation needs the weights at the end of the epoch, so the GPU cannot run ahead.
        self.runs_ahead = bound.is_asynchronous and not any(len(run.held) for run in runs)
        self._in_flight: list[Epochs | None] | None = None

    def advance(self, steps: int | None = None) -> None:
        """Train some steps of every run, by default for about REPORT_SECONDS, or process pending results."""
        if any(run is not None and not run.has_trained for run in self.runs):
            if self._in_flight is None:
                self._begin(steps)
            self._end()
            if self.runs_ahead:
                self._begin(steps)
        for run in self.runs:
            if run is not None:
                run.take_trained()

    def _begin(self, steps: int | None) -> None:
        recorder, chunks = self._recorder, list[Epochs | None]()
        with phase(recorder, ROWS):
            for run in self.runs:
                is_due = run is not None and (self.runs_ahead or not run.has_trained)
                chunks.append(run.next_chunk(steps) if run is not None and is_due else None)
        if all(chunk is None for chunk in chunks):
            return
        self._in_flight = chunks
        if recorder is not None:
            # One run stands for all: they take their steps together.
            first, sent = next((run, chunk) for run, chunk in zip(self.runs, chunks, strict=True) if run and chunk)
            recorder.begin_chunk(first.first_epoch(sent), [-(-len(order) // first.batch) for order in sent.orders])
        with phase(recorder if self.bound.is_asynchronous else None, LAUNCH):
            self.bound.begin(chunks)
        with phase(recorder, ROWS):
            for run, chunk in zip(self.runs, chunks, strict=True):
                if run is not None and chunk is not None:
                    run.make_next_orders(len(chunk.orders))

    def _end(self) -> None:
        assert self._in_flight is not None, "an unfinished run has a next chunk"
        chunks, self._in_flight = self._in_flight, None
        with phase(self._recorder, STEPS):
            trained = self.bound.end()
        if self._recorder is not None:
            self._recorder.end_chunk(self.bound.seconds, self.bound.is_asynchronous)
            if not self.bound.is_asynchronous:
                self._recorder.launches = self.bound.launch_times()
            elif self._recorder.launches is None:
                with phase(self._recorder, TIME_LAUNCHES):
                    self._recorder.launches = self.bound.launch_times()
        for run, chunk, results in zip(self.runs, chunks, trained, strict=True):
            if run is not None and chunk is not None:
                run.keep(results, self.bound.seconds)
