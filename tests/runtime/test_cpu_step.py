"""Training steps as networks on the CPU: every layer's gradient against float64, in the plan that a user gets."""

import numpy as np
import pytest

from gradient_cases import GRADIENT_CASES
from layer_cases import network, random_inputs
from onchip.errors import PlanError
from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    AvgPool2d,
    BatchNorm2d,
    BatchSum,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    Dropout,
    Gather,
    GlobalSum,
    Linear,
    MatMul,
    MaxPool2d,
    Mul,
    ReLU,
    Reshape,
    RunningAverage,
    Tanh,
)
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.gradient.step import VALUES, training_step
from onchip.plan.kernel import Job
from onchip.runtime.cpu import step as steps
from onchip.runtime.cpu.step import CpuStep
from onchip.runtime.placement import plan
from training_steps import assert_right, begin, by_layers, trained_through


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
    target, share = np.random.default_rng(3).standard_normal((5, net.output.row_size)), np.full(5, 1 / 5)
    rows = (*random_inputs(case, 5), *(each.astype(numpy_dtype(net.output.dtype)) for each in (target, share)))
    bound, state = CpuStep(plan(step, "cpu", Job(batch=5)), 2), begin(step)
    after = run(bound, rows, state)
    assert_right(step, after, rows, state)
    alone = run(CpuStep(bound.plan, 1), rows, state)
    assert all(after[name].tobytes() == array.tobytes() for name, array in alone.items()), "other bits on one thread"
    again = run(bound, rows, {name: after[name] for name in state})
    assert_right(step, again, rows, {name: after[name] for name in state})


@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "nesterov", "adam", "adamw"])
def test_many_steps(optimiser):
    rng = np.random.default_rng(0)
    how = TrainingStep("cross_entropy", optimiser, clip_norm=0.5, ema=0.9)
    step = by_layers(training_step(mlp(20, 40, 13, 3), how, decays=True))
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
    step = by_layers(training_step(mlp(5, 4, 3), TrainingStep("cross_entropy")))
    bound, state = CpuStep(plan(step, "cpu", Job(batch=4)), 1), begin(step)
    after = run(bound, (np.empty((0, 5), np.float32), np.empty(0, np.int64), np.empty(0, np.float32)), state)
    assert after["loss"] == 0
    assert all(np.array_equal(after[name], array) for name, array in state.items())


# -- memory ----------------------------------------------------------------------------------------------------


def lenet() -> Network:
    """A small network with convolutions, pools, a batch norm, Linears and a Reshape of its input."""
    rng = np.random.default_rng(5)
    shapes = {"c1.weight": (6, 1, 5, 5), "c1.bias": (6,), "c2.weight": (7, 6, 3, 3), "fc.weight": (5, 63)}
    weights = {name: (rng.standard_normal(shape) / 4).astype(np.float32) for name, shape in shapes.items()}
    weights |= {f"bn.{role}": np.ones(7, np.float32) for role in ("mean", "var", "weight", "bias")}
    layers = [
        ("image", Reshape((1, 14, 14))), ("c1", Conv2d(pads=(2, 2, 2, 2))), ("tanh", Tanh()),
        ("pool", MaxPool2d((2, 2))),
        ("c2", Conv2d()), ("bn", BatchNorm2d()), ("relu", ReLU()), ("mean", AvgPool2d((3, 3), (1, 1))),
        ("flat", Reshape((63,))), ("drop", Dropout(0.2)), ("fc", Linear()),
    ]  # fmt: skip
    return sequential(TensorType(("B", 196)), layers, weights)


def small_mlp() -> Network:
    return mlp(21, 33, 17, 3)


@pytest.mark.parametrize("network", [lenet, small_mlp])
@pytest.mark.parametrize("optimiser", ["momentum", "adamw"])
def test_memory_is_never_read_before_it_is_written(network, optimiser, monkeypatch):
    """The same bits with memory of other values, with batches of other sizes in between, and on any threads."""
    how = TrainingStep("cross_entropy", optimiser, clip_norm=0.5)
    step = by_layers(training_step(network(), how, decays=True))
    planned, rng = plan(step, "cpu", Job(batch=64)), np.random.default_rng(0)
    D, N = step.inputs["x"].row_size, 3
    batches = {
        B: (rng.standard_normal((B, D), np.float32), rng.integers(0, N, B), np.full(B, 1 / max(1, B), np.float32))
        for B in (64, 1, 5, 7, 300)
    }
    found = []
    for fill, threads in ((0x00, 2), (0xFF, 2), (0x7B, 1)):  # 0xFF: NaN
        monkeypatch.setattr(steps, "unset_memory", lambda nbytes, fill=fill: np.full(nbytes, fill, np.uint8))
        bound, state = CpuStep(planned, threads), begin(step)
        for rows in batches.values():
            state = run(bound, rows, {name: state[name] for name in step.state})
        found.append(state)
    for name, array in found[0].items():
        assert np.isfinite(array).all(), name
        assert all(array.tobytes() == other[name].tobytes() for other in found[1:]), name


