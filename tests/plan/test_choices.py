"""Estimated rewrites: each is applied where it pays, and the plan prints why one was left out."""

import pytest

from onchip.errors import PlanError
from onchip.network.build import sequential
from onchip.network.graph import Network
from onchip.network.layers import Conv2d, ConvTranspose2d, Interleave, Linear
from onchip.network.types import TensorType
from onchip.plan.kernel import Job
from onchip.plan.plan_json import array_weights, plan_from_json, plan_to_json
from onchip.plan.planner import make_plan
from takers import CPU, Take, TakeBut, stored


def two_linears(width: int) -> Network:
    weights = {"a.weight": stored(width, width), "b.weight": stored(width, width)}
    return sequential(TensorType(("B", width)), [("a", Linear()), ("b", Linear())], weights)


def stretched() -> Network:
    weights = {"t.weight": stored(4, 6, 4, 4)}
    return sequential(TensorType(("B", 4, 8, 8)), [("t", ConvTranspose2d((2, 2)))], weights)


def test_two_linears_are_merged_where_that_pays():
    """A gemm of 2048 x 2048 matrices is 17 Gflop: more than 10 rows through both, less than 10,000."""
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
    assert plan.left_out == ("left out phases: the time per row would not drop",)


def test_phases_are_made_where_only_they_can_run():
    plan = make_plan(stretched(), CPU, [TakeBut(ConvTranspose2d)])
    assert {type(node.layer) for node in plan.network.nodes} == {Conv2d, Interleave}
    assert plan.left_out == ()


def test_and_not_where_they_cannot():
    plan = make_plan(stretched(), CPU, [TakeBut(Interleave)])
    assert [type(node.layer) for node in plan.network.nodes] == [ConvTranspose2d]
    assert plan.left_out == ("left out phases: no kernel of two cores supports layer 't' (Interleave)",)
    with pytest.raises(PlanError):
        make_plan(stretched(), CPU, [])


def test_the_reasons_travel():
    plan = make_plan(stretched(), CPU, [kernel := TakeBut(Interleave)])
    again = plan_from_json(plan_to_json(plan), array_weights(plan.network), [kernel])
    assert str(again) == str(plan)


def test_one_cover_for_each_that_finds_something_to_do():
    weights = {"t.weight": stored(4, 2, 4, 4), "a.weight": stored(512, 512), "b.weight": stored(512, 512)}
    layers = [("t", ConvTranspose2d((2, 2), (1, 1, 1, 1))), ("a", Linear()), ("b", Linear())]
    net = sequential(TensorType(("B", 4, 8, 256)), layers, weights)

    class Counted(TakeBut):
        requested = 0

        def claims(self, net, start, device, job):
            self.requested += start == 0
            yield from super().claims(net, start, device, job)

    kernel = Counted(Interleave)
    plan = make_plan(net, CPU, [kernel], Job(batch=1))
    assert [node.name for node in plan.network.nodes] == ["t", "b"]
    assert kernel.requested == 3
