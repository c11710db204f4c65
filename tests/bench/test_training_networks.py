"""The networks whose training is measured: their steps and loss curves on the CPU, at small sizes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onchip.bench.cases import step_job
from onchip.bench.cases.training_networks import NETWORKS
from onchip.kernels import reference
from onchip.network.graph import Network
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.gradient.step import VALUES, training_step
from onchip.plan.gradient.training_form import DRAW
from onchip.plan.kernel import TRAINING_PRECISIONS, Job
from onchip.runtime.check import FACTOR, ULP, ULPS
from onchip.runtime.placement import plan
from random_gradients import State, bind, errors, nudged
from training_steps import by_layers, run_step

B, BATCHES = 9, 4
NAIVE_CURVES = 3  # from weights a rounding apart
PARAMETERS = {
    "lenet5": 61_706, "resnet8": 78_714, "text_cnn": 5_990_402, "transformer": 168_844, "tabular_resnet": 271_498,
    "autoencoder": 9_569, "lstm": 100_106, "dcgan_generator": 6_354_244, "dcgan_discriminator": 2_767_425,
    "u_net": 118_001,
}  # fmt: skip


def test_full_sizes():
    assert {name: trained.build().parameters for name, trained in NETWORKS.items()} == PARAMETERS


@pytest.mark.parametrize("name", NETWORKS)
def test_no_layer_of_a_step_on_the_cpu_is_computed_by_numpy(name):
    trained = NETWORKS[name]
    net = training_step(trained.build(**trained.small), trained.step, trainable=trained.is_trained)
    groups = plan(net, "cpu", Job(batch=trained.batch)).groups
    assert "plain" not in [group.claim.kernel for group in groups]


def batches(net: Network, loss: str) -> list[tuple[np.ndarray, ...]]:
    """Rows, targets and shares that depend on the rows."""
    rng = np.random.default_rng(0)
    (kind,), found = net.inputs.values(), []
    for _ in range(BATCHES):
        x = _rows(rng, net, kind)
        score = x.reshape(B, -1).mean(axis=1) + x.reshape(B, -1)[:, 0]
        if loss == "cross_entropy":
            target = np.digitize(score, np.quantile(score, np.linspace(0, 1, net.output.row_size + 1)[1:-1]))
        elif net.output == kind:  # as an autoencoder
            target = x
        else:
            target = np.broadcast_to((score > np.median(score)).reshape(B, *[1] * len(net.output.row_shape)),
                                     (B, *net.output.row_shape)).astype(np.float32)  # fmt: skip
        found.append((x, target, np.full(B, 1 / B, np.float32)))
    return found


def _rows(rng: np.random.Generator, net: Network, kind: TensorType) -> np.ndarray:
    if "int" in kind.dtype:
        return rng.integers(0, NETWORKS[net.name].small["vocabulary"], (B, *kind.row_shape)).astype(kind.dtype)
    return rng.random((B, *kind.row_shape), np.float32)


class Steps:
    """Steps of a small network, from the first one on."""

    def __init__(self, name: str, optimiser: str) -> None:
        trained = NETWORKS[name]
        net, how = trained.build(**trained.small), TrainingStep(trained.loss, optimiser)
        self.net = training_step(net, how, trainable=trained.is_trained, decays=optimiser == "adamw")
        self.optimiser, self._batches = optimiser, batches(net, trained.loss)
        self.begin = {name: np.asarray(self.net.weights[name]) for name in self.net.state}

    def rows(self, count: int) -> tuple[np.ndarray, ...]:
        return self._batches[count % BATCHES]

    def values(self, count: int) -> State:
        """What changes from step to step; count: from 1 on."""
        lr = 0.01 if self.optimiser == "momentum" else 1e-3
        now = {VALUES: np.array([lr, 0.01, 0.9, 1 - 0.9**count, 1 - 0.999**count], np.float32)}
        return now | ({DRAW: np.array([11, count])} if DRAW in self.begin else {})


@pytest.mark.sample(2)
@pytest.mark.parametrize("steps", [4, 200])
@pytest.mark.parametrize("optimiser", ["momentum", "adamw"])
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_and_the_loss_curve_follow_float64(name, optimiser, steps):
    of = Steps(name, optimiser)
    follow_float64(of, bind(plan(of.net, "cpu", Job(batch=B))), steps)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NETWORKS)
def test_the_loss_curve_on_a_gpu(name):
    of = Steps(name, "adamw")
    follow_float64(of, bind(plan(of.net, "cuda", Job(batch=B))), 200)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", TRAINING_PRECISIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_on_a_gpu(name, precision):
    of = Steps(name, "momentum")
    planned = plan(of.net, "cuda", Job(precision, B))
    bound, other, state = bind(planned), bind(planned), of.begin
    for count in range(1, 5):
        rows, stored = of.rows(count), as_floats(state) | of.values(count)
        after = run_step(bound, rows, stored)
        wrong = errors(of.net, of.optimiser, after, rows, stored, precision)
        assert not wrong, f"step {count}: {wrong}"
        for again in (run_step(bound, rows, stored), run_step(other, rows, stored)):  # by a graph; by launches, first
            assert all(array.tobytes() == again[name].tobytes() for name, array in after.items())
        _, state = reference.run_step(of.net, rows, state | of.values(count), "float64")


def follow_float64(of: Steps, bound: object, steps: int) -> None:
    """Each step from the float64 state is right, and so is the curve of losses."""
    states = {"float64": of.begin, "ours": of.begin}
    states |= {f"float32 {i}": nudged(of.begin, i) for i in range(NAIVE_CURVES)}
    losses: dict[str, list[float]] = {curve: [] for curve in states}
    for count in range(1, steps + 1):
        rows, now = of.rows(count), of.values(count)
        stored = as_floats(states["float64"]) | now
        wrong = errors(of.net, of.optimiser, run_step(bound, rows, stored), rows, stored)
        assert not wrong, f"step {count}: {wrong}"
        for curve, state in states.items():
            if curve == "ours":
                after = run_step(bound, rows, as_floats(state) | now)
                loss = after.pop("loss")
            else:
                loss, after = reference.run_step(of.net, rows, state | now, curve.split()[0])
            states[curve] = after
            losses[curve].append(loss.item())
    exact = np.array(losses.pop("float64"))
    off = {curve: np.abs(np.array(found) - exact).max() / exact.max() for curve, found in losses.items()}
    allowed = FACTOR * max(off[curve] for curve in off if curve != "ours") + ULPS * ULP["fp32"]
    assert off["ours"] <= allowed, f"the curve is off by {off['ours']:.3g}, allowed {allowed:.3g}"
    assert steps < 200 or exact[-BATCHES:].mean() < exact[:BATCHES].mean()


def as_floats(state: State) -> State:
    """In float32, as a device stores it."""
    return {name: array if array.dtype.kind == "i" else array.astype(np.float32) for name, array in state.items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_loss_curve_is_no_farther_from_float64_than_torchs(name, monkeypatch):
    """The best of some that begin a rounding apart: an activation near 0 may be on the other side of a ReLU in any."""
    pytest.importorskip("torch")
    from onchip.bench.peers import torch_steps

    for module in (step_job, torch_steps):
        monkeypatch.setattr(module, "LR", 1e-4)
    curves = [losses_beside_torchs(name, seed, 100, torch_steps.TorchSteps) for seed in range(NAIVE_CURVES)]
    exact, ours, torchs = np.moveaxis(np.array(curves), 1, 0)
    off, naive = ((np.abs(losses - exact).max(1) / exact.max(1)).min() for losses in (ours, torchs))
    assert off <= FACTOR * naive + ULPS * ULP["fp32"], f"off by {off:.3g}, torch's by {naive:.3g}"


def losses_beside_torchs(name, seed, steps, torch_steps_of) -> list[list[float]]:
    """In float64, on the CPU, and by torch, over the same rows."""
    trained = NETWORKS[name]
    net = trained.build(**trained.small)
    net = net.replace(weights={**net.weights, **as_floats(nudged(dict(net.weights), seed))})
    network = dataclasses.replace(trained, build=lambda: net)
    job = step_job.StepJob(name, network, B, "fp32", "cpu", 2, drops=False)
    rows, losses = tuple(job.rows(B).values()), [list[float](), list[float]()]
    bound, exact, ours = bind(plan(by_layers(job.step), "cpu", Job(batch=B))), job.state(), job.state()
    for i in range(1, steps + 1):
        now = {VALUES: np.array([step_job.LR, 0, 0, 1 - 0.9**i, 1 - 0.999**i], np.float32)}
        loss, exact = reference.run_step(job.step, rows, exact | now, "float64")
        ours = run_step(bound, rows, as_floats(ours) | now)
        for curve, each in zip(losses, (loss, ours.pop("loss")), strict=True):
            curve.append(each.item())
    return [*losses, torch_steps_of(None, False, job, None).losses(job.rows(B), steps).tolist()]