def test_the_rows_of_a_run_do_not_change():
    step = by_layers(training_step(small_mlp(), TrainingStep("mse")))
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((9, 21), np.float32), rng.standard_normal((9, 3), np.float32), np.ones(9, np.float32)
    copies = tuple(array.copy() for array in rows)
    outputs = []
    bound = CpuStep(plan(step, "cpu", Job(batch=9)), 2)
    for array in rows:
        array.flags.writeable = False
    for _ in range(2):
        bound.state[VALUES][0] = 1e-4
        outputs.append(bound.run(dict(zip(step.inputs, rows, strict=True)), 9)["loss"])
    assert all(np.array_equal(array, copy) for array, copy in zip(rows, copies, strict=True))
    assert outputs[1] < outputs[0], "the first loss is the caller's"


def test_a_state_that_a_later_layer_reads_is_replaced_at_the_end():
    weights = {"mean": np.full(3, 2, np.float32)}
    nodes = (
        Node("g", BatchSum(), ("x",)),
        Node("new", RunningAverage(0.5), ("g",), {"average": "mean"}),
        Node("y", Mul(), ("x",), {"constant": "mean"}),
    )
    net = Network({"x": TensorType(("B", 3))}, nodes, ("y",), weights, state={"mean": "new"})
    bound = CpuStep(plan(net, "cpu", Job(batch=2)), 1)
    assert "update" in [group.claim.kernel for group in bound.plan.groups]
    x = np.ones((2, 3), np.float32)
    assert np.array_equal(bound.run({"x": x}, 2)["y"], 2 * x)
    assert np.array_equal(bound.state["mean"], [2, 2, 2])
    x *= 4
    assert np.array_equal(bound.run({"x": x}, 2)["y"], 8 * x / 4)
    assert np.array_equal(bound.state["mean"], [5, 5, 5])


def scaled_attention() -> Network:
    x, z = TensorType(("B", 3, 4)), TensorType(("B", 4, 5))
    nodes = Node("m", MatMul(), ("x", "z")), Node("y", Mul(), ("m",), {"constant": "w"})
    return Network({"x": x, "z": z}, nodes, ("y",), {"w": np.full(1, 2, np.float32)})


def taps() -> Network:
    nodes = (
        Node("chosen", Gather(1, (0, 2, 1, 3)), ("x",)), Node("split", Reshape((2, 2)), ("chosen",)),
        Node("scaled", Mul(), ("split",), {"constant": "w"}), Node("y", GlobalSum((1,)), ("scaled",)),
    )  # fmt: skip
    return Network({"x": TensorType(("B", 5))}, nodes, ("y",), {"w": np.array([[2, 3], [4, 5]], np.float32)})


def padded_bias() -> Network:
    """A weight whose padding and order differ from the network's; a Linear and a transposed convolution share it."""
    weights = {"w": np.random.default_rng(3).standard_normal((7, 3, 3)).astype(np.float32)}
    nodes = Node("up", ConvTranspose1d((2,)), ("x",), {"weight": "w"}), Node("y", Conv1d(), ("up",), {"weight": "w"})
    return Network({"x": TensorType(("B", 7, 6))}, nodes, ("y",), weights)


@pytest.mark.parametrize("network", [scaled_attention, taps, padded_bias])
def test_kernels_read_weights_in_every_run(network):
    net = trained_through(network())
    step, rng = training_step(net, TrainingStep("half_sse")), np.random.default_rng(1)
    rows = tuple(rng.standard_normal((5, *kind.row_shape), np.float32) for kind in list(step.inputs.values())[:-1])
    bound, state = CpuStep(plan(step, "cpu", Job(batch=5)), 2), begin(step, lr=0.01)
    for _ in range(3):
        after = run(bound, (*rows, np.ones(5, np.float32)), state)
        assert_right(step, after, (*rows, np.ones(5, np.float32)), state)
        state = {name: after[name] for name in state}


def test_a_plan_of_a_whole_step_is_refused():
    planned = plan(training_step(small_mlp(), TrainingStep("mse")), "cpu", Job(batch=9))
    with pytest.raises(PlanError, match="the plan is for a training run") as refused:
        CpuStep(planned, 1)
    assert refused.value.got == "mlp_train<21,33,17,3,ReLU,mse>"
