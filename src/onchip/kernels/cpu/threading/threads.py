"""The thread pool of all CPU kernels: parallel loops over tasks.

Idea       The caller posts a job of tasks and runs them one by one. Helpers, the pool's threads, claim tasks too if
           they are awake. A claim is one compare-and-swap.
No joins   The caller waits for tasks that a helper has begun, never for a thread: a helper that the system does not
           schedule has begun none, and delays nobody.
Late       A helper may be preempted within a task. A caller that slept for longer than it worked runs the next jobs on
           one thread, twice as many each time that happens again.
One job    At most one job is posted. Another caller starts alone, and posts its remaining tasks once that job is done.
Same bits  A task's result does not depend on its thread: the worker index only selects scratch memory.
Sleep      A helper spins for some microseconds, then sleeps. Helpers are woken as a tree: the caller is worker 0, and
           worker w wakes 2 w + 1 and 2 w + 2.
Fork       A child has no helpers until it calls `start_helpers`; until then its jobs run on the calling thread.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from onchip.kernels.cpu.compiler.compile_ahead import queue_functions
from onchip.kernels.cpu.compiler.emit import INT
from onchip.kernels.cpu.compiler.jit import address_of, code_call, compiled, entry, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import cgutils, intrinsic, types
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.threading.atomics import (
    IS_ARM,
    acquire,
    acquired_lock,
    atomic_add,
    atomic_compare_exchange,
    atomic_exchange,
    atomic_load,
    nanoseconds,
    pause,
    release,
)

T = TypeVar("T")

MAX_WORKERS = 1024  # per job, even with more cores
_LINE = 128  # bytes: two cache lines, which are prefetched as a pair; no false sharing

# The board: the shared state of callers and helpers. Byte offsets:
_CLAIM = 0  # job number << 32 | its unclaimed tasks
_DONE = _LINE  # tasks of this job that helpers have finished
_JOB = 2 * _LINE  # function, arguments, tasks, workers: valid while a task is unclaimed
_POSTED = 3 * _LINE  # 1 while a job is posted
_CALLER = 4 * _LINE  # 1 while its caller sleeps; then the lock it sleeps on
_STOP = 5 * _LINE  # 1: helpers exit
_SINGLE = 6 * _LINE  # jobs left to run on one thread; then how many there were at first
_WORKERS = 7 * _LINE  # per worker: 1 while it sleeps; then the lock it sleeps on
_ASLEEP, _LOCK = 0, 8
_LEFT_MASK = (1 << 32) - 1

# Some tens of microseconds: consecutive loops and calls find helpers awake, and an idle helper soon frees its core.
_SPINS = 20_000 if IS_ARM else 1_000

MIN_SINGLE, MAX_SINGLE = 4, 256  # jobs

_board = aligned_zeros((_WORKERS + MAX_WORKERS * _LINE) // 8, np.int64)
HELPERS: list[threading.Thread] = []
_starting = threading.Lock()


def start_helpers(threads: int) -> None:
    """Let `run_tasks` share jobs among up to `threads` threads of this process."""
    if len(HELPERS) < threads - 1:
        _start(min(threads, MAX_WORKERS))


def queue_helpers(threads: int) -> None:
    if threads > 1:
        queue_functions((_serve, _wake_up))


def load_helpers(threads: int) -> None:
    """Compile or load the helpers' code, so that `start_helpers` is quick."""
    if threads > 1:
        _serve.link()
        _wake_up.link()


def _start(threads: int) -> None:
    with _starting:
        if not HELPERS:
            _set_lock(_CALLER)
            load_helpers(threads)
        # A process at its thread limit, or about to exit, uses the helpers it has.
        with contextlib.suppress(RuntimeError):
            while len(HELPERS) < threads - 1:
                worker = len(HELPERS) + 1
                _set_lock(_WORKERS + worker * _LINE)
                helper = threading.Thread(target=_serve.load, args=(worker,), name=f"onchip-{worker}", daemon=True)
                HELPERS.append(helper)  # before start, so that no other helper gets its index
                helper.start()


