"""Plans as data: JSON restores the same plan, for CPU and GPU, and anything else is refused."""

import copy
import dataclasses
import json

import numpy as np
import pytest

from checks import random_mlp
from onchip.errors import DeviceError, FormatError, InputError, OnchipError, PlanError
from onchip.kernels.cpu import KERNELS
from onchip.network.build import mlp, sequential
from onchip.network.layers import BatchNorm1d, CumSum, Linear, ReLU
from onchip.network.recipe import Recipe, materialise
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.device import A100, H200
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.plan.plan_json import (
    array_weights,
    plan_digest,
    plan_from_json,
    plan_record,
    plan_to_json,
    recorded_device,
    recorded_kind,
)
from onchip.plan.planner import make_plan
from onchip.runtime.placement import kernels_for
from onchip.workloads import faces
from random_networks import random_network
from takers import CPU

KINDS = (CPU, A100, H200)


def again(plan, kernels):
    return plan_from_json(plan_to_json(plan), array_weights(plan.network), kernels)


def assert_same(one, two):
    assert str(one) == str(two)
    assert plan_digest(one) == plan_digest(two)
    assert (one.device, one.job) == (two.device, two.job)
    for a, b in zip(one.groups, two.groups, strict=True):
        assert (a.inputs, a.outputs, a.claim.nodes) == (b.inputs, b.outputs, b.claim.nodes)
        assert a.claim.cost == b.claim.cost
        assert dict(a.claim.recipes) == dict(b.claim.recipes)
        for name, recipe in a.claim.recipes.items():
            made, twin = (materialise(recipe, plan.network.weights) for plan in (one, two))
            assert made.tobytes() == twin.tobytes(), name


@pytest.mark.parametrize("seed", range(40))
def test_any_plan_is_the_same_from_its_json(seed):
    plan = make_plan(random_network(seed), CPU, KERNELS, Job(batch=10**9 if seed % 2 else 7))
    assert_same(plan, again(plan, KERNELS))


@pytest.mark.parametrize("device", [CPU, H200], ids=lambda device: device.kind)
def test_a_plan_for_training_is_the_same_from_its_json(device):
    how = TrainingStep(
        "cross_entropy", "adam", label_smoothing=0.1, clip_norm=0.5, is_weighted=True, byte_scale=1 / 255
    )
    net = mlp(20, 9, 5)
    plan = make_plan(training_step(net, how, decays=True), device, kernels_for(device), Job("fp32", 64))
    twin = again(plan, kernels_for(device))
    assert_same(plan, twin)
    assert twin.whole_step.network.nodes == net.nodes
    assert (twin.whole_step.how, twin.whole_step.decays, twin.whole_step.frozen) == (how, True, ())
    stored = json.loads(plan_to_json(plan))
    assert stored["job"] == {"precision": "fp32", "batch": 64, "without": [], "tables": "fp32"}
    assert stored["trained"]["how"] == {
        "loss": "cross_entropy", "optimiser": "adam", "label_smoothing": 0.1, "clip_norm": 0.5, "is_weighted": True,
        "byte_scale": 1 / 255, "ema": 0.0, "outputs": [], "beta1": 0.9,
    }  # fmt: skip


@pytest.mark.parametrize("device", [CPU, H200], ids=lambda device: device.kind)
@pytest.mark.parametrize("seed", range(12))
def test_any_plan_is_chosen_again_by_its_record(device, seed):
    """On a machine of the same kind with other measured rates."""
    net, job = random_network(seed), Job(batch=10**9 if seed % 2 else 7)
    plan = make_plan(net, device, kernels_for(device), job, whole=False)
    record = json.loads(json.dumps(plan_record(plan)))
    here = dataclasses.replace(
        device, bandwidth=device.bandwidth * 9, flops={**device.flops, "fp32": device.flops["fp32"] / 9}
    )
    assert recorded_kind(record) == device.kind
    found = recorded_device(record, here)
    assert plan_digest(make_plan(net, found, kernels_for(found), job, whole=False)) == record["sha256"]


