"""Plans of training steps as data: JSON restores the same plan and the same bits, and anything else is refused."""

import copy
import json

import numpy as np
import pytest

from layer_cases import CASES, network, random_inputs
from onchip.errors import FormatError, InputError, OnchipError
from onchip.formats.graph_json import graph_from_json, graph_to_json
from onchip.kernels.cpu import KERNELS
from onchip.network.build import mlp
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    ELU,
    BatchNorm2d,
    BatchSum,
    Conv2d,
    Dropout,
    FirstMoment,
    InputGrad,
    LeakyReLU,
    Linear,
    Mul,
    Reshape,
)
from onchip.network.recipe import value_weight
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.gradient.step import VALUES, training_step
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.plan.plan_json import array_weights, plan_digest, plan_from_json, plan_to_json
from onchip.plan.planner import make_plan
from onchip.runtime.cpu.step import CpuStep
from onchip.runtime.placement import kernels_for
from takers import CPU
from training_steps import by_layers


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def images() -> Network:
    """A convolution, a norm of the batch and a dropout."""
    norm = {role: f"n.{role}" for role in ("weight", "bias", "mean", "var")}
    nodes = (
        Node("c", Conv2d(pads=(1, 1, 1, 1)), ("x",), {"weight": "c.weight", "bias": "c.bias"}),
        Node("n", BatchNorm2d(), ("c",), norm),
        Node("a", LeakyReLU(0.2), ("n",)),
        Node("d", Dropout(0.3), ("a",)),
        Node("f", Reshape(), ("d",)),
        Node("y", Linear(), ("f",), {"weight": "y.weight"}),
    )
    weights = {"c.weight": weight(3, 2, 3, 3), "c.bias": weight(3), "y.weight": weight(4, 75) / 9}
    weights |= {name: np.abs(weight(3)) + 0.5 for name in norm.values()}
    return Network({"x": TensorType(("B", 2, 5, 5))}, nodes, ("y",), weights)


MLP = training_step(mlp(7, 5, 4), TrainingStep("cross_entropy", "adamw", 0.1, clip_norm=0.5), decays=True)
STEPS = {
    "mlp": by_layers(MLP),
    "whole": MLP,
    "images": training_step(images(), TrainingStep("cross_entropy", "momentum")),
}


def again(plan: Plan) -> Plan:
    return plan_from_json(plan_to_json(plan), array_weights(plan.network), kernels_for(plan.device))


def run(plan: Plan, rows: tuple[np.ndarray, ...]) -> dict[str, bytes]:
    """The bits of the loss and of the state after two steps."""
    step = CpuStep(plan, 1)
    step.state[VALUES][...] = 0.1, 0.01, 0.9, 0.1, 0.001
    for _ in range(2):
        outputs = step.run(dict(zip(plan.network.inputs, rows, strict=True)), len(rows[-1]))
    return {name: array.tobytes() for name, array in (*step.state.items(), *outputs.items())}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("device", [CPU, H200], ids=lambda device: device.kind)
def test_the_plan_of_a_step_is_the_same_from_its_json(name, device):
    plan = make_plan(STEPS[name], device, kernels_for(device), Job(batch=6), whole=False)
    twin = again(plan)
    assert str(twin) == str(plan)
    assert plan_digest(twin) == plan_digest(plan)
    assert twin.network.nodes == plan.network.nodes
    assert twin.network.state == plan.network.state
    assert (twin.network.trained is None) == (name == "mlp")
    for one, two in zip(plan.groups, twin.groups, strict=True):
        assert (one.inputs, one.outputs, one.claim.cost) == (two.inputs, two.outputs, two.claim.cost)
        assert one.claim.recipes == two.claim.recipes


@pytest.mark.parametrize("name", ["mlp", "images"])
def test_and_computes_the_same_bits(name):
    step, rng = STEPS[name], np.random.default_rng(0)
    x = rng.standard_normal((6, *step.inputs["x"].row_shape), np.float32)
    rows = x, rng.integers(0, 4, 6), np.full(6, 1 / 6, np.float32)
    plan = make_plan(step, CPU, KERNELS, Job(batch=6))
    assert run(again(plan), rows) == run(plan, rows)


@pytest.mark.parametrize("case", [case for case in CASES if case.layer.is_differentiable], ids=str)
def test_gradients_keep_the_attributes_of_their_layer(case):
    net = network(case)
    nodes = (*net.nodes, Node("flat", Reshape(), ("y",)), Node("l", Linear(), ("flat",), {"weight": "l.weight"}))
    net = Network(net.inputs, nodes, ("l",), {**net.weights, "l.weight": weight(2, net.output.row_size)})
    step = training_step(net, TrainingStep("mse"))
    assert random_inputs(case, 2)
    plan = make_plan(step, CPU, KERNELS, Job(batch=2))
    assert again(plan).network.nodes == step.nodes


