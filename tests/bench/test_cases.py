import dataclasses
import json
import sys
import types

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import onchip.bench
from checks import random_mlp
from onchip.bench.cases import backprop, decode, digits, training, training_steps
from onchip.bench.cases import lenet as bench_lenet
from onchip.bench.command import run_benchmarks
from onchip.bench.frame import Case, Ready, UnavailableError, run_cases
from onchip.bench.options import Options, parse_counts
from onchip.bench.peers import torch_training
from onchip.cli.bench import bench
from onchip.errors import FormatError, InputError
from onchip.kernels.training import bytes_of
from onchip.measure.pace import Pace
from onchip.measure.truth import Verdict
from onchip.runtime.cpu.backend import this_cpu
from onchip.runtime.engine import compile
from onchip.train.loop import fit
from onchip.train.options import TrainOptions
from onchip.workloads import lenet

QUICK = Pace(rounds=2, block_s=0.001, warm_up_s=1e-9, pause_s=0, min_runs=1, max_runs=2)


@pytest.fixture(autouse=True)
def _known_rates(monkeypatch):
    """Tests run in parallel: they must not measure the machine's rates, nor store them."""
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
    cases = [c for c in digits.cases(Options(peers=True, batches=(64, 7)), data) if c.engine != "torch.compile"]
    outcome = run_cases(cases, QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    steps = [row for row in outcome.rows if row.case == "step, batch 64, uint8 pixels"]
    assert {row.engine for row in steps} >= {"onchip"}
    assert all("random data" in row.setting and row.unit == "steps/s" for row in steps)
    cases = ["step, batch 64, uint8 pixels", "step, batch 64, float rows", "step, batch 7, uint8 pixels"]
    assert list(dict.fromkeys(row.case for row in outcome.rows)) == [*cases, "infer, 30 rows"]
    floats = [row for row in outcome.rows if row.case == cases[1]]
    assert [row.engine for row in floats] == [row.engine for row in steps]
    assert all("random data, standardised" in row.setting for row in floats)


def test_digits_has_five_batch_sizes_and_ten_seeds():
    data = digits.random_data(200, 30)
    named = [(case.case, case.parts) for case in digits.cases(Options(accuracy=True), data)]
    sizes = {16: 13, 64: 4, 256: 1, 1024: 1, 4096: 1}
    steps = [
        (f"step, batch {size}, {rows}", parts)
        for size, parts in sizes.items()
        for rows in (("uint8 pixels", "float rows") if size in (64, 1024) else ("uint8 pixels",))
    ]
    assert named == [*steps, ("infer, 30 rows", 1), ("30 epochs, 10 seeds", 10)]


def test_other_batch_sizes_have_fewer_steps(monkeypatch):
    monkeypatch.setattr(digits, "STEPS", 5)
    data = digits.random_data(200, 30)
    parts = {case.case: case.parts for case in digits.cases(Options(batches=(16, 64)), data)}
    assert (parts["step, batch 16, uint8 pixels"], parts["step, batch 64, uint8 pixels"]) == (5, 4)


def test_backprop_with_and_without_peers():
    cases = [c for c in backprop.cases(Options(peers=True, rows=(7, 600))) if c.engine != "torch.compile"]
    outcome = run_cases(cases, QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    assert list(dict.fromkeys(row.case for row in outcome.rows)) == [
        f"epoch of {n} patterns, {rows}" for n in (7, 600) for rows in ("uint8 pixels", "float rows")
    ]
    assert all(row.unit == "epochs/s" and row.floor_ms > 0 and row.setting for row in outcome.rows)


@pytest.mark.parametrize("mnist", [True, False])
def test_pixels_are_bytes_and_float_rows_are_not(mnist, monkeypatch):
    if not mnist:
        monkeypatch.setattr(digits.digits, "find_mnist", lambda: None)
    pixels = backprop.training_case(300, Options())
    floats = training.with_floats(pixels)
    assert bytes_of(pixels.x) is not None
    assert bytes_of(floats.x) is None
    assert floats.x.dtype == np.float32
    assert (floats.x.mean(), floats.x.std()) == pytest.approx((0, 1), abs=1e-4)
    assert floats.y is pixels.y


# -- training ----------------------------------------------------------------------------------------------


def make_job(n=150, batch_size=32, loss="cross_entropy", **options):
    data = digits.random_data(n, 40)
    last = "Sigmoid" if loss == "half_sse" else None
    y = data.y_train if loss == "cross_entropy" else backprop.backprop.one_hot(data.y_train)
    train = TrainOptions(loss=loss, batch_size=batch_size, epochs=1, **options)
    return training.TrainingCase(
        lambda seed: random_mlp(784, 12, 10, seed=seed, output=last), data.x_train, y, train, threads=1
    )


def test_a_wrong_training_is_found():
    job = make_job()
    options = {"device": "cpu", "threads": 1, **dataclasses.asdict(job.seeded(0))}
    result, other = (fit(job.net(0), job.x, y, **options) for y in (job.y, np.roll(job.y, 1)))
    assert job.verify(result.losses, result.network).is_right
    assert not job.verify(other.losses, other.network).is_right
    assert not job.verify(result.losses, job.net(0)).is_right
    assert not job.verify(result.losses[:-1], result.network).is_right


def test_the_check_runs_some_steps_of_the_same_job(monkeypatch):
    monkeypatch.setattr(training, "CHECKED_ROWS", 100)
    assert [len(rows) for rows in make_job(batch_size=32).few.batches(0)] == [32, 32, 32, 4]
    assert [len(rows) for rows in make_job(batch_size=4).few.batches(0)] == [4] * 16
    assert [len(rows) for rows in make_job(batch_size=150).few.batches(0)] == [100, 100]  # the second shows momentum
    ordered = make_job(batch_size=64, shuffle=False)
    assert np.array_equal(np.concatenate(ordered.batches(0)), np.arange(150))
    assert not np.array_equal(np.concatenate(make_job().batches(0)), np.concatenate(make_job().batches(1)))


def test_accuracies_are_those_of_fit_seed_by_seed():
    job, data = make_job(), digits.random_data(150, 40)
    ready = training.onchip_accuracy(job, data.x_test, data.y_test, seeds=3)
    assert ready.check().is_right
    ready.run()
    assert len(ready.scores()) == 3
    for seed, score in enumerate(ready.scores()):
        result = fit(job.net(seed), job.x, job.y, batch_size=32, epochs=1, seed=seed, device="cpu")
        assert score == training.percent(compile(result.network, "cpu")(data.x_test), data.y_test)


JOBS = {
    "SGD": {},
    "SGD, several chunks": {"batch_size": 70},
    "momentum": {"momentum": 0.9},
    "half the sum of squares, full batch": {"loss": "half_sse", "batch_size": 150, "momentum": 0.5, "lr": 1e-3},
    "half the sum of squares, in order": {"loss": "half_sse", "shuffle": False, "lr": 1e-3},
}


@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_torch_trains_the_same_network(options, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(torch_training, "CHUNKS", (64,))
    job = make_job(**options)
    forms = torch_training.torch_forms(job)
    assert list(forms["torch by hand"]) == ["whole batches", "chunks of 64 rows"][: 1 + (job.options.batch_size > 64)]
    for name in ("torch eager", "torch by hand"):
        for variant, make in forms[name].items():
            verdict = make(job, 0).check()
            assert verdict.is_right, f"{name}, {variant} is off by {verdict.error:.3g}"
    wrong = dataclasses.replace(job, options=dataclasses.replace(job.options, lr=2 * job.options.lr))
    run = forms["torch by hand"]["whole batches"](wrong, 0)
    losses = [run.step(x, y).item() for x, y in run.batches()]
    assert not job.verify(losses, run.network(), torch_training.SLACK).is_right


def test_torch_by_hand_refuses_other_layers():
    pytest.importorskip("torch")
    job = dataclasses.replace(make_job(), net=lambda seed: random_mlp(784, 12, 10, activation="Tanh"))
    with pytest.raises(UnavailableError, match="Tanh"):
        torch_training.ByHand(job, chunk=None)


def test_torch_accuracy_and_the_fastest_form():
    pytest.importorskip("torch")
    job, data = make_job(), digits.random_data(150, 40)
    forms = torch_training.torch_forms(job)["torch by hand"]
    ready = torch_training.torch_accuracy(job, "torch by hand", forms, data.x_test, data.y_test, seeds=2)
    assert ready.check().is_right
    ready.run()
    ours = training.onchip_accuracy(job, data.x_test, data.y_test, seeds=2)
    ours.run()
    assert ready.scores() == pytest.approx(ours.scores(), abs=5)  # another reduction order may change predictions
    assert torch_training.torch_run(job, "torch eager", torch_training.torch_forms(job)["torch eager"]).setting in (
        "foreach SGD", "fused SGD",
    )  # fmt: skip


def test_adam_and_its_schedule_in_torch_and_onchip():
    pytest.importorskip("torch")
    data, train = digits.random_data(150, 40), dataclasses.replace(lenet.TRAIN, batch_size=20, epochs=2)
    x = data.x_train.reshape(-1, 1, 28, 28)
    job = training.TrainingCase(
        lambda seed: lenet.network(784, (3, 4), (9, 8), seed), x, data.y_train, train, threads=1
    )
    assert training.onchip_run(job).check().is_right
    make = torch_training.autograd_forms(job)["torch eager"]["foreach Adam"]
    assert make(job, 0).check().is_right
    wrong = dataclasses.replace(job, options=dataclasses.replace(train, schedule="constant"))
    run = make(wrong, 0)
    losses = [run.step(x, y).item() for x, y in run.batches()]
    assert not job.verify(losses, run.network(), torch_training.SLACK).is_right


def test_accuracy_needs_mnist(monkeypatch, tmp_path):
    monkeypatch.setenv("ONCHIP_DATA", str(tmp_path))
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    for cases in digits.cases, training_steps.cases:
        with pytest.raises(FormatError, match="MNIST"):
            cases(Options(accuracy=True))


def test_lenet_is_trained_to_its_accuracy(monkeypatch):
    data = digits.random_data(300, 60)
    monkeypatch.setattr(bench_lenet, "SEEDS", 2)
    case, *peers = bench_lenet.cases(Options(peers=True), data)
    assert (case.engine, case.parts, [peer.engine for peer in peers]) == (
        "onchip", 2, ["torch eager", "torch.compile"],
    )  # fmt: skip
    ready = case.prepare()
    assert ready.check().is_right
    ready.run()
    assert len(ready.scores()) == 2


def test_options():
    assert parse_counts("1, 7,1_000,7", "rows") == (1, 7, 1000)
    for text in ("", "x", "0", "1,-2"):
        with pytest.raises(InputError, match="bad number of cats"):
            parse_counts(text, "cats")
    with pytest.raises(InputError, match=r"unknown benchmark(.|\n)*did you mean decode"):
        run_benchmarks(["dekode"], Options(), None)


# -- commands ----------------------------------------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch):
    """A benchmark named "planted": onchip is right, the peer is wrong."""

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
    assert "peer: wrong result" in result.stderr
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


def test_bench_refuses_before_it_runs(tmp_path):
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file")
    wrong = (["none"], ["decode", "--out", out], ["--device", "tpu"], ["--threads", "0"], ["digits", "--batches", "0"])
    for arguments in wrong:
        result = call(bench, *arguments)
        assert getattr(result.exception, "exit_code", 0) == 2, arguments
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_backprop_as_a_command(tmp_path):
    result = call(bench, "backprop", "--rows", "50", "--threads", "1", "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    pixels, floats = json.loads(result.stdout)["backprop"]["rows"]
    assert (pixels["case"], pixels["checked"]) == ("epoch of 50 patterns, uint8 pixels", True)
    assert (floats["case"], floats["checked"]) == ("epoch of 50 patterns, float rows", True)


def test_results_before_a_failure_are_saved(planted, tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("a bug")

    module = sys.modules["planted_benchmark"]
    right = module.cases(Options())[:1]
    monkeypatch.setattr(module, "cases", lambda options: [*right, Case("planted", "2 rows", "onchip", fail, 1)])
    with pytest.raises(RuntimeError, match="a bug"):
        run_benchmarks(["planted"], Options(), tmp_path, pace=QUICK)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert path.name == "planted.json.partial"
    assert json.loads(path.read_text())["commit"].endswith("+partial")  # even if the file is renamed
    assert [row["case"] for row in json.loads(path.read_text())["rows"]] == ["1 row"]
    monkeypatch.setattr(module, "cases", lambda options: right)
    run_benchmarks(["planted"], Options(), tmp_path, pace=QUICK)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["planted.json"]


PARTS = {
    "rows": ["--rows", "7"], "batches": ["--batches", "7"], "quick": ["--quick"], "one thread": ["--threads", "1"],
    "no peers": [],
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_a_partial_run_does_not_replace_a_full_one(part, planted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onchip.bench.command.core_count", lambda: 2)  # more than one, on any machine
    peers = [] if part == "no peers" else ["--peers"]
    result = call(bench, "planted", "--device", "cpu", *peers, *PARTS[part])
    assert not list(tmp_path.rglob("*.json*"))
    assert "only a complete run with --peers goes to" in result.stderr
    call(bench, "planted", "--device", "cpu", *peers, *PARTS[part], "--out", "here")
    assert [path.name for path in tmp_path.rglob("*.json*")] == ["planted.json"]


def test_a_full_run_is_written_with_its_commit(planted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onchip.bench.report.machine.git", lambda *_: None)
    result = call(bench, "planted", "--device", "cpu", "--peers", "--commit", "a1" * 20)
    (path,) = (tmp_path / "benchmarks" / "results").rglob("*.json")
    assert json.loads(path.read_text())["commit"] == "a1" * 20
    assert f"wrote {path.relative_to(tmp_path)}" in result.stderr
    refused = call(bench, "planted", "--device", "cpu", "--commit", "a1")
    assert refused.exception.exit_code == 2


def test_one_name_twice_is_run_once(planted, tmp_path):
    written, exit_code = run_benchmarks(["planted", "planted"], Options(), tmp_path, pace=QUICK)
    assert len(written) == 1
    assert exit_code == 1
