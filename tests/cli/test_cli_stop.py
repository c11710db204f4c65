"""Ctrl-C and SIGTERM at any time from start to exit: one line, exit code 2, no traceback."""

import os
import signal
import subprocess
import sys
import time

import pytest

from conftest import SRC
from onchip.cli.stop import Stoppable, StoppedError

LINE = "stopped: no file is half-written\n"

# The program, which sends itself a signal when a module is imported or when Python exits.
PROGRAM = """
import atexit, os, sys

number, moment = int(sys.argv[1]), sys.argv[2]
sys.argv[1:] = sys.argv[3:]

def send():
    os.kill(os.getpid(), number)

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            send()

sys.meta_path.insert(0, Watch())
if moment == "exit":
    atexit.register(send)
from onchip.cli.main import main

sys.exit(main())
"""


def run_program(number, moment, *args):
    command = [sys.executable, "-c", PROGRAM, str(int(number)), moment, *args]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.parametrize("moment", ["onchip.cli.output", "typer", "numpy", "llvmlite"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_an_import(number, moment):
    assert run_program(number, moment, "plan", "decode") == (2, "", LINE)


def stop_twice(cleaned):
    """A signal, then more of them during the cleanup after the first."""
    with Stoppable(is_program=False):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
            cleaned.append(True)


def test_a_second_signal_does_not_cut_short_the_way_out():
    cleaned = []
    with pytest.raises(StoppedError):
        stop_twice(cleaned)
    assert cleaned


def test_a_signal_long_after_a_first_one_that_was_lost_is_heard(monkeypatch):
    monkeypatch.setattr("onchip.cli.stop.REPEAT_S", -1.0)
    cleaned = []
    with pytest.raises(StoppedError):
        stop_twice(cleaned)
    assert not cleaned


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_python_ends_changes_nothing(number):
    code, out, err = run_program(number, "exit", "plan", "decode", "--device", "h200")
    assert (code, err) == (0, "")
    assert out.startswith("decode on NVIDIA H200")


@pytest.mark.parametrize("delay_s", [0, 0.1, 0.5])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_from_outside(spawn, tmp_path, number, delay_s):
    process = spawn("run", "decode", "--count", 10**9, "--device", "cpu", "-o", "y.npy")
    assert process.stderr.readline().startswith("weights:")  # printed before it plans and compiles
    time.sleep(delay_s)
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err.endswith(LINE)
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == []
