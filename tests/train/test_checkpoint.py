"""Checkpoints: a stopped or killed run resumes and ends with the same bits; damaged ones are refused."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checks import rows
from onchip.errors import FormatError, InputError, OutputError
from onchip.network.build import mlp
from onchip.train.loop import fit

X, Y = rows(200, 9), np.arange(200) % 3
OPTIONS = {"lr": 0.05, "batch_size": 16, "epochs": 6, "device": "cpu"}
WEIGHTS = np.linspace(0, 2, len(X), dtype=np.float32)


class StoppedError(Exception):
    pass


def run_until(folder, step, **options):
    """Train with checkpoints, and stop after `step` steps by an exception, like Ctrl-C."""
    seen = 0

    def stop(progress):
        nonlocal seen
        seen = (progress.epoch - 1) * progress.steps + progress.step
        if seen >= step:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(folder, on_progress=stop, debug=True, **options)  # debug: one step at a time
    return seen


def train(folder=None, **options):
    kept = {} if folder is None else {"checkpoint": folder, "checkpoint_every": 0.0}
    return fit(mlp(9, 14, 3), X, Y, **{**OPTIONS, **kept, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01, "schedule": "step", "step_every": 2},
        {"optimiser": "adam", "lr": 0.01, "schedule": "cosine", "warmup": 1.5},
        {"momentum": 0.9, "schedule": "one_cycle"},
        {
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": {"*.bias": 0, "*": 0.01},
            "frozen": "fc1.bias",
            "ema": 0.9,
        },
        {"validation": 0.3, "patience": 2, "lr": 0.5},
        {
            "optimiser": "adamw",
            "lr": 0.01,
            "weight_decay": 0.1,
            "clip_norm": 0.3,
            "label_smoothing": 0.1,
            "class_weight": {1: 5},
            "sample_weight": WEIGHTS,
        },
    ],
)
@pytest.mark.parametrize("step", [1, 13, 26, 40])
def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path, options, step):
    whole = train(**options)
    if step >= len(whole.losses):
        step = len(whole.losses) - 1
    run_until(tmp_path, step, **options)
    told = []
    resumed = train(tmp_path, resume=True, on_epoch=told.append, **options)
    assert np.array_equal(resumed.losses, whole.losses)
    assert [(e.epoch, e.loss, e.accuracy, e.validation_loss, e.lr) for e in resumed.history] == [
        (e.epoch, e.loss, e.accuracy, e.validation_loss, e.lr) for e in whole.history
    ]
    assert tuple(told) == resumed.history
    assert resumed.best_epoch == whole.best_epoch
    for name, w in whole.network.weights.items():
        assert np.array_equal(resumed.network.weights[name], w)
    for name, array in whole.state.items():
        assert np.array_equal(resumed.state[name], array)


def test_a_run_that_is_done_is_not_run_again(tmp_path):
    whole = train(tmp_path)
    again = train(tmp_path, resume=True)
    assert np.array_equal(again.losses, whole.losses)
    assert again.seconds == whole.seconds


def test_the_time_of_an_epoch_counts_what_came_before_the_stop(tmp_path):
    run_until(tmp_path, 10)  # an epoch has 13 steps
    standing = sorted(tmp_path.iterdir())[-1].read_bytes()
    assert b'\\"epoch_rows\\": 144' in standing  # of the 9 steps after the newest checkpoint
    resumed = train(tmp_path, resume=True)
    assert resumed.seconds == pytest.approx(sum(epoch.seconds for epoch in resumed.history), rel=0.2)


def test_two_checkpoints_are_kept(tmp_path):
    run_until(tmp_path, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-000000000007.safetensors",
        "checkpoint-000000000008.safetensors",
    ]


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    run_until(tmp_path, 5)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match="checkpoints of another run"):
        train(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_resuming_nothing_begins(tmp_path):
    assert np.array_equal(train(tmp_path / "new", resume=True).losses, train().losses)


@pytest.mark.parametrize("damage", ["a byte of a weight", "a byte of the header", "cut short", "empty"])
def test_a_damaged_checkpoint_is_refused_and_the_last_good_one_named(tmp_path, damage):
    run_until(tmp_path, 9)
    good, newest = sorted(tmp_path.iterdir())
    content = bytearray(newest.read_bytes())
    if damage == "a byte of a weight":
        content[-100] ^= 1
    elif damage == "a byte of the header":
        content[content.index(b"epoch_correct")] ^= 1
    newest.write_bytes({"cut short": content[:-7], "empty": b""}.get(damage, content))
    with pytest.raises(FormatError, match="is damaged") as caught:
        train(tmp_path, resume=True)
    assert str(newest) in caught.value.what
    assert str(good) in caught.value.hint
    newest.unlink()  # as the message suggests
    assert np.array_equal(train(tmp_path, resume=True).losses, train().losses)


def test_only_damaged_ones_left(tmp_path):
    run_until(tmp_path, 9)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match="is damaged") as caught:
        train(tmp_path, resume=True)
    assert "no other is left" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"lr": 0.06}, "lr=0.06"),
        ({"epochs": 7}, "epochs=7"),
        ({"net": mlp(9, 15, 3)}, "another network"),
        ({"net": mlp(9, 14, 3, seed=1)}, "another network"),
        ({"x": X + 1}, "other data"),
        ({"y": (Y + 1) % 3}, "other data"),
        ({"sample_weight": WEIGHTS}, "other data"),
        ({"class_weight": "balanced"}, "class_weight=balanced"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, got):
    run_until(tmp_path, 3)
    arguments = {"net": mlp(9, 14, 3), "x": X, "y": Y, **OPTIONS, **change}
    net, x, y = (arguments.pop(name) for name in ("net", "x", "y"))
    with pytest.raises(InputError, match="belongs to another run") as caught:
        fit(net, x, y, checkpoint=tmp_path, resume=True, **arguments)
    assert caught.value.got == got


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError):
        train(tmp_path)


def test_a_file_instead_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        train(tmp_path / "file")


def test_temporary_files_of_a_killed_writer_are_removed(tmp_path):
    left = tmp_path / ".checkpoint-000000000003.safetensors.abcd.tmp"
    left.write_bytes(b"half")
    train(tmp_path)
    assert not left.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forked")
def test_a_run_killed_twenty_times_ends_with_the_same_bits(tmp_path):
    train()  # compiles the kernels, so that the runs below only load them
    train(validation=0.1, optimiser="adam", lr=0.01)
    script = Path(__file__).with_name("killed_run.py")
    ran = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    kills, *stood = map(int, ran.stdout.split())
    assert kills == 20
    assert len(set(stood)) >= 5  # not all of them died before their first checkpoint, or at the same one
    whole, resumed = np.load(tmp_path / "whole.npz"), np.load(tmp_path / "resumed.npz")
    assert stood[-1] < len(whole["losses"])
    assert whole.files == resumed.files
    for name in whole.files:
        assert np.array_equal(whole[name], resumed[name]), name


def test_numpy_scalars_can_be_checkpointed(tmp_path):
    given = {"lr": np.float32(0.05), "epochs": np.int64(2)}
    whole = train(tmp_path, **given)
    assert np.array_equal(train(tmp_path, resume=True, **given).losses, whole.losses)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "a"])
def test_a_bad_time_between_checkpoints_is_refused(tmp_path, seconds):
    with pytest.raises(InputError, match="time between checkpoints"):
        train(tmp_path, checkpoint_every=seconds)
    assert not any(tmp_path.iterdir())
