"""Plans as text, the cheapest cover, refusals with reasons, and planning that computes nothing."""

import time
from dataclasses import replace

import numpy as np
import pytest

from checks import random_mlp
from onchip.errors import DeviceError, InputError, PlanError
from onchip.kernels.cpu import KERNELS
from onchip.plan.device import H200, KNOWN, Device
from onchip.plan.kernel import Claim, Job, Price, Refusal
from onchip.plan.planner import make_plan
from onchip.spec.build import mlp, sequential
from onchip.spec.layers import Linear, ReLU, Reshape, Sigmoid, Softmax
from onchip.spec.network import Network
from onchip.spec.recipe import Recipe
from onchip.spec.types import TensorType

CPU = Device(
    name="two cores", kind="cpu", arch="x86_64", units=2, flops={"fp32": 270e9}, bandwidth=20e9, launch_us=3.0,
    fast_bytes=2 << 20, memory_bytes=8 << 30, source="made up for the tests", vector_bytes=64,
)  # fmt: skip


class Take:
    """A kernel that claims runs of given lengths at a given price."""

    device_kind, precisions = "cpu", ("fp32",)

    def __init__(self, name: str, *lengths: int, flop: int = 100) -> None:
        self.name, self.lengths, self.flop = name, lengths, flop

    def claims(self, net, start, device, job):
        for length in self.lengths:
            names = tuple(node.name for node in net.nodes[start : start + length])
            if len(names) == length:
                yield Claim(self.name, f"{self.name}<{length}>", names, Price(self.flop, 8), "the test says so")
            else:
                yield Refusal(self.name, net.nodes[start].name, f"needs {length} layers")


def three_layers() -> Network:
    return sequential(TensorType(("B", 4)), [("a", ReLU()), ("b", Sigmoid()), ("c", ReLU())], {})


def test_the_cheapest_cover_wins():
    plan = make_plan(three_layers(), CPU, [Take("single", 1), Take("pair", 2)])
    assert [g.claim.nodes for g in plan.groups] in ([("a",), ("b", "c")], [("a", "b"), ("c",)])
    dear = make_plan(three_layers(), CPU, [Take("single", 1), Take("pair", 2, flop=10**9)])
    assert [g.claim.kernel for g in dear.groups] == ["single"] * 3
    assert make_plan(three_layers(), CPU, [Take("single", 1), Take("all", 3)]).between_bytes == 0


def test_a_refusal_is_told_with_its_reason():
    plan = make_plan(three_layers(), CPU, [Take("single", 1), Take("four", 4)])
    assert "refused: four at a: needs 4 layers" in str(plan)
    with pytest.raises(PlanError, match="no kernel of two cores takes layer 'a'") as error:
        make_plan(three_layers(), CPU, [Take("four", 4)])
    assert "needs 4 layers" in str(error.value)


def test_groups_know_what_flows_between_them():
    plan = make_plan(three_layers(), CPU, [Take("single", 1)])
    assert [(g.inputs, g.outputs) for g in plan.groups] == [(("x",), ("a",)), (("a",), ("b",)), (("b",), ("c",))]
    assert plan.between_bytes == 2 * 4 * 4


def test_kernels_of_other_devices_are_not_asked():
    with pytest.raises(PlanError):
        make_plan(three_layers(), H200, [Take("single", 1)])


def test_a_precision_that_the_device_lacks():
    with pytest.raises(DeviceError, match="does not compute in fp16"):
        make_plan(three_layers(), CPU, [Take("single", 1)], Job("fp16"))


def test_printed_plan():
    # Widths of whole vectors on every CPU: the padding of others, and so the bytes of weights, is the machine's.
    plan = make_plan(mlp(72, 64, 64, 16, bias=False, name="decode"), CPU, KERNELS, Job(batch=12_800))
    assert str(plan) == (
        "decode on two cores, fp32, infer, 12,800 rows\n"
        "group  layers    kernel                       on chip  bytes/row  flop/row     floor  why\n"
        "0      fc1..fc3  mlp_fused<72,64,64,16,ReLU>   32 KiB        352    19,584  931.4 µs  "
        "64 rows at a time stay in 32 KiB of cache, layer after layer\n"
        "floor 931.4 µs, 0 B/row between groups, 39 KiB of weights, 0 flop to build them"
    )


def test_printed_plan_of_training():
    net = mlp(784, 320, 160, 10, name="digits")
    text = str(make_plan(net, CPU, KERNELS, Job(batch=64, loss="cross_entropy")))
    assert text.startswith("digits on two cores, fp32, train, cross_entropy, 64 rows\n")
    assert "mlp_train<784,320,160,10,ReLU,cross_entropy>" in text


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (mlp(4, 3, output="Softmax"), "train without it"),
        (mlp(4, 3, output="Sigmoid"), "takes logits"),
        (three_layers(), "whole MLP chain"),
    ],
    ids=["softmax", "sigmoid", "no linear"],
)
def test_training_refuses_what_it_cannot_train(net, reason):
    with pytest.raises(PlanError, match=reason):
        make_plan(net, CPU, KERNELS, Job(loss="cross_entropy"))


def test_planning_never_computes_a_weight():
    def never(*_):
        raise AssertionError("a weight was computed while planning")

    huge = {"a.weight": Recipe("table", (), (4096, 1_000_000), "float32", 10**12, never)}
    net = sequential(TensorType(("B", 1_000_000)), [("a", Linear()), ("r", ReLU())], huge)
    start = time.perf_counter()
    plan = make_plan(net, CPU, KERNELS)
    assert time.perf_counter() - start < 0.2
    assert plan.groups[0].claim.weight_bytes >= 4 * 4096 * 1_000_000


def test_what_a_rewrite_derives_is_priced():
    weights = {"a.weight": np.ones((8, 2), np.float32), "b.weight": np.ones((3, 8), np.float32)}
    plan = make_plan(sequential(TensorType(("B", 2)), [("a", Linear()), ("b", Linear())], weights), CPU, KERNELS)
    assert plan.rewrite_flop == 2 * 3 * 8 * 2
    assert "96 flop to build them" in str(plan)


def test_momentum_belongs_to_training():
    with pytest.raises(InputError, match="momentum without training"):
        Job(momentum=True)


def test_every_known_device_has_a_source():
    for device in KNOWN.values():
        assert device.source
        assert device.kind == "cuda"
        assert device.flops["fp32"] > 0


def test_floor_is_compute_or_memory_whichever_is_longer():
    slow_memory = replace(CPU, bandwidth=1.0)
    price = Price(row_flop=270, row_bytes=8, fixed_bytes=4)
    assert price.floor_us(CPU, "fp32", 10**6) == pytest.approx(1000 + 3)
    assert price.floor_us(slow_memory, "fp32", 1) == pytest.approx(12e6 + 3)


def test_json_says_what_the_text_says():
    plan = make_plan(random_mlp(6, 5, 4), CPU, KERNELS)
    told = plan.to_dict()
    assert told["groups"][0]["kernel"] in str(plan)
    assert told["floor_us"] == pytest.approx(plan.floor_us)


def test_reshape_then_softmax_over_another_axis_is_its_own_group():
    weights = {"a.weight": np.ones((6, 4), np.float32)}
    layers = [("a", Linear()), ("split", Reshape((2, 3))), ("s", Softmax())]
    plan = make_plan(sequential(TensorType(("B", 4)), layers, weights), CPU, KERNELS)
    assert [g.claim.nodes for g in plan.groups] == [("a", "split"), ("s",)]
