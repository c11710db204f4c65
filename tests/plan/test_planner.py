"""Plans as text, the cheapest cover, refusals with reasons, and planning that computes nothing."""

import itertools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import random_mlp
from onchip.errors import DeviceError, InputError, PlanError
from onchip.kernels.cpu import KERNELS, TRAINING
from onchip.kernels.cuda import KERNELS as CUDA_KERNELS
from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Add,
    BatchNorm1d,
    Conv2d,
    Dropout,
    Linear,
    ReLU,
    Reshape,
    Sigmoid,
    Softmax,
)
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.device import H200, KNOWN, Peak
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Claim, Cost, Job
from onchip.plan.planner import MAX_LAYERS, make_plan
from python_calls import python_calls
from takers import CPU, Take, TakeBut, stored


def three_layers() -> Network:
    return sequential(TensorType(("B", 4)), [("a", ReLU()), ("b", Sigmoid()), ("c", ReLU())], {})


def test_the_cheapest_cover_wins():
    plan = make_plan(three_layers(), CPU, [Take("single", 1), Take("pair", 2)])
    assert [g.claim.nodes for g in plan.groups] in ([("a",), ("b", "c")], [("a", "b"), ("c",)])
    dear = make_plan(three_layers(), CPU, [Take("single", 1), Take("pair", 2, flop=10**9)])
    assert [g.claim.kernel for g in dear.groups] == ["single"] * 3
    assert make_plan(three_layers(), CPU, [Take("single", 1), Take("all", 3)]).between_bytes == 0


def test_a_network_of_very_many_layers_is_refused_at_once():
    net = sequential(TensorType(("B", 4)), [(f"r{i}", ReLU()) for i in range(MAX_LAYERS + 1)], {})
    with pytest.raises(PlanError, match="the network has too many layers") as error:
        make_plan(net, CPU, KERNELS)
    assert (error.value.got, error.value.expected) == (f"{MAX_LAYERS + 1:,}", f"at most {MAX_LAYERS:,}")


def test_a_number_of_rows_that_cannot_be():
    for batch in (0, -1, 10**30, 10**400, 10**5000):
        with pytest.raises(InputError, match="bad batch size"):
            Job(batch=batch)


def test_a_refusal_is_told_with_its_reason():
    plan = make_plan(three_layers(), CPU, [Take("single", 1), Take("four", 4)])
    assert "refused: four at a: needs 4 layers" in str(plan)
    plan = make_plan(three_layers(), CPU, [Take("single", 1), Take("four", 4), Take("quartet", 4)])
    assert "refused: four, quartet at a: needs 4 layers" in str(plan)
    with pytest.raises(PlanError, match="no kernel of two cores supports layer 'a'") as error:
        make_plan(three_layers(), CPU, [Take("four", 4)])
    assert "needs 4 layers" in str(error.value)


def test_the_layer_that_no_kernel_takes_is_the_one_that_is_named():
    net = sequential(TensorType(("B", 4)), [("a", ReLU()), ("b", Sigmoid()), ("c", ReLU())], {})
    with pytest.raises(PlanError, match=r"two cores .*'b' \(Sigmoid\)"):
        make_plan(net, CPU, [TakeBut(Sigmoid)])


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


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "net", [mlp(8, 8, 4), training_step(mlp(8, 8, 4), TrainingStep("mse"))], ids=["infer", "train"]
)
@pytest.mark.parametrize(
    ("device", "kernels", "precisions"),
    [
        (H200, CUDA_KERNELS, "fp32, tf32, bf16, fp16"),
        (replace(CPU, flops={"fp32": 1e9, "fp8": 1e9}), KERNELS, "fp32"),
    ],
    ids=["gpu", "cpu"],
)
def test_a_precision_that_no_kernel_computes_in(device, kernels, precisions, net, whole, monkeypatch):
    monkeypatch.setattr("onchip.plan.planner.cover", lambda *_: pytest.fail("the planner searched for a cover"))
    with pytest.raises(PlanError, match=f"no kernel of {device.name} computes in fp8") as refused:
        make_plan(net, device, kernels, Job("fp8", 64), whole=whole)
    assert (refused.value.got, refused.value.expected) == ("fp8", precisions)
    assert refused.value.hint == "precision fp32"


