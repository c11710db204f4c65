"""Training runs over ranks: the bits of one process, whichever rank trains a run."""

import threading

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.errors import InputError, KernelError
from onchip.kernels.cpu.train.step import BLOCK
from onchip.measure.profile import profile
from onchip.train import loop, many
from onchip.train.loop import fit
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from row_steps import images
from thread_ranks import ThreadRanks

NETS = [random_mlp(6, 5, 3, seed=seed) for seed in range(5)]
X, Y = rows(60, 6), np.arange(60) % 3
OPTIONS = TrainOptions(epochs=2, batch_size=16, lr=0.1, validation=0.2)
RUNS = [Run(net, OPTIONS) for net in NETS]


def call_on(size, make, monkeypatch):
    """The result of the same call on every rank, or the error it raised."""
    group, here = ThreadRanks(size), threading.local()
    for module in (many, loop):
        monkeypatch.setattr(module, "find_ranks", lambda: here.ranks)
    found = {}

    def call(rank):
        here.ranks = rank
        try:
            found[rank.rank] = make()
        except (InputError, KernelError) as error:
            found[rank.rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in group.all]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(rank.is_over for rank in group.all)
    return [found[rank] for rank in range(size)]


def fit_on(size, runs, monkeypatch):
    return call_on(size, lambda: fit_runs(runs, X, Y, device="cpu", threads=1, spread=True), monkeypatch)


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


def test_all_ranks_receive_a_divergence(monkeypatch):
    wild = Run(NETS[1], TrainOptions(epochs=3, batch_size=16, lr=1e30))
    for results in fit_on(2, [RUNS[0], wild], monkeypatch):
        assert isinstance(results[1], KernelError)
        assert not isinstance(results[0], KernelError)


def test_all_ranks_raise_the_error_of_one(monkeypatch):
    def begin(planned, *others):
        if planned[0].net is NETS[1]:  # the second rank's first
            raise KernelError("the chip is on fire", hint="water")
        return real(planned, *others)

    real = many.start_runs
    monkeypatch.setattr(many, "start_runs", begin)
    for error in fit_on(2, RUNS, monkeypatch):
        assert error.what == "the chip is on fire (rank 1 on host1)"
        assert error.hint == "water"


# -- rows of a batch ---------------------------------------------------------------------------------------

WIDE = rows(BLOCK * 3 + 100, 6)
TARGETS = np.arange(len(WIDE)) % 3


def train_wide(batch, **how):
    return fit(
        NETS[0], WIDE, TARGETS, device="cpu", threads=1, batch_size=batch, epochs=3, lr=0.1, momentum=0.9,
        clip_norm=0.1 if batch == len(WIDE) else 0.0, sample_weight=np.linspace(0, 2, len(WIDE)), **how,
    )  # fmt: skip


@pytest.mark.parametrize("batch", [len(WIDE), 2 * BLOCK + 7])  # a full batch; two batches, the second one short
def test_ranks_that_share_batches_have_the_bits_of_one(monkeypatch, batch):
    alone = train_wide(batch)
    for got in call_on(2, lambda: train_wide(batch, spread=True), monkeypatch):
        for name, weight in alone.network.weights.items():
            assert got.network.weights[name].tobytes() == weight.tobytes()
        assert got.losses.tobytes() == alone.losses.tobytes()


def test_a_profile_compares_a_whole_batch_with_the_estimate(monkeypatch):
    with profile() as found:
        train_wide(len(WIDE))
        call_on(2, lambda: train_wide(len(WIDE), spread=True), monkeypatch)
    assert [training.is_alone for training in found.recorded_trainings] == [True, False, False]


def test_a_short_step_is_not_shared(monkeypatch):
    for error in call_on(2, lambda: train_wide(64, spread=True), monkeypatch):
        assert error.what == "batches are too small to be shared by ranks"


def test_ranks_do_not_share_the_batches_of_a_batch_norm(monkeypatch):
    """Each rank would normalise by the statistics of its own rows."""
    net, x = images(), rows(60, 192).reshape(60, 3, 8, 8)
    for error in call_on(2, lambda: fit(net, x, Y, device="cpu", epochs=1, spread=True), monkeypatch):
        assert isinstance(error, InputError)
        assert "ranks share only batches of MLPs" in error.what
        assert "whose batch norms need the statistics of the whole batch" in error.got
        assert "one process" in error.hint
