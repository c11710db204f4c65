"""What the documents say is so: the results table comes from the committed files, links lead somewhere."""

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

import onchip
from onchip.bench.report.chart import main as draw_chart
from onchip.bench.report.table import BEGIN, END
from onchip.bench.report.table import main as make_table

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize(("page", "more"), [("README.md", ["--front"]), ("docs/results.md", [])])
def test_the_results_table_is_made_from_the_committed_files(page, more, capsys):
    requested = [str(ROOT / page), str(ROOT / "benchmarks" / "results"), "--check", *more]
    assert make_table(requested) == 0, capsys.readouterr()


def test_the_chart_is_drawn_from_the_committed_files(capsys, tmp_path):
    picture, results = str(ROOT / "docs" / "speedup.svg"), str(ROOT / "benchmarks" / "results")
    assert draw_chart([picture, results, "--check"]) == 0, capsys.readouterr()
    bars = [element for element in ElementTree.parse(picture).iter() if element.get("rx") and element.get("y") != "3.5"]
    assert 5 < len(bars) <= 12  # the legend has up to two
    (tmp_path / "old.svg").write_text("<svg/>")
    assert draw_chart([str(tmp_path / "old.svg"), results, "--check"]) == 1
    assert draw_chart([str(tmp_path / "old.svg"), results]) == 0
    assert (tmp_path / "old.svg").read_text() == Path(picture).read_text()


LADDERS = sorted((ROOT / "benchmarks" / "results").glob("*/ladder-*.json"))


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "ladders").glob("*.md")), ids=lambda page: page.stem)
def test_a_ladder_page_shows_the_charts_of_its_files(page, capsys):
    files = [path for path in LADDERS if path.stem == f"ladder-{page.stem}"]
    assert files
    for path in files:
        picture = page.with_name(f"{page.stem}-{path.parent.name}.svg")
        assert f"]({picture.name})" in page.read_text()
        assert draw_chart([str(picture), str(path), "--check"]) == 0, capsys.readouterr()


def test_the_plan_is_drawn_by_the_command_on_its_page(cli, tmp_path):
    (command,) = re.findall(
        r"^\$ onchip (plan .*--svg .*)$", (ROOT / "docs/tutorials/faces.md").read_text(), re.MULTILINE
    )
    assert cli(*shlex.split(command)).code == 0
    assert (tmp_path / "plan.svg").read_text() == (ROOT / "docs" / "plan.svg").read_text(), "out of date: make docs"


def test_the_bytes_of_the_readme_picture_are_those_of_the_network():
    net = onchip.load("decode")
    assert {node.layer.kind for node in net.nodes} == {"Linear", "ReLU"}
    by_layers = sum(net.types[name].row_bytes for node in net.nodes for name in (node.inputs[0], node.name))
    fused = sum(net.types[name].row_bytes for name in (*net.inputs, *net.outputs))
    for text in ((ROOT / "docs/fused.svg").read_text(), (ROOT / "README.md").read_text()):
        assert f"{by_layers:,} " in text
        assert f"{fused:,}" in text


def test_the_front_page_shows_at_most_ten_results():
    text = (ROOT / "README.md").read_text()
    table = text[text.index(BEGIN) : text.index(END)]
    assert 0 < table.count("\n| ") - 2 <= 10  # besides the head and the line below it


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_files_that_the_architecture_names_are_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"`(tests/[\w/.]+|\w+/[\w/]+\.(?:py|cu|cuh))`", text):
        where = [ROOT / name, ROOT / "src/onchip" / name, ROOT / "src/onchip/kernels" / name]
        assert any(path.exists() for path in where), name


def test_the_documented_commands_exist():
    from onchip.cli.main import build_app

    names = {command.name for command in build_app().registered_commands}
    told = set(re.findall(r"^\| `onchip (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert told == names
