"""The files that onchip train writes: the log, the curve, the checkpoints."""

import json
import os
import resource
import signal
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from onchip.cli.train_log import TrainLog
from onchip.errors import OutputError
from onchip.train.training_run import Epoch

EPOCH = Epoch(1, 0.5, 0.9, None, None, 0.1, 1.0, 100.0)
QUICK = ["--data", "sklearn", "--hidden", "16", "--epochs", "4", "--lr", "0.1", "--device", "cpu"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- the log -----------------------------------------------------------------------------------------------


def test_the_log_is_a_head_and_a_line_an_epoch(cli, tmp_path):
    from onchip import __version__

    ran = cli("train", "digits", *QUICK, "--validation", 0.1, "--log", "run.jsonl", "--json")
    assert ran.code == 0, ran.err
    head, *epochs = lines(tmp_path / "run.jsonl")
    assert head["versions"] == {"onchip": __version__, "numpy": np.__version__, "python": sys.version.split()[0]}
    assert (head["data"], head["lr"], head["layers"], head["model"]) == ("sklearn digits", 0.1, [64, 16, 10], "digits")
    assert epochs == json.loads(ran.out)["history"]
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3, 4]
    assert all(0 < epoch["validation_accuracy"] <= 1 for epoch in epochs)


def test_a_run_that_never_begins_leaves_the_old_log(cli, tmp_path):
    (tmp_path / "run.jsonl").write_text("old")
    assert cli("train", "digits", *QUICK, "--log", "run.jsonl", "--device", "cuda:99").code == 2
    assert (tmp_path / "run.jsonl").read_text() == "old"


def read_whole(path):
    """The lines of a log, of which the last must be complete too."""
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_the_old_log_stays_until_the_new_one_has_a_line(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"epoch": 1}\n')
    with TrainLog(path, {"lr": 0.1}) as log:
        assert read_whole(path) == [{"epoch": 1}]
        with path.open() as reader:
            log.begin()
            assert reader.read() == '{"epoch": 1}\n'  # a reader of the old log still reads all of it
        assert read_whole(path) == [{"lr": 0.1}]
        log.epoch(EPOCH)
        assert read_whole(path)[1]["loss"] == 0.5
    assert os.listdir(tmp_path) == ["run.jsonl"]


def test_a_line_that_does_not_fit_the_disk_is_not_half_there(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be cut off in the cache that tests share
    path, before = tmp_path / "run.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with TrainLog(path, {"lr": 0.1}) as log:
        log.epoch(EPOCH)
        whole = read_whole(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))  # like a disk with 10 B left
        try:
            with pytest.raises(OutputError, match=f"cannot write {path}"):
                log.epoch(EPOCH)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert read_whole(path) == whole
        log.epoch(EPOCH)
        assert len(read_whole(path)) == 3


