"""Work in pieces, done by whoever is awake: how every CPU kernel is run by several threads.

Idea       The caller posts a job of so many pieces and takes one after the other itself. Helpers, threads that this
           process keeps, take some too if they are awake. To take a piece is one atomic step.
No joins   The caller waits for pieces that a helper has begun, never for a thread: a helper that the machine does not
           run, because others use it too, has begun nothing and holds nobody up.
Patience   A helper that the machine takes away in the middle of a piece is late: a caller that slept for longer than it
           worked does the next jobs alone, twice as many each time that happens again.
One job    is posted at a time. Who calls meanwhile begins alone, and posts what is left when the other job is done.
Same bits  A piece gives the same numbers whoever does it: the number of its worker says only where its scratch lies.
Sleep      A helper looks for work for some microseconds, then sleeps. Sleepers are woken from one to the next: the
           caller is worker 0, and worker w wakes 2 w + 1 and 2 w + 2.
Fork       A child has no helpers until `start_helpers` is called there; without, its callers work alone.
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

from onchip.kernels.cpu.compiler.compile_ahead import announce
from onchip.kernels.cpu.compiler.emit import INT
from onchip.kernels.cpu.compiler.jit import address_of, code_call, compiled, entry, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import cgutils, intrinsic, types
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.threading.atomics import (
    IS_ARM,
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_replace,
    held_lock,
    nanoseconds,
    pause,
    release,
    sleep_on,
)

T = TypeVar("T")

MAX_WORKERS = 1024  # that a job is shared by; a machine with more cores uses so many
_LINE = 128  # bytes: no cache line, and no two that are fetched together, has words of two threads

# The board: what callers and helpers know of each other, by place in bytes.
_TURN = 0  # the number of the job << 32 | its pieces that nobody has begun
_DONE = _LINE  # pieces that helpers have done of this job
_JOB = 2 * _LINE  # function, arguments, pieces, workers: they stand as long as a piece is left
_POSTED = 3 * _LINE  # 1 while a job is posted
_CALLER = 4 * _LINE  # 1 while its caller sleeps; then the lock on which it does
_STOP = 5 * _LINE  # 1: helpers end
_ALONE = 6 * _LINE  # jobs that callers do alone; then how many they did the last time
_WORKERS = 7 * _LINE  # of each worker: 1 while it sleeps; then the lock on which it does
_ASLEEP, _LOCK = 0, 8
_LEFT = (1 << 32) - 1

# Some tens of microseconds: loops and calls one after the other find helpers awake, and a helper without work soon
# leaves its core to others.
_SPINS = 20_000 if IS_ARM else 1_000

_FEWEST_ALONE, _MAX_ALONE = 4, 256  # jobs

_board = aligned_zeros((_WORKERS + MAX_WORKERS * _LINE) // 8, np.int64)
HELPERS: list[threading.Thread] = []
_starting = threading.Lock()


def start_helpers(threads: int) -> None:
    """Let `run_tasks` share jobs among up to `threads` threads of this process."""
    if len(HELPERS) < threads - 1:
        _start(min(threads, MAX_WORKERS))


def queue_helpers(threads: int) -> None:
    if threads > 1:
        announce((_serve, _wake_up))


def load_helpers(threads: int) -> None:
    """Compile, or load, what `start_helpers` starts: it is then quick."""
    if threads > 1:
        _serve.link()
        _wake_up.link()


def _start(threads: int) -> None:
    with _starting:
        if not HELPERS:
            _set_lock(_CALLER)
            load_helpers(threads)
        # A process that may have no more threads, or is about to end, works with those it has.
        with contextlib.suppress(RuntimeError):
            while len(HELPERS) < threads - 1:
                worker = len(HELPERS) + 1
                _set_lock(_WORKERS + worker * _LINE)
                helper = threading.Thread(target=_serve.load, args=(worker,), name=f"onchip-{worker}", daemon=True)
                HELPERS.append(helper)  # first: whatever happens, no other gets its number
                helper.start()


def _set_lock(sleeper: int) -> None:
    _board[(sleeper + _LOCK) // 8] = held_lock()


@atexit.register
def _stop_helpers() -> None:
    """End the helpers before the code that they run is gone."""
    _board[_STOP // 8] = 1
    for worker in range(1, len(HELPERS) + 1):
        _wake_up(worker)
    for helper in HELPERS:
        if helper.is_alive():
            helper.join()


def _forget_helpers() -> None:
    """A forked child has none, and whatever was posted is its parent's."""
    _board[:] = 0
    HELPERS.clear()
    _starting._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)


class Spare(Generic[T]):
    """Memory that a call has to itself: it takes what another has given back, or makes it. Callers never wait."""

    def __init__(self, make: Callable[[int], T]) -> None:
        """make(threads): for a call on so many threads, which are the same in every call"""
        self.make, self.free = make, list[T]()  # for callers to whom a function's call is long

    def take(self, threads: int) -> T:
        try:
            return self.free.pop()
        except IndexError:
            return self.make(threads)

    def give_back(self, memory: T) -> None:
        self.free.append(memory)


# -- what compiled code calls ------------------------------------------------------------------------------

llvm.add_symbol("onchip_board", _board.ctypes.data)


