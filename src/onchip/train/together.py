"""Runs trained concurrently, chunk by chunk.

The GPU trains the next chunk while the host processes the results of the last one: for a small network, both take
about equally long.
"""

from __future__ import annotations

from collections.abc import Sequence

from onchip.kernels.training import Epochs, JointTrainer, SharedData
from onchip.network.recipe import Array
from onchip.train.training_run import PlannedRun, TrainingRun, flat_rows


def start_runs(planned: Sequence[PlannedRun], x: Array, y: Array, shared: SharedData) -> ConcurrentRuns:
    """Prepare runs that share a trainer; x and y are already checked."""
    order_lengths = [len(rows) for run in planned for rows in (run.train, run.held) if len(rows)]
    row_weights, x = [run.row_weights for run in planned], flat_rows(x)
    joint = planned[0].bound.trainers([run.plan.network for run in planned], x, y, row_weights, order_lengths, shared)
    joint.make_ready()
    for run, trainer in zip(planned, joint.trainers, strict=True):
        if len(run.held):
            trainer.evaluate(run.train[:0])  # no rows: compiles before timing starts
    return ConcurrentRuns(
        joint, [TrainingRun(run, trainer) for run, trainer in zip(planned, joint.trainers, strict=True)]
    )


class ConcurrentRuns:
    """Training runs that share a trainer and its launches."""

    def __init__(self, trainer: JointTrainer, runs: Sequence[TrainingRun]) -> None:
        self.trainer = trainer
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
        chunks: list[Epochs | None] = []
        for run in self.runs:
            is_due = run is not None and (self.runs_ahead or not run.has_trained)
            chunks.append(run.next_chunk(steps) if run is not None and is_due else None)
        if all(chunk is None for chunk in chunks):
            return
        self._in_flight = chunks
        self.trainer.begin(chunks)
        for run, chunk in zip(self.runs, chunks, strict=True):
            if run is not None and chunk is not None:
                run.make_next_orders(len(chunk.orders))

    def _end(self) -> None:
        assert self._in_flight is not None, "an unfinished run has a next chunk"
        chunks, self._in_flight = self._in_flight, None
        trained = self.trainer.end()
        for run, chunk, results in zip(self.runs, chunks, trained, strict=True):
            if run is not None and chunk is not None:
                run.keep(results, self.trainer.seconds)
