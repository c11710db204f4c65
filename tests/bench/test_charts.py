"""Charts: what is drawn, where, in which colours; read back from the SVG."""

import math
import re
from xml.etree import ElementTree

import pytest

from onchip.bench.report.axis import even_axis, even_ticks, log_axis, log_ticks, short_number, short_rate, short_time
from onchip.bench.report.bars import Bar, bar_chart
from onchip.bench.report.lines import Line, line_chart
from onchip.bench.report.roofline import Point, Roofs, roofline
from onchip.svg import DARK, LIGHT, MARKERS, fitted, standalone, text_width

SVG = "{http://www.w3.org/2000/svg}"
WIDTHS = (320.0, 620.0, 860.0)
HOSTILE = '<script>alert("x")</script> & \x1b[31m\ud800 \u202e'


def drawn(svg, kind, name=""):
    found = ElementTree.fromstring(svg).iter(f"{SVG}{kind}")
    return [element for element in found if not name or name in element.get("class", "").split()]


@pytest.mark.parametrize(("low", "high"), [(0.97, 1.02), (0.9, 1.3), (1, 2), (0.5, 20), (1e-3, 1e9), (3e-7, 4e-7)])
@pytest.mark.parametrize("most", [3, 5, 12])
def test_ticks_of_a_log_axis(low, high, most):
    ticks = log_ticks(low, high, most)
    assert 2 <= len(ticks) <= most
    assert all(low * (1 - 1e-6) <= tick <= high * (1 + 1e-6) for tick in ticks)
    assert ticks == sorted(set(ticks))
    if high / low < 3 and most >= 5:
        assert len(ticks) >= 3, "a narrow range has ticks, too"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.993, 0.998), (-3, 4), (0, 7e9)])
def test_even_ticks(low, high):
    ticks = even_ticks(low, high, 6)
    assert 2 <= len(ticks) <= 6
    assert all(low - 1e-9 * abs(low) <= tick <= high * (1 + 1e-9) for tick in ticks)


def test_axes_accept_equal_values():
    assert log_axis([5.0], 0, 100).at(5.0) == pytest.approx(50)
    assert 0 < even_axis([5.0, 5.0], 0, 100).at(5.0) < 100
    assert even_axis([0.0], 0, 100).ticks(20)


def test_numbers():
    assert [short_number(x) for x in (0, 999, 1000, 1.5e6, 2e15, 0.25)] == ["0", "999", "1 k", "1.5 M", "2 P", "0.25"]
    assert [short_time(ms) for ms in (0.0005, 0.25, 3, 1500)] == ["500 ns", "250 µs", "3 ms", "1.5 s"]
    assert short_rate(1.979e15, "flop") == "1.98 Pflop/s"


BARS = [
    Bar("a case", 2.0, "2.00x", "torch", marks=((3.0, "3x jax"),)),
    Bar("another case with a name that is much longer than its line", 0.5, "0.50x", "onnxruntime", "slower"),
    Bar(HOSTILE, 8.0, "8.00x", "torch.compile, folded"),
]


@pytest.mark.parametrize("width", WIDTHS)
def test_bars_are_as_long_as_their_values(width):
    svg = bar_chart("speedups", BARS, width, str, base=1.0, mark="other peers")
    two, half, eight = drawn(svg, "rect")
    x = {name: float(bar.get("x")) for name, bar in (("two", two), ("half", half), ("eight", eight))}
    long = [float(bar.get("width")) for bar in (two, half, eight)]
    assert x["two"] == x["eight"] == pytest.approx(x["half"] + long[1], abs=0.2)  # they begin at 1x
    assert long[1] == pytest.approx(long[0], abs=0.3)  # a log axis: half is as far as twice
    assert long[2] == pytest.approx(3 * long[0], abs=0.5)
    assert [bar.get("class") for bar in (two, half, eight)] == ["ours", "slower", "ours"]
    (mark,) = drawn(svg, "circle", "mark")[1:]  # the first is the legend's
    assert float(mark.get("cx")) == pytest.approx(x["two"] + long[0] * math.log2(3), abs=0.3)


