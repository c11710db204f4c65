"""A plan as a picture: groups as boxes in the order in which they run, with the bytes that pass between them.

A value that the next group reads is an arrow down. A value that a later group reads leaves its box on the right, runs
down a lane and enters each reader from the right; a lane is used again when its value has no more readers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from onchip.errors import printable
from onchip.network.text import size_text
from onchip.plan.kernel import by_reason
from onchip.plan.plan import Group, Plan, format_us
from onchip.svg import element, fitted, picture, text, text_width, titled

WIDE = 460.0  # pixels: of a box
MANY = 40  # groups: of more, a box has two lines instead of five
_LINE, _PAD, _GAP = 18.0, 10.0, 30.0  # pixels: a line of text, around it, between boxes
_LANE, _PORT = 10.0, 18.0  # pixels: between lanes, and between the arrows that enter or leave a box on its right
_NAMES = 150.0  # pixels: right of the boxes, for the bytes of values that leave there
_BOLD = 1.12
_WORDS = re.compile(r"[^\s,:;]+")


@dataclass
class _Box:
    """A network input, a group or a network output; all positions in pixels."""

    title: str  # under the pointer
    lines: tuple[tuple[str, str], ...]  # text and its class
    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    link: str = ""
    share: tuple[float, float] | None = None  # of the plan's estimate: the group's floor and estimate
    down: tuple[str, ...] = ()  # values that the next box reads
    leaving: list[str] = field(default_factory=list)  # values that later boxes read
    entering: list[str] = field(default_factory=list)
    y: float = 0.0
    height: float = 0.0


def plan_picture(plan: Plan, width: float = WIDE, link: str = "") -> str:
    """An SVG of the plan.

    width  of a box, in pixels
    link   "#group-": a click on group 3 leads to #group-3; "": nowhere
    """
    boxes = _boxes(plan, width, link)
    lanes = _connect(boxes)
    y = 34.0
    for box in boxes:
        ports = _PORT * (len(box.leaving) + len(box.entering))
        box.y, box.height = y, max(2 * _PAD + _LINE * len(box.lines) - 4 + (8 if box.share else 0), ports + 8)
        y += box.height + _GAP
    whole = _x(max(lanes.values()) + 1, width) if lanes else width
    head = f"floor {format_us(plan.floor_us)}, estimate {format_us(plan.estimate_us)}"
    between = f"{plan.between_bytes:,} B/row between groups"
    parts = [text(2, 18, fitted(f"{head}, {between}", whole - 4, 12), "dim", font_size=12)]
    parts += [_arrow_down(plan, box, width) for box in boxes if box.down]
    parts += _lanes(plan, boxes, lanes, width)
    parts += [_draw(box, width) for box in boxes]
    title = f"Plan: {plan.title}; {len(plan.groups)} groups, {head}, {between}"
    return picture(whole, y - _GAP + 4, printable(title), *parts, role="group" if link else "img")


# -- what is in a box ----------------------------------------------------------------------------------------


def _boxes(plan: Plan, width: float, link: str) -> list[_Box]:
    net = plan.network
    used = dict.fromkeys(name for group in plan.groups for name in group.inputs)
    boxes = [_end(plan, name, "input", (), (name,)) for name in net.inputs if name in used]
    whole = plan.estimate_us or 1.0
    boxes += [_group(plan, i, group, width, link, whole) for i, group in enumerate(plan.groups)]
    return boxes + [_end(plan, name, "output", (name,), ()) for name in net.outputs]


def _end(plan: Plan, name: str, kind: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> _Box:
    shown = f"{kind} {name}: {plan.network.types[name]}"
    return _Box(shown, ((shown, "ink"),), "box", reads, writes)


def _group(plan: Plan, number: int, group: Group, width: float, link: str, whole_us: float) -> _Box:
    claim, cost = group.claim, group.claim.cost
    args = plan.device, plan.job.precision, plan.job.batch
    floor, estimate = cost.floor_us(*args), cost.estimate_us(*args)
    times = f"floor {format_us(floor)}, estimate {format_us(estimate)}"
    slow, is_short = plan.slow_because(group), len(plan.groups) > MANY
    lines = [(f"{number}  {claim.label}", "ink strong")]
    if is_short:
        room = width - 2 * _PAD - 4 - text_width(f" · {times}")
        lines.append((f"{fitted(layers_text(plan, group), room)} · {times}", "dim"))
    else:
        sizes = [f"{cost.row_bytes:,} B/row", f"{cost.row_flop:,} flop/row"]
        sizes += [f"{size_text(claim.weight_bytes)} of weights"] if claim.weight_bytes else []
        sizes += [f"{size_text(claim.fast_bytes)} on chip"] if claim.fast_bytes else []
        lines += [
            (layers_text(plan, group), "dim"),
            *((line, "ink") for line in _wrapped(sizes, width)),
            (times, "ink"),
        ]
        lines += [("; ".join(folded), "dim")] if (folded := rewrites_of(plan, group)) else []
    return _Box(
        "\n".join(facts(plan, number, group)), tuple(lines), "slow-kernel" if slow else "kernel",
        tuple(dict.fromkeys(group.inputs)), group.outputs, f"{link}{number}" if link else "",
        (floor / whole_us, estimate / whole_us),
    )  # fmt: skip


def _wrapped(parts: Sequence[str], width: float) -> list[str]:
    """The parts in as few lines as fit a box."""
    lines = list(parts[:1])
    for part in parts[1:]:
        longer = f"{lines[-1]} · {part}"
        lines[-1:] = [longer] if text_width(longer) <= width - 2 * _PAD - 4 else [lines[-1], part]
    return lines


def layers_text(plan: Plan, group: Group) -> str:
    """ "fc1..fc3, 5 layers"; of a group that converts a value's layout, the value."""
    layers = plan.layers_of(group)
    if len(layers) > 1:
        return f"{layers[0]}..{layers[-1]}, {len(layers)} layers"
    return next(iter(layers or group.claim.writes))