@intrinsic
def _at(typing_context: Any, place: Any) -> Any:
    """The address of a place of the board."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])  # as a function: those are found wherever they lie
        return b.add(b.ptrtoint(cgutils.get_or_insert_function(b.module, kind, "onchip_board"), INT), args[0])

    return types.int64(types.int64), codegen


_call = code_call(3)  # of the address of its arguments, the worker, the piece
_PIECE_FUNCTION = ir.FunctionType(ir.VoidType(), [INT] * 3)  # the address of its arguments, the worker, the piece


# -- sleeping and waking -----------------------------------------------------------------------------------


@compiled(inline=True)
def _wake(sleeper: int) -> None:
    """sleeper: the place of a worker or of the caller"""
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
    """Who said that it sleeps found something to do: if somebody has begun to wake it, that must be over first."""
    if atomic_exchange(sleeper + _ASLEEP, 0) == 0:
        sleep_on(int_at(sleeper + _LOCK))


# -- helpers -----------------------------------------------------------------------------------------------


@compiled(inline=True)
def _has_work(worker: int) -> bool:
    return atomic_load(_at(_TURN)) & _LEFT != 0 and worker < int_at(_at(_JOB) + 24)  # type: ignore[no-any-return]


@compiled()
def _take_pieces(worker: int) -> int:
    """Do pieces of the posted job as long as there are any; how many.

    What is read of a job stands if a piece of it could be taken afterwards: all of it was written before, and is
    written again only when no piece is left.
    """
    count, job, turn = 0, ints_at(_at(_JOB), 4), _at(_TURN)
    while True:
        now = atomic_load(turn)
        function, arguments, pieces, workers = job[0], job[1], job[2], job[3]
        left = now & _LEFT
        if left == 0 or worker >= workers:
            return count
        if not atomic_replace(turn, now, now - 1):
            continue
        if worker != 0 and count == 0:
            _wake_next(worker, workers)
        _call(function, arguments, worker, pieces - left)
        count += 1
        if worker != 0:
            atomic_add(_at(_DONE), 1)
            _wake(_at(_CALLER))


@entry
def _serve(worker: int) -> int:
    """A helper's life."""
    sleeper, spins = _at(_WORKERS + worker * _LINE), 0
    while atomic_load(_at(_STOP)) == 0:
        if _take_pieces(worker) > 0:
            spins = 0
        if spins < _SPINS:
            pause()
            spins += 1
            continue
        atomic_exchange(sleeper + _ASLEEP, 1)
        if _has_work(worker) or atomic_load(_at(_STOP)) != 0:
            _stay_awake(sleeper)
        else:
            sleep_on(int_at(sleeper + _LOCK))
        spins = 0
    return 0


# -- callers -----------------------------------------------------------------------------------------------


@compiled(inline=True)
def _wait_for(count: int) -> bool:
    """Return when helpers have done so many pieces; whether the caller slept meanwhile."""
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
            sleep_on(int_at(caller + _LOCK))
            has_slept = True
    return has_slept


@compiled(inline=True)
def _note_wait(is_late: bool) -> None:
    """After a late helper: how many jobs are done alone."""
    alone = _at(_ALONE)
    jobs = min(_MAX_ALONE, max(_FEWEST_ALONE, 2 * int_at(alone + 8))) if is_late else 0
    atomic_exchange(alone + 8, jobs)
    atomic_exchange(alone, jobs)


@linked(*(types.int64,) * 4)
def _run_pieces(function: int, arguments: int, pieces: int, threads: int) -> None:
    posted, begun = _at(_POSTED), 0
    if threads > 1 and pieces > 1 and atomic_load(_at(_ALONE)) > 0:
        atomic_add(_at(_ALONE), -1)
        threads = 1
    while begun < pieces:
        left = pieces - begun
        if threads > 1 and left > 1 and atomic_replace(posted, 0, 1):
            job, turn = ints_at(_at(_JOB), 4), _at(_TURN)
            job[0], job[1], job[2], job[3] = function, arguments, pieces, min(threads, left)
            atomic_exchange(_at(_DONE), 0)
            atomic_exchange(turn, ((atomic_load(turn) >> 32) + 1) << 32 | left)
            _wake_next(0, min(threads, left))
            begin = nanoseconds()
            own = _take_pieces(np.int64(0))  # type: ignore[arg-type]  # of a bare 0 it is compiled anew
            by_helpers, end = left - own, nanoseconds()
            has_slept = _wait_for(by_helpers)
            if by_helpers > 0:
                _note_wait(has_slept and nanoseconds() - end > end - begin)
            atomic_exchange(posted, 0)
            return
        _call(function, arguments, 0, begun)
        begun += 1


@intrinsic
def run_tasks(typing_context: Any, function: Any, arguments: Any, pieces: Any, threads: Any) -> Any:
    """In compiled code: function(worker, piece, *arguments) for each of `pieces` pieces, by up to `threads` threads.

    function   a `compiled` one; pieces of one job must not write to the same memory, those of one worker may
    arguments  a tuple
    """
    kinds = tuple(map(types.unliteral, arguments.types))
    signature = types.void(function, types.Tuple(kinds), types.int64, types.int64)
    call = function.get_call_type(typing_context, (types.int64, types.int64, *kinds), {})
    address_of(_run_pieces)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        made = function.dispatcher.get_compile_result(call)
        context.active_code_library.add_linking_library(made.library)
        stored = cgutils.alloca_once_value(b, args[1])
        body = ir.Function(b.module, _PIECE_FUNCTION, b.module.get_unique_name("piece"))
        body.linkage = "internal"
        inner = ir.IRBuilder(body.append_basic_block())
        values = inner.load(inner.inttoptr(body.args[0], stored.type))
        given = [body.args[1], body.args[2], *cgutils.unpack_tuple(inner, values)]
        context.call_internal_no_propagate(inner, made.fndesc, call, given)
        inner.ret_void()
        kind = ir.FunctionType(ir.VoidType(), [INT] * 4)
        run = cgutils.get_or_insert_function(b.module, kind, run_tasks.needs.symbol)
        b.call(run, [b.ptrtoint(body, INT), b.ptrtoint(stored, INT), args[2], args[3]])
        return context.get_dummy_value()

    return signature, codegen


run_tasks.needs = _run_pieces  # so that a kernel that is kept on disk finds it
