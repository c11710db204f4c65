"""SVG as text: elements, text of bounded width, and one palette for light and dark pages."""

from __future__ import annotations

import html
import re
from pathlib import Path

from onchip.errors import printable

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
SIZE = 13.0  # pixels, of text
MARKERS = 6  # colours and shapes of series other than onchip's

# Every text colour has a contrast of 4.5 to the surface, every mark one of 3 (WCAG AA); blue is onchip's alone.
LIGHT = {
    "ink": "#1f2328", "dim": "#59636e", "surface": "#ffffff", "page": "#f6f8fa", "grid": "#dde3e9", "axis": "#818b98",
    "ours": "#0b5fc0", "tint": "#e3eefb", "other": "#8a939d", "slower": "#b35900", "warm": "#fff1e0",
    "s0": "#b35900", "s1": "#00795a", "s2": "#a0467f", "s3": "#7a6a00", "s4": "#5b6470", "s5": "#2a82ac",
}  # fmt: skip
DARK = {
    "ink": "#e6edf3", "dim": "#9aa4af", "surface": "#161b22", "page": "#0d1117", "grid": "#2b323b", "axis": "#7d8590",
    "ours": "#58a6ff", "tint": "#16304f", "other": "#7d8793", "slower": "#f0883e", "warm": "#3d2408",
    "s0": "#f0883e", "s1": "#3fc39a", "s2": "#db8fc0", "s3": "#d7c04a", "s4": "#a5aeb8", "s5": "#79c8f0",
}  # fmt: skip
_RULES = Path(__file__).with_suffix(".css")
_NARROW, _WIDE = frozenset("ijl.,:;'|!()[]{}Itfr/ "), frozenset("mwMW@%&—")


def element(name: str, *inside: str, **attributes: str | float) -> str:
    """An element around SVG text. `class_` is class, `text_anchor` text-anchor; numbers have at most one decimal."""
    pairs = (f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    head = f"<{name}{''.join(pairs)}"
    return f"{head}>{''.join(inside)}</{name}>" if inside else f"{head}/>"


def _value(value: str | float) -> str:
    return escaped(value) if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, content: str, kind: str = "ink", **attributes: str | float) -> str:
    """A line of text whose baseline is at y."""
    return element("text", escaped(content), x=x, y=y, class_=kind, **attributes)


def span(content: str, kind: str) -> str:
    """A part of a line of text."""
    return element("tspan", escaped(content), class_=kind)


def titled(name: str, title: str, *inside: str, **attributes: str | float) -> str:
    """An element with a title, which browsers show under the pointer."""
    return element(name, element("title", escaped(title)), *inside, **attributes)


def escaped(content: str) -> str:
    """Text as XML: control characters, which XML forbids, are shown as Python shows them."""
    return html.escape("\n".join(map(printable, content.split("\n"))))


def text_width(content: str, size: float = SIZE) -> float:
    """About the width of text in a wide sans-serif font (DejaVu Sans, Verdana), in pixels; others are narrower."""
    wide = sum(0.37 if c in _NARROW else 0.95 if c in _WIDE else 0.7 if c.isupper() else 0.62 for c in content)
    return wide * size


def fitted(content: str, width: float, size: float = SIZE) -> str:
    """The text, shortened in its middle to fit `width` pixels; control characters as they are shown."""
    content = printable(content)
    if text_width(content, size) <= width:
        return content
    keep = len(content) - 1
    while keep > 2 and text_width(_shortened(content, keep), size) > width:
        keep -= 1
    return _shortened(content, keep)


def _shortened(content: str, keep: int) -> str:
    return f"{content[: keep - keep // 3].rstrip()}…{content[len(content) - keep // 3 :].lstrip()}"


def picture(width: float, height: float, label: str, *inside: str, role: str = "img", size: float = SIZE) -> str:
    """An <svg> that scales with its page; `label` describes it to those who do not see it."""
    return element(
        "svg", *inside, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_value(width)} {_value(height)}",
        width=width, height=height, role=role, aria_label=label, font_family=FONT, font_size=size,
    )  # fmt: skip


def standalone(svg: str) -> str:
    """The picture as a file of its own, light or dark as the reader's system is."""
    light, dark = map(_coloured, (LIGHT, DARK))
    head, _, rest = svg.partition(">")
    return f"{head}><style>{light}@media (prefers-color-scheme: dark) {{ {dark} }}</style>{rest}\n"


def _coloured(colours: dict[str, str]) -> str:
    """The rules with colours in place of variables, which some viewers of SVG files do not know."""
    rules = _RULES.read_text(encoding="utf-8")
    return re.sub(r"var\(--([\w-]+)\)", lambda found: colours[found[1]], rules)


def style_sheet() -> str:
    """CSS for pictures inside a page. The page sets data-theme on <html>, or leaves the choice to the system."""
    light, dark = (";".join(f"--{name}:{colour}" for name, colour in each.items()) for each in (LIGHT, DARK))
    return (
        f":root{{{light};color-scheme:light}}"
        f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark};color-scheme:dark}}}}"
        f":root[data-theme=dark]{{{dark};color-scheme:dark}}\n{_RULES.read_text(encoding='utf-8')}"
    )