def test_printed_plan():
    # Widths that are whole vectors on every CPU: padding, and so weight bytes, would depend on the machine.
    plan = make_plan(mlp(72, 64, 64, 16, bias=False, name="decode"), CPU, KERNELS, Job(batch=12_800))
    assert str(plan) == (
        "decode on two cores, fp32, infer, 12,800 rows\n"
        "group  layers    kernel                       on chip  bytes/row  flop/row     floor  estimate  why\n"
        "0      fc1..fc3  mlp_fused<72,64,64,16,ReLU>   32 KiB        352    19,584  696.3 µs   1.50 ms  "
        "tiles of 64 rows (32 KiB) stay in cache from layer to layer\n"
        "floor 696.3 µs, estimate 1.50 ms, 0 B/row between groups, 39 KiB of weights, 0 flop to build them"
    )


def test_printed_plan_of_training():
    step = training_step(mlp(784, 320, 160, 10, name="digits"), TrainingStep("cross_entropy"))
    text = str(make_plan(step, CPU, KERNELS, Job("fp32", 64)))
    assert text.startswith("digits on two cores, fp32, train, cross_entropy, 64 rows\n")
    assert "mlp_train<784,320,160,10,ReLU,cross_entropy>" in text


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (mlp(4, 3, output="Softmax"), "train without it"),
        (mlp(4, 3, output="Sigmoid"), "expects logits"),
        (mlp(4, 3, 3, activation="SiLU"), "whole MLP chain"),
    ],
    ids=["softmax", "sigmoid", "silu"],
)
def test_training_refuses_what_it_cannot_train(net, reason):
    step = training_step(net, TrainingStep("cross_entropy"))
    with pytest.raises(PlanError, match=reason) as refused:
        make_plan(step, CPU, TRAINING)
    assert refused.value.what == "no kernel of two cores trains network 'mlp'"
    plan = make_plan(step, CPU, KERNELS)
    assert plan.whole_step is None
    assert f"refused: mlp_train at fc1: {refused.value.got.partition(': ')[2]}" in str(plan)


def test_planning_never_computes_a_weight():
    huge = {"a.weight": stored(4096, 1_000_000, flop=10**12)}
    net = sequential(TensorType(("B", 1_000_000)), [("a", Linear()), ("r", ReLU())], huge)
    plan = make_plan(net, CPU, KERNELS)
    assert plan.groups[0].claim.weight_bytes >= 4 * 4096 * 1_000_000


def test_what_a_rewrite_derives_is_priced():
    weights = {"a.weight": np.ones((8, 2), np.float32), "b.weight": np.ones((3, 8), np.float32)}
    plan = make_plan(sequential(TensorType(("B", 2)), [("a", Linear()), ("b", Linear())], weights), CPU, KERNELS)
    assert plan.rewrite_flop == 2 * 3 * 8 * 2
    assert "96 flop to build them" in str(plan)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": "hinge"}, "unknown loss"),
        ({"loss": ""}, "unknown loss"),
        ({"optimiser": "adagrad"}, "unknown optimiser"),
        ({"label_smoothing": 1.5}, "bad label_smoothing"),
        ({"clip_norm": -1.0}, "bad clip_norm"),
        ({"is_weighted": 1}, "bad is_weighted"),
        ({"byte_scale": 255.0}, "bad scale of bytes"),
    ],
)
def test_a_training_step_refuses_bad_values(values, words):
    with pytest.raises(InputError, match=words):
        TrainingStep(**{"loss": "mse", **values})


def test_every_known_device_has_a_source():
    for device in KNOWN.values():
        assert device.source
        assert device.kind == "cuda"
        assert device.flops["fp32"] > 0


def test_estimate_and_floor_are_compute_or_memory_whichever_is_longer():
    slow = replace(CPU, bandwidth=1.0, peak=Peak({"fp32": 360e9}, 2.0, 4.0, 0.5), cache_bytes=12)
    cost = Cost(row_flop=270, row_bytes=8, fixed_bytes=4, launches=2)
    assert cost.estimate_us(CPU, "fp32", 10**6) == pytest.approx(1000 + 6)
    assert cost.estimate_us(slow, "fp32", 1) == pytest.approx(12e6 + 6)
    assert cost.floor_us(CPU, "fp32", 10**6) == pytest.approx(750)
    assert cost.floor_us(slow, "fp32", 1) == pytest.approx(12 / 4 * 1e6 + 1)  # it fits into the cache
    assert cost.floor_us(slow, "fp32", 2) == pytest.approx(20 / 2 * 1e6 + 1)


@pytest.mark.parametrize("device", [CPU, *KNOWN.values()], ids=lambda device: device.name)
def test_nothing_is_estimated_to_beat_the_floor(device):
    assert device.peak.bandwidth >= device.bandwidth
    assert device.peak.launch_us <= device.launch_us
    assert all(device.peak.flops[precision] >= rate for precision, rate in device.flops.items())


