"""Layouts: claims that read and write NHWC values, estimated conversions, and an optimal search."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onchip.errors import PlanError
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, ReLU, Sigmoid
from onchip.network.types import TensorType
from onchip.plan.kernel import Claim, Cost, Job, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels, stored_type
from onchip.plan.plan_json import array_weights, plan_from_json, plan_to_json
from onchip.plan.planner import make_plan
from takers import CPU

IMAGE = TensorType(("B", 4, 3, 5))
LAYOUTS = (ROWS, CHANNELS_LAST)
Offer = tuple[int, int, str, str]  # first node, end, layout read, layout written


def row_of(count: int) -> Network:
    return sequential(IMAGE, [(f"r{i}", ReLU()) for i in range(count)], {})


class Lays:
    """Claims sequences of nodes in layouts, with a number of launches each; converts with another number."""

    name, device_kind, precisions = "lays", "cpu", ("fp32",)

    def __init__(self, offers: Mapping[Offer, int], conversion: int | None = 1) -> None:
        self.offers, self._conversion = offers, conversion

    def claims(self, net, start, device, job):
        for (first, end, taken, made), launches in self.offers.items():
            if first == start:
                nodes = net.nodes[start:end]
                reads = {value: Use(taken) for value in nodes[0].inputs}
                writes = {} if made == ROWS else {nodes[-1].name: made}
                names = tuple(node.name for node in nodes)
                cost = Cost(0, 0, launches=launches)
                yield Claim(self.name, f"{taken}-{made}", names, cost, "", reads=reads, writes=writes)

    def conversion(self, net, value, given, wanted, device, job):
        if self._conversion is None:
            return None
        cost = Cost(0, 0, launches=self._conversion)
        return Claim(self.name, "turn", (), cost, "", reads={value: Use(given)}, writes={value: wanted})


def cost(plan) -> int:
    return sum(group.claim.cost.launches for group in plan.groups)


def cheapest(offers: Mapping[Offer, int], conversion: int, at: int, layout: str, count: int) -> float:
    """The lowest cost of all covers from node `at` on, whose value is stored in a layout."""
    if at == count:
        return 0 if layout == ROWS else conversion
    found = [
        launches + (conversion if taken != layout else 0) + cheapest(offers, conversion, end, made, count)
        for (first, end, taken, made), launches in offers.items()
        if first == at
    ]
    return min(found, default=float("inf"))


@given(data=st.data())
def test_no_way_is_cheaper(data):
    count = data.draw(st.integers(1, 5))
    runs = [(a, b, x, y) for a in range(count) for b in range(a + 1, count + 1) for x in LAYOUTS for y in LAYOUTS]
    offers = data.draw(st.dictionaries(st.sampled_from(runs), st.integers(1, 9)))
    conversion = data.draw(st.integers(1, 5))
    least = cheapest(offers, conversion, 0, ROWS, count)
    if least == float("inf"):
        with pytest.raises(PlanError):
            make_plan(row_of(count), CPU, [Lays(offers, conversion)])
        return
    plan = make_plan(row_of(count), CPU, [Lays(offers, conversion)])
    assert cost(plan) == least
    assert [name for group in plan.groups for name in group.claim.nodes] == [f"r{i}" for i in range(count)]
    made = {"x"}  # every array is written before it is read
    for group in plan.groups:
        assert made >= set(group.inputs)
        made |= set(group.outputs)
    assert made >= set(plan.network.outputs)


def test_what_lies_otherwise_has_a_name_and_a_type_of_its_own():
    plan = make_plan(row_of(2), CPU, [Lays({(0, 1, ROWS, CHANNELS_LAST): 1, (1, 2, CHANNELS_LAST, ROWS): 1})])
    assert [(group.inputs, group.outputs) for group in plan.groups] == [
        (("x",), ("r0:channels_last",)), (("r0:channels_last",), ("r1",)),
    ]  # fmt: skip
    assert plan.types["r0:channels_last"] == TensorType(("B", 3, 5, 4))
    assert plan.between == ("r0:channels_last",)
    assert plan.between_bytes == 4 * 60
    assert "\nNHWC between groups: r0" in str(plan)


def test_a_value_of_that_name_is_not_taken_for_it():
    net = sequential(IMAGE, [("r", ReLU()), ("r:channels_last", ReLU())], {})
    plan = make_plan(net, CPU, [Lays({(0, 1, ROWS, CHANNELS_LAST): 1, (1, 2, CHANNELS_LAST, ROWS): 1})])
    assert plan.groups[0].outputs == ("r:channels_last'",)


def test_a_conversion_stands_in_the_plan():
    plan = make_plan(row_of(2), CPU, [Lays({(0, 1, ROWS, CHANNELS_LAST): 1, (1, 2, ROWS, ROWS): 1}, 2)])
    assert [(group.claim.label, group.inputs, group.outputs) for group in plan.groups] == [
        ("rows-channels_last", ("x",), ("r0:channels_last",)),
        ("turn", ("r0:channels_last",), ("r0",)),
        ("rows-rows", ("r0",), ("r1",)),
    ]
    assert "1      r0      turn" in str(plan)


def test_without_a_converter_layouts_must_meet():
    with pytest.raises(PlanError, match="supports layer 'r1'"):
        make_plan(row_of(2), CPU, [Lays({(0, 1, ROWS, CHANNELS_LAST): 1, (1, 2, ROWS, ROWS): 1}, None)])


def test_a_value_with_two_readers_is_converted_once():
    nodes = [
        Node("a", ReLU(), ("x",)),
        Node("b", Sigmoid(), ("a",)),
        Node("c", ReLU(), ("a",)),
        Node("d", Add(), ("b", "c")),
    ]
    net = Network({"x": IMAGE}, nodes, ("d",), {})
    offers = {
        (0, 1, ROWS, CHANNELS_LAST): 1, (1, 2, ROWS, ROWS): 1, (2, 3, ROWS, ROWS): 1, (3, 4, ROWS, ROWS): 1,
    }  # fmt: skip
    plan = make_plan(net, CPU, [Lays(offers)])
    assert [group.claim.label for group in plan.groups].count("turn") == 1


def test_an_output_lies_in_rows_at_the_end():
    plan = make_plan(row_of(1), CPU, [Lays({(0, 1, ROWS, CHANNELS_LAST): 1})])
    assert [group.outputs for group in plan.groups] == [("r0:channels_last",), ("r0",)]


@pytest.mark.parametrize("offers", [
    {(0, 1, ROWS, CHANNELS_LAST): 1, (1, 2, CHANNELS_LAST, ROWS): 1},
    {(0, 1, ROWS, CHANNELS_LAST): 1, (1, 2, ROWS, ROWS): 1},
])  # fmt: skip
def test_a_plan_with_layouts_is_the_same_from_its_json(offers):
    kernels = [Lays(offers)]
    plan = make_plan(row_of(2), CPU, kernels)
    again = plan_from_json(plan_to_json(plan), array_weights(plan.network), kernels)
    assert str(again) == str(plan)
    assert [(g.inputs, g.outputs) for g in again.groups] == [(g.inputs, g.outputs) for g in plan.groups]
    with pytest.raises(PlanError, match="as planned"):
        plan_from_json(plan_to_json(plan), array_weights(plan.network), [Lays({(0, 2, ROWS, ROWS): 1}, None)])


def test_many_values_at_once_stay_cheap_to_plan():
    """2^20 layout states, of which the cheapest are followed."""
    nodes = [Node(f"r{i}", ReLU(), ("x",)) for i in range(20)]
    nodes.append(Node("sum", Add(), tuple(f"r{i}" for i in range(20))))
    net = Network({"x": IMAGE}, nodes, ("sum",), {})
    offers = {(i, i + 1, ROWS, layout): 2 if layout == ROWS else 1 for i in range(20) for layout in LAYOUTS}
    offers |= {(20, 21, CHANNELS_LAST, ROWS): 1, (20, 21, ROWS, ROWS): 1}
    assert cost(make_plan(net, CPU, [Lays(offers, 5)], Job())) == 21


def test_lying():
    assert stored_type(IMAGE, ROWS) == IMAGE
    assert stored_type(TensorType(("B", 7, 9), "float16"), CHANNELS_LAST) == TensorType(("B", 9, 7), "float16")
    assert [has_channels(TensorType(("B", *shape))) for shape in ((4, 3, 5), (1, 3, 5), (4, 1, 1), (4,), (4, 2))] == [
        True, False, False, False, True,
    ]  # fmt: skip


class Reads(Lays):
    """Claims single layers in ROWS; some read their input more than once."""

    def __init__(self, *often: str) -> None:
        super().__init__({})
        self.often = often

    def claims(self, net, start, device, job):
        node = net.nodes[start]
        reads = {value: Use(is_read_often=True) for value in node.inputs if node.name in self.often}
        yield Claim(self.name, "reads", (node.name,), Cost(0, 0), "", reads=reads)


@pytest.mark.parametrize(
    ("outputs", "reads_x", "often", "is_read_often"),
    [
        (("b",), ("a",), (), False),
        (("b",), ("a",), ("b",), False),  # values between groups are in device memory anyway
        (("b",), ("a",), ("a",), True),
        (("b",), ("a", "b"), (), True),  # the input, by two
        (("a", "b"), ("a",), (), True),  # an output, by the next layer
    ],
)
def test_what_is_read_more_than_once(outputs, reads_x, often, is_read_often):
    nodes = [Node("a", ReLU(), ("x",)), Node("b", Add(), ("a", "x") if "b" in reads_x else ("a", "a"))]
    plan = make_plan(Network({"x": IMAGE}, nodes, outputs, {}), CPU, [Reads(*often)])
    assert plan.is_read_often == is_read_often
