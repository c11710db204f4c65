"""Training runs on either device, by one interface: of a kernel that runs whole steps, and by layers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from checks import rows
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.errors import PlanError
from onchip.kernels.training import Epochs, SharedData
from onchip.network.build import mlp
from onchip.network.training import TrainingStep
from onchip.plan.device import H200
from onchip.plan.gradient.step import TARGET, training_step
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.placement import training_kernels_for
from onchip.train.options import TrainOptions
from onchip.train.training_run import PlannedRun, plan_run

N, BATCH = 40, 16
KINDS = {"whole": {"optimiser": "adam"}, "by layers": {"optimiser": "adam", "ema": 0.9}}  # of options
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gxx)]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cuda":
        emulate_device(monkeypatch)
    return request.param


def data():
    return rows(N, 8, seed=2), np.arange(N) % 3


def planned_on(device, kind) -> PlannedRun:
    options = TrainOptions(batch_size=BATCH, lr=0.01, epochs=4, validation=0.2, **KINDS[kind])
    planned = plan_run(mlp(8, 16, 3, seed=1), *data(), options, SharedData(), device=device, threads=None)
    assert (planned.plan.whole_step is not None) == (kind == "whole")
    return planned


def bound_on(planned, count=1):
    (x, y), runs = data(), [planned.network_run] * count
    bound = planned.backend.bind_runs(planned.plan, runs, {"x": x}, {TARGET: y}, SharedData(), planned.evaluation)
    bound.make_ready()
    return bound


def trained(bound, order, steps_done):
    """The losses of an epoch."""
    lrs = np.full((1, -(-len(order) // BATCH)), 0.01)
    bound.begin([Epochs((order,), lrs, steps_done=steps_done)])
    (((losses, _),),) = bound.end()
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_runs_continue_from_what_was_read(device, kind):
    planned = planned_on(device, kind)
    order, steps = np.ascontiguousarray(planned.train[::-1]), -(-len(planned.train) // BATCH)
    one, other = bound_on(planned), bound_on(planned)
    first = trained(one, order, 0)
    assert len(first) == steps
    weights, moments = one.weights(0), one.moments(0)
    assert weights.keys() == set(planned.net.weights)
    assert {f"{moment}:{name}" for moment in ("mean", "square") for name in weights} <= moments.keys()
    assert one.evaluate(0, planned.held) != other.evaluate(0, planned.held)
    other.write(0, weights, {"steps": np.array([steps])} | moments)
    assert one.evaluate(0, planned.held) == other.evaluate(0, planned.held)
    assert np.array_equal(trained(one, order, steps), trained(other, order, steps))
    assert not np.array_equal(trained(bound_on(planned), order, 0), trained(one, order, 2 * steps))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_without_epochs_is_skipped(device, kind):
    planned = planned_on(device, kind)
    count = planned.backend.runs_at_once(planned.plan, 2)
    assert count == (2 if device == "cuda" and kind == "whole" else 1)
    bound = bound_on(planned, count)
    before = bound.weights(count - 1)
    steps = -(-len(planned.train) // BATCH)
    others = [Epochs((planned.train,), np.full((1, steps), 0.01))] * (count - 1)
    bound.begin([*others, None])
    *results, skipped = bound.end()
    assert [len(losses) for ((losses, _),) in results] == [steps] * len(others)
    assert skipped == []
    assert all(np.array_equal(before[name], w) for name, w in bound.weights(count - 1).items())


def test_a_plan_of_a_whole_step_runs_no_rows(device):
    planned = planned_on(device, "whole")
    for bind in (planned.backend.bind, planned.backend.bind_step):
        with pytest.raises(PlanError, match="the plan is for a training run"):
            bind(planned.plan)


@pytest.mark.parametrize(("batch", "scale"), [(16, 0.0), (16, 1 / 255), (256, 1 / 255), (4096, 0.0)])
def test_what_the_runtime_knows_of_a_training_kernel_is_frozen(batch, scale):
    step = training_step(mlp(784, 320, 160, 10), TrainingStep("cross_entropy", byte_scale=scale))
    (group,) = make_plan(step, H200, training_kernels_for(H200), Job("fp32", batch)).groups
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.claim.facts.batch = 1
