"""Training steps as networks on the CPU: every layer's gradient against float64, in the plan that a user gets."""

import numpy as np
import pytest

from gradient_cases import GRADIENT_CASES
from layer_cases import network, random_inputs
from onchip.network.build import mlp
from onchip.plan.gradient.step import VALUES, training_step
from onchip.plan.kernel import Job, TrainingStep
from onchip.runtime.cpu.step import CpuStep
from onchip.runtime.placement import plan
from training_steps import assert_right, begin, trained_through


def run(bound: CpuStep, rows, state) -> dict[str, np.ndarray]:
    """The state after a run, and the loss."""
    for name, array in state.items():
        bound.state[name][...] = array
    outputs = bound.run(dict(zip(bound.plan.network.inputs, rows, strict=True)), len(rows[-1]))
    return {name: array.copy() for name, array in (*bound.state.items(), *outputs.items())}


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_every_layer(case):
    net = trained_through(network(case))
    step = training_step(net, TrainingStep("mse", "momentum"))
    rows = *random_inputs(case, 5), np.random.default_rng(3).standard_normal((5, net.output.row_size), np.float32)
    rows = *rows, np.full(5, 1 / 5, np.float32)
    bound, state = CpuStep(plan(step, "cpu", Job(batch=5)), 2), begin(step)
    after = run(bound, rows, state)
    assert_right(step, after, rows, state)
    alone = run(CpuStep(bound.plan, 1), rows, state)
    assert all(after[name].tobytes() == array.tobytes() for name, array in alone.items()), "other bits on one thread"
    again = run(bound, rows, {name: after[name] for name in state})
    assert_right(step, again, rows, {name: after[name] for name in state})


@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam", "adamw"])
def test_many_steps(optimiser):
    rng = np.random.default_rng(0)
    step = training_step(mlp(20, 40, 13, 3), TrainingStep("cross_entropy", optimiser, clip_norm=0.5), decays=True)
    bound, state = CpuStep(plan(step, "cpu", Job(batch=33)), 2), begin(step)
    losses = []
    for count in range(1, 30):
        B = 33 if count % 5 else 7  # a short batch, by the same plan
        x = rng.standard_normal((B, 20), np.float32)
        rows = x, x[:, :3].argmax(axis=1), np.full(B, 1 / B, np.float32)
        state[VALUES] = np.array([0.05, 0.01, 0.9, 1 - 0.9**count, 1 - 0.999**count], np.float32)
        after = run(bound, rows, state)
        assert_right(step, after, rows, state)
        losses.append(after.pop("loss")[0])
        state = after
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_no_rows_change_no_weight_but_by_the_optimiser():
    step = training_step(mlp(5, 4, 3), TrainingStep("cross_entropy"))
    bound, state = CpuStep(plan(step, "cpu", Job(batch=4)), 1), begin(step)
    after = run(bound, (np.empty((0, 5), np.float32), np.empty(0, np.int64), np.empty(0, np.float32)), state)
    assert after["loss"] == 0
    assert all(np.array_equal(after[name], array) for name, array in state.items())
