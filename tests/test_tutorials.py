"""What the documents tell a reader to type works: commands run, Python runs, examples run, options exist."""

import importlib.util
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples/README.md",
]
BLOCK = re.compile(r"^```(console|sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PARSED = ("demo",)  # only: test_cli_examples.py runs it, with less work


def blocks(page):
    return [(found[1], found[2]) for found in BLOCK.finditer(page.read_text())]


def why_skipped(text):
    """Of code that begins with '# needs: torch onnx' and one of them is not installed."""
    needs = re.match(r"# needs: (.*)", text)
    missing = [name for name in (needs[1].split() if needs else []) if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def arguments(line):
    """Of an onchip command in a line of a shell; None where the line is none."""
    words = shlex.split(line, comments=True)
    while words and (
        "=" in words[0] or words[0] in ("mpiexec", "srun") or words[0].startswith("-") or words[0].isdigit()
    ):
        words = words[1:]
    return words[1:] if words[:1] == ["onchip"] else None


def check_options(args):
    """The command is known and understands these options; it is not run."""
    from typer.main import get_command

    from onchip.cli.main import build_app

    if args[:1] not in ([], ["--help"], ["help"]):
        command = get_command(build_app(args[0])).commands[args[0]]
        command.make_context(args[0], args[1:], obj=args, parent=typer.Context(command))


@pytest.fixture
def vocabulary():
    """As it was before: a page that adds a layer adds it for itself."""
    from onchip.network.layers import LAYERS

    before = dict(LAYERS)
    yield
    LAYERS.clear()
    LAYERS.update(before)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_what_a_page_tells_to_type_works(page, cli, vocabulary, monkeypatch):
    monkeypatch.delenv("ONCHIP_DATA", raising=False)
    names = {"__name__": "page"}
    for kind, text in blocks(page):
        if kind == "python" and page.name in ("api.md", "add-a-kernel.md"):  # signatures; test_add_a_layer.py
            continue
        if kind == "python" and not why_skipped(text):
            exec(compile(text, str(page), "exec"), names)
        elif kind == "sh":
            for args in filter(None, map(arguments, text.splitlines())):
                check_options(args)
        elif kind == "console":
            for args in map(arguments, re.findall(r"^\$ (.*)$", text, re.MULTILINE)):
                if args and args[0] in PARSED:
                    check_options(args)
                elif args:
                    ran = cli(*args)
                    assert ran.code == 0, (args, ran.err)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(path, tmp_path, monkeypatch, capsys):
    if reason := why_skipped(path.read_text().partition('"""\n')[2].lstrip()):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [path.name])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_the_notebook_runs(tmp_path, monkeypatch):
    """Its cells as they stand, without Jupyter; outputs are not kept in the file."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text())
    names = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)


def test_what_pages_show_of_the_code_is_so():
    """The table of layers, the printed plan, the API reference: `python docs/make_pages.py` writes them."""
    made = runpy.run_path(str(ROOT / "docs" / "make_pages.py"))["pages"]()
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name} is out of date: python docs/make_pages.py"


def test_every_example_is_in_the_list_of_examples():
    listed = set(re.findall(r"\]\((\w+\.(?:py|ipynb))\)", (ROOT / "examples" / "README.md").read_text()))
    assert listed == {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")}
