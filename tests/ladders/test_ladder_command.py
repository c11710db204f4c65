import dataclasses
import json

import pytest
import typer
from typer.testing import CliRunner

from onchip.bench.frame import Reporter
from onchip.bench.ladder import ladder_results, with_bank_conflicts
from onchip.cli.ladder import ladder
from onchip.errors import DeviceError, InputError
from onchip.ladders import LADDERS
from onchip.ladders.frame import Climb, Step
from onchip.measure.pace import summarise
from onchip.measure.truth import Verdict
from onchip.runtime.cpu.backend import this_cpu
from onchip.runtime.cuda.devices import cuda_devices


def call(*arguments):
    app = typer.Typer()
    app.command()(ladder)
    return CliRunner().invoke(app, list(arguments))


def test_ladder_command(tmp_path):
    listed = call()
    assert "numba-parallel" in listed.stdout
    assert call("--list").stdout == listed.stdout
    assert list(json.loads(call("--json").stdout)) == list(LADDERS)
    decode = call("decode", "--list").stdout
    assert "report ms, 2,097,152 rows" in decode
    assert "one-thread" not in decode
    assert list(json.loads(call("decode", "--list", "--json").stdout)) == ["decode"]
    rungs = ["--rung", "numpy", "--rung", "onchip"]
    result = call("decode", "--device", "cpu", "--rows", "129", *rungs, "--json", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["engine"] for row in document["rows"]] == ["ladder:numpy", "ladder:onchip"]
    (path,) = tmp_path.rglob("ladder-decode-129.json")
    assert json.loads(path.read_text()) == document


def test_two_rungs_side_by_side():
    result = call("scan", "--diff", "two-level", "single-pass")
    assert result.exit_code == 0
    assert "+__global__" in result.stdout
    assert "\x1b" not in result.stdout


def test_a_rungs_row_records_how_it_was_timed():
    step = Step("a", "", Verdict(0.0, 1e-6), summarise([2.0]), 500, 170_000.0, 1.0)
    known = dataclasses.replace(step, rows=60_000, report_ms=None, precision="fp16", facts={"registers": 70})
    elsewhere = dataclasses.replace(step, rows=9, report_ms=0.5, report_on="16 GPUs", nondeterministic="atomics")
    results = ladder_results(Climb("fake", "", 60_000, 2, (step, known), {"b": "no chip"}), this_cpu(), "a1")
    scaled, full = results.rows
    assert scaled.setting == "timed on 500 rows, scaled, in the report 170,000 ms"
    assert ladder_results(Climb("fake", "", 9, 2, (elsewhere,)), this_cpu(), "a1").rows[0].setting == (
        "in the report 0.5000 ms on 16 GPUs, two runs may differ: atomics"
    )
    assert (full.setting, full.floor_ms, full.threads) == ("", 1.0, 2)
    assert (scaled.precision, scaled.extra, full.precision, full.extra) == ("fp32", {}, "fp16", {"registers": 70})
    assert (results.skipped, results.commit) == ({"ladder:b": "no chip"}, "a1")


@pytest.fixture
def _no_gpu():
    if cuda_devices():
        pytest.skip("there is a GPU here")


@pytest.mark.usefixtures("_no_gpu")
def test_without_a_gpu():
    result = call("decode", "--rows", "7", "--rung", "numpy")
    assert result.exit_code == 0
    assert "device: cpu (auto: " in result.stderr
    assert "on the CPU" in result.stdout
    assert isinstance(call("decode", "--device", "cuda").exception, DeviceError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--device", "cuda:1"], "unknown device"),
        (["decode", "--device", "cuda", "--threads", "2"], "only a CPU has threads"),
        (["decode", "--device", "cpu", "--counters"], "--counters needs a GPU"),
        (["none"], "unknown ladder"),
        (["--diff", "separate", "shuffles"], "--diff needs a ladder"),
        (["decode", "--diff", "separate", "shuffles", "--json"], "a diff has no JSON"),
        (["decode", "--diff", "separate", "none"], "unknown rung"),
        (["decode", "--commit", "HEAD"], "bad commit"),
    ],
)
def test_misuse(arguments, message):
    result = call(*arguments)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


def test_a_ladder_without_cpu_rungs_needs_a_gpu():
    exception = call("digits", "--device", "cpu").exception
    assert isinstance(exception, InputError)
    assert exception.expected == "cuda"


def test_a_copy_without_git_gets_its_commit_by_an_option(tmp_path, monkeypatch):
    monkeypatch.setattr("onchip.bench.report.machine.git", lambda *_: None)
    options = ["--rows", "33", "--rung", "numpy", "--commit", "a1" * 20]
    result = call("decode", "--device", "cpu", *options, "--out", str(tmp_path), "--json")
    assert json.loads(result.stdout)["commit"] == "a1" * 20


def test_other_rows_get_another_file(tmp_path):
    call("decode", "--device", "cpu", "--rows", "33", "--rung", "numpy", "--out", str(tmp_path))
    assert [path.name for path in tmp_path.rglob("*.json")] == ["ladder-decode-33.json"]


def test_bank_conflicts_join_the_facts(monkeypatch):
    steps = [
        Step(rung, "", Verdict(0.0, 1e-6), summarise([2.0]), 7, None, 1.0, facts={"launches": launches})
        for rung, launches in (("a", 5), ("b", 1))
    ]
    steps.append(dataclasses.replace(steps[0], rung="fit", facts={}))  # has no list of launches
    climbed = Climb("fake", "", 7, None, tuple(steps))

    def counted(ladder, B, rungs):
        assert (ladder, B, rungs) == ("fake", 7, ["a", "b"])
        return {"a": 1234, "b": 0}

    monkeypatch.setattr("onchip.bench.ladder.bank_conflicts", counted)
    found = with_bank_conflicts(climbed, Reporter())
    assert [step.facts for step in found.steps] == [
        {"launches": 5, "bank conflicts": 1234}, {"launches": 1, "bank conflicts": 0}, {},
    ]  # fmt: skip

    def refused(*_):
        raise DeviceError("ncu failed", got="ERR_NVGPUCTRPERM")

    lines = []
    monkeypatch.setattr("onchip.bench.ladder.bank_conflicts", refused)
    assert with_bank_conflicts(climbed, Reporter(lines.append)) is climbed
    assert lines == ["bank conflicts not counted: ncu failed: ERR_NVGPUCTRPERM"]
