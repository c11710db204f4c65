"""The ladders' pages: each exists, names every rung, and shows the times of the committed files."""

from pathlib import Path

import pytest

from onchip.bench.report.table import BEGIN, END
from onchip.bench.report.table import main as make_table
from onchip.ladders import LADDERS, find_ladder, ladder_devices

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", LADDERS)
def test_a_page_names_every_rung(name):
    text = (ROOT / "docs" / "ladders" / f"{name}.md").read_text()
    headings = [line.split("`")[1] for line in text.splitlines() if line.startswith("## `")]
    assert headings == [rung.name for device in ladder_devices(name) for rung in find_ladder(name, device).rungs]


@pytest.mark.parametrize("name", LADDERS)
def test_a_page_shows_the_committed_times(name, capsys):
    page = ROOT / "docs" / "ladders" / f"{name}.md"
    files = sorted((ROOT / "benchmarks" / "results").rglob(f"ladder-{name}*.json"))
    if files:
        assert make_table([str(page), *map(str, files), "--check"]) == 0, capsys.readouterr().err
    else:
        text = page.read_text()
        assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() == ""
