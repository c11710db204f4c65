"""The thread pool: each task runs once, and no caller waits for a thread that has begun none."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.kernels.cpu.compiler.jit import compiled, data_of
from onchip.kernels.cpu.threading import threads
from onchip.kernels.cpu.threading.threads import FreeList, run_tasks, start_helpers
from onchip.runtime.engine import compile

SRC = Path(__file__).parents[4] / "src"


@compiled()
def _count(worker, task, counts, workers):
    counts[task] += 1
    workers[task] = worker
    total = 0.0
    for i in range(2000):
        total += np.sin(np.float64(i))
    counts[task] += total > 1e9


@compiled()
def _count_all(counts, workers, threads):
    run_tasks(_count, (counts, workers), len(counts), threads)


def run_python(code: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    given = {"capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": str(SRC)}, "timeout": timeout}
    return subprocess.run([sys.executable, "-c", code], **given)


@pytest.mark.parametrize("tasks", [0, 1, 2, 3, 300])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_task_runs_once_on_a_worker_of_the_job(tasks, threads):
    start_helpers(5)
    counts, workers = np.zeros(tasks, np.int64), np.full(tasks, -1)
    _count_all(counts, workers, threads)
    assert (counts == 1).all()
    assert ((workers >= 0) & (workers < threads)).all()


def test_concurrent_callers_run_all_of_their_tasks():
    start_helpers(3)

    def call(_):
        counts, workers = np.zeros(50, np.int64), np.zeros(50, np.int64)
        _count_all(counts, workers, 3)
        return (counts == 1).all()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(call, range(60)))


@compiled()
def _late(worker, task, workers):
    workers[task] = worker
    if worker:  # some tens of milliseconds
        total = 0.0
        for i in range(3_000_000):
            total += np.sin(np.float64(i))
        workers[task] += total > 1e9


@compiled()
def _late_all(workers, threads):
    run_tasks(_late, (workers,), len(workers), threads)


def test_after_a_late_helper_jobs_run_on_one_thread():
    start_helpers(2)
    workers = np.zeros(300, np.int64)
    for _ in range(2000):  # until a helper runs a task
        _late_all(workers, 2)
        if workers.any():
            break
        time.sleep(0.005)  # on a busy machine it may sleep for long
    assert workers.any()
    for _ in range(threads.MIN_SINGLE):
        _late_all(workers, 2)
        assert not workers.any()


def test_concurrent_engines_do_not_mix_results():
    x = rows(700, 72)
    engines = [compile(random_mlp(72, 64, 4, seed=seed), device="cpu") for seed in range(3)]
    truths = [engine(x) for engine in engines]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda i: engines[i % 3](x), range(60)))
    assert all(np.array_equal(y, truths[i % 3]) for i, y in enumerate(results))


ENGINE = """\
import os, threading, numpy as np, onchip
from onchip.kernels.cpu.threading import threads
from onchip.runtime.cpu import backend as cpu
cpu.core_count = lambda: 3
engine = onchip.compile(onchip.mlp(72, 64, 4), device='cpu', threads=3)
x = np.random.default_rng(0).standard_normal((3000, 72), dtype=np.float32)
"""


def test_helpers_that_never_run_delay_no_caller():
    """They are started and woken but never scheduled, as on an overloaded machine."""
    code = (
        "forever = threading.Event()\n"
        "threads._serve.load = lambda worker: forever.wait()\n"
        "threads._board[(threads._WORKERS + threads._LINE) // 8] = 1\n"  # worker 1 sleeps
        "one = onchip.compile(onchip.mlp(72, 64, 4), device='cpu', threads=1)(x)\n"
        "print(all(np.array_equal(engine(x), one) for _ in range(20)), len(threads.HELPERS))\n"
        "print(onchip.scan(np.ones(1 << 20, np.int64))[-1])\n"
        "forever.set()\n"
    )
    done = run_python(ENGINE + code)
    assert (done.returncode, done.stdout) == (0, "True 2\n1048576\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_starts_helpers_of_its_own():
    """Also if another thread of its parent is in a call."""
    code = (
        "truth = engine(x)\n"
        "stop = threading.Event()\n"
        "def work():\n"
        "    while not stop.is_set(): engine(x)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "for _ in range(5):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        same, before = all(np.array_equal(engine(x), truth) for _ in range(5)), len(threads.HELPERS)\n"
        "        os._exit(0 if same and before == 2 and threading.active_count() == 3 else 1)\n"
        "    print(os.waitpid(child, 0)[1])\n"
        "stop.set()\n"
        "thread.join()\n"
    )
    done = run_python("import warnings; warnings.simplefilter('ignore')\n" + ENGINE + code)
    assert (done.returncode, done.stdout.split()) == (0, ["0"] * 5), done.stderr


def test_a_process_ends_while_a_thread_is_in_a_call_and_numbas_own_threads_never_start():
    code = (
        "def work():\n"
        "    while True: engine(x)\n"
        "engine(x)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "import numba\n"
        "try: print(numba.threading_layer())\n"
        "except ValueError: print('none', len(threads.HELPERS))\n"
    )
    done = run_python(ENGINE + code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "none 2\n", "")


def test_memory_is_exclusive_while_it_is_taken():
    made = []
    spare = FreeList(lambda threads: made.append(threads) or len(made))
    assert (spare.take(2), spare.take(2)) == (1, 2)
    spare.give_back(1)
    assert (spare.take(2), spare.take(2), made) == (1, 3, [2, 2, 2])


@compiled()
def _data(array):
    return data_of(array)


def test_data_of_reads_the_address_from_the_array_object():
    whole = np.zeros((5, 7), np.float32)
    read_only = whole[1:]
    read_only.flags.writeable = False
    for array in (whole, whole[2:], whole[:, 3:], read_only, whole.view(np.int32), np.zeros(())):
        assert _data(id(array)) == array.ctypes.data


def test_a_call_from_a_thread_that_ends_leaves_nothing_behind():
    engine, x, got = compile(random_mlp(72, 64, 4), device="cpu"), rows(700, 72), []
    for _ in range(3):
        thread = threading.Thread(target=lambda: got.append(engine(x)))
        thread.start()
        thread.join()
    assert all(np.array_equal(y, engine(x)) for y in got)
