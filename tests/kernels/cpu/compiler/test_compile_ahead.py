"""A helper process compiles functions in advance; two processes never compile the same function at once."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import onchip
from onchip.kernels.cpu.compiler import compile_ahead, jit
from onchip.kernels.cpu.microkernels.dense import dense

KEY = "0123456789ab" * 4
HOLD = """import sys, pathlib
from onchip.kernels.cpu.compiler.compile_ahead import lock_function
print(lock_function(pathlib.Path(sys.argv[1]), sys.argv[2]), flush=True)
sys.stdin.read()"""

AHEAD = """import sys
from onchip.kernels.cpu.compiler.helper import compile_ahead
compile_ahead(sys.argv[1:])"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "numba").mkdir()
    return tmp_path / "numba"


def test_dependencies_come_first():
    *needed, last = jit.linked_below(dense)
    assert last is dense
    assert len(set(needed)) == len(needed)
    assert "multiply_panel" in [made.function.__name__ for made in needed]


def test_a_lock_is_waited_for_up_to_a_limit(folder):
    command = [sys.executable, "-c", HOLD, str(folder), KEY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        assert not compile_ahead.lock_function(folder, KEY, wait_s=0.1)
        assert compile_ahead.lock_function(folder, KEY[::-1])  # another function
        compile_ahead.unlock_function(folder, KEY[::-1])
        other.stdin.close()
    assert compile_ahead.lock_function(folder, KEY)


def test_no_helper_without_a_folder_or_a_second_core(folder, monkeypatch):
    monkeypatch.setattr(compile_ahead, "started", [])
    monkeypatch.setattr(compile_ahead, "core_count", lambda: 1)
    assert compile_ahead.start_helper(dense.function, folder, count=9) == 1
    monkeypatch.setattr(compile_ahead, "core_count", lambda: 2)
    assert compile_ahead.start_helper(dense.function, None, count=9) == 1
    assert compile_ahead.start_helper(dense.function, folder, count=2) == 1
    assert compile_ahead.started == []
    assert compile_ahead.lock_function(None, KEY)  # without a lock


def test_another_helper_starts_after_the_first_has_ended(folder, monkeypatch):
    monkeypatch.setattr(compile_ahead, "started", [])
    monkeypatch.setattr(compile_ahead, "core_count", lambda: 2)
    monkeypatch.setattr(compile_ahead, "PROGRAM", "import sys; sys.stdout.close()")
    assert compile_ahead.start_helper(dense.function, folder, count=9) == 2
    (first,) = compile_ahead.started
    assert first.wait() == 0
    assert compile_ahead.start_helper(dense.function, folder, count=9) == 2
    (second,) = compile_ahead.started
    assert second is not first
    assert second.wait() == 0


def test_the_helper_fills_the_cache(tmp_path):
    """A kernel's functions, by the names that the first process passes; no output."""
    names = ["onchip.kernels.cpu.microkernels.dense:dense", "onchip.kernels.cpu.layout.move:gone.<locals>.f"]
    env = {**os.environ, "ONCHIP_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", AHEAD, *names]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")
    assert len(list((tmp_path / "cache" / "numba").iterdir())) >= 2


class Function:
    """A linked function that records when it is compiled."""

    def __init__(self, name, size, below=(), is_locked=False):
        self.name, self.size, self.below, self.is_locked, self.made = name, size, below, is_locked, []

    def try_compile(self, force):
        is_ready = all(inner.name in self.made for inner in self.below)
        if is_ready and (force or not self.is_locked):
            self.made.append(self.name)
            return True
        return False


def in_order(functions):
    made = []
    for function in functions:
        function.made = made
    compile_ahead.compile_together(functions)
    return made


def test_the_longest_chain_comes_first():
    a, b = Function("a", 2), Function("b", 3)
    last = Function("last", 4, [a])
    assert in_order([a, b, last, Function("long", 5), Function("short", 1)]) == ["a", "long", "last", "b", "short"]


def test_a_function_locked_by_another_process_is_compiled_after_a_limit(monkeypatch):
    monkeypatch.setattr(compile_ahead, "WAIT_S", 0.05)
    taken = Function("taken", 9, is_locked=True)
    assert in_order([taken, Function("after", 9, [taken]), Function("free", 1)]) == ["free", "taken", "after"]


def test_a_lost_dependency_is_compiled_again_alone(tmp_path):
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


def test_functions_of_training_steps_are_queued_before_the_first_is_compiled(monkeypatch):
    monkeypatch.setattr(compile_ahead, "queued", {})
    x, y = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)
    onchip.fit(onchip.mlp(4, 8, 2), x, y, epochs=1, device="cpu")
    names = [made.__name__ for made in compile_ahead.queued_functions()]
    assert {"forward", "output_gradients", "backward", "gradient_of_task"} <= set(names)
    assert "run_steps" not in names  # the first process's own


def test_functions_may_be_queued_while_the_queue_is_read(monkeypatch):
    """As other threads do, which bind other networks."""
    monkeypatch.setattr(compile_ahead, "queued", {})

    class Operation:
        @property
        def code(self):
            compile_ahead.queue_functions([object()])
            return "code"

    compile_ahead.queue_functions([Operation(), Operation()])
    assert compile_ahead.queued_functions() == ["code", "code"]


def test_threads_that_compile_at_the_same_time_start_one_helper(monkeypatch, tmp_path):
    made, others = [], []

    class Process:
        def __init__(self, *args, **options):
            made.append(self)
            if len(made) == 1:
                others.append(threading.Thread(target=start))
                others[0].start()
                others[0].join(0.1)  # it waits, or starts another one

        def poll(self):
            return None

        def kill(self):
            return

        wait = kill

    def start():
        return compile_ahead.start_helper(json.dumps, tmp_path, 100)

    monkeypatch.setattr(compile_ahead, "core_count", lambda: 2)
    monkeypatch.setattr(compile_ahead, "started", [])
    monkeypatch.setattr(compile_ahead.subprocess, "Popen", Process)
    assert start() == 2
    others[0].join()
    assert len(made) == 1
