import numpy as np
import pytest

from onchip.ladders import backprop as ladder
from onchip.ladders.backprop import LADDER
from onchip.ladders.frame import climb
from onchip.measure.pace import Pace
from onchip.workloads import backprop
from onchip.workloads.backprop import Patterns

RUNGS = {rung.name: rung for rung in LADDER.rungs}
QUICK = Pace(rounds=2, block_s=0.001, warm_up_s=1e-9, pause_s=0, min_runs=1, max_runs=2)


def random_patterns(n, pixels=784, seed=1):
    rng = np.random.default_rng(seed)
    return Patterns(rng.random((n, pixels), dtype=np.float32), backprop.one_hot(rng.integers(0, 10, n)))


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize(("n", "threads"), [(1, 1), (1, 2), (37, 2)])
def test_every_rung_is_right(name, n, threads):
    net, x = backprop.network(seed=n), random_patterns(n)
    verdict = ladder.truth(net, x).verify(RUNGS[name]().prepare(net, x, threads)())
    assert verdict.is_right, f"{name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"


@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_runs_other_widths_and_biases(name):
    net = backprop.network(5, hidden=(17, 9, 4), seed=3)
    rng = np.random.default_rng(4)
    biases = {k: rng.standard_normal(w.shape, dtype=np.float32) for k, w in net.weights.items() if k.endswith("bias")}
    net, x = net.replace(weights={**net.weights, **biases}), random_patterns(70, pixels=5)
    run = RUNGS[name]().prepare(net, x, threads=2)
    assert ladder.truth(net, x).verify(run()).is_right
    assert np.array_equal(run(), run())  # every run starts from the same weights


def test_the_check_finds_wrong_results(monkeypatch):
    net, x = backprop.network(), random_patterns(40)
    truth, got = ladder.truth(net, x), ladder.Reordered().prepare(net, x, 1)()
    assert truth.verify(got).is_right
    assert not truth.verify(got[:-1]).is_right
    other = Patterns(x.x, np.roll(x.y, 1, axis=0))
    assert not truth.verify(ladder.Reordered().prepare(net, other, 1)()).is_right
    monkeypatch.setattr(ladder, "MOMENTUM", np.float32(0))  # a constant in the compiled rungs
    assert not truth.verify(ladder.NumPy().prepare(net, x, 1)()).is_right


def test_climb_times_every_rung():
    climbed = climb(LADDER, rows=130, threads=2, pace=QUICK)
    assert climbed.all_right
    assert [step.rung for step in climbed.steps] == ["serial", "reordered", "openmp", "numpy", "onchip"]
    assert all(step.timing is not None and step.timing.median_ms > 0 for step in climbed.steps)
    assert climbed.floors["fp32"] > 0
