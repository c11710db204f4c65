"""The step of a run as a network, and the kernels that run it whole."""

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import Dropout, DropoutMask, Identity, ReLU
from onchip.network.layers.optimiser import BETA1, BETA2
from onchip.network.recipe import Recipe, as_is
from onchip.network.training import TrainingStep
from onchip.plan.gradient.step import VALUES
from onchip.train.loop import fit
from onchip.train.step import step_of

STEPS, B = 5, 12
LR, DECAY, MOMENTUM = 0.05, 0.01, 0.5


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "half_sse"])
@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam", "adamw"])
def test_a_kernel_trains_as_the_nodes_of_its_step(loss, optimiser):
    """The nodes of the step that fit plans, run one at a time in float64."""
    net, x = random_mlp(7, 6, 4), rows(B, 7)
    y = np.arange(B) % 4 if loss == "cross_entropy" else rows(B, 4, seed=2)
    result = fit(
        net, x, y, loss=loss, optimiser="sgd" if optimiser == "momentum" else optimiser, lr=LR, weight_decay=DECAY,
        momentum=MOMENTUM if optimiser == "momentum" else 0.0, clip_norm=0.3, batch_size=B, epochs=STEPS, device="cpu",
    )  # fmt: skip
    step = result.plan.network
    assert step.trained.decays
    state = {name: np.asarray(step.weights[name], np.float64) for name in step.state}
    share, losses = np.full(B, 1.0 if loss == "half_sse" else 1 / B), []
    for t in range(1, STEPS + 1):
        state[VALUES] = np.array([LR, DECAY, MOMENTUM, 1 - BETA1**t, 1 - BETA2**t])
        total, state = reference.run_step(step, (x, y, share), state)
        losses.append(np.asarray(total).item())
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
    for name in net.weights:
        np.testing.assert_allclose(result.network.weights[name], state[name], rtol=1e-3, atol=2e-6)


def with_idle_layers(net: Network) -> Network:
    """With an Identity after the first layer, and a dropout that drops nothing."""
    first, _, last = net.nodes
    idle = Node("drop", Dropout(0.0), ("fc1",)), Node("same", Identity(), ("drop",))
    return net.replace(nodes=(first, *idle, Node("relu1", ReLU(), ("same",)), last))


def with_derived_weight(net: Network) -> Network:
    weight = net.weights["fc1.weight"]
    recipe = Recipe.of(as_is, ("stored",), weight.shape, "float32")
    return net.replace(weights={**net.weights, "stored": weight, "fc1.weight": recipe})


@pytest.mark.parametrize("change", [with_idle_layers, with_derived_weight])
def test_all_weights_are_trained_and_idle_layers_change_nothing(change):
    net, x, y = random_mlp(7, 6, 4), rows(B, 7), np.arange(B) % 4
    plain, other = (fit(each, x, y, device="cpu", epochs=2) for each in (net, change(net)))
    assert other.losses.tobytes() == plain.losses.tobytes()
    for name in net.weights:
        assert other.network.weights[name].tobytes() == plain.network.weights[name].tobytes()


def test_a_step_has_the_layers_that_change_something():
    step = step_of(with_idle_layers(random_mlp(7, 6, 4)), TrainingStep("mse"))
    assert [node.name for node in step.trained.network.nodes] == ["fc1", "relu1", "fc2"]


def test_a_dropout_stays():
    net = random_mlp(7, 6, 4)
    first, relu, last = net.nodes
    drops = net.replace(nodes=(first, Node("drop", Dropout(0.5), ("fc1",)), Node("relu1", ReLU(), ("drop",)), last))
    assert any(isinstance(node.layer, DropoutMask) for node in step_of(drops, TrainingStep("mse")).nodes)
    assert relu.name == "relu1"
