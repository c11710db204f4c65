"""Rewrites as priced alternatives: each is done where it pays, and the plan says why one was left out."""

from dataclasses import replace

import pytest

from onchip.errors import PlanError
from onchip.plan.kernel import Job, Price
from onchip.plan.plan_json import given_weights, plan_from_json, plan_to_json
from onchip.plan.planner import make_plan
from onchip.spec.build import sequential
from onchip.spec.layers import Conv2d, ConvTranspose2d, Interleave, Linear
from onchip.spec.network import Network
from onchip.spec.types import TensorType
from takers import CPU, Take, TakeBut, stored


def two_linears(width: int) -> Network:
    weights = {"a.weight": stored(width, width), "b.weight": stored(width, width)}
    return sequential(TensorType(("B", width)), [("a", Linear()), ("b", Linear())], weights)


def stretched() -> Network:
    weights = {"t.weight": stored(4, 6, 4, 4)}
    return sequential(TensorType(("B", 4, 8, 8)), [("t", ConvTranspose2d((2, 2)))], weights)


def test_two_linears_are_merged_where_that_pays():
    """A product of 2048 x 2048 matrices is 17 Gflop: more than 10 rows through both, less than 10,000."""
    few, many = (make_plan(two_linears(2048), CPU, [], Job(batch=B), whole=False) for B in (10, 10_000))
    assert [node.name for node in few.network.nodes] == ["a", "b"]
    assert few.rewrites == ()
    assert few.left_out[0].startswith(
        "left out merge: weights of 16.0 MiB take 17,179,869,184 flop (72.02 ms) to build"
    )
    assert few.left_out[0].endswith("this job has 10")
    assert few.left_out[0] in str(few)
    assert few.to_dict()["left_out"] == list(few.left_out)
    assert [node.name for node in many.network.nodes] == ["b"]
    assert many.left_out == ()


def test_small_linears_are_merged_for_a_few_rows():
    plan = make_plan(two_linears(64), CPU, [], Job(batch=100), whole=False)
    assert [node.name for node in plan.network.nodes] == ["b"]


def test_phases_are_left_out_where_the_layer_itself_is_cheaper():
    class Cheap(Take):
        def claims(self, net, start, device, job):
            if isinstance(net.nodes[start].layer, ConvTranspose2d):
                yield from super().claims(net, start, device, job)

    plan = make_plan(stretched(), CPU, [Take("dear", 1, flop=10**6), Cheap("cheap", 1)])
    assert [group.claim.kernel for group in plan.groups] == ["cheap"]
    assert plan.left_out == ("left out phases.few: a row would be no cheaper",)


def test_phases_are_made_where_only_they_can_run():
    plan = make_plan(stretched(), CPU, [TakeBut(ConvTranspose2d)])
    assert {type(node.layer) for node in plan.network.nodes} == {Conv2d, Interleave}
    assert plan.left_out == ()


def test_and_not_where_they_cannot():
    plan = make_plan(stretched(), CPU, [TakeBut(Interleave)])
    assert [type(node.layer) for node in plan.network.nodes] == [ConvTranspose2d]
    assert plan.left_out == ("left out phases.few: no kernel of two cores takes layer 't' (Interleave)",)
    with pytest.raises(PlanError):
        make_plan(stretched(), CPU, [])


def test_the_reasons_travel():
    plan = make_plan(stretched(), CPU, [kernel := TakeBut(Interleave)])
    again = plan_from_json(plan_to_json(plan), given_weights(plan.network), [kernel])
    assert str(again) == str(plan)


def test_one_cover_for_each_that_finds_something_to_do():
    weights = {"t.weight": stored(4, 2, 4, 4), "a.weight": stored(512, 512), "b.weight": stored(512, 512)}
    layers = [("t", ConvTranspose2d((2, 2), (1, 1, 1, 1))), ("a", Linear()), ("b", Linear())]
    net = sequential(TensorType(("B", 4, 8, 256)), layers, weights)

    class Counted(TakeBut):
        asked = 0

        def claims(self, net, start, device, job):
            self.asked += start == 0
            yield from super().claims(net, start, device, job)

    kernel = Counted(Interleave)
    plan = make_plan(net, CPU, [kernel], Job(batch=1))
    assert [node.name for node in plan.network.nodes] == ["t", "b"]
    assert kernel.asked == 3


def test_layers_of_few_channels_are_a_choice_of_their_own():
    """Where a kernel makes all phases of a few channels at once, only the others are split."""
    weights = {"a.weight": stored(8, 32, 4, 4), "b.weight": stored(32, 3, 4, 4)}
    step = ConvTranspose2d((2, 2), (1, 1, 1, 1))
    net = sequential(TensorType(("B", 8, 8, 8)), [("a", step), ("b", step)], weights)

    class Few(Take):
        def claims(self, net, start, device, job):
            is_few = net.types[net.nodes[start].name].row_shape[0] <= 3
            for claim in super().claims(net, start, device, job):
                dear = is_few != isinstance(net.nodes[start].layer, ConvTranspose2d)
                yield replace(claim, price=Price(10**9, 1)) if dear else claim

    plan = make_plan(net, CPU, [Few("taker", 1)])
    assert [node.name for node in plan.network.nodes] == ["a.0_0", "a.0_1", "a.1_0", "a.1_1", "a", "b"]
    assert len(plan.left_out) == 1
    assert plan.left_out[0].startswith("left out phases.few")
    assert [node.name for node in make_plan(net, CPU, [Few("taker", 1)], Job(without=("phases",))).network.nodes] == [
        "a",
        "b",
    ]