def _set_lock(sleeper: int) -> None:
    _board[(sleeper + _LOCK) // 8] = acquired_lock()


@atexit.register
def _stop_helpers() -> None:
    """Stop the helpers before their code is unloaded."""
    _board[_STOP // 8] = 1
    for worker in range(1, len(HELPERS) + 1):
        _wake_up(worker)
    for helper in HELPERS:
        if helper.is_alive():
            helper.join()


def _forget_helpers() -> None:
    """A forked child has no helpers, and a posted job is its parent's."""
    _board[:] = 0
    HELPERS.clear()
    _starting._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)


class FreeList(Generic[T]):
    """A free list of memory for calls. Callers never wait: `take` allocates if it is empty."""

    def __init__(self, make: Callable[[int], T]) -> None:
        """make(threads) allocates for one call; all calls have the same number of threads."""
        self.make, self.free = make, list[T]()  # public: quick_call avoids a method call

    def take(self, threads: int) -> T:
        try:
            return self.free.pop()
        except IndexError:
            return self.make(threads)

    def give_back(self, memory: T) -> None:
        self.free.append(memory)


# -- called by compiled code -------------------------------------------------------------------------------

llvm.add_symbol("onchip_board", _board.ctypes.data)


@intrinsic
def _at(typing_context: Any, offset: Any) -> Any:
    """The address of an offset in the board."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])  # declared as a function, so that it may be at any distance
        return b.add(b.ptrtoint(cgutils.get_or_insert_function(b.module, kind, "onchip_board"), INT), args[0])

    return types.int64(types.int64), codegen


_call = code_call(3)  # (address of the arguments, worker, task)
_TASK_FUNCTION = ir.FunctionType(ir.VoidType(), [INT] * 3)  # the same signature


# -- sleeping and waking -----------------------------------------------------------------------------------


@compiled(inline=True)
def _wake(sleeper: int) -> None:
    """sleeper: the address of a worker's or the caller's state"""
    if atomic_load(sleeper + _ASLEEP) != 0 and atomic_exchange(sleeper + _ASLEEP, 0) != 0:
        release(int_at(sleeper + _LOCK))


@compiled(inline=True)
def _wake_worker(worker: int) -> None:
    _wake(_at(_WORKERS + worker * _LINE))


@entry
def _wake_up(worker: int) -> int:
    _wake_worker(worker)
    return 0


@compiled(inline=True)
def _wake_next(worker: int, workers: int) -> None:
    for other in range(2 * worker + 1, min(2 * worker + 3, workers)):
        _wake_worker(other)


@compiled(inline=True)
def _stay_awake(sleeper: int) -> None:
    """Clear the sleep flag; if another thread cleared it first, wait until it releases the lock."""
    if atomic_exchange(sleeper + _ASLEEP, 0) == 0:
        acquire(int_at(sleeper + _LOCK))


# -- helpers -----------------------------------------------------------------------------------------------


@compiled(inline=True)
def _has_work(worker: int) -> bool:
    return atomic_load(_at(_CLAIM)) & _LEFT_MASK != 0 and worker < int_at(_at(_JOB) + 24)  # type: ignore[no-any-return]


@compiled()
def _run_unclaimed(worker: int) -> int:
    """Run tasks of the posted job until none is unclaimed; return how many.

    The fields of a job are valid if a claim succeeds after reading them: they are written before its tasks are posted,
    and overwritten only when none is left.
    """
    count, job, claim = 0, ints_at(_at(_JOB), 4), _at(_CLAIM)
    while True:
        now = atomic_load(claim)
        function, arguments, tasks, workers = job[0], job[1], job[2], job[3]
        left = now & _LEFT_MASK
        if left == 0 or worker >= workers:
            return count
        if not atomic_compare_exchange(claim, now, now - 1):
            continue
        if worker != 0 and count == 0:
            _wake_next(worker, workers)
        _call(function, arguments, worker, tasks - left)
        count += 1
        if worker != 0:
            atomic_add(_at(_DONE), 1)
            _wake(_at(_CALLER))


@entry
def _serve(worker: int) -> int:
    """A helper's main loop."""
    sleeper, spins = _at(_WORKERS + worker * _LINE), 0
    while atomic_load(_at(_STOP)) == 0:
        if _run_unclaimed(worker) > 0:
            spins = 0
        if spins < _SPINS:
            pause()
            spins += 1
            continue
        atomic_exchange(sleeper + _ASLEEP, 1)
        if _has_work(worker) or atomic_load(_at(_STOP)) != 0:
            _stay_awake(sleeper)
        else:
            acquire(int_at(sleeper + _LOCK))
        spins = 0
    return 0


# -- callers -----------------------------------------------------------------------------------------------


@compiled(inline=True)
def _wait_for(count: int) -> bool:
    """Wait until helpers have finished `count` tasks; return whether the caller slept."""
    done, caller, spins, has_slept = _at(_DONE), _at(_CALLER), 0, False
    while atomic_load(done) != count:
        if spins < _SPINS:
            pause()
            spins += 1
            continue
        atomic_exchange(caller + _ASLEEP, 1)
        if atomic_load(done) == count:
            _stay_awake(caller)
        else:
            acquire(int_at(caller + _LOCK))
            has_slept = True
    return has_slept


@compiled(inline=True)
def _note_wait(is_late: bool) -> None:
    """Set how many of the next jobs run on one thread: after a late helper, twice as many as last time; else none."""
    single = _at(_SINGLE)
    jobs = min(MAX_SINGLE, max(MIN_SINGLE, 2 * int_at(single + 8))) if is_late else 0
    atomic_exchange(single + 8, jobs)
    atomic_exchange(single, jobs)


@linked(*(types.int64,) * 4)
def _run_job(function: int, arguments: int, tasks: int, threads: int) -> None:
    posted, begun = _at(_POSTED), 0
    if threads > 1 and tasks > 1 and atomic_load(_at(_SINGLE)) > 0:
        atomic_add(_at(_SINGLE), -1)
        threads = 1
    while begun < tasks:
        left = tasks - begun
        if threads > 1 and left > 1 and atomic_compare_exchange(posted, 0, 1):
            job, claim = ints_at(_at(_JOB), 4), _at(_CLAIM)
            job[0], job[1], job[2], job[3] = function, arguments, tasks, min(threads, left)
            atomic_exchange(_at(_DONE), 0)
            atomic_exchange(claim, ((atomic_load(claim) >> 32) + 1) << 32 | left)
            _wake_next(0, min(threads, left))
            begin = nanoseconds()
            by_caller = _run_unclaimed(np.int64(0))  # type: ignore[arg-type]  # a literal 0 would compile another version
            by_helpers, end = left - by_caller, nanoseconds()
            has_slept = _wait_for(by_helpers)
            if by_helpers > 0:
                _note_wait(has_slept and nanoseconds() - end > end - begin)
            atomic_exchange(posted, 0)
            return
        _call(function, arguments, 0, begun)
        begun += 1


@intrinsic
def run_tasks(typing_context: Any, function: Any, arguments: Any, tasks: Any, threads: Any) -> Any:
    """In compiled code: function(worker, task, *arguments) for each of `tasks` tasks, on up to `threads` threads.

    function   a `compiled` one; tasks of different workers must not write to the same memory
    arguments  a tuple
    """
    kinds = tuple(map(types.unliteral, arguments.types))
    signature = types.void(function, types.Tuple(kinds), types.int64, types.int64)
    call = function.get_call_type(typing_context, (types.int64, types.int64, *kinds), {})
    address_of(_run_job)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        compiled_function = function.dispatcher.get_compile_result(call)
        context.active_code_library.add_linking_library(compiled_function.library)
        stored = cgutils.alloca_once_value(b, args[1])
        body = ir.Function(b.module, _TASK_FUNCTION, b.module.get_unique_name("task"))
        body.linkage = "internal"
        inner = ir.IRBuilder(body.append_basic_block())
        values = inner.load(inner.inttoptr(body.args[0], stored.type))
        call_args = [body.args[1], body.args[2], *cgutils.unpack_tuple(inner, values)]
        context.call_internal_no_propagate(inner, compiled_function.fndesc, call, call_args)
        inner.ret_void()
        kind = ir.FunctionType(ir.VoidType(), [INT] * 4)
        run = cgutils.get_or_insert_function(b.module, kind, run_tasks.needs.symbol)
        b.call(run, [b.ptrtoint(body, INT), b.ptrtoint(stored, INT), args[2], args[3]])
        return context.get_dummy_value()

    return signature, codegen


run_tasks.needs = _run_job  # a kernel cached on disk links against it
