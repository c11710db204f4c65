"""The plan as a picture: every group, every value, whatever the shape of the network."""

import itertools
import re
from xml.etree import ElementTree

import pytest

import onchip
from image_networks import residual
from onchip.bench.cases.training_networks import u_net
from onchip.bench.report.plan_page import plan_page
from onchip.network.training import TrainingStep
from onchip.plan.device import KNOWN
from onchip.plan.kernel import Job
from onchip.plan.picture import MANY, plan_picture
from onchip.plan.planner import make_plan
from onchip.runtime.placement import kernels_for
from onchip.train.step import step_of

SVG = "{http://www.w3.org/2000/svg}"
STEP = TrainingStep("mse", "adam")
NETWORKS = {
    "one layer": lambda: onchip.mlp(3, 2),
    "a chain": lambda: onchip.load("faces"),
    "a residual": residual,
    "a training step": lambda: step_of(u_net(size=16, width=4, levels=2), STEP),
}


def planned(name):
    device = KNOWN["h200"]
    return make_plan(NETWORKS[name](), device, kernels_for(device), Job("fp32", 64))


@pytest.fixture(scope="module", params=NETWORKS)
def plan(request):
    return planned(request.param)


def boxes(svg):
    """Title, top and bottom of each box."""
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        top = float(rect.get("y"))
        found.append((group.find(f"{SVG}title").text, top, top + float(rect.get("height"))))
    return found


@pytest.mark.parametrize("width", [298.0, 460.0])
def test_a_box_per_group_one_below_the_other(plan, width):
    found = boxes(plan_picture(plan, width))
    groups = [title for title, *_ in found if title.startswith("group ")]
    assert [title.splitlines()[0] for title in groups] == [
        f"group {i}: {g.claim.label}" for i, g in enumerate(plan.groups)
    ]
    assert len(found) == len(groups) + len(plan.network.outputs) + sum(
        any(name in group.inputs for group in plan.groups) for name in plan.network.inputs
    )
    for (_, _, bottom), (_, top, _) in itertools.pairwise(found):
        assert bottom < top


def test_every_value_that_passes_is_an_arrow_with_its_bytes(plan):
    svg = plan_picture(plan)
    titles = [path.find(f"{SVG}title") for path in ElementTree.fromstring(svg).iter(f"{SVG}path")]
    named = {name for title in titles if title is not None for name in title.text.split(", ")}
    read = {name for group in plan.groups for name in group.inputs}
    assert read <= named
    shown = "".join(ElementTree.fromstring(svg).itertext())
    for name in plan.between:
        if plan.types[name].is_batched:
            assert f"{plan.types[name].row_bytes:,} B/row" in shown


def test_lanes_do_not_share_a_place():
    """Two values in one lane would look like one."""
    svg = plan_picture(planned("a training step"))
    taken: dict[str, list[tuple[float, float]]] = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        spans = re.findall(r"M([\d.]+) ([\d.]+)V([\d.]+)", path.get("d"))
        if path.find(f"{SVG}title") is not None and "H" in path.get("d"):
            ((x, top, bottom),) = spans
            taken.setdefault(x, []).append((float(top), float(bottom)))
    assert taken
    for spans in taken.values():
        spans.sort()
        assert all(bottom <= top for (_, bottom), (top, _) in itertools.pairwise(spans))


def test_a_box_says_what_was_folded_refused_and_is_slow():
    plan = planned("a chain")
    titles = {title.splitlines()[0]: title for title, *_ in boxes(plan_picture(plan))}
    (first,) = (title for line, title in titles.items() if line.startswith("group 0"))
    assert "rewrote: folded bn0 into proj" in first
    assert "refused: " in first
    assert plan.groups[0].claim.why in first
    slow = [i for i, group in enumerate(plan.groups) if plan.slow_because(group)]
    assert [
        i
        for i in range(len(plan.groups))
        for title in titles.values()
        if title.startswith(f"group {i}:") and "\nslow: " in title
    ] == slow


def test_a_long_plan_has_short_boxes():
    plan = make_plan(step_of(u_net(size=16, width=4), STEP), KNOWN["h200"], kernels_for(KNOWN["h200"]), Job("fp32", 64))
    assert len(plan.groups) > MANY
    found = boxes(plan_picture(plan))
    assert max(bottom - top for title, top, bottom in found if title.startswith("group ") and "..." not in title) < 130
    assert len(found) > len(plan.groups)


def test_the_page_has_the_details_of_every_group(plan):
    page = plan_page(plan)
    for i, group in enumerate(plan.groups):
        assert page.count(f'<div id="group-{i}"') == 1
        assert page.count(f'href="#group-{i}"') == 2  # of the picture for wide and for narrow screens
        assert group.claim.label.replace("<", "&lt;").replace(">", "&gt;") in page
    assert '<h2 id="refusals-title">' in page or not plan.refusals
    assert all(line.replace("<", "&lt;").replace(">", "&gt;") in page for line in plan.rewrites)


def test_names_from_a_file_are_escaped():
    net = onchip.mlp(3, 2)
    plan = make_plan(net.replace(name='<script>alert("x")</script>\x1b'), KNOWN["h200"], kernels_for(KNOWN["h200"]))
    assert plan_page(plan).count("<script>") == 1  # the page's own
    ElementTree.fromstring(plan_picture(plan))
