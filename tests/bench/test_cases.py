import json
import sys
import types

import pytest
import typer
from typer.testing import CliRunner

import onchip.bench
from checks import random_mlp
from onchip.bench import CASES, decode, digits, training
from onchip.bench.command import run_benchmarks
from onchip.bench.frame import Case, Ready, run_cases
from onchip.bench.options import Options, parse_rows
from onchip.cli.bench import NAMES, bench
from onchip.cli.ladder import ladder
from onchip.errors import DeviceError, FormatError, InputError
from onchip.ladders.measure import Pace
from onchip.ladders.truth import Verdict

QUICK = Pace(rounds=2, block_s=0.001, warm_up_s=1e-9, pause_s=0, min_runs=1, max_runs=2)


@pytest.fixture(autouse=True)
def _kept_rates(monkeypatch):
    """A test that runs beside others must not measure what the machine can do, let alone keep it."""
    from onchip.runtime.cpu import this_cpu

    monkeypatch.setattr("onchip.bench.command.this_cpu", lambda measure=False: this_cpu())


# -- cases -------------------------------------------------------------------------------------------------


def test_decode_with_and_without_peers():
    assert [case.case for case in decode.cases(Options())] == ["12800 rows", "262144 rows"]
    cases = [c for c in decode.cases(Options(peers=True, rows=(7, 130))) if c.engine != "torch.compile"]
    outcome = run_cases(cases, QUICK)
    assert outcome.exit_code == 0
    assert {"onchip", "numpy"} <= {row.engine for row in outcome.rows}
    assert all(row.median_ms > 0 and row.rate > 0 and row.floor_ms > 0 for row in outcome.rows)
    assert {row.case for row in outcome.rows} == {"7 rows", "130 rows"}


def test_digits_with_and_without_peers():
    data = digits.random_data(200, 30)  # three whole batches and a short one
    cases = [c for c in digits.cases(Options(peers=True), data) if c.engine != "torch.compile"]
    outcome = run_cases(cases, QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    steps = [row for row in outcome.rows if row.case == "step, batch 64"]
    assert {row.engine for row in steps} >= {"onchip"}
    assert all("random data" in row.setting and row.unit == "steps/s" for row in steps)
    assert {row.case for row in outcome.rows} == {"step, batch 64", "infer, 30 rows"}


def lesson(n=150, batch_size=32):
    data = digits.random_data(n, 40)
    return training.Lesson(lambda seed: random_mlp(784, 12, 10, seed=seed), data.x_train, data.y_train,
                           data.x_test, data.y_test, 0.03, batch_size, threads=1)  # fmt: skip


def test_a_training_that_is_off_is_caught():
    job = lesson()
    result = training._fit(job, job.net(0), job.x, job.y, seed=0, epochs=1)
    assert job.judge(result.losses, result.network).is_right
    other = training._fit(job, job.net(0), job.x, job.y, seed=1, epochs=1)
    assert not job.judge(other.losses, other.network).is_right
    assert not job.judge(result.losses, job.net(0)).is_right
    assert not job.judge(result.losses[:-1], result.network).is_right


def test_accuracy_is_the_mean_over_seeds():
    job = lesson()
    ready = training.onchip_accuracy(job, epochs=1)
    assert ready.check().is_right
    for _ in range(2):
        ready.run()
    assert 0 <= ready.score() <= 100


def test_torch_trains_the_same_network():
    pytest.importorskip("torch")
    job = lesson()
    assert training.torch_epoch(job, compiled=False).check().is_right
    ready = training.torch_accuracy(job, epochs=1)
    assert ready.check().is_right
    ready.run()
    assert 0 <= ready.score() <= 100


def test_accuracy_needs_mnist(monkeypatch, tmp_path):
    monkeypatch.setenv("ONCHIP_DATA", str(tmp_path))
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    with pytest.raises(FormatError, match="MNIST"):
        digits.cases(Options(accuracy=True))


def test_options():
    assert parse_rows("1, 7,1_000,7") == (1, 7, 1000)
    for text in ("", "x", "0", "1,-2"):
        with pytest.raises(InputError, match="bad number of rows"):
            parse_rows(text)
    with pytest.raises(DeviceError, match="on the CPU so far"):
        Options(device="cuda")
    with pytest.raises(InputError, match="unknown benchmark"):
        CASES["none"]
    assert ", ".join(CASES) == NAMES


# -- commands ----------------------------------------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch):
    """A benchmark called "planted": ours is right, the peer is wrong."""

    def cases(options):
        def engine(error):
            return lambda: Ready(lambda: None, lambda: Verdict(error, 1e-6))

        return [Case("planted", "1 row", "onchip", engine(0.0), 1), Case("planted", "1 row", "peer", engine(1.0), 1)]

    module = types.ModuleType("planted_benchmark")
    module.cases = cases
    monkeypatch.setitem(sys.modules, "planted_benchmark", module)
    monkeypatch.setitem(onchip.bench._HOME, "planted", "planted_benchmark")


def call(command, *arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_a_wrong_engine_fails_the_command(planted, tmp_path):
    result = call(bench, "planted", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "wrong: no time" in result.stdout
    assert "peer is wrong" in result.stderr
    (path,) = tmp_path.rglob("*.json")
    assert path.name == "planted.json"
    row = json.loads(path.read_text())["rows"][1]
    assert (row["engine"], row["checked"], row["median_ms"]) == ("peer", False, None)


def test_bench_writes_and_prints(tmp_path):
    result = call(bench, "decode", "--rows", "7", "--threads", "1", "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.rglob("*.json")
    assert path.parent.name.startswith("cpu-")
    assert json.loads(result.stdout) == {"decode": json.loads(path.read_text())}
    assert f"wrote {path}" in result.stderr


def test_bench_says_no_before_it_works(tmp_path):
    (tmp_path / "file").write_text("")
    for arguments in (["none"], ["decode", "--out", str(tmp_path / "file")], ["--device", "cuda"], ["--threads", "0"]):
        result = call(bench, *arguments)
        assert getattr(result.exception, "exit_code", 0) == 2, arguments
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_one_name_twice_is_run_once(planted, tmp_path):
    written, exit_code = run_benchmarks(["planted", "planted"], Options(), tmp_path, pace=QUICK)
    assert len(written) == 1
    assert exit_code == 1


def test_ladder_command(tmp_path):
    listed = call(ladder)
    assert "numba-parallel" in listed.stdout
    assert list(json.loads(call(ladder, "--json").stdout)) == ["decode"]
    rungs = ["--rung", "numpy", "--rung", "onchip"]
    result = call(ladder, "decode", "--rows", "129", *rungs, "--json", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["engine"] for row in document["rows"]] == ["ladder:numpy", "ladder:onchip"]
    (path,) = tmp_path.rglob("ladder-decode.json")
    assert json.loads(path.read_text()) == document
