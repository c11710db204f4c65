"""Runs trained concurrently, chunk by chunk.

The GPU trains the next chunk while the host processes the results of the last one: for a small network, both take
about equally long.
"""

from __future__ import annotations

from collections.abc import Sequence

from onchip.kernels.training import Epochs, JointTrainer, SharedData
from onchip.network.recipe import Array
from onchip.train.recording import LAUNCH, PLAN, ROWS, STEPS, TIME_LAUNCHES, TrainingRecorder, phase
from onchip.train.step_trainer import BoundSteps, StepRuns
from onchip.train.training_run import PlannedRun, TrainingRun, flat_rows


def start_runs(
    planned: Sequence[PlannedRun], x: Array, y: Array, shared: SharedData, recorder: TrainingRecorder | None = None
) -> ConcurrentRuns:
    """Prepare runs that share a trainer; x and y are already checked."""
    order_lengths = [len(rows) for run in planned for rows in (run.train, run.held) if len(rows)]
    row_weights = [run.row_weights for run in planned]
    networks, bound = [run.plan.whole_step.network for run in planned if run.plan.whole_step], planned[0].bound
    joint: JointTrainer
    if isinstance(bound, BoundSteps):
        joint = StepRuns(bound, x, [len(run.train) for run in planned])
    else:
        with phase(recorder, ROWS):
            joint = bound.trainers(networks, flat_rows(x), y, row_weights, order_lengths, shared)
    with phase(recorder, PLAN):
        joint.make_ready()
        for run, trainer in zip(planned, joint.trainers, strict=True):
            if len(run.held):
                trainer.evaluate(run.train[:0])  # no rows: compiles before timing starts
    runs = [TrainingRun(run, trainer) for run, trainer in zip(planned, joint.trainers, strict=True)]
    if recorder is not None:
        is_alone = shared.runs == 1 and shared.ranks is None
        recorder.start(runs[0].net.name, runs[0].plan, runs[0].chosen, len(runs), runs[0].steps, is_alone)
        joint.time_steps()
    return ConcurrentRuns(joint, runs, recorder)


class ConcurrentRuns:
    """Training runs that share a trainer and its launches."""

    def __init__(
        self, trainer: JointTrainer, runs: Sequence[TrainingRun], recorder: TrainingRecorder | None = None
    ) -> None:
        self.trainer, self._recorder = trainer, recorder
        self.runs: list[TrainingRun | None] = list(runs)  # the caller sets finished runs to None
        # Validation needs the weights at the end of the epoch, so the GPU cannot run ahead.
        self.runs_ahead = trainer.is_asynchronous and not any(len(run.held) for run in runs)
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
        with phase(recorder if self.trainer.is_asynchronous else None, LAUNCH):
            self.trainer.begin(chunks)
        with phase(recorder, ROWS):
            for run, chunk in zip(self.runs, chunks, strict=True):
                if run is not None and chunk is not None:
                    run.make_next_orders(len(chunk.orders))

    def _end(self) -> None:
        assert self._in_flight is not None, "an unfinished run has a next chunk"
        chunks, self._in_flight = self._in_flight, None
        with phase(self._recorder, STEPS):
            trained = self.trainer.end()
        if self._recorder is not None:
            self._recorder.end_chunk(self.trainer.seconds, self.trainer.is_asynchronous)
            if not self.trainer.is_asynchronous:
                self._recorder.launches = self.trainer.launch_times()
            elif self._recorder.launches is None:
                with phase(self._recorder, TIME_LAUNCHES):
                    self._recorder.launches = self.trainer.launch_times()
        for run, chunk, results in zip(self.runs, chunks, trained, strict=True):
            if run is not None and chunk is not None:
                run.keep(results, self.trainer.seconds)
