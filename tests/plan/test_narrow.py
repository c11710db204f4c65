"""Values between layers in 16 bits: what changes in a network, and when a plan does it."""

import numpy as np
import pytest

from networks import Grow, seeded
from onchip.kernels import reference
from onchip.measure.truth import relative_error
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.io import with_io
from onchip.network.layers import Add, ArgMax, Cast, Conv2d, GlobalMean, Linear, ReLU, Softmax
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.plan.rewrites import narrow_values
from onchip.runtime.placement import kernels_for
from random_networks import random_network

FORMATS = {"fp16": "float16", "bf16": "bfloat16"}


def images() -> Network:
    grow = Grow(seeded(3), 4, 8, 8, dtype="float32")
    grow.weight_dtype = "float32"
    first = grow.add(ReLU(), grow.conv("x", Conv2d(pads=(1, 1, 1, 1)), 16, 3, 3))
    second = grow.conv(first, Conv2d(pads=(1, 1, 1, 1)), 16, 3, 3)
    return grow.network(grow.add(GlobalMean((2, 3)), grow.add(ReLU(), grow.add(Add(), first, second))))


def test_the_largest_of_an_input_is_asked_of_the_input_as_it_came():
    grow = Grow(seeded(3), 5, dtype="float32")
    grow.weight_dtype = "float32"
    net = grow.network(grow.add(ArgMax(), "x"), grow.linear("x", 3))
    made, _ = narrow_values(net, "bf16")
    assert made.by_name[net.outputs[0]].inputs == ("x",)
    assert [node.layer for node in made.nodes if isinstance(node.layer, Cast)] == [Cast("bfloat16"), Cast("float32")]


def planned(net: Network, precision: str, batch: int = 4096):
    return make_plan(net, H200, kernels_for(H200), Job(precision, batch))


@pytest.mark.parametrize("precision", FORMATS)
def test_ends_keep_names_and_dtypes_and_all_inside_is_narrow(precision):
    dtype = FORMATS[precision]
    net = images()
    made, told = narrow_values(net, precision)
    assert told == [f"stored values between layers in {dtype}"]
    assert made.inputs == net.inputs
    assert made.outputs == net.outputs
    assert made.types[made.outputs[0]] == net.types[net.outputs[0]]
    inside = {made.types[node.name].dtype for node in made.nodes if node.name not in made.outputs}
    assert inside == {dtype}
    assert sum(isinstance(node.layer, Cast) for node in made.nodes) == 2


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("seed", range(40))
def test_ends_of_any_network_are_what_they_were(seed, precision):
    net = random_network(seed)
    made, _ = narrow_values(net, precision)
    assert made.outputs == net.outputs
    assert dict(made.inputs) == dict(net.inputs)
    assert [made.types[name] for name in made.outputs] == [net.types[name] for name in net.outputs]


@pytest.mark.parametrize("precision", FORMATS)
def test_it_means_the_same_but_for_rounding(precision):
    net = images()
    x = np.random.default_rng(1).standard_normal((5, 4, 8, 8)).astype(np.float32)
    made, _ = narrow_values(net, precision)
    assert relative_error(reference.forward(made, x), reference.forward(net, x)) == 0  # in float64 nothing is rounded


def test_casts_that_io_brought_are_gone():
    net = with_io(images(), "float16")
    made, _ = narrow_values(net, "fp16")
    assert not [node for node in made.nodes if isinstance(node.layer, Cast)]
    assert {made.types[node.name].dtype for node in made.nodes} == {"float16"}


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_wide_products_keep_wide_values(precision):
    net = images()
    assert narrow_values(net, precision) == (net, [])


def test_float64_and_networks_without_products_stay():
    soft = sequential(TensorType(("B", 8), "float32"), [("a", ReLU()), ("b", Softmax())], {})
    assert narrow_values(soft, "fp16") == (soft, [])
    wide = Network(
        {"x": TensorType(("B", 8), "float32")},
        (Node("wide", Cast("float64"), ("x",)), Node("y", Linear(), ("wide",), {"weight": "w"})),
        ("y",), {"w": np.ones((4, 8))},
    )  # fmt: skip
    assert narrow_values(wide, "fp16") == (wide, [])


def test_a_plan_does_it_where_fewer_bytes_move():
    plan = planned(images(), "fp16")
    assert "stored values between layers in float16" in plan.rewrites
    between = {plan.network.types[name].dtype for group in plan.groups[:-1] for name in group.claim.nodes[-1:]}
    assert between == {"float16"}
    assert plan.estimate_us < planned(images(), "fp32").estimate_us


def test_a_plan_of_one_kernel_stays_as_it_is():
    layers = [("a", Linear()), ("b", ReLU()), ("c", Linear())]
    weights = {"a.weight": np.ones((32, 32), np.float32), "c.weight": np.ones((32, 32), np.float32)}
    plan = planned(sequential(TensorType(("B", 32), "float32"), layers, weights), "fp16")
    assert len(plan.groups) == 1
    assert not plan.rewrites
    assert not plan.left_out
