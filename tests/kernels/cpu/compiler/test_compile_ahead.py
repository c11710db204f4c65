"""A second process compiles what the first will need; two with one cache never compile the same function at once."""

import os
import subprocess
import sys

import numpy as np
import pytest

import onchip
from onchip.kernels.cpu.compiler import compile_ahead, jit
from onchip.kernels.cpu.layout import move
from onchip.kernels.cpu.microkernels.dense import dense
from onchip.kernels.cpu.mlp import fused as mlp_fused

KEY = "0123456789ab" * 4
HOLD = """import sys, pathlib
from onchip.kernels.cpu.compiler.compile_ahead import lock_function
print(lock_function(pathlib.Path(sys.argv[1]), sys.argv[2]), flush=True)
sys.stdin.read()"""

AHEAD = """import sys
from onchip.kernels.cpu.compiler.compile_ahead import compile_ahead
compile_ahead(sys.argv[1:])"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "numba").mkdir()
    yield tmp_path / "numba"
    if kept := compile_ahead._locks.pop(tmp_path / "numba", None):
        os.close(kept)


def test_functions_stand_behind_those_that_they_need():
    needed = [made.function.__name__ for made in jit.linked_below(mlp_fused._run)]
    assert len(set(needed)) == len(needed)
    assert needed.index("multiply_panel") < needed.index("dense") < needed.index("_columns")
    assert jit.linked_below(dense)[-1] is dense
    assert jit.linked_below(move._run)[-1].function.__name__ == "_run"


def test_who_finds_a_function_locked_waits_but_not_for_ever(folder):
    command = [sys.executable, "-c", HOLD, str(folder), KEY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        assert not compile_ahead.lock_function(folder, KEY, wait_s=0.1)
        assert compile_ahead.lock_function(folder, KEY[::-1])  # another function
        compile_ahead.unlock_function(folder, KEY[::-1])
        other.stdin.close()
    assert compile_ahead.lock_function(folder, KEY)


def test_without_a_folder_or_a_second_core_nobody_is_started(folder, monkeypatch):
    monkeypatch.setattr(compile_ahead, "_started", [])
    monkeypatch.setattr(compile_ahead, "_core_count", lambda: 1)
    assert compile_ahead.start_helper(move._run, folder, count=9) == 1
    monkeypatch.setattr(compile_ahead, "_core_count", lambda: 2)
    assert compile_ahead.start_helper(move._run, None, count=9) == 1
    assert compile_ahead.start_helper(move._run, folder, count=2) == 1
    assert compile_ahead._started == []
    assert compile_ahead.lock_function(None, KEY)  # from nobody


def test_a_second_network_has_a_second_process_of_its_own_when_the_first_has_ended(folder, monkeypatch):
    monkeypatch.setattr(compile_ahead, "_started", [])
    monkeypatch.setattr(compile_ahead, "_core_count", lambda: 2)
    monkeypatch.setattr(compile_ahead, "_PROGRAM", "import sys; sys.stdout.close()")
    assert compile_ahead.start_helper(move._run, folder, count=9) == 2
    (first,) = compile_ahead._started
    assert first.wait() == 0
    assert compile_ahead.start_helper(move._run, folder, count=9) == 2
    (second,) = compile_ahead._started
    assert second is not first
    assert second.wait() == 0


def test_the_other_process_fills_the_cache(tmp_path):
    """All that a kernel needs, by the names that the first process gives it; nothing on its streams."""
    names = ["onchip.kernels.cpu.mlp.fused:_columns", "onchip.kernels.cpu.layout.move:gone.<locals>.f"]
    env = {**os.environ, "ONCHIP_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", AHEAD, *names]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")
    assert len(list((tmp_path / "cache" / "numba").iterdir())) >= 2


class Made:
    """A linked function that is made when it is asked for, not before its turn comes."""

    def __init__(self, name, size, below=(), is_taken=False):
        self.name, self.size, self.below, self.is_taken, self.made = name, size, below, is_taken, []

    def try_make(self, is_alone):
        is_ready = all(inner.name in self.made for inner in self.below)
        if is_ready and (is_alone or not self.is_taken):
            self.made.append(self.name)
            return True
        return False


def in_order(functions):
    made = []
    for function in functions:
        function.made = made
    compile_ahead.make_together(functions)
    return made


def test_the_longest_way_is_gone_first():
    a, b = Made("a", 2), Made("b", 3)
    last = Made("last", 4, [a])
    assert in_order([a, b, last, Made("long", 5), Made("short", 1)]) == ["a", "long", "last", "b", "short"]


def test_what_another_process_is_at_is_left_to_it_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(compile_ahead, "WAIT_S", 0.05)
    taken = Made("taken", 9, is_taken=True)
    assert in_order([taken, Made("after", 9, [taken]), Made("free", 1)]) == ["free", "taken", "after"]


def test_a_function_that_is_kept_is_found_when_what_it_needs_was_lost(tmp_path):
    env = {**os.environ, "ONCHIP_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    code = (
        "from onchip.kernels.cpu.microkernels.dense import dense, multiply_panel\n"
        "print(dense.key, multiply_panel.key, dense.link())"
    )
    command = [sys.executable, "-c", code]
    kept, lost, _ = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()
    folder = tmp_path / "cache" / "numba"
    before = (folder / kept).stat().st_mtime_ns
    (folder / lost).unlink()
    subprocess.run(command, env=env, capture_output=True, check=True)
    assert (folder / lost).exists()
    assert (folder / kept).stat().st_mtime_ns == before


def test_what_training_steps_call_is_announced_before_the_first_is_compiled(monkeypatch):
    monkeypatch.setattr(compile_ahead, "_announced", {})
    x, y = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)
    onchip.fit(onchip.mlp(4, 8, 2), x, y, epochs=1, device="cpu")
    names = [made.__name__ for made in compile_ahead.announced()]
    assert {"forward", "output_gradients", "backward", "gradient_of_task"} <= set(names)
    assert "run_steps" not in names  # the first process's own
