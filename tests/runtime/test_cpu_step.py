"""Training steps as networks on the CPU: every layer's gradient against float64, in the plan that a user gets."""

import numpy as np
import pytest

from gradient_cases import GRADIENT_CASES
from layer_cases import network, random_inputs
from onchip.kernels import reference
from onchip.network.build import mlp
from onchip.network.graph import Network, Node
from onchip.network.layers import Mul, Reshape
from onchip.plan.gradient.step import VALUES, training_step
from onchip.plan.gradient.training_form import DRAW
from onchip.plan.kernel import Job, TrainingStep
from onchip.runtime.check import DTYPE_ULP, FACTOR, ULP, ULPS, scaled_error
from onchip.runtime.cpu.step import CpuStep
from onchip.runtime.placement import plan


def trained_through(net: Network) -> Network:
    """The network with a trainable factor on every float input, and its output in one axis."""
    nodes, weights, names = [], dict(net.weights), {}
    for name, kind in net.inputs.items():
        if "float" in kind.dtype:
            names[name] = f"{name}.scaled"
            factor = np.linspace(0.5, 1.5, kind.row_size).reshape(kind.row_shape)
            weights[f"{name}.factor"] = factor.astype(np.float32)
            nodes.append(Node(names[name], Mul(), (name,), {"constant": f"{name}.factor"}))
    nodes += [
        Node(node.name, node.layer, tuple(names.get(value, value) for value in node.inputs), node.weights)
        for node in net.nodes
    ]
    nodes.append(Node("flat", Reshape(), (net.outputs[0],)))
    return Network(net.inputs, tuple(nodes), ("flat",), weights)


def begin(step: Network, lr=0.1) -> dict[str, np.ndarray]:
    """The first state: its velocities are gradients after a step."""
    values = np.array([lr, 0.0, 0.9, 1.0, 1.0], np.float32)
    state = {name: np.asarray(step.weights[name]) for name in step.state} | {VALUES: values}
    return state | ({DRAW: np.array([7, 1])} if DRAW in state else {})


def run(bound: CpuStep, rows, state) -> dict[str, np.ndarray]:
    """The state after a run, and the loss."""
    for name, array in state.items():
        bound.state[name][...] = array
    outputs = bound.run(dict(zip(bound.plan.network.inputs, rows, strict=True)), len(rows[-1]))
    return {name: array.copy() for name, array in (*bound.state.items(), *outputs.items())}


def assert_right(step: Network, got, rows, state):
    """Each array is at most twice as far from float64 as the reference in float32."""
    (loss, truth), (naive_loss, naive) = (
        reference.run_step(step, rows, state, dtype) for dtype in ("float64", "float32")
    )
    truth["loss"], naive["loss"] = loss, naive_loss
    ulp = max(DTYPE_ULP.get(kind.dtype, ULP["fp32"]) for kind in step.types.values())
    for name in truth:
        array, naively, found = map(np.atleast_1d, (truth[name], naive[name], got[name]))
        allowed, error = FACTOR * scaled_error(naively, array) + ULPS * ulp, scaled_error(found, array)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


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