@pytest.mark.parametrize("width", WIDTHS)
def test_text_stays_inside_and_is_escaped(width):
    svg = bar_chart(HOSTILE, BARS, width, str, base=1.0)
    assert not drawn(svg, "script")
    for text in drawn(svg, "text"):
        size, content = float(text.get("font-size", 13)), "".join(text.itertext())
        x, anchor, wide = float(text.get("x")), text.get("text-anchor", "start"), text_width(content, size)
        begin = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        assert begin >= -1, content
        assert begin + wide <= width + 0.13 * wide + 1, content  # bold text is wider than estimated


def test_no_vertical_line_crosses_a_label_on_a_phone():
    svg = bar_chart("speedups", BARS, 320.0, str, base=1.0, lines=[(1.7, "floor")])
    labels = [float(text.get("y")) for text in drawn(svg, "text", "ink")]
    for line in drawn(svg, "path"):
        for top, bottom in re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", line.get("d")):
            assert not any(float(top) < y < float(bottom) for y in labels)


def test_lines_have_a_marker_per_point_and_onchip_is_on_top():
    ours = Line("onchip", "ours", ((16, 10.0), (64, 40.0), (256, 90.0)))
    peer = Line("torch", "s0", ((16, 5.0), (256, 80.0)), 1)
    svg = line_chart("rates", [ours, peer], 620.0, "rows", "rows/s", short_number, short_number)
    assert len(drawn(svg, "circle", "ours")) == 3 + 1  # and the legend's
    assert len(drawn(svg, "polygon", "s0")) == 2 + 1
    paths = [path.get("class") for path in drawn(svg, "path") if path.get("class", "").startswith("line-")]
    assert paths[-1] == "line-ours"
    shown = ["".join(text.itertext()) for text in drawn(svg, "text")]
    assert {"16", "64", "256"} <= set(shown), "the sizes themselves are ticks"
    line_chart("one", [Line("onchip", "ours", ((1, 1.0),))], 320.0, "", "", short_number, short_number, x_log=False)


def test_series_differ_without_colours():
    kinds = [(i % MARKERS, (i + i // MARKERS) % MARKERS) for i in range(2 * MARKERS)]
    assert len(set(kinds)) == len(kinds)


def test_a_roofline_has_every_kernel():
    roofs = Roofs({"fp32": 1e12, "fp16": 8e12}, 1e11, 1e12)
    points = [Point(i + 1, f"k{i}", 1e6, 10.0**i, 1e-3) for i in range(4, 9)]
    points += [Point(9, "a copy", 1e6, 0, 1e-3)]  # without arithmetic it has no place on the log axis
    for width in WIDTHS:
        svg = roofline("roofline", roofs, points, width)
        dots = drawn(svg, "circle", "ours")[1:]
        assert len(dots) == 5
        assert len({(dot.get("cx"), dot.get("cy")) for dot in dots}) == 5
        assert len(drawn(svg, "path", "roof")) == 2 + 1  # one per precision, and the legend's
        numbers = ["".join(text.itertext()) for text in drawn(svg, "text", "halo")]
        assert numbers == ["5", "6", "7", "8", "9"]


def test_text_is_shortened_in_its_middle():
    assert fitted("short", 100) == "short"
    cut = fitted("a name that is much too long", 100)
    assert cut.startswith("a na")
    assert cut.endswith("ong")
    assert text_width(cut) <= 100


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast_is_that_of_wcag_aa(colours):
    for text in ("ink", "dim", "ours", "slower"):
        for ground in ("surface", "page"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for text in ("ink", "dim"):
        for ground in ("tint", "warm"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mark in ("ours", "other", "slower", "axis", *(f"s{i}" for i in range(MARKERS))):
        assert contrast(colours[mark], colours["surface"]) >= 3, mark
    assert all(colours[f"s{i}"] != colours["ours"] for i in range(MARKERS)), "onchip's colour is its own"


def test_a_file_has_its_colours_inside():
    svg = standalone(bar_chart("speedups", BARS, 860.0, str, base=1.0))
    assert "var(" not in svg
    assert "prefers-color-scheme: dark" in svg
    assert LIGHT["ours"] in svg
    assert DARK["ours"] in svg
    assert ElementTree.fromstring(svg).get("aria-label") == "speedups"
