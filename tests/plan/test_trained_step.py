"""What a step says that it trains, and the kernels that run whole steps by it."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest

from onchip.errors import FormatError
from onchip.kernels.cpu import KERNELS
from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.network.recipe import Recipe, as_is
from onchip.network.training import TrainingStep
from onchip.plan.device import H200
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.plan_json import array_weights, plan_from_json, plan_to_json
from onchip.plan.planner import make_plan
from onchip.runtime.placement import kernels_for, training_kernels_for
from python_calls import python_calls
from takers import CPU
from training_steps import by_layers

DEVICES = pytest.mark.parametrize("device", [CPU, H200], ids=lambda device: device.kind)
HOW = TrainingStep("cross_entropy", "momentum")


def step_of(*widths: int, **options) -> Network:
    return training_step(mlp(*widths), HOW, **options)


def test_a_step_says_what_it_trains():
    net = mlp(7, 5, 4)
    step = training_step(net, HOW, decays=True, trainable=lambda name: name != "fc1.bias")
    assert step.trained.network is net
    assert (step.trained.how, step.trained.decays, step.trained.frozen) == (HOW, True, ("fc1.bias",))
    assert net.trained is None


def test_only_a_step_with_the_same_nodes_says_so():
    step = step_of(7, 5, 4)
    assert step.replace(name="other").trained is step.trained
    assert step.replace(nodes=step.nodes).trained is None
    assert step.replace(outputs=step.outputs).trained is None
    assert step.replace(weights=step.weights).trained is None
    for twin in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert twin.trained.network.nodes == step.trained.network.nodes
        assert twin.trained.how == HOW


@DEVICES
@pytest.mark.parametrize("decays", [False, True])
def test_a_kernel_claims_all_nodes_of_a_step(device, decays):
    step = step_of(7, 5, 4, decays=decays)
    plan = make_plan(step, device, kernels_for(device), Job(batch=6))
    (group,) = plan.groups
    assert group.claim.nodes == tuple(node.name for node in step.nodes)
    assert group.claim.kernel.startswith("mlp_train")
    assert plan.whole_step is step.trained


@DEVICES
def test_a_whole_step_is_planned_at_once(device):
    """Its nodes are not planned one by one: a deep network has hundreds."""
    step, kernels = step_of(*(8,) * 40), kernels_for(device)
    assert len(step.nodes) > 300
    make_plan(step, device, kernels)
    assert python_calls(lambda: make_plan(step, device, kernels)) < 75_000  # by layers: 250,000 and more


def derived(net: Network) -> Network:
    weight = net.weights["fc1.weight"]
    recipe = Recipe.of(as_is, ("fc1.stored",), weight.shape, "float32")
    return net.replace(weights={**net.weights, "fc1.stored": weight, "fc1.weight": recipe})


@DEVICES
@pytest.mark.parametrize(
    ("net", "frozen", "name"),
    [(mlp(7, 5, 4), ["fc2.bias"], "fc2.bias"), (derived(mlp(7, 5, 4)), [], "fc1.weight")],
    ids=["frozen", "derived"],
)
def test_a_step_that_trains_some_weights_is_planned_by_layers(device, net, frozen, name):
    step = training_step(net, HOW, trainable=lambda weight: weight not in frozen)
    plan = make_plan(step, device, kernels_for(device), Job(batch=6))
    assert plan.whole_step is None
    assert len(plan.groups) > 1
    assert f"refused: mlp_train at fc1: trains all weights, and '{name}' is not to be trained" in str(plan)


@DEVICES
@pytest.mark.parametrize(
    ("how", "decays", "why"),
    [
        (TrainingStep("mse", "nesterov"), False, "trains with sgd, momentum, adam, adamw, not nesterov"),
        (TrainingStep("mse"), {"fc1.weight": 0.1}, "decays all weights alike, not by name"),
        (TrainingStep("mse", ema=0.9), False, "keeps no average of the weights (ema)"),
        (TrainingStep("mse"), {}, "decays all weights alike, not by name"),
    ],
)
def test_kernels_of_whole_steps_refuse_what_they_cannot_compute(device, how, decays, why):
    plan = make_plan(training_step(mlp(7, 5, 4), how, decays=decays), device, kernels_for(device), Job(batch=6))
    assert plan.whole_step is None
    assert f"refused: mlp_train at fc1: {why}" in str(plan)


@DEVICES
@pytest.mark.parametrize("loss", ["bce_with_logits", "mae", "huber"])
def test_kernels_for_whole_steps_refuse_other_losses(device, loss):
    """Each of them, which with mean squared errors runs one of these batches: none computes another loss instead."""
    kernels = [kernel for kernel in kernels_for(device) if getattr(kernel, "runs_whole_steps", False)]

    def answers(kernel, loss):
        step = training_step(mlp(784, 320, 160, 10), TrainingStep(loss, byte_scale=1 / 255))
        return [answer for batch in (64, 256) for answer in kernel.claims(step, 0, device, Job(batch=batch))]

    assert all(any(isinstance(each, Claim) for each in answers(kernel, "mse")) for kernel in kernels)
    refusals = [answer for kernel in kernels for answer in answers(kernel, loss)]
    assert {type(answer) for answer in refusals} == {Refusal}
    assert {answer.why for answer in refusals} == {f"trains with cross_entropy, half_sse, mse, not {loss}"}
    step = training_step(mlp(20, 32, 16), TrainingStep(loss))
    assert make_plan(step, device, kernels_for(device), Job(batch=6)).whole_step is None


@DEVICES
def test_without_what_it_trains_a_step_is_planned_by_layers(device):
    plan = make_plan(by_layers(step_of(7, 5, 4)), device, kernels_for(device), Job(batch=6))
    assert plan.whole_step is None
    assert len(plan.groups) > 1


@DEVICES
def test_kernels_of_whole_steps_claim_no_network_without_state(device):
    for kernel in training_kernels_for(device):
        assert not list(kernel.claims(mlp(7, 5, 4), 0, device, Job()))
        step = step_of(7, 5, 4)
        assert not [each for each in kernel.claims(step, 1, device, Job()) if isinstance(each, Claim)]


# -- as JSON -----------------------------------------------------------------------------------------------------


def test_a_forged_step_is_refused():
    step = step_of(7, 5, 4, trainable=lambda name: name != "fc1.bias")
    document = json.loads(plan_to_json(make_plan(step, CPU, KERNELS, Job(batch=6))))
    weights = array_weights(step)
    assert plan_from_json(json.dumps(document), weights, KERNELS).network.trained.frozen == ("fc1.bias",)
    for change in (
        {"frozen": []},
        {"decays": True},
        {"decays": {"fc1.weight": 0.1}},
        {"decays": {"fc1.weight": "much"}},
        {"how": dataclasses.asdict(TrainingStep("mse", "momentum"))},
        {"how": dataclasses.asdict(TrainingStep("cross_entropy", "adam"))},
        {"network": {**document["trained"]["network"], "outputs": ["relu1"]}},
    ):
        forged = {**document, "trained": {**document["trained"], **change}}
        with pytest.raises(FormatError) as refused:
            plan_from_json(json.dumps(forged), weights, KERNELS)
        assert refused.value.got == "nodes of another step"


@pytest.mark.parametrize("decays", [False, True, {}, {"fc1.weight": 0.25, "fc2.bias": 1e-3}])
def test_decays_are_kept(decays):
    step = training_step(mlp(7, 5, 4), TrainingStep("mse", "adamw"), decays=decays)
    twin = plan_from_json(plan_to_json(make_plan(step, CPU, KERNELS, Job(batch=6))), array_weights(step), KERNELS)
    assert twin.network.trained.decays == decays
    assert twin.network.nodes == step.nodes


def test_a_step_in_json_has_the_weights_that_it_is_given():
    step = step_of(7, 5, 4)
    text, weights = plan_to_json(make_plan(step, CPU, KERNELS, Job(batch=6))), array_weights(step)
    weights["fc1.weight.velocity"] = np.ones((5, 7), np.float32)
    twin = plan_from_json(text, weights, KERNELS)
    assert twin.network.weights["fc1.weight.velocity"].all()