def test_json_says_what_the_text_says():
    plan = make_plan(random_mlp(6, 5, 4), CPU, KERNELS)
    told = plan.to_dict()
    assert told["groups"][0]["kernel"] in str(plan)
    assert told["floor_us"] == plan.floor_us < told["estimate_us"] == plan.estimate_us


def test_reshape_then_softmax_over_another_axis_is_its_own_group():
    weights = {"a.weight": np.ones((6, 4), np.float32)}
    layers = [("a", Linear()), ("split", Reshape((2, 3))), ("s", Softmax())]
    plan = make_plan(sequential(TensorType(("B", 4)), layers, weights), CPU, KERNELS)
    assert [g.claim.nodes for g in plan.groups] == [("a", "split"), ("s",)]


def test_groups_of_a_network_with_branches():
    nodes = [
        Node("a", ReLU(), ("x",)),
        Node("b", Sigmoid(), ("a",)),
        Node("c", Add(), ("a", "b", "x", "a")),
        Node("d", ReLU(), ("c",)),
    ]
    net = Network({"x": TensorType(("B", 4))}, nodes, ("d", "a"), {})
    plan = make_plan(net, CPU, [Take("pair", 2)])
    assert [(g.inputs, g.outputs) for g in plan.groups] == [(("x",), ("a", "b")), (("a", "b", "x"), ("d",))]
    assert plan.between_bytes == 4 * 4  # b; a is an output and is written anyway


def test_the_recipes_behind_a_recipe_are_priced_too():
    """A norm folded into a Linear that is then merged with the next one."""
    weights = {"a.weight": stored(8, 2), "n.mean": stored(8), "n.var": stored(8), "b.weight": stored(3, 8)}
    net = sequential(TensorType(("B", 2)), [("a", Linear()), ("n", BatchNorm1d()), ("b", Linear())], weights)
    plan = make_plan(net, CPU, KERNELS)
    assert plan.rewrites == ("folded n into a", "merged a into b: 2-8-3 becomes 2-3")
    norm, product, bias = 8 * 2 + 2 * 8, 2 * 3 * 8 * 2, 2 * 3 * 8
    assert plan.rewrite_flop == norm + product + bias


def test_a_long_network_is_planned_at_once():
    layers, weights = [], {}
    for i in range(60):
        layers += [(f"l{i}", Linear()), (f"n{i}", BatchNorm1d()), (f"d{i}", Dropout()), (f"m{i}", Linear())]
        layers += [(f"r{i}", ReLU())]
        weights |= {f"l{i}.weight": stored(8, 8), f"m{i}.weight": stored(8, 8)}
        weights |= {f"n{i}.mean": stored(8), f"n{i}.var": stored(8)}
    net = sequential(TensorType(("B", 8)), layers, weights)
    plan = make_plan(net, CPU, [Take("single", 1)])
    assert python_calls(lambda: make_plan(net, CPU, [Take("single", 1)])) < 1_500_000
    assert len(plan.groups) == 120
    assert len(plan.rewrites) == 180


class Counted(Take):
    """Records the nodes at which it is queried."""

    def __init__(self, name: str, *lengths: int, flop: int = 100) -> None:
        super().__init__(name, *lengths, flop=flop)
        self.requested: list[int] = []

    def claims(self, net, start, device, job):
        self.requested.append(start)
        yield from super().claims(net, start, device, job)


def row_of(count: int) -> Network:
    return sequential(TensorType(("B", 4)), [(f"r{i}", ReLU()) for i in range(count)], {})


def test_nobody_is_asked_where_no_claim_leads():
    pair = Counted("pair", 2)
    assert len(make_plan(row_of(10), CPU, [pair]).groups) == 5
    assert pair.requested == [0, 2, 4, 6, 8]


def test_nobody_is_asked_where_it_is_too_late_to_be_cheaper():
    """All ten for 8 launches: a single one for 3 of them may begin three times, never a fourth."""
    whole, single = Counted("whole", 10, flop=0), Counted("single", 1, flop=0)
    whole.cost, single.cost = Cost(0, 0, launches=8), Cost(0, 0, launches=3)
    plan = make_plan(row_of(10), CPU, [whole, single])
    assert [group.claim.kernel for group in plan.groups] == ["whole"]
    assert single.requested == [0, 1, 2]


