"""A plan as an HTML page: its picture, and the details of every group."""

from __future__ import annotations

from onchip.bench.report.page import Section, html_page, scrolled
from onchip.network.text import html_table, plural, size_text
from onchip.plan.kernel import by_reason
from onchip.plan.picture import WIDE, facts, layers_text, plan_picture
from onchip.plan.plan import Group, Plan, format_us
from onchip.svg import escaped

_NARROW = 298.0  # pixels, of a box on a phone
_ABOUT = (
    "A box per group, in the order in which they run. Its bar is its share of the time, the dark part its floor; "
    "orange boxes take over twice their floor. Select a box for its details."
)


def plan_page(plan: Plan) -> str:
    """The whole document."""
    tiles = (
        (format_us(plan.estimate_us), f"estimate for {plural(plan.job.batch, 'row')}"),
        (format_us(plan.floor_us), "floor: the least time that the hardware allows"),
        (f"{plan.between_bytes:,} B/row", f"between {plural(len(plan.groups), 'group')}"),
        (size_text(plan.weight_bytes), "of weights"),
    )
    listed = "".join(
        f'<li class="tile"><strong>{escaped(value)}</strong><span>{escaped(what)}</span></li>' for value, what in tiles
    )
    details = "".join(_details(plan, i, group) for i, group in enumerate(plan.groups))
    sections = [
        Section("picture", "Picture", _ABOUT, {"": [_picture(plan)]}),
        Section("groups", "Groups", "", {"": [details]}),
    ]
    if lines := [*plan.rewrites, *filter(None, [plan.fold, *plan.left_out])]:
        items = "".join(f"<li>{escaped(line)}</li>" for line in lines)
        sections.append(Section("rewrites", "Rewrites", "", {"": [_card(f"<ul>{items}</ul>")]}))
    if refusals := by_reason(plan.refusals):
        rows = [[each.node, each.kernel, each.why] for each in refusals]
        table = scrolled("Refusals", html_table(["layer", "kernel", "why"], rows))
        sections.append(Section("refusals", "Refusals", "Kernels that could not run a layer.", {"": [_card(table)]}))
    return html_page(plan.title, f'<ul class="tiles">{listed}</ul>', sections)


def _card(inside: str) -> str:
    return f'<article class="card full">{inside}</article>'


def _picture(plan: Plan) -> str:
    wide, narrow = (plan_picture(plan, width, "#group-") for width in (WIDE, _NARROW))
    return (
        '<article class="card full plan"><figure class="chart">'
        f'<div class="wide scroll-x">{wide}</div><div class="narrow scroll-x">{narrow}</div></figure></article>'
    )


def _details(plan: Plan, number: int, group: Group) -> str:
    claim, cost = group.claim, group.claim.cost
    args = plan.device, plan.job.precision, plan.job.batch
    values = [
        ("kernel", claim.label), ("layers", layers_text(plan, group)), ("floor", format_us(cost.floor_us(*args))),
        ("estimate", format_us(cost.estimate_us(*args))), ("bytes per row", f"{cost.row_bytes:,}"),
        ("flop per row", f"{cost.row_flop:,}"), ("launches", f"{cost.launches:,}"),
        ("on chip", size_text(claim.fast_bytes)), ("weights", size_text(claim.weight_bytes)),
        ("to build the weights", f"{claim.build_flop:,} flop"), ("reads", ", ".join(group.inputs)),
        ("writes", ", ".join(group.outputs)),
    ]  # fmt: skip
    listed = "".join(f"<dt>{name}</dt><dd>{escaped(value)}</dd>" for name, value in values if value)
    lines = "".join(f"<li>{escaped(line)}</li>" for line in facts(plan, number, group)[1:])
    title = f"{number}  {claim.label}: {layers_text(plan, group)}, {format_us(cost.estimate_us(*args))}"
    return (
        f'<details class="card group-details"><summary>{escaped(title)}</summary>'
        f'<div id="group-{number}" tabindex="-1"><dl>{listed}</dl><ul>{lines}</ul></div></details>'
    )
