"""Inputs of a step that do not fit are refused before a kernel reads them, on either device."""

import numpy as np
import pytest

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.errors import InputError, ShapeError
from onchip.network.build import mlp
from onchip.network.training import TrainingStep
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.runtime.placement import plan
from random_gradients import bind
from training_steps import by_layers


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gxx)])
def bound(request, monkeypatch):
    if request.param == "cuda":
        emulate_device(monkeypatch)
    step = by_layers(training_step(mlp(6, 5, 3), TrainingStep("cross_entropy")))
    return bind(plan(step, request.param, Job(batch=4)))


def rows(B):
    return {"x": np.ones((B, 6), np.float32), "target": np.arange(B) % 3, "share": np.full(B, 1 / B, np.float32)}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x: x[:2]),
        ("x", lambda x: x[:, :5]),
        ("x", lambda x: x.astype(np.float64)),
        ("target", lambda target: target.astype(np.int32)),
        ("share", lambda share: share[:, None]),
    ],
)
def test_rows_that_do_not_fit(bound, name, change):
    right = dict(zip(bound.plan.network.inputs, rows(4).values(), strict=True))
    wanted = dict(zip(rows(4), right, strict=True))[name]
    with pytest.raises(ShapeError, match=f"'{wanted}' has the wrong shape or dtype"):
        bound.run(right | {wanted: change(right[wanted])}, 4)
    bound.run(right, 4)


def test_missing_inputs(bound):
    with pytest.raises(InputError, match="wrong inputs"):
        bound.run({}, 4)


def test_no_rows(bound):
    """The CPU computes a loss of 0; a GPU launches no empty grid."""
    none = dict(zip(bound.plan.network.inputs, (array[:0] for array in rows(4).values()), strict=True))
    if bound.plan.device.kind == "cpu":
        assert bound.run(none, 0)["loss"] == 0
    else:
        with pytest.raises(InputError, match="no rows in the batch"):
            bound.run(none, 0)
