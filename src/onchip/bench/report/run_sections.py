"""The sections of a report that show runs: rooflines of profiles and ladders, training curves, pictures."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from onchip.bench.report.axis import short_number, short_rate
from onchip.bench.report.ladder_sections import rung_name
from onchip.bench.report.lines import Line, line_chart
from onchip.bench.report.page import Section, chart_card, source_line
from onchip.bench.report.results import Results, Row, machine_title
from onchip.bench.report.roofline import Point, Roofs, roofline
from onchip.bench.report.sources import Log, Picture
from onchip.measure.pace import show_ms
from onchip.network.text import plural, size_text
from onchip.plan.plan import format_us
from onchip.svg import escaped

_MOVED, _COMPUTED = "bytes per row", "flop per row"  # what a rung on a GPU reports


def roofline_section(profiles: Sequence[tuple[Path, Mapping[str, Any]]], files: Sequence[Results]) -> Section | None:
    """A roofline per profile, with every kernel, and per ladder, with every rung that reports bytes and flop."""
    groups = dict[str, list[str]]()
    for path, profile in profiles:
        if profile["kernels"]:
            groups.setdefault(profile["device"], []).append(_profile_card(path, profile))
    for results in files:
        if any(_has_work(row) for row in results.rows):
            groups.setdefault(machine_title(results.machine), []).append(_rungs_card(results))
    about = (
        "What each kernel reaches, below what the device allows for its flop per byte: left of the ridge memory is the "
        "limit, right of it arithmetic."
    )
    return Section("roofline", "Roofline", about, groups) if groups else None


def _profile_card(path: Path, profile: Mapping[str, Any]) -> str:
    kernels = profile["kernels"]
    roofs = Roofs({profile["precision"]: profile["peak_flops"]}, profile["bandwidth"], profile["cache_bandwidth"])
    points = [
        Point(i + 1, each["kernel"], each["nbytes"], each["flop"], each["mean_us"] / 1e6)
        for i, each in enumerate(kernels)
    ]
    head = ["", "kernel", "layers", "mean", "share", "flop/s", "bytes/s", "of floor", "estimate"]
    cells = [
        [str(i + 1), each["kernel"], _ends(each["layers"]), format_us(each["mean_us"]), f"{each['share']:.1%}",
         short_rate(each["flop"] / max(each["mean_us"], 1e-9) * 1e6, "flop"),
         short_rate(each["nbytes"] / max(each["mean_us"], 1e-9) * 1e6, "B"), f"{each['of_floor']:.0%}",
         format_us(each["estimate_us"])]
        for i, each in enumerate(kernels)
    ]  # fmt: skip
    title = f"{profile['network']}: {plural(len(kernels), 'kernel')}"
    about = (
        f"{profile['precision']}: {plural(profile['calls'], 'call')}, {plural(profile['rows'], 'row')}; "
        f"a call takes {format_us(profile['call_us'])}, {format_us(profile['kernel_us'])} of it in kernels"
    )
    label = f"Roofline of {title}. " + "; ".join(
        f"{row[0]} {row[1]}: {row[5]}, {row[7]} of floor" for row in cells[:12]
    )
    source = f'<p class="source"><code>{escaped(path.name)}</code></p>'
    return chart_card(title, about, partial(roofline, label, roofs, points), head, cells, source, table_is_open=True)


def _ends(layers: Sequence[str]) -> str:
    return f"{layers[0]}..{layers[-1]}" if len(layers) > 1 else "".join(layers)


def _has_work(row: Row) -> bool:
    work = row.extra.get(_MOVED), row.extra.get(_COMPUTED)
    return bool(row.median_ms and _rows_of(row)) and all(isinstance(each, int | float) and each > 0 for each in work)


def _rows_of(row: Row) -> int:
    """The rows of a rung's case: "1024 rows"."""
    count = row.case.partition(" ")[0]
    return int(count) if count.isdigit() else 0


