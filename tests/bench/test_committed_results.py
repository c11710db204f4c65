"""Every committed result file is one full run of one commit."""

import itertools
import shlex
import subprocess
from pathlib import Path

import pytest

from onchip.bench.report.machine import SHA
from onchip.bench.report.results import read_results
from onchip.plan.floor import TOO_LOW

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
NAMES = [str(path.relative_to(ROOT / "benchmarks" / "results")) for path in FILES]


RESTRICTIONS = {"bench": ("--rows", "--batches", "--quick", "--threads"), "ladder": ("--rung", "--threads")}


def why_partial(command: str, stem: str) -> str:
    """Why this command writes only a part of a file; "" if it writes all of it."""
    _, kind, *arguments = shlex.split(command)
    options = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    if restrictions := options.intersection(RESTRICTIONS[kind]):
        return f"it is restricted by {', '.join(restrictions)}"
    if kind == "ladder":  # with --rows or --ranks, another file
        given = dict(itertools.pairwise(arguments))
        rows, ranks = given.get("--rows"), given.get("--ranks")
        written = f"ladder-{arguments[0]}" + (f"-{rows}" if rows else "") + (f"-ranks-{ranks}" if ranks else "")
        return "" if written == stem else f"it writes {written}.json"
    if "--peers" not in options:
        return "it has no peers"
    return "" if stem in arguments else "it measures something else"


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_file_is_one_full_run_of_one_commit(path):
    results = read_results(path)
    assert SHA.fullmatch(results.commit), f"{results.commit}: a clean commit is expected"
    assert not why_partial(results.command, path.stem), results.command
    assert path.parent.name == results.machine["device"]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_its_commit_is_in_this_history(path):
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no git history, or a shallow one: git fetch --unshallow")
    commit = read_results(path).commit
    assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, f"{commit} is not an ancestor"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_engine_beats_the_floor(path):
    """A floor is physics: a time below that of a GPU, computed from its data sheet, means that the floor is wrong."""
    results = read_results(path)
    for row in results.rows:
        where = f"{row.workload}, {row.case}, {row.engine}, {row.precision}"
        if row.median_ms is not None and row.floor_ms is not None:
            assert row.floor_ms <= row.median_ms, where
        assert results.machine["device"].startswith("cpu") or "floor" not in row.extra, f"{where}: {TOO_LOW}"


@pytest.mark.parametrize(
    ("command", "stem", "why"),
    [
        ("onchip bench decode mlp --device cuda --peers", "mlp", ""),
        ("onchip bench digits --peers --accuracy", "digits", ""),
        ("onchip ladder faces --rows 1000 --ranks 2", "ladder-faces-1000-ranks-2", ""),
        ("onchip ladder faces --ranks 2", "ladder-faces", "it writes ladder-faces-ranks-2.json"),
        ("onchip bench digits --peers --batches=64", "digits", "restricted by --batches"),
        ("onchip bench decode --peers --rows 7", "decode", "restricted by --rows"),
        ("onchip bench decode --peers --quick", "decode", "restricted by --quick"),
        ("onchip bench decode --device cpu", "decode", "no peers"),
        ("onchip bench decode --peers", "mlp", "something else"),
        ("onchip ladder decode --device cpu", "ladder-decode", ""),
        ("onchip ladder decode --rows 12800 --counters", "ladder-decode-12800", ""),
        ("onchip ladder decode --rows 12800", "ladder-decode", "writes ladder-decode-12800.json"),
        ("onchip ladder decode --rung numpy", "ladder-decode", "restricted by --rung"),
    ],
)
def test_partial_runs_are_recognised(command, stem, why):
    found = why_partial(command, stem)
    assert why in found
    assert bool(why) == bool(found)