def rewrites_of(plan: Plan, group: Group) -> list[str]:
    """The rewrites that name a layer of this group: what was folded into it."""
    layers = set(plan.layers_of(group))
    return [line for line in plan.rewrites if layers.intersection(_WORDS.findall(line))]


def facts(plan: Plan, number: int, group: Group) -> list[str]:
    """Everything about a group, one line each."""
    claim, layers = group.claim, plan.layers_of(group)
    lines = [f"group {number}: {claim.label}", claim.why]
    lines += [f"layers: {', '.join(layers)}"] if layers else []
    lines += [f"slow: {slow}"] if (slow := plan.slow_because(group)) else []
    lines += [f"reduction order: {claim.order}"] if claim.order else []
    lines += [f"rewrote: {line}" for line in rewrites_of(plan, group)]
    lines += [
        f"refused: {each.kernel} at {each.node}: {each.why}" for each in by_reason(plan.refusals) if each.node in layers
    ]
    return [printable(line) for line in lines if line]


# -- what connects them ------------------------------------------------------------------------------------


def _connect(boxes: Sequence[_Box]) -> dict[str, int]:
    """Fill in `down`, `leaving` and `entering`; the lane of each value that leaves."""
    written = {name: i for i, box in enumerate(boxes) for name in box.writes}
    last = {name: i for i, box in enumerate(boxes) for name in box.reads}
    ends = list[int]()  # of the value that uses each lane: the box of its last reader
    lanes = dict[str, int]()
    for i, box in enumerate(boxes):
        following = boxes[i + 1].reads if i + 1 < len(boxes) else ()
        box.down = tuple(name for name in box.writes if name in following)
        for name in box.writes:
            if last.get(name, i) > i + 1:
                lane = next((k for k, end in enumerate(ends) if end <= i), len(ends))
                ends[lane : lane + 1] = [last[name]]
                lanes[name] = lane
                box.leaving.append(name)
        box.entering += [name for name in box.reads if name in lanes and written[name] < i - 1]
    return lanes


def _bytes(plan: Plan, name: str) -> str:
    """What moves: per row, or in all where it does not depend on the batch."""
    known = plan.types.get(name, plan.network.types.get(name))
    if known is None:
        return name
    return f"{known.row_bytes:,} B/row" if known.is_batched else size_text(known.row_bytes)


def _arrow_down(plan: Plan, box: _Box, width: float) -> str:
    x, top, bottom = width / 2, box.y + box.height, box.y + box.height + _GAP
    label = ", ".join(_bytes(plan, name) for name in box.down)
    line = titled("path", ", ".join(box.down), class_="arrow", d=f"M{x:.1f} {top:.1f}V{bottom - 7:.1f}")
    head = element("path", class_="head", d=f"M{x - 4.5:.1f} {bottom - 8:.1f}h9l-4.5 8z")
    return line + head + text(x + 12, top + _GAP / 2 + 3, fitted(label, width / 2 - 16, 12), "dim num", font_size=12)


def _lanes(plan: Plan, boxes: Sequence[_Box], lanes: dict[str, int], width: float) -> list[str]:
    """Of each value that leaves on the right: its bytes, and one path with a branch into every reader."""
    parts, paths, ends = [], dict[str, list[str]](), dict[str, float]()
    for box in boxes:
        y = box.y + 12
        for name in box.entering:
            paths[name].append(f"M{_x(lanes[name], width):.1f} {y:.1f}H{width + 9:.1f}")
            parts.append(element("path", class_="head", d=f"M{width + 9:.1f} {y - 4.5:.1f}v9l-8 -4.5z"))
            ends[name] = y
            y += _PORT
        for name in box.leaving:
            shown = fitted(_bytes(plan, name), _NAMES - 24, 12)
            begin = width + 12 + text_width(shown, 12)
            parts.append(element("path", class_="arrow", d=f"M{width:.1f} {y:.1f}h6"))
            parts.append(text(width + 9, y + 4, shown, "dim num", font_size=12))
            x = _x(lanes[name], width)
            paths[name] = [f"M{begin:.1f} {y:.1f}H{x:.1f}", f"M{x:.1f} {y:.1f}V"]
            y += _PORT
    for name, (out, down, *branches) in paths.items():
        parts.append(titled("path", name, class_="arrow", d="".join([out, f"{down}{ends[name]:.1f}", *branches])))
    return parts


def _x(lane: int, width: float) -> float:
    return width + _NAMES + _LANE * (lane + 0.5)


def _draw(box: _Box, width: float) -> str:
    inside = [element("rect", x=1, y=box.y, width=width - 2, height=box.height, rx=6, class_=box.kind)]
    for i, (line, kind) in enumerate(box.lines):
        room = (width - 2 * _PAD - 4) / (_BOLD if "strong" in kind else 1)
        inside.append(text(_PAD + 4, box.y + _PAD + 10 + _LINE * i, fitted(line, room), f"{kind} num"))
    if box.share is not None:
        floor, estimate = box.share
        y, most = box.y + box.height - 9, width - 2 * _PAD - 8
        colour = "slower" if box.kind == "slow-kernel" else "ours"
        for share, opacity in ((estimate, ".4"), (floor, "1")):
            size = max(1.0, most * share)
            inside.append(element("rect", x=_PAD + 4, y=y, width=size, height=4, class_=colour, opacity=opacity))
    drawn = titled("g", box.title, *inside)
    return element("a", drawn, href=box.link, aria_label=box.title.partition("\n")[0]) if box.link else drawn
