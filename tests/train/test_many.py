"""Many runs at once on shared rows: each has the bits of a single run."""

import numpy as np
import pytest

from checks import rows
from onchip.errors import InputError, KernelError, ShapeError
from onchip.network.build import mlp
from onchip.runtime.cpu.backend import core_count
from onchip.train.loop import fit
from onchip.train.many import Run, _launch_groups, fit_runs
from onchip.train.options import TrainOptions


def data(n=300):
    x = rows(n, 12)
    return x, (x[:, 0] > x[:, 1]).astype(np.int64)


def test_every_run_has_the_bits_of_fit_alone():
    x, y = data()
    settings = [
        {"lr": 0.1, "epochs": 3},
        {"lr": 0.01, "epochs": 2, "optimiser": "adam", "batch_size": 7},
        {"lr": 0.05, "epochs": 4, "momentum": 0.9, "batch_size": 300, "shuffle": False},
        {"lr": 0.1, "epochs": 5, "validation": 0.2, "patience": 2, "seed": 3},
    ]
    parts = [None, np.arange(0, 300, 2), np.arange(37), np.random.default_rng(0).permutation(300)[:200]]
    nets = [mlp(12, width, 2, seed=i) for i, width in enumerate((9, 33, 16, 64))]
    runs = [Run(net, TrainOptions(**s), part) for net, s, part in zip(nets, settings, parts, strict=True)]
    results = fit_runs(runs, x, y, device="cpu")
    assert len(results) == 4
    for run, setting, result in zip(runs, settings, results, strict=True):
        part = slice(None) if run.rows is None else run.rows
        alone = fit(run.net, x[part], y[part], device="cpu", **setting)
        assert np.array_equal(result.losses, alone.losses)
        assert result.best_epoch == alone.best_epoch
        for name, w in alone.network.weights.items():
            assert np.array_equal(result.network.weights[name], w)


def test_more_runs_than_threads_and_one_thread():
    x, y = data(60)
    runs = [Run(mlp(12, 4, 2, seed=i), TrainOptions(epochs=2, seed=i)) for i in range(3 * core_count() + 1)]
    told = []
    many = fit_runs(runs, x, y, device="cpu", on_progress=told.append)
    one = fit_runs(runs, x, y, device="cpu", threads=1)
    assert told[-1] == len(runs)
    for a, b in zip(many, one, strict=True):
        assert np.array_equal(a.losses, b.losses)
    assert not np.array_equal(many[0].losses, many[1].losses)


def test_similar_runs_are_grouped():
    class Planned:
        def __init__(self, kind):
            self.kind = kind

        def is_like(self, other):
            return self.kind == other.kind

        def runs_at_once(self, count):
            return {5: 3, 2: 1}.get(count, 1)

    planned = [Planned(kind) for kind in "abaaaa"]
    assert _launch_groups(planned, range(6)) == [[0, 2, 3], [4], [5], [1]]
    assert _launch_groups(planned, [1, 3, 5]) == [[1], [3], [5]]  # only this rank's runs


def test_no_runs_are_no_results():
    assert fit_runs([], *data()) == []


def test_a_run_that_diverges_does_not_end_the_others():
    x, y = data(60)
    runs = [Run(mlp(12, 4, 2), TrainOptions(lr=lr, epochs=9)) for lr in (0.1, 1e30, 0.2)]
    good, bad, other = fit_runs(runs, x, y, device="cpu")
    assert isinstance(bad, KernelError)
    assert "diverged" in bad.what
    assert len(good.history) == len(other.history) == 9


def test_losses_with_the_same_targets_go_together():
    x, y = rows(40, 12), rows(40, 2, seed=4)
    runs = [Run(mlp(12, 4, 2), TrainOptions(loss=loss, epochs=2, lr=0.01)) for loss in ("mse", "half_sse")]
    for run, result in zip(runs, fit_runs(runs, x, y, device="cpu"), strict=True):
        alone = fit(run.net, x, y, device="cpu", loss=run.options.loss, epochs=2, lr=0.01)
        assert np.array_equal(result.losses, alone.losses)


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (Run(mlp(12, 4, 3), TrainOptions()), ShapeError, "need different data"),
        (Run(mlp(11, 4, 2), TrainOptions()), ShapeError, "need different data"),
        (Run(mlp(12, 4, 2), TrainOptions(loss="mse")), ShapeError, "target values"),
        (Run(mlp(12, 4, 2), TrainOptions(validation=0.99), np.arange(1)), InputError, "no rows left"),
    ],
)
def test_runs_that_cannot_be_are_refused(other, error, message):
    x, y = data(20)
    with pytest.raises(error, match=message):
        fit_runs([Run(mlp(12, 4, 2), TrainOptions(epochs=1)), other], x, y, device="cpu")


@pytest.mark.parametrize(
    "part", [np.array([0, 1, 10**9]), np.array([-301]), np.arange(20.0), np.ones(299, bool), np.ones((3, 2), int)]
)
def test_rows_that_are_not_there_are_refused(part):
    with pytest.raises(InputError, match="bad rows to train on"):
        fit_runs([Run(mlp(12, 4, 2), TrainOptions(epochs=1), part)], *data(), device="cpu")


def test_rows_may_be_a_mask_or_counted_from_the_end():
    x, y = data()
    runs = [Run(mlp(12, 4, 2), TrainOptions(epochs=2), part) for part in (np.arange(300) >= 200, np.arange(-100, 0))]
    alone = fit(mlp(12, 4, 2), x[200:], y[200:], device="cpu", epochs=2)
    for result in fit_runs(runs, x, y, device="cpu"):
        assert np.array_equal(result.losses, alone.losses)