def _rungs_card(results: Results) -> str:
    rows, peak = [row for row in results.rows if _has_work(row)], results.machine.get("peak") or {}
    used = {row.precision.rpartition("x")[2] for row in rows}  # 3xtf32 runs at the rate of tf32
    flops = {name: float(rate) for name, rate in peak.get("flops", {}).items() if name in used}
    roofs = Roofs(flops or {"fp32": 1.0}, float(peak.get("bandwidth", 1.0)), float(peak.get("cache_bandwidth", 1.0)))
    points, cells = list[Point](), list[list[str]]()
    for i, row in enumerate(rows):
        count, ms = _rows_of(row), row.median_ms or 0.0
        moved, flop = float(row.extra[_MOVED]) * count, float(row.extra[_COMPUTED]) * count
        kind = "ours" if rung_name(row).startswith("onchip") else "other"
        points.append(Point(i + 1, rung_name(row), moved, flop, ms / 1e3, kind))
        rates = short_rate(flop / ms * 1e3, "flop"), short_rate(moved / ms * 1e3, "B")
        cells.append([str(i + 1), rung_name(row), row.precision, show_ms(ms), f"{flop / moved:.3g}", *rates])
    title = f"{rows[0].workload}, rungs of the ladder: {rows[0].case}"
    label = f"Roofline of {title}. " + "; ".join(f"{row[0]} {row[1]}: {row[5]}" for row in cells)
    source = source_line(results)
    head = ["", "rung", "precision", "ms", "flop per byte", "flop/s", "bytes/s"]
    return chart_card(
        title, "The engine's rungs are blue.", partial(roofline, label, roofs, points), head, cells, source
    )


# -- trainings ---------------------------------------------------------------------------------------------


def training_section(logs: Sequence[Log]) -> Section | None:
    cards = [card for log in logs for card in _training_cards(log)]
    about = "Loss and accuracy per epoch, from the logs of onchip train --log."
    return Section("training", "Training curves", about, {"": cards}, is_small=True) if cards else None


def _training_cards(log: Log) -> list[str]:
    if not log.epochs:
        return []
    options = log.options
    name = f"{options.get('model', log.path.stem)} on {options.get('data') or 'data'}"
    setting = ", ".join(
        f"{key.replace('_', ' ')} {options[key]}" for key in ("optimiser", "lr", "batch_size", "seed") if key in options
    )
    loss = str(options.get("loss", "loss")).replace("_", " ")
    cards = [_curve_card(f"{name}: loss", setting, log, "loss", f"loss ({loss})", lambda y: f"{y:.3g}")]
    if any(epoch.get("accuracy") is not None for epoch in log.epochs):
        cards.append(
            _curve_card(f"{name}: accuracy", setting, log, "accuracy", "accuracy", lambda y: f"{100 * y:.4g}%")
        )
    return [card for card in cards if card]


def _curve_card(title: str, setting: str, log: Log, what: str, y_label: str, show: Any) -> str:
    lines = list[Line]()
    for name, key, kind in (("training", what, "ours"), ("validation", f"validation_{what}", "s0")):
        points = [(float(epoch["epoch"]), epoch[key]) for epoch in log.epochs if epoch.get(key) is not None]
        if points:
            lines.append(Line(name, kind, tuple(points), len(lines)))
    if not lines:
        return ""
    y_log = what == "loss" and all(y > 0 for line in lines for _, y in line.points)
    last = "; ".join(f"{line.name} {show(line.points[0][1])} to {show(line.points[-1][1])}" for line in lines)
    head = ["epoch", *(line.name for line in lines)]
    known = [dict(line.points) for line in lines]
    cells = [[str(epoch["epoch"]), *(show(each[epoch["epoch"]]) if epoch["epoch"] in each else "-" for each in known)]
             for epoch in log.epochs]  # fmt: skip

    def draw(width: float) -> str:
        return line_chart(
            f"{title}: {last}", lines, width, "epoch", y_label, short_number, show, x_log=False, y_log=y_log
        )

    source = f'<p class="source"><code>{escaped(log.path.name)}</code></p>'
    return chart_card(title, setting, draw, head, cells, source)


# -- pictures ----------------------------------------------------------------------------------------------


def picture_section(pictures: Sequence[Picture]) -> Section | None:
    cards = []
    for each in pictures:
        name, data = escaped(each.path.name), base64.b64encode(each.data).decode()
        caption = f'<figcaption class="source">{name}, {size_text(len(each.data))}</figcaption>'
        image = f'<img alt="{name}" src="data:{each.kind};base64,{data}">'
        cards.append(f'<article class="card picture"><figure>{image}{caption}</figure></article>')
    return Section("pictures", "Sample pictures", "", {"": cards}, is_small=True) if cards else None