@pytest.mark.parametrize("delay_s", [0, 0.01, 0.1])
def test_a_killed_run_leaves_whole_lines(spawn, tmp_path, delay_s):
    process = spawn("train", "digits", *QUICK[:4], "--epochs", 1000000, "--device", "cpu", "--log", "run.jsonl")
    while not (tmp_path / "run.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.002)
    time.sleep(delay_s)
    process.kill()
    process.communicate()
    head, *epochs = read_whole(tmp_path / "run.jsonl")
    assert head["lr"] > 0
    assert [epoch["epoch"] for epoch in epochs] == list(range(1, len(epochs) + 1))


# -- the curve ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "begins"), [("c.png", b"\x89PNG"), ("c.SVG", b"<?xml"), ("c.pdf", b"%PDF")])
def test_the_curve_is_a_picture(cli, tmp_path, name, begins):
    pytest.importorskip("matplotlib")
    ran = cli("train", "digits", *QUICK, "--validation", 0.1, "--plot", name)
    assert ran.code == 0, ran.err
    assert f"wrote {name}" in ran.err
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert os.listdir(tmp_path) == [name]


def test_a_name_is_no_formula(cli, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / r"t$\frac$.csv").write_text("x,y\n" + "1,a\n2,b\n" * 9)
    ran = cli("train", "mlp", "--data", r"t$\frac$.csv", "--labels", "last", "--epochs", 1, "--plot", "c.png")
    assert ran.code == 0, ran.err
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_the_curve_shows_the_run(tmp_path, monkeypatch):
    figure_module = pytest.importorskip("matplotlib.figure")
    from onchip.cli.curve import draw_curve

    drawn = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    history = [Epoch(i, 1 / i, 1 - 1 / i, 2 / i, 0.5, 0.1, 1.0, 100.0) for i in range(1, 6)]
    draw_curve(tmp_path / "c.png", "a title", "cross_entropy", history, 3, "accuracy 90% on 10 test rows")
    loss, accuracy = drawn[0].axes
    assert [line.get_label() for line in loss.lines] == ["training", "validation", "best: epoch 3"]
    assert loss.lines[0].get_ydata().tolist() == [epoch.loss for epoch in history]
    assert accuracy.lines[0].get_ydata().tolist() == [epoch.accuracy for epoch in history]
    assert (loss.get_ylabel(), loss.get_yscale(), accuracy.get_ylabel()) == ("loss (cross entropy)", "log", "accuracy")
    assert "a title" in drawn[0].get_suptitle()
    (legend,) = [child for child in loss.get_children() if type(child).__name__ == "Legend"]
    assert legend.get_bbox_to_anchor().transformed(loss.transAxes.inverted()).y0 == pytest.approx(1)  # above the lines
    narrow = [replace(epoch, loss=1.31 - epoch.epoch / 100, validation_loss=None) for epoch in history]
    draw_curve(tmp_path / "c.png", "a title", "cross_entropy", narrow, 5, "")
    loss = drawn.pop(1).axes[0]
    low, high = loss.get_ylim()
    assert sum(low < tick < high for tick in loss.get_yticks()) >= 3
    numbers = [Epoch(1, 0.0, None, None, None, 0.1, 1.0, 100.0)]  # a loss of 0 has no logarithm
    draw_curve(tmp_path / "c.png", "a title", "mse", numbers, 1, "")
    (axis,) = drawn[1].axes
    assert ([line.get_label() for line in axis.lines], axis.get_yscale()) == (["training"], "linear")


def test_without_matplotlib_it_says_so_before_the_work(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = cli("train", "digits", *QUICK, "--plot", "c.png")
    assert ran.code == 2
    assert "pip install 'onchip[plot]'" in ran.err
    assert "data:" not in ran.err


# -- checkpoints -------------------------------------------------------------------------------------------


def test_a_finished_run_is_resumed_to_the_same_result(cli, tmp_path):
    first = cli("train", "digits", *QUICK, "--checkpoint", "state", "-o", "a.onnx", "--log", "a.jsonl")
    assert first.code == 0, first.err
    again = cli("train", "digits", *QUICK, "--checkpoint", "state", "--resume", "-o", "b.onnx", "--log", "b.jsonl")
    assert again.code == 0, again.err
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert lines(tmp_path / "b.jsonl")[1:] == lines(tmp_path / "a.jsonl")[1:]
    refused = cli("train", "digits", *QUICK, "--checkpoint", "state")
    assert refused.code == 2
    assert "--resume" in refused.err
    other = cli("train", "digits", *QUICK, "--checkpoint", "state", "--resume", "--seed", 1)
    assert other.code == 2
    assert "belongs to another run" in other.err


def test_stopped_it_says_how_to_go_on_and_ends_with_the_same_bits(cli, spawn, tmp_path):
    sizes = ["--hidden", 320, "--epochs", 80, "--batch-size", 4]
    args = ["train", "digits", "--data", "sklearn", *sizes, "--device", "cpu"]
    kept = ["--checkpoint", "state", "--checkpoint-every", 0.1, "--log", "run.jsonl"]
    process = spawn(*args, *kept, "-o", "a.onnx")
    log = tmp_path / "run.jsonl"
    while not (any(tmp_path.glob("state/checkpoint-*")) and log.exists() and len(log.read_text().splitlines()) > 2):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert "train digits --checkpoint state --resume" in err.splitlines()[-1]
    assert sorted(os.listdir(tmp_path)) == ["run.jsonl", "state"]
    before = lines(log)
    ran = cli(*args, *kept, "--resume", "-o", "a.onnx")
    assert ran.code == 0, ran.err
    after = lines(log)
    assert len(after) == 81
    shared = [epoch["loss"] for epoch in before[1:]]
    assert [epoch["loss"] for epoch in after[1:]][: len(shared)] == shared
    assert cli(*args, "-o", "b.onnx").code == 0
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_stopped_without_a_checkpoint_prints_mains_message(spawn, tmp_path):
    process = spawn("train", "digits", "--data", "sklearn", "--epochs", 1000000, "--log", "run.jsonl")
    while not (tmp_path / "run.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert err.splitlines()[-1] == "stopped: no file is half-written"
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        json.loads(line)  # each is complete