def test_a_record_of_another_kind_of_device_is_refused():
    net = random_mlp(6, 5, 4)
    for device in KINDS:
        record = json.loads(json.dumps(plan_record(make_plan(net, device, kernels_for(device)))))
        for here in KINDS:
            if device is here:
                assert recorded_device(record, here) == device
            else:
                with pytest.raises(DeviceError, match="another kind of device"):
                    recorded_device(record, here)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_plan_for_a_gpu_has_the_same_launches(precision):
    layers = [("a", Linear()), ("r", ReLU()), ("b", Linear()), ("s", CumSum(axis=1))]
    weights = {"a.weight": np.ones((64, 72), np.float32), "b.weight": np.ones((5000, 64), np.float32)}
    plan = make_plan(sequential(TensorType(("B", 72)), layers, weights), H200, kernels_for(H200), Job(precision))
    twin = again(plan, kernels_for(H200))
    assert_same(plan, twin)
    for one, two in zip(plan.groups, twin.groups, strict=True):
        for B in (1, 1000):
            assert one.claim.facts.at(B) == two.claim.facts.at(B)


def test_weights_that_are_still_to_be_made_stay_recipes():
    ones = np.ones(3, np.float32)
    weights = {"a.weight": np.ones((3, 4), np.float32), "n.mean": ones, "n.var": ones}
    net = sequential(TensorType(("B", 4)), [("a", Linear()), ("n", BatchNorm1d())], weights)
    plan = make_plan(net, CPU, KERNELS)
    assert any(isinstance(weight, Recipe) for weight in plan.network.weights.values())
    assert set(array_weights(plan.network)) == set(weights)
    assert_same(plan, again(plan, KERNELS))
    seeded = make_plan(faces.network(), CPU, KERNELS)  # random weights are generated when an engine is built
    assert array_weights(seeded.network) == {}
    assert str(again(seeded, KERNELS)) == str(seeded)


def test_another_plan_has_another_digest():
    net, on_h200, on_a100 = random_mlp(6, 5, 4), kernels_for(H200), kernels_for(A100)
    plans = [
        make_plan(net, CPU, KERNELS), make_plan(net, CPU, KERNELS, Job(batch=7)), make_plan(net, H200, on_h200),
        make_plan(net, A100, on_a100), make_plan(random_mlp(6, 5, 3), CPU, KERNELS),
    ]  # fmt: skip
    assert len({plan_digest(plan) for plan in plans}) == len(plans)


# -- invalid plans ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told():
    weights = {"a.weight": np.ones((3, 4), np.float32), "b.weight": np.ones((2, 3), np.float32)}
    net = sequential(TensorType(("B", 4)), [("a", Linear()), ("b", Linear()), ("r", ReLU())], weights)
    plan = make_plan(net, CPU, KERNELS)
    return json.loads(plan_to_json(plan)), array_weights(plan.network)


def places(value, path=()):
    """The path of every value in a JSON document."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from places(entry, (*path, key))


def test_a_forged_plan_raises_nothing_but_our_own_errors(told):
    document, weights = told
    refused = 0
    for path in list(places(document))[1:]:
        for change in (None, -1, "__main__:main", [], {}):
            forged = copy.deepcopy(document)
            inside = forged
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = change
            try:
                plan_from_json(json.dumps(forged), weights, KERNELS)
            except OnchipError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: plan.update(version=1), "version"),
        (lambda plan: plan.update(version=4), "version"),  # its job had all values of a training step in one object
        (lambda plan: plan.update(version=5), "version"),  # it had no state
        (lambda plan: plan.update(version=True), "version"),
        (lambda plan: plan["groups"].pop(), "omit layers"),
        (lambda plan: plan["groups"][0].update(kernel="nobody"), "as planned"),
        (lambda plan: plan["groups"][0].update(label="mlp_fused<4,7>"), "as planned"),
        (lambda plan: plan["groups"][0].update(layers=["nothing"]), "as planned"),
        (lambda plan: next(iter(plan["recipes"].values())).update(op="__main__:main"), "unknown recipe operation"),
        (lambda plan: next(iter(plan["recipes"].values())).update(sources=list(plan["recipes"])), "cycle"),
        (lambda plan: plan.pop("job"), "not a plan"),
        (lambda plan: plan["job"].update(precision="fp7"), "unknown precision"),
        (lambda plan: plan.update(trained={}), "not a plan"),
        (lambda plan: plan["job"].update(loss="mse"), "not a plan"),
    ],
)
def test_what_is_wrong_is_said(told, change, words):
    document, weights = told
    forged = copy.deepcopy(document)
    change(forged)
    with pytest.raises((FormatError, PlanError, InputError), match=words):
        plan_from_json(json.dumps(forged), weights, KERNELS)


def test_no_json_is_no_plan():
    for text in ("", "[]", "{", "[" * 100_000, "null"):
        with pytest.raises(FormatError):
            plan_from_json(text, {}, KERNELS)