@given(data=st.data())
def test_no_cover_is_cheaper(data):
    """Compared with every partition of the network, with random costs."""
    count = data.draw(st.integers(1, 6))
    runs = [(start, end) for start in range(count) for end in range(start + 1, count + 1)]
    prices = data.draw(st.dictionaries(st.sampled_from(runs), st.integers(1, 20)))
    kernel = Priced(prices)
    cuts = (c for n in range(count) for c in itertools.combinations(range(1, count), n))
    covers = [list(pairwise((0, *cut, count))) for cut in cuts]
    costs = [sum(prices[run] for run in cover) for cover in covers if all(run in prices for run in cover)]
    if not costs:
        with pytest.raises(PlanError):
            make_plan(row_of(count), CPU, [kernel])
        return
    plan = make_plan(row_of(count), CPU, [kernel])
    assert sum(group.claim.cost.launches for group in plan.groups) == min(costs)
    assert [name for group in plan.groups for name in group.claim.nodes] == [f"r{i}" for i in range(count)]


class Priced:
    """Claims sequences of nodes, with a number of launches each."""

    name, device_kind, precisions = "priced", "cpu", ("fp32",)

    def __init__(self, prices: dict[tuple[int, int], int]) -> None:
        self.prices = prices

    def claims(self, net, start, device, job):
        for (first, end), launches in self.prices.items():
            if first == start:
                names = tuple(node.name for node in net.nodes[start:end])
                yield Claim(self.name, self.name, names, Cost(0, 0, launches=launches), "the test says so")


def test_the_layer_where_every_way_ends_is_named():
    with pytest.raises(PlanError, match="supports layer 'c'") as error:
        make_plan(three_layers(), CPU, [Take("pair", 2)])
    assert "pair: needs 2 layers" in str(error.value)


@pytest.mark.parametrize("kind", ["convolutions", "mlp"])
def test_a_deep_network_is_planned_at_once(kind):
    layers, weights = [], {}
    for i in range(200 if kind == "convolutions" else 150):
        layers += [(f"l{i}", Conv2d(pads=(1, 1, 1, 1)) if kind == "convolutions" else Linear()), (f"r{i}", ReLU())]
        weights[f"l{i}.weight"] = stored(8, 8, 3, 3) if kind == "convolutions" else stored(8, 8)
    net = sequential(TensorType(("B", 8, 8, 8)) if kind == "convolutions" else TensorType(("B", 8)), layers, weights)
    assert len(make_plan(net, CPU, KERNELS).groups) == 1
    assert python_calls(lambda: make_plan(net, CPU, KERNELS)) < 250_000


def test_a_long_row_of_single_layers_is_planned_at_once():
    """The time is linear in the length, not quadratic."""
    net = sequential(TensorType(("B", 4)), [(f"r{i}", ReLU()) for i in range(2000)], {})
    plan = make_plan(net, CPU, KERNELS)
    assert python_calls(lambda: make_plan(net, CPU, KERNELS)) < 2_500_000
    assert sum(len(group.claim.nodes) for group in plan.groups) == 2000


# -- layers that no kernel supports yet ------------------------------------------------------------------------


def test_a_device_that_is_only_known_may_lack_kernels():
    net = sequential(TensorType(("B", 4)), [("a", Linear()), ("b", Sigmoid())], {"a.weight": stored(3, 4)})
    with pytest.raises(PlanError):
        make_plan(net, CPU, [])
    plan = make_plan(net, CPU, [], Job(batch=10**6), whole=False)
    assert [group.claim.label for group in plan.groups] == ["none yet for Linear", "none yet for Sigmoid"]
    first, second = (group.claim.cost for group in plan.groups)
    assert (first.row_flop, first.row_bytes, first.fixed_bytes) == (24, 4 * (4 + 3), 4 * 12)
    assert (second.row_flop, second.row_bytes, second.fixed_bytes) == (60, 4 * (3 + 3), 0)
    assert plan.estimate_us == pytest.approx((28e6 + 48) / 20e9 * 1e6 + 3 + 24e6 / 20e9 * 1e6 + 3)
    assert plan.groups[0].claim.weight_bytes == 48
    assert "no kernel of this device supports it yet" in str(plan)


def test_a_layer_is_without_a_kernel_only_where_none_takes_it():
    class TakeB(Take):
        def claims(self, net, start, device, job):
            if net.nodes[start].name == "b":
                yield from super().claims(net, start, device, job)

    # Much slower than the layer itself, and still better than no kernel.
    plan = make_plan(three_layers(), CPU, [TakeB("b", 1, flop=10**9)], whole=False)
    assert [group.claim.kernel for group in plan.groups] == ["", "b", ""]


def test_and_not_where_a_dearer_way_takes_them_all():
    class TakeFirst(Take):
        def claims(self, net, start, device, job):
            if start == 0:
                yield from super().claims(net, start, device, job)

    kernels = [TakeFirst("cheap", 1), TakeFirst("dear", 3, flop=10**9)]
    assert [g.claim.kernel for g in make_plan(three_layers(), CPU, kernels, whole=False).groups] == ["dear"]
