"""--debug of the commands that launch kernels: one meaning, also on a machine without a GPU."""

import numpy as np
import pytest

from checks import assert_refused
from onchip.runtime.cuda.checked_launches import checks_launches

COMMANDS = {
    "run": ("run", "decode", "--count", "3", "--device", "cpu"),
    "train": ("train", "digits", "--data", "sklearn", "--epochs", "1", "--device", "cpu"),
    "scan": ("scan", "x.npy", "-o", "y.npy", "--device", "cpu"),
    "check": ("check", "decode", "--rows", "3"),
    "bench": ("bench", "decode", "--rows", "3", "--quick", "--device", "cpu"),
    "ladder": ("ladder", "decode", "--rows", "3", "--rung", "numpy", "--device", "cpu"),
    "demo": ("demo", "--epochs", "1", "--rows", "1"),
}
TIMES = "--debug: the times are not meaningful"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_launch_is_checked(cli, tmp_path, monkeypatch, command):
    monkeypatch.setattr("onchip.workloads.demo.torch_layers", lambda net, wanted: None)  # importing it takes seconds
    np.save(tmp_path / "x.npy", np.ones(9, np.float32))
    ran = cli(*COMMANDS[command], "--debug")
    assert ran.code == 0, ran.err
    assert checks_launches()
    assert (TIMES in ran.err) is (command in ("bench", "ladder", "demo"))
    assert "--out DIR" not in ran.err


@pytest.mark.parametrize("command", ["scan", "ladder"])
def test_without_it_none_is(cli, tmp_path, command):
    np.save(tmp_path / "x.npy", np.ones(9, np.float32))
    ran = cli(*COMMANDS[command])
    assert ran.code == 0, ran.err
    assert not checks_launches()
    assert TIMES not in ran.err


@pytest.mark.parametrize(
    "given", [(*COMMANDS["bench"], "--out", "d"), (*COMMANDS["ladder"], "--out", "d"),
              (*COMMANDS["ladder"], "--plot", "d.png")],
)  # fmt: skip
def test_times_are_not_written(cli, tmp_path, given):
    ran = cli(*given, "--debug")
    assert_refused(ran, tmp_path, "--debug writes no times to a file", f"--debug and {given[-2]} {given[-1]}")
    assert not list(tmp_path.iterdir())


def test_a_complete_benchmark_writes_no_file(cli, tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr(
        "onchip.bench.command.run_benchmarks", lambda names, options, folder, **_: (folders.append(folder), ({}, 0))[1]
    )
    for debug in ([], ["--debug"]):
        assert cli("bench", "decode", "--peers", "--device", "cpu", *debug).code == 0
    assert folders[0] is not None
    assert folders[1] is None


def test_help(cli):
    for command in COMMANDS:
        assert "--debug" in cli(command, "--help").out
