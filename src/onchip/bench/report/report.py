"""The report: one page from result files, profiles, training logs and pictures."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.bench.report.change_section import changes_section
from onchip.bench.report.ladder_sections import ladder_section, largest_ladders, scaling_section
from onchip.bench.report.page import Section, html_page, scrolled
from onchip.bench.report.results import Results, short_commit
from onchip.bench.report.run_sections import picture_section, roofline_section, training_section
from onchip.bench.report.sources import Sources, by_machine
from onchip.bench.report.speedup_sections import speedup_section, summary_tiles, times_section
from onchip.network.text import html_table, plural
from onchip.svg import escaped

TITLE = "onchip report"
# What a reader can add: the kind of file, and the command that writes it.
_MORE = (
    ("results", "speedups over peers and scaling", "onchip bench decode --peers --quick --out results"),
    ("ladders", "every optimisation step", "onchip ladder decode --out results"),
    ("roofline", "every kernel of a network", "onchip profile MODEL --json > results/profile.json"),
    ("training", "training curves", "onchip train digits --log results/digits.jsonl"),
    ("pictures", "sample pictures", "onchip run faces --count 64 -o results/faces.png"),
    ("changes", "changes since older results", "onchip report results --before OLDER"),
)


def report(found: Sources, before: Sources | None = None) -> str:
    """The page as HTML. before: older results, to show what changed."""
    files = [results for _, results in found.results]
    ladders = largest_ladders(files)
    sections = [
        changes_section(before.results, found.results) if before is not None else None,
        speedup_section(files), times_section(files), ladder_section(ladders),
        roofline_section(found.profiles, ladders), scaling_section(files), training_section(found.logs),
        picture_section(found.pictures),
    ]  # fmt: skip
    shown = [section for section in sections if section is not None]
    about = f'<p class="about">{escaped(_contents(found))}</p>{summary_tiles(files)}'
    return html_page(TITLE, about, [*shown, *_sources(files)], _more(shown))


def _contents(found: Sources) -> str:
    counts = (
        (len(found.results), "result file"), (len(found.profiles), "profile"), (len(found.logs), "training log"),
        (len(found.pictures), "picture"),
    )  # fmt: skip
    of = ", ".join(plural(count, what) for count, what in counts if count)
    dates = sorted(results.date[:10] for _, results in found.results)
    when = f", measured {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else "") if dates else ""
    return f"{of}{when}. Times are medians. The floor is the least time that the hardware allows."


def _sources(files: Sequence[Results]) -> list[Section]:
    """The machines with their versions, and what was skipped."""
    cards = []
    for machine, some in by_machine(files).items():
        rows = [[results.command, short_commit(results.commit), results.date[:10], plural(len(results.rows), "row")]
                for results in some]  # fmt: skip
        versions = {name: each for results in some for name, each in results.versions.items() if each}
        listed = ", ".join(f"{name} {each}" for name, each in versions.items())
        skipped = dict.fromkeys(f"{engine}: {reason}" for results in some for engine, reason in results.skipped.items())
        lines = "".join(f"<li>skipped {escaped(line)}</li>" for line in skipped)
        table = scrolled(f"{machine}: result files", html_table(["command", "commit", "date", "rows"], rows))
        cards.append(
            f'<article class="card full"><h3>{escaped(machine)}</h3><p class="about">{escaped(listed)}</p>{table}'
            f"{f'<ul>{lines}</ul>' if lines else ''}</article>"
        )
    return [Section("sources", "Machines and commands", "", {"": cards})] if cards else []


def _more(shown: Sequence[Section]) -> str:
    """How to add the sections that are missing."""
    have = {section.name for section in shown} | ({"results"} if any(s.name == "speedups" for s in shown) else set())
    lines = "".join(
        f"<li>{escaped(what)}: <code>{escaped(command)}</code></li>"
        for name, what, command in _MORE
        if name not in have
    )
    return f"<h2>More for this page</h2><ul>{lines}</ul>" if lines else ""
