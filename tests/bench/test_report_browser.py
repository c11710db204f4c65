"""The report and the plan's page in a real browser: layout, keyboard, names, and nothing loaded."""

import shutil
from pathlib import Path

import pytest

import onchip
from browser import PROGRAMS, browser
from onchip.bench.cases.training_networks import resnet8
from onchip.bench.report.plan_page import plan_page
from onchip.bench.report.report import report
from onchip.bench.report.sources import read_sources
from onchip.network.training import TrainingStep
from onchip.plan.device import KNOWN
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.placement import kernels_for
from onchip.train.step import step_of

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, PROGRAMS)), reason="no chromium: pages are not opened in a browser"
)
RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"
SIZES = [(360, True), (1280, False), (2560, False)]
# Texts of a picture that overlap each other or leave the picture, in the visible ones.
CROWDED = """
[...document.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width).flatMap(svg => {
  const frame = svg.getBoundingClientRect(), scale = frame.width / svg.viewBox.baseVal.width;
  const all = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  const bad = all.filter(([, box]) => box.left < frame.left - 2 || box.right > frame.right + 2
    || box.bottom > frame.bottom + 2 || box.top < frame.top - 2).map(([name]) => `${name} leaves its picture`);
  const slack = 3 * scale;
  all.sort((a, b) => a[1].top - b[1].top);
  all.forEach(([name, a], i) => {
    for (let j = i + 1; j < all.length && all[j][1].top < a.bottom - slack; j++) {
      const b = all[j][1];
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > slack) bad.push(`${name} on ${all[j][0]}`);
    }
  });
  return bad;
})
"""
NARROW = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


def planned(net, batch=64):
    return make_plan(net, KNOWN["h200"], kernels_for(KNOWN["h200"]), Job("fp32", batch))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "report.html").write_text(report(read_sources([RESULTS])))
    step = step_of(resnet8(size=16, width=8), TrainingStep("cross_entropy", "adam"))
    for name, net in (("one", onchip.mlp(3, 2)), ("residual", resnet8()), ("step", step)):
        (folder / f"{name}.html").write_text(plan_page(planned(net)))
    return folder


@pytest.fixture(scope="module")
def page(folder):
    with browser(folder / "profile") as page:
        yield page


@pytest.mark.parametrize("name", ["report", "one", "residual", "step"])
@pytest.mark.parametrize(("width", "phone"), SIZES)
def test_the_layout_fits(page, folder, name, width, phone):
    page.open(folder / f"{name}.html", width, dark=phone, phone=phone)
    page.value("document.querySelectorAll('details.group').forEach(each => each.open = true)")
    assert page.value(NARROW), "the page scrolls sideways"
    assert page.value(CROWDED) == []
    assert page.requests() == []
    assert page.complaints() == []


def test_text_on_a_phone_is_readable(page, folder):
    page.open(folder / "report.html", 360, phone=True)
    sizes = page.value("""[...document.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width)
      .map(svg => 12 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)""")
    assert min(sizes) > 10


def test_the_theme_is_the_systems_until_it_is_chosen(page, folder):
    ground = "getComputedStyle(document.body).backgroundColor"
    page.open(folder / "report.html", dark=True)
    dark = page.value(ground)
    page.open(folder / "report.html")
    light = page.value(ground)
    assert light != dark
    page.value("document.getElementById('theme').focus()")
    page.press("Enter")
    assert page.value(ground) == dark
    page.press("Enter")
    assert page.value(ground) == light


def test_the_keyboard_reaches_what_a_mouse_does(page, folder):
    page.open(folder / "report.html")
    reached = []
    for _ in range(30):
        page.press("Tab")
        reached.append(page.value("document.activeElement.tagName + ' ' + (document.activeElement.id || '')").strip())
    assert reached[0] == "A", "the link that skips the navigation"
    assert "BUTTON theme" in reached
    assert "SUMMARY" in reached
    assert page.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.value("document.querySelector('details.data > summary').focus()")
    page.press("Enter")
    assert page.value("document.querySelector('details.data').open")


@pytest.mark.parametrize("name", ["report", "step"])
def test_what_a_screen_reader_gets(page, folder, name):
    page.open(folder / f"{name}.html")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"image", "button", "link", "region", "heading", "navigation", "DisclosureTriangle"}
    found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    unnamed = [role for role, text in found if role in roles and not text.strip()]
    assert unnamed == []
    assert {"main", "navigation", "heading", "button"} <= {role for role, _ in found}
    assert any(role == "image" for role, _ in found) == (name == "report")  # boxes of a plan are links
    assert page.value("document.documentElement.lang") == "en"


def test_a_title_is_shown_under_the_pointer(page, folder):
    page.open(folder / "report.html")
    bar = "[...document.querySelectorAll('.wide rect.ours')].find(each => each.querySelector('title'))"
    title = page.value(f"{bar}.querySelector('title').textContent")
    page.value(f"{bar}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    x, y = page.value(f"(b => [b.x + 2, b.y + 3])({bar}.getBoundingClientRect())")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert page.value("document.getElementById('tip').innerText") == title
    page.press("Escape")
    assert page.value("document.getElementById('tip').hidden")


def test_a_box_leads_to_its_details(page, folder):
    page.open(folder / "residual.html")
    assert not page.value("document.getElementById('group-1').closest('details').open")
    page.value("document.querySelector('.wide a[href=\"#group-1\"]').focus()")
    page.press("Enter")
    page.value("new Promise(done => requestAnimationFrame(done))")
    assert page.value("document.getElementById('group-1').closest('details').open")
    assert page.value("document.activeElement.id") == "group-1"
