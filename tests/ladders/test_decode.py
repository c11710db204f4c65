import dataclasses
import functools

import numpy as np
import pytest

from onchip.ladders.decode import LADDER
from onchip.ladders.frame import climb
from onchip.measure.pace import Pace
from onchip.measure.truth import Truth
from onchip.network.build import mlp
from onchip.workloads import decode

RUNGS = {rung.name: rung for rung in LADDER.rungs}
QUICK = Pace(rounds=2, block_s=0.01, warm_up_s=0.001, pause_s=0, min_runs=2, max_runs=3)


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("B", [1, 7, 129])
@pytest.mark.parametrize("seed", [0, 5])
def test_every_rung_is_right(name, B, seed):
    net, x = decode.network(seed), decode.inputs(B, seed + 1)
    verdict = Truth(net, x).verify(RUNGS[name]().prepare(net, x, threads=2 if B > 1 else 1)())
    assert verdict.is_right, f"{name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"


@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_runs_other_widths(name):
    net = mlp(5, 17, 3, bias=False)
    x = np.random.default_rng(3).standard_normal((33, 5), dtype=np.float32)
    assert Truth(net, x).verify(RUNGS[name]().prepare(net, x, threads=1)()).is_right


@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_propagates_nan(name):
    net, x = decode.network(), decode.inputs(7)
    x[3, 5] = np.nan
    y = RUNGS[name]().prepare(net, x, threads=1)()
    assert np.isnan(y[3]).all()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()


def test_climb_times_every_rung():
    climbed = climb(LADDER, rows=129, threads=1, pace=QUICK)
    assert climbed.all_right
    assert [step.rung for step in climbed.steps] == list(RUNGS)
    assert all(step.timing is not None and step.timing.median_ms > 0 for step in climbed.steps)
    assert climbed.steps[0].rows < 129 == climbed.steps[-1].rows
    assert climbed.floors["fp32"] > 0


def test_climb_with_other_random_weights():
    ladder = dataclasses.replace(LADDER, network=functools.partial(decode.network, 42))
    assert climb(ladder, rows=7, rungs=["numpy", "onchip"], pace=QUICK).all_right