# -- invalid plans ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved() -> tuple[dict, dict[str, np.ndarray]]:
    nodes = (
        Node("a", ELU(0.5), ("x",)),
        Node("g", InputGrad(ELU(0.5)), ("x", "a", "x")),
        Node("s", BatchSum(), ("g",)),
        Node("new", FirstMoment(), ("s",), {"moment": "m"}),
        Node("y", Mul(), ("a",), {"constant": "s.row"}),
    )
    weights = {"m": weight(3), "s.row": value_weight("s", (3,))}
    net = Network({"x": TensorType(("B", 3))}, nodes, ("y",), weights, state={"m": "new"})
    plan = make_plan(net, CPU, KERNELS, Job(batch=2))
    return json.loads(plan_to_json(plan)), array_weights(plan.network)


def gradient(document: dict) -> dict:
    """The attributes of the gradient."""
    return document["network"]["nodes"][1]["attributes"]


def value_recipe(document: dict) -> dict:
    return document["recipes"]["s.row"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: plan.pop("state"), "not a plan"),
        (lambda plan: plan.update(state=["m"]), "not a plan"),
        (lambda plan: plan["state"].update(nothing=""), "state 'nothing' is not an array"),
        (lambda plan: plan["state"].update(m="y"), "cannot replace state 'm'"),
        (lambda plan: plan["state"].update(m="nothing"), "no such value"),
        (lambda plan: plan["state"].update(m=7), "no such value"),
        (lambda plan: plan["state"].update({"s.row": ""}), "a derived weight"),
        (lambda plan: value_recipe(plan).update(shape=[2, 3]), "a value of the network"),
        (lambda plan: value_recipe(plan).update(attributes={"value": "nothing"}), "no earlier layer"),
        (lambda plan: value_recipe(plan).update(attributes={}), "no earlier layer"),
        (lambda plan: gradient(plan).update(of="LeakyReLU"), "wrong type"),
        (lambda plan: gradient(plan).update(of={}), "no 'kind'"),
        (lambda plan: gradient(plan)["of"].update(kind="Nobody"), "unknown kind"),
        (lambda plan: gradient(plan).update(of={"kind": "BatchSum", "attributes": {}}), "BatchSum has no gradient"),
        (lambda plan: gradient(plan)["of"]["attributes"].update(alpha="steep"), "invalid value"),
        (lambda plan: gradient(plan)["of"]["attributes"].update(alfa=1), "unknown attributes"),
        (lambda plan: gradient(plan).update(index=9), "no such input"),
    ],
)
def test_what_is_wrong_is_said(saved, change, words):
    document, weights = saved
    forged = copy.deepcopy(document)
    change(forged)
    with pytest.raises(InputError, match=words):
        plan_from_json(json.dumps(forged), weights, KERNELS)


@pytest.mark.parametrize("depth", [1, 100, 300, 10_000])
def test_a_gradient_of_a_gradient_of_a_gradient_is_refused(saved, depth):
    document, weights = saved
    forged = copy.deepcopy(document)
    gradient(forged)["of"] = "deepest"
    begin, end = '{"kind": "InputGrad", "attributes": {"of": ', "}}"
    deepest = '{"kind": "ELU", "attributes": {}}'
    text = json.dumps(forged).replace('"deepest"', begin * depth + deepest + end * depth)
    with pytest.raises(InputError, match=r"InputGrad has no gradient|recursion|nested too deeply"):
        plan_from_json(text, weights, KERNELS)


def test_a_forged_plan_of_a_step_raises_nothing_but_our_own_errors(saved):
    document, weights = saved
    refused = 0

    def forge(inside):
        nonlocal refused
        for key in list(inside) if isinstance(inside, dict) else range(len(inside)):
            kept = inside[key]
            if isinstance(kept, dict | list):
                forge(kept)
            for change in (None, -1, "c", [], {}):
                inside[key] = change
                try:
                    plan_from_json(json.dumps(document), weights, KERNELS)
                except OnchipError:
                    refused += 1
            inside[key] = kept

    for part in ("state", "recipes", "network"):
        forge(document[part])
    assert refused > 100


def test_files_of_networks_have_no_step_layers():
    for step in STEPS.values():
        graph = graph_to_json(step)
        with pytest.raises(FormatError, match="unknown kind"):
            graph_from_json(graph, step.weights)
