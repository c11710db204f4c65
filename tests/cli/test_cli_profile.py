"""onchip profile."""

import json

import numpy as np
import pytest

from onchip.cli.main import main
from onchip.formats.load import save
from onchip.measure.pace import Pace
from onchip.network.build import mlp


def test_the_table(capsys):
    assert main(["profile", "decode", "100", "--device", "cpu", "--seconds", "0.05"]) == 0
    out = capsys.readouterr().out
    assert "mlp_fused" in out
    assert "plain calls" in out


def test_json_and_a_timeline(capsys, tmp_path):
    path = tmp_path / "t.json"
    args = ["profile", "decode", "50", "--device", "cpu", "--seconds", "0.05", "--json", "--trace", str(path)]
    assert main(args) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["B"] == 50
    assert found["engine"]["kernels"][0]["kernel"].startswith("mlp_fused")
    few, calls = found["engine"]["recorded"], found["engine"]["calls"]
    assert f"wrote {path} with {few:,} of {calls:,} calls: open it with" in captured.err
    assert any(event["ph"] == "X" for event in json.loads(path.read_text())["traceEvents"])


@pytest.mark.parametrize(
    ("args", "what"), [(["decode", "0"], "a profile needs rows"), (["decode", "5", "--seconds", "0"], "bad --seconds")]
)
def test_misuse(capsys, args, what):
    assert main(["profile", *args]) == 2
    assert what in capsys.readouterr().err


def test_a_run_with_a_profile_and_a_timeline(capsys, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((500, 72), np.float32))
    args = ["run", "decode", str(tmp_path / "x.npy"), "--device", "cpu", "-o", str(tmp_path / "y.npy")]
    assert main([*args, "--profile", "--trace", str(tmp_path / "t.json"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert "mlp_fused" in captured.err
    assert f"wrote {tmp_path / 't.json'}: open it with" in captured.err
    assert any(event["ph"] == "X" for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    assert main([*args[:-1], str(tmp_path / "z.npy")]) == 0
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "z.npy").read_bytes()
    assert "mlp_fused" not in capsys.readouterr().err


TRAIN = ["train", "digits", "--data", "sklearn", "--epochs", "2", "--hidden", "16", "--device", "cpu"]


@pytest.mark.parametrize(("options", "networks"), [((), "1 network"), (("--seeds", "3"), "3 networks")])
def test_a_training_with_a_profile_and_a_timeline(capsys, tmp_path, options, networks):
    path, plain = tmp_path / "t.json", tmp_path / "plain.onnx"
    args = [*TRAIN, *options, "--json", "--profile", "--trace", str(path), "-o", str(tmp_path / "net.onnx")]
    assert main(args) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert f"training digits on cpu: {networks}" in captured.err
    assert "plan and build" in captured.err
    assert "weights: update" in captured.err
    assert "calls" not in captured.err  # of the engine that runs the test rows
    events = json.loads(path.read_text())["traceEvents"]
    assert {"phases", "epochs"} <= {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert main([*TRAIN, *options, "-o", str(plain)]) == 0
    assert plain.read_bytes() == (tmp_path / "net.onnx").read_bytes()
    assert "plan and build" not in capsys.readouterr().err


def test_a_stopped_training_writes_no_timeline(tmp_path, monkeypatch):
    from onchip.cli.stop import StoppedError
    from onchip.train.training_run import TrainingRun

    def stop(run):
        raise StoppedError

    monkeypatch.setattr(TrainingRun, "end_epoch", stop)
    assert main([*TRAIN, "--profile", "--trace", str(tmp_path / "t.json"), "-o", str(tmp_path / "net.onnx")]) == 2
    assert not list(tmp_path.iterdir())


def test_a_timeline_must_not_replace_another_output(capsys, tmp_path):
    path = str(tmp_path / "out.onnx")
    assert main([*TRAIN, "-o", path, "--trace", path]) == 2
    assert "--trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "what"),
    [("decode", "decode, 10 rows, onchip: profile of one call\ndecode on cpu: 1 call, 10 rows"),
     ("backprop", "profile of one call\ntraining backprop on cpu: 1 network, 3 epochs, 3 steps, batch 10")],
)  # fmt: skip
def test_a_benchmark_with_profiles(capsys, monkeypatch, name, what):
    monkeypatch.setattr("onchip.bench.command.QUICK_PACE", Pace(1, 0, 0, 0, 1, 1))
    assert main(["bench", name, "--rows", "10", "--quick", "--device", "cpu", "--profile", "--json"]) == 0
    captured = capsys.readouterr()
    assert what in captured.err
    assert "share" not in captured.out
    assert json.loads(captured.out)[name]["rows"]
    assert main(["bench", name, "--rows", "10", "--quick", "--device", "cpu"]) == 0
    assert "profile" not in capsys.readouterr().err


def test_a_benchmark_that_calls_no_engine():
    from onchip.cli.bench import log_profile
    from onchip.measure.profile import Profile

    lines = []
    log_profile(lines.append, "scan, 10 elements", Profile())
    assert lines == ["scan, 10 elements: no profile, as it calls no engine: it may replay a captured graph"]


@pytest.mark.parametrize("command", ["run", "profile"])
def test_a_timeline_overwrites_no_input_and_its_folder_exists(capsys, tmp_path, command):
    """Seen before any work is done."""
    save(mlp(8, 4), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.ones((5, 8), np.float32))
    kept = {name: (tmp_path / name).read_bytes() for name in ("m.onnx", "x.npy")}
    rows = [str(tmp_path / "x.npy"), "-o", str(tmp_path / "y.npy")] if command == "run" else ["5", "--seconds", "0.01"]
    job = [command, str(tmp_path / "m.onnx"), *rows, "--device", "cpu", "--trace"]
    for name in kept if command == "run" else ("m.onnx",):
        assert main([*job, str(tmp_path / name)]) == 2
        assert "--trace would overwrite" in capsys.readouterr().err
    assert main([*job, str(tmp_path / "absent" / "t.json")]) == 2
    assert "cannot write" in capsys.readouterr().err
    if command == "run":
        assert main([*job, str(tmp_path / "y.npy")]) == 2
        assert "--trace would overwrite --output" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept
