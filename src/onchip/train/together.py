"""Runs trained concurrently, chunk by chunk.

The GPU trains the next chunk while the host processes the results of the last one: for a small network, an epoch takes
the host about as long as the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from onchip.kernels.training import JointTrainer, Piece, SharedData
from onchip.network.recipe import Array
from onchip.train.training_run import PlannedRun, TrainingRun, flat_rows


def begin_runs(planned: Sequence[PlannedRun], x: Array, y: Array, shared: SharedData) -> Together:
    """Prepare similar runs for their first step; x and y are checked already."""
    orders = [len(rows) for run in planned for rows in (run.train, run.held) if len(rows)]
    row_weights, x = [run.row_weights for run in planned], flat_rows(x)
    team = planned[0].bound.trainers([run.plan.network for run in planned], x, y, row_weights, orders, shared)
    team.make_ready()
    for run, trainer in zip(planned, team.trainers, strict=True):
        if len(run.held):
            trainer.evaluate(run.train[:0])  # empty: only compiles, before timing starts
    return Together(team, [TrainingRun(run, trainer) for run, trainer in zip(planned, team.trainers, strict=True)])


class Together:
    """Training runs that share a trainer team and its launches."""

    def __init__(self, team: JointTrainer, runs: Sequence[TrainingRun]) -> None:
        self.team = team
        self.runs: list[TrainingRun | None] = list(runs)  # the caller sets finished runs to None
        # Validation needs the weights at the end of the epoch, so the GPU cannot run ahead.
        self.runs_ahead = team.is_beside_host and not any(len(run.held) for run in runs)
        self._under_way: list[Piece | None] | None = None

    def advance(self, steps: int | None = None) -> None:
        """Train some steps of every run, by default for about REPORT_SECONDS, or process results that are pending."""
        if any(run is not None and not run.has_trained for run in self.runs):
            if self._under_way is None:
                self._begin(steps)
            self._end()
            if self.runs_ahead:
                self._begin(steps)
        for run in self.runs:
            if run is not None:
                run.take_trained()

    def _begin(self, steps: int | None) -> None:
        pieces: list[Piece | None] = []
        for run in self.runs:
            is_due = run is not None and (self.runs_ahead or not run.has_trained)
            pieces.append(run.next_chunk(steps) if run is not None and is_due else None)
        if all(piece is None for piece in pieces):
            return
        self._under_way = pieces
        self.team.begin(pieces)
        for run, piece in zip(self.runs, pieces, strict=True):
            if run is not None and piece is not None:
                run.make_next_orders(len(piece.orders))

    def _end(self) -> None:
        assert self._under_way is not None, "a run that is not done has a next piece"
        pieces, self._under_way = self._under_way, None
        trained = self.team.end()
        for run, piece, told in zip(self.runs, pieces, trained, strict=True):
            if run is not None and piece is not None:
                run.keep(told, self.team.seconds)
