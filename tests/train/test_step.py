"""The step of a run as a network, and the kernels that run it whole."""

import re
from fnmatch import fnmatch

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.errors import InputError
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchNorm1d, Decayed, Dropout, DropoutMask, Identity, ReLU
from onchip.network.layers.optimiser import BETA1, BETA2
from onchip.network.recipe import Recipe, as_is
from onchip.network.training import TrainingStep
from onchip.plan.gradient.step import VALUES
from onchip.plan.kernel import Job
from onchip.runtime.cpu.step import CpuStep
from onchip.runtime.placement import plan
from onchip.train.loop import fit
from onchip.train.options import TrainOptions
from onchip.train.step import step_of
from training_steps import by_layers

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


# -- frozen weights --------------------------------------------------------------------------------------------


def with_norm() -> Network:
    norm = {
        f"n.{role}": np.abs(rows(1, 6, seed=i))[0] + 0.5 for i, role in enumerate(("mean", "var", "weight", "bias"))
    }
    net = random_mlp(7, 6, 4)
    first, _, last = net.nodes
    nodes = (first, Node("n", BatchNorm1d(), ("fc1",), {name[2:]: name for name in norm}),
             Node("relu1", ReLU(), ("n",)), last)  # fmt: skip
    return net.replace(nodes=nodes, weights={**net.weights, **norm})


@pytest.mark.parametrize(
    ("frozen", "trained"),
    [
        ((), {"fc1.weight", "fc1.bias", "n.weight", "n.bias", "n.mean", "n.var", "fc2.weight", "fc2.bias"}),
        (("fc1.*",), {"n.weight", "n.bias", "n.mean", "n.var", "fc2.weight", "fc2.bias"}),
        (("fc?.weight", "n.*"), {"fc1.bias", "fc2.bias"}),
        (("*.mean",), {"fc1.weight", "fc1.bias", "n.weight", "n.bias", "fc2.weight", "fc2.bias"}),
    ],
)
def test_frozen_weights_are_not_state(frozen, trained):
    step = step_of(with_norm(), TrainingStep("mse", "momentum"), frozen=frozen)
    assert {name for name in step.state if not name.endswith(".velocity")} - {VALUES} == trained
    matched = {name for name in with_norm().weights if any(fnmatch(name, pattern) for pattern in frozen)}
    assert set(step.trained.frozen) == matched


def test_a_frozen_norm_computes_as_at_inference():
    net, x, target = with_norm(), rows(B, 7), rows(B, 4, seed=2)
    step = step_of(net, TrainingStep("mse"), frozen=("n.mean",))
    (loss,), _ = reference.run_step(step, (x, target, np.full(B, 1 / B)))
    assert loss == pytest.approx(reference.batch_loss("mse", reference.forward(net, x, "float64"), target)[0])


@pytest.mark.parametrize(
    ("frozen", "message", "hint"),
    [
        (("fc3.*",), "frozen matches no weight", "expected: +a pattern of fc1.weight, fc1.bias, n.mean"),
        (("fc1.*", "bias"), "frozen matches no weight", r"did you mean \*.bias\?"),
        (("fc1",), "frozen matches no weight", r"did you mean fc1.\*\?"),
        (("fc1.wieght",), "frozen matches no weight", "did you mean fc1.weight"),
        (("*",), "every weight is frozen", "patterns that leave some of fc1.weight, "),
        (("fc*", "n.weight", "n.bias"), "every weight is frozen", "patterns that leave some"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything(frozen, message, hint):
    with pytest.raises(InputError, match=message) as refused:
        step_of(with_norm(), TrainingStep("mse"), frozen=frozen)
    assert re.search(hint, str(refused.value))


def test_a_frozen_weight_may_be_derived():
    step = step_of(with_derived_weight(random_mlp(7, 6, 4)), TrainingStep("mse"), frozen=("fc1.weight",))
    assert set(step.state) == {"fc1.bias", "fc2.weight", "fc2.bias", VALUES}


def test_fit_freezes_by_name():
    net = random_mlp(7, 6, 4)
    with pytest.raises(InputError, match="frozen matches no weight"):
        fit(net, rows(B, 7), np.arange(B) % 4, device="cpu", frozen="fc9.*")
    result = fit(net, rows(B, 7), np.arange(B) % 4, device="cpu", frozen="fc2.*,fc1.weight", epochs=2)
    changed = {name for name, weight in result.network.weights.items() if (weight != net.weights[name]).any()}
    assert changed == {"fc1.bias"}
    assert "trains all weights, and 'fc1.weight' is not to be trained" in result.plan.refusals[0].why


# -- weight decay by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight_decay", "decays"),
    [
        (0.0, False),
        (0.1, True),
        ((("*.bias", 0.0), ("*", 0.1)), {"fc1.weight": 0.1, "fc2.weight": 0.1}),
        ((("fc1.*", 0.2), ("*.weight", 0.1)), {"fc1.weight": 0.2, "fc1.bias": 0.2, "fc2.weight": 0.1}),
        ((("fc2.bias", 0.3),), {"fc2.bias": 0.3}),
        ((("fc2.bias", 0.3), ("fc2.bias", 0.1)), {"fc2.bias": 0.3}),
        ((("*", 0.0),), {}),
    ],
)
def test_the_first_pattern_that_matches_decays(weight_decay, decays):
    step = step_of(random_mlp(7, 6, 4), TrainingStep("mse"), weight_decay)
    assert step.trained.decays == decays
    factors = {
        node.weights["weight"]: node.layer.decay_factor for node in step.nodes if isinstance(node.layer, Decayed)
    }
    assert factors == (dict.fromkeys(step.trained.network.weights, 1.0) if decays is True else decays or {})


def test_one_pattern_for_all_is_a_plain_number():
    """With the same bits."""
    net, x, target = random_mlp(7, 6, 4), rows(B, 7), rows(B, 4, seed=2)
    states = []
    for weight_decay in (0.3, (("*", 0.3),)):
        options = TrainOptions(weight_decay=weight_decay, optimiser="adamw", loss="mse")
        step = by_layers(step_of(net, TrainingStep("mse", "adamw"), options.weight_decay))
        bound = CpuStep(plan(step, "cpu", Job(batch=B)), 1)
        for t in range(1, 4):
            bound.state[VALUES][...] = 0.1, options.step_decay, 0, 1 - BETA1**t, 1 - BETA2**t
            bound.run({"x": x, "target": target, "share": np.full(B, 1 / B, np.float32)}, B)
        states.append({name: array for name, array in bound.state.items() if name != VALUES})
    assert all(array.tobytes() == states[1][name].tobytes() for name, array in states[0].items())


def test_a_pattern_of_no_weight_is_refused():
    with pytest.raises(InputError, match="weight_decay matches no weight") as refused:
        step_of(random_mlp(7, 6, 4), TrainingStep("mse"), (("bias", 0.0), ("*", 0.1)))
    assert refused.value.hint == "did you mean *.bias?"
