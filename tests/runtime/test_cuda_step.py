"""Training steps as networks on a GPU, here emulated: the plan that a user gets, against float64."""

import random

import numpy as np
import pytest

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from fake_cuda import FakeDriver, fake_gpu
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.gradient.update import UpdateLowering
from onchip.kernels.cuda.recipes.derived import FLOAT32, DerivedLowering
from onchip.network.build import sequential
from onchip.network.layers import (
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Linear,
    MaxPool2d,
    ReLU,
    Reshape,
)
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.gradient.step import VALUES, training_step
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.step import CudaStep
from onchip.runtime.placement import plan
from training_steps import assert_right, begin, by_layers, run_step

pytestmark = needs_gxx


def array(*shape):
    return np.random.default_rng(shape).standard_normal(shape, np.float32) / np.float32(np.sqrt(np.prod(shape[1:])))


def two_linears():
    return sequential(
        TensorType(("B", 7)), [("a", Linear()), ("b", Linear())],
        {"a.weight": array(70, 7), "a.bias": array(70), "b.weight": array(5, 70)},
    )  # fmt: skip


def two_convolutions():
    layers = [("a", Conv2d((2, 1), (1, 0, 2, 1))), ("b", Conv2d(groups=2)), ("flat", Reshape()), ("c", Linear())]
    weights = {"a.weight": array(4, 3, 3, 2), "a.bias": array(4), "b.weight": array(6, 2, 2, 2)}
    weights["c.weight"] = array(3, 6 * 3 * 7)
    return sequential(TensorType(("B", 3, 6, 8)), layers, weights)


def norms_and_pools():
    layers = [
        ("a", Conv2d()), ("n", BatchNorm2d()), ("r", ReLU()), ("p", MaxPool2d((3, 3), (2, 2))), ("d", Dropout(0.25)),
        ("q", AvgPool2d((2, 2), (1, 1))), ("flat", Reshape()), ("b", Linear()), ("m", BatchNorm1d()), ("c", Linear()),
    ]  # fmt: skip
    weights = {"a.weight": array(4, 3, 2, 2), "b.weight": array(6, 4 * 2 * 2), "c.weight": array(3, 6)}
    for name, C in (("n", 4), ("m", 6)):
        weights |= {f"{name}.{role}": np.abs(array(C)) + 0.1 for role in ("mean", "var", "weight", "bias")}
    return sequential(TensorType(("B", 3, 8, 8)), layers, weights)


def rows_of(step, B, classes=None):
    rng = np.random.default_rng(B)
    made = []
    for name, kind in step.inputs.items():
        if name == "share":
            made.append(np.full(B, 1 / B, np.float32))
        elif "int" in kind.dtype:
            made.append(rng.integers(0, classes, B))
        else:
            made.append(rng.standard_normal((B, *kind.row_shape), np.float32))
    return tuple(made)


@pytest.fixture
def gpu(monkeypatch):
    return emulate_device(monkeypatch)


@pytest.mark.parametrize("B", [1, 5, 130])
@pytest.mark.parametrize(
    ("net", "training"),
    [
        (two_linears, TrainingStep("mse", "adamw")),
        (two_linears, TrainingStep("cross_entropy", "sgd", label_smoothing=0.1)),
        (two_linears, TrainingStep("half_sse", "momentum", clip_norm=0.1)),
        (two_convolutions, TrainingStep("cross_entropy", "momentum")),
        (norms_and_pools, TrainingStep("mse", "momentum")),
    ],
)
def test_a_step(gpu, net, training, B):
    step = by_layers(training_step(net(), training, decays=True))
    bound = CudaStep(gpu, plan(step, "cuda", Job(batch=B)))
    rows, state = rows_of(step, B, classes=3), begin(step)
    state[VALUES][1] = 0.01  # weight decay
    for name in state:
        if name.endswith(".second"):  # from 0, Adam's first step would divide a gradient by itself, and its error too
            state[name] = np.random.default_rng(B).uniform(0.5, 1.5, state[name].shape).astype(np.float32)
    after = run_step(bound, rows, state)
    assert_right(step, after, rows, state)
    again = run_step(bound, rows, state)
    assert all(after[name].tobytes() == array.tobytes() for name, array in again.items())
    following = run_step(bound, rows, {name: after[name] for name in state})
    assert_right(step, following, rows, {name: after[name] for name in state})


def test_a_state_that_is_a_weight_as_it_is_is_not_copied(gpu):
    step = training_step(norms_and_pools(), TrainingStep("mse", "adam"))
    groups = CudaStep(gpu, plan(step, "cuda", Job(batch=5))).bound.groups
    derived = [
        each for group in groups if isinstance(group.lowering, DerivedLowering) for each in group.lowering.weights
    ]
    assert derived
    assert all(kind != FLOAT32 or index >= 0 for kind, _, _, index in derived)


def test_what_reads_new_weights_waits_for_them(monkeypatch):
    """Kernels load weights before the previous launch ends, but for the one that computes the weights."""
    gpu = fake_gpu(monkeypatch, FakeDriver())
    step = by_layers(training_step(two_linears(), TrainingStep("mse", "adamw"), decays=True))
    groups = CudaStep(gpu, make_plan(step, H200, KERNELS, Job("bf16", 64))).bound.groups
    overlapping = [[launch.config.overlaps for launch in group.at(64).launches] for group in groups]
    writes = {i for i, group in enumerate(groups) if isinstance(group.lowering, DerivedLowering | UpdateLowering)}
    assert len(writes) == 2
    for i in writes:
        assert not any(overlapping[(i + 1) % len(groups)])
    assert any(map(any, overlapping))


@pytest.mark.parametrize("net", [two_linears, two_convolutions, norms_and_pools])
def test_branches_run_in_any_order(gpu, net):
    """The graph of a step, with its launches in any order that its edges allow: the same bits."""
    step = by_layers(training_step(net(), TrainingStep("mse", "adam", clip_norm=0.5), decays=True))
    bound, rows = CudaStep(gpu, plan(step, "cuda", Job(batch=37))), rows_of(step, 37)
    expected = run_step(bound, rows, begin(step))
    for seed in range(4):
        gpu.driver.shuffled = random.Random(seed)
        got = run_step(bound, rows, begin(step))
        assert all(array.tobytes() == got[name].tobytes() for name, array in expected.items())
    assert len(gpu.driver.replays) == 4
    (graph,) = {graph for graph, _ in gpu.driver.replays}
    after = gpu.driver.built[graph].values()
    assert max(map(len, after)) > 1  # it has branches
