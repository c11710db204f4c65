"""No command writes to a file that it reads, or to one file twice: it raises an error first."""

import os
from pathlib import Path

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.formats.load import save

TABLE = ["--data", "table.csv", "--labels", "last"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The input files of the commands below; only run.toml is read."""
    monkeypatch.chdir(tmp_path)
    save(random_mlp(20, 16, 3), "m.onnx")
    np.save("x.npy", rows(8, 20))
    for name in ("params.bin", "ids.bin", "table.csv", "test.csv", "labels.npy", "train-labels-idx1-ubyte"):
        Path(name).write_text(f"precious {name}")
    Path("run.toml").write_text('model = "mlp"\ndata = "table.csv"\nlabels = "last"\nlog = "./table.csv"\n')
    Path("link.npy").symlink_to("x.npy")
    os.link("table.csv", "hard.jsonl")
    Path("state").mkdir()
    Path("state", "checkpoint-000000000001.safetensors").write_text("precious state")
    Path("mnist").mkdir()
    for kind in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        Path("mnist", f"{kind}-ubyte.gz").write_text(f"precious {kind}")
    monkeypatch.setenv("ONCHIP_DATA", str(tmp_path))


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "m.onnx", "x.npy", "-o", "x.npy"], "--output would overwrite INPUT"),
        (["run", "m.onnx", "x.npy", "-o", "link.npy"], "--output would overwrite INPUT"),
        (["run", "sentiment", "ids.bin", "--weights", "params.bin", "-o", "params.bin"], "overwrite --weights"),
        (["run", "sentiment", "ids.bin", "--weights", "params.bin", "-o", "./ids.bin"], "overwrite INPUT"),
        (["scan", "x.npy", "-o", "x.npy"], "--output would overwrite FILE"),
        (["train", "mlp", *TABLE, "--log", "table.csv"], "--log would overwrite --data"),
        (["train", "mlp", *TABLE, "--log", "hard.jsonl"], "--log would overwrite --data"),
        (["train", "mlp", "--data", "x.npy", "--labels", "labels.npy", "--log", "labels.npy"], "overwrite --labels"),
        (["train", "mlp", *TABLE, "--test-data", "test.csv", "--log", "test.csv"], "overwrite --test-data"),
        (["train", "mlp", *TABLE, "--test-data", "x.npy", "--test-labels", "train-labels-idx1-ubyte", "--log",
          "train-labels-idx1-ubyte"], "--log would overwrite --test-labels"),
        (["train", "m.onnx", *TABLE, "-o", "m.onnx"], "--output would overwrite MODEL"),
        (["train", "--config", "run.toml"], "--log would overwrite --data"),
        (["train", "--config", "run.toml", "--log", "run.toml"], "--log would overwrite --config"),
        (["train", "digits", "-o", "new.onnx", "--log", "new.onnx"], "--log would overwrite --output"),
        (["train", "digits", "--plot", "new.png", "--log", "new.png"], "--plot would overwrite --log"),
        (["train", "digits", "-o", "new.onnx", "--checkpoint", "new.onnx"], "would overwrite --output"),
        (["train", "digits", "--checkpoint", "state", "--resume", "--log",
          "state/checkpoint-000000000001.safetensors"], "would overwrite --log"),
        (["train", "digits", "--log", "mnist/train-images-idx3-ubyte.gz"], "overwrite MNIST's train-images"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_an_output_is_a_separate_file(cli, args, words):
    before = contents()
    ran = cli(*args)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err.splitlines()[0]
    assert ran.err.splitlines()[-1].startswith("  try:")
    assert contents() == before
    assert not Path("new.onnx").exists()


@pytest.mark.usefixtures("files")
def test_a_ladders_picture_is_not_its_result_file(cli):
    from onchip.bench.report.machine import device_slug
    from onchip.runtime.cpu.backend import this_cpu

    result = Path("out", device_slug(this_cpu()), "ladder-decode-10.json")
    ran = cli("ladder", "decode", "--device", "cpu", "--rows", 10, "--out", "out", "--plot", result)
    assert ran.code == 2
    assert "--out would overwrite --plot" in ran.err
    assert not result.exists()


def test_names_that_are_no_files_are_no_inputs(cli, tmp_path):
    """A log may have the name of the workload, its data set or a column, and may replace an old log."""
    (tmp_path / "table.csv").write_text("a,digits\n" + "1,x\n2,y\n" * 20)
    quick = ["--epochs", 1, "--device", "cpu", "--log", "digits"]
    for _ in range(2):
        ran = cli("train", "digits", "--data", "sklearn", "--hidden", 4, *quick)
        assert ran.code == 0, ran.err
    ran = cli("train", "mlp", "--data", "table.csv", "--labels", "digits", *quick)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("name", ["pipe", "null"])
def test_an_output_that_is_no_file_is_refused(cli, tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to(os.devnull)
    ran = cli("train", "digits", "--data", "sklearn", "--log", name)
    assert (ran.code, ran.out) == (2, "")
    assert "a device or a pipe" in ran.err
    assert sorted(os.listdir(tmp_path)) == ["null", "pipe"]
    assert os.path.islink(tmp_path / "null")
