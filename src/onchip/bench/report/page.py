"""A self-contained HTML page: style, script and pictures are inside, and nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onchip.bench.report.results import Results, short_commit
from onchip.network.text import html_table
from onchip.svg import escaped, style_sheet

WIDE, NARROW = 620.0, 330.0  # pixels, of a chart: the page shows the one that fits
_HERE = Path(__file__).parent
# Even if a name from a file got past escaping, the page could load and send nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
Draw = Callable[[float], str]


@dataclass(frozen=True)
class Section:
    """A part of the page, with a link in its navigation."""

    name: str  # of its anchor, and in the navigation
    title: str
    about: str
    groups: Mapping[str, Sequence[str]]  # cards by machine; "": of no machine
    is_small: bool = False  # the cards are narrow


def html_page(title: str, about: str, sections: Sequence[Section], end: str = "") -> str:
    """The whole document.

    about  HTML below the title
    end    HTML below the sections
    """
    links = "".join(f'<a href="#{section.name}">{section.name.capitalize()}</a>' for section in sections)
    body = "".join(map(_section, sections))
    css, js = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{style_sheet()}\n{css}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to content</a>\n'
        f'<header><div class="bar"><nav aria-label="Sections">{links}</nav>'
        '<button type="button" id="theme" hidden>Dark</button></div></header>\n'
        f'<main id="main" tabindex="-1"><h1>{escaped(title)}</h1>{about}\n{body}</main>\n'
        f'<footer>{end}</footer>\n<div id="tip" role="status" hidden></div>\n<script>{js}</script>\n</body>\n</html>\n'
    )


def _section(section: Section) -> str:
    kind = "cards small" if section.is_small else "cards"
    parts = []
    for i, (machine, cards) in enumerate(section.groups.items()):
        grid = f'<div class="{kind}">{"".join(cards)}</div>'
        summary = f"<summary>{escaped(machine)}</summary>"
        parts.append(f'<details class="group"{"" if i else " open"}>{summary}{grid}</details>' if machine else grid)
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">'
        f'<h2 id="{section.name}-title">{escaped(section.title)}</h2>'
        f"{_about(section.about)}{''.join(parts)}</section>\n"
    )


def chart_card(title: str, about: str, draw: Draw, head: Sequence[str], rows: Sequence[Sequence[str]],
               source: str = "", table_is_open: bool = False) -> str:  # fmt: skip
    """A chart for wide and for narrow screens, the table of its data, and the command that measured it."""
    return (
        f'<article class="card"><figure class="chart"><figcaption><h3>{escaped(title)}</h3>'
        f"{_about(about)}</figcaption>"
        f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div></figure>'
        f"{data_table(title, head, rows, table_is_open)}{source}</article>"
    )


def _about(text: str) -> str:
    return f'<p class="about">{escaped(text)}</p>' if text else ""


def data_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], is_open: bool = False) -> str:
    """A table that opens on request."""
    summary = f'<summary>Data<span class="hidden"> of {escaped(title)}</span></summary>'
    return (
        f'<details class="data"{" open" if is_open else ""}>{summary}'
        f"{scrolled(f'{title}: data', html_table(head, rows))}</details>"
    )


def scrolled(label: str, table: str) -> str:
    """A table that scrolls inside itself where it is wider than the screen, also by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(label)}">{table}</div>'


def source_line(results: Results) -> str:
    """The command, commit and date of a result file."""
    command, commit = escaped(results.command), escaped(short_commit(results.commit))
    return f'<p class="source"><code>{command}</code> at <code>{commit}</code>, {escaped(results.date[:10])}</p>'
