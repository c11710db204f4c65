"""Training runs over ranks: the bits of one process, whichever rank trains a run."""

import threading

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.errors import InputError, KernelError
from onchip.train import many
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from thread_ranks import ThreadRanks

NETS = [random_mlp(6, 5, 3, seed=seed) for seed in range(5)]
X, Y = rows(60, 6), np.arange(60) % 3
OPTIONS = TrainOptions(epochs=2, batch_size=16, lr=0.1, validation=0.2)
RUNS = [Run(net, OPTIONS) for net in NETS]


def fit_on(size, runs, monkeypatch):
    """What every rank gets of the same call; an error is what it raised."""
    group, here = ThreadRanks(size), threading.local()
    monkeypatch.setattr(many, "find_ranks", lambda: here.ranks)
    found = {}

    def call(rank):
        here.ranks = rank
        try:
            found[rank.rank] = fit_runs(runs, X, Y, device="cpu", threads=1, spread=True)
        except (InputError, KernelError) as error:
            found[rank.rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in group.all]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(rank.is_over for rank in group.all)
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [2, 7])  # 7: two ranks have nothing to do
def test_every_rank_has_the_bits_of_one(monkeypatch, size):
    alone = fit_runs(RUNS, X, Y, device="cpu", threads=1)
    for results in fit_on(size, RUNS, monkeypatch):
        for got, expected in zip(results, alone, strict=True):
            assert {name: w.tobytes() for name, w in got.network.weights.items()} == {
                name: w.tobytes() for name, w in expected.network.weights.items()
            }
            assert got.losses.tobytes() == expected.losses.tobytes()
            assert got.epoch_losses == expected.epoch_losses
            assert str(got.plan) == str(expected.plan)


def test_a_run_that_diverges_is_told_to_all(monkeypatch):
    wild = Run(NETS[1], TrainOptions(epochs=3, batch_size=16, lr=1e30))
    for results in fit_on(2, [RUNS[0], wild], monkeypatch):
        assert isinstance(results[1], KernelError)
        assert not isinstance(results[0], KernelError)


def test_what_one_rank_fails_with_all_raise(monkeypatch):
    def begin(planned, *others):
        if planned[0].net is NETS[1]:  # the second rank's first
            raise KernelError("the chip is on fire", hint="water")
        return real(planned, *others)

    real = many.begin_runs
    monkeypatch.setattr(many, "begin_runs", begin)
    for error in fit_on(2, RUNS, monkeypatch):
        assert error.what == "the chip is on fire (rank 1 on host1)"
        assert error.hint == "water"
