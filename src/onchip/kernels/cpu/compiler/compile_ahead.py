"""Compiling on a second core: a helper process compiles functions that this one needs soon, into the shared cache.

Idea    LLVM and Numba hold the GIL, so threads would alternate. The first cache miss starts a helper process with the
        same list of functions. Each process picks the function with the longest remaining chain of dependents, by code
        size, whose own dependencies are compiled and whose key is not locked by the other. Compiled functions go to
        the cache, where every process finds them.
Floor   Half the time of one process, plus a second to start the helper.
Limits  Functions whose argument types are known without a call: linked ones. This process compiles the others. Without
        a second core, a cache folder or file locks there is no helper.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from onchip.kernels.cpu.compiler.notice import notice

try:
    import fcntl
except ImportError:  # Windows: no helper
    fcntl = None  # type: ignore[assignment]

PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
sys.modules["scipy"] = None  # Numba would load it without need
from onchip.kernels.cpu.compiler.helper import compile_ahead
compile_ahead(json.loads(sys.argv[2]))"""
WAIT_S, _LOOK_S = 30.0, 0.01  # longest wait for another process's function, and the polling interval
_FEWEST = 3  # functions: starting a process takes as long as compiling two
_HELPER = 0  # the byte of the lock file that the helper locks; functions have others

_locks: dict[Path, int] = {}  # lock files, opened once: closing one releases all of this process's locks on it
queued: dict[Any, None] = {}
started: list[subprocess.Popen[bytes]] = []  # the last one; at most one runs
_starting = threading.Lock()
_is_helper: list[bool] = []  # this process


def lock_function(folder: Path | None, key: str, wait_s: float = 0.0) -> bool:
    """Lock a function until `unlock_function`; False if another process holds the lock for `wait_s`."""
    end = time.monotonic() + wait_s
    while _lock(folder, 1 + int(key[:12], 16)) is False:
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_S)
    return True


def unlock_function(folder: Path | None, key: str) -> None:
    if folder in _locks:
        with contextlib.suppress(OSError):
            fcntl.lockf(_locks[folder], fcntl.LOCK_UN, 1, 1 + int(key[:12], 16))


def _lock(folder: Path | None, byte: int) -> bool | None:
    """Try to lock a byte of the lock file next to the folder; None if nothing can be locked."""
    if folder is None or fcntl is None:
        return None
    try:
        if folder not in _locks:
            _locks[folder] = os.open(folder.parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(_locks[folder], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return None
    return True


def queue_functions(things: Iterable[Any]) -> None:
    """Queue what will be needed soon: functions, and image operations, whose `code` is a linked function."""
    queued.update(dict.fromkeys(things))


def queue_kernels(kernels: Iterable[Any]) -> None:
    """Queue the code of kernels that will be bound: for most, the function `_run` of their module."""
    found = (getattr(sys.modules[type(kernel).__module__], "_run", None) for kernel in kernels)
    queue_functions(function for function in found if function is not None)


def queued_functions() -> list[Any]:
    return [getattr(thing, "code", thing) for thing in list(queued)]  # a copy: other threads may queue more


def become_helper(folder: Path | None) -> bool:
    """Mark this process as the helper; False if another one runs."""
    _is_helper.append(True)
    return bool(_lock(folder, _HELPER))


def _name_of(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def start_helper(function: Callable[..., Any], folder: Path | None, count: int) -> int:
    """Start a helper that compiles the dependencies of `function` and of queued functions, if there is a core for it
    and `count` functions are worth it. Returns how many processes compile.
    """
    with _starting:  # several threads may compile
        if any(process.poll() is None for process in started):
            return 2
        if _is_helper or folder is None or fcntl is None or not sys.executable or core_count() < 2 or count < _FEWEST:
            return 1
        names, nowhere = [*map(_name_of, list(queued)), _name_of(function)], subprocess.DEVNULL
        command = [sys.executable, "-P", "-c", PROGRAM, json.dumps(sys.path), json.dumps(names)]
        try:
            started[:] = [subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)]
        except OSError:  # process limit
            return 1
        return 2


@atexit.register
def _end_helper() -> None:
    """Stop the helper; its remaining functions are compiled where they are needed."""
    for process in started:
        process.kill()
        process.wait()


def core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Linked(Protocol):
    """What compile_together uses of a LinkedFunction (jit.py)."""

    @property
    def size(self) -> int: ...
    @property
    def below(self) -> Sequence[Linked]: ...
    def try_compile(self, force: bool) -> bool: ...


F = TypeVar("F", bound=Linked)


def compile_together(functions: Sequence[Linked], should_continue: Callable[[], bool] = lambda: True) -> None:
    """Compile or load linked functions, concurrently with other processes.

    functions        dependencies first
    should_continue  called before each; False stops
    """
    missing, last_done = _longest_chain_first(functions), time.monotonic()
    while missing and should_continue():
        force = time.monotonic() > last_done + WAIT_S  # the lock's owner hangs
        done = next((function for function in missing if function.try_compile(force)), None)
        if done is None:
            time.sleep(_LOOK_S)
        else:
            missing.remove(done)
            last_done = time.monotonic()
            notice.finish_one()


def _longest_chain_first(functions: Sequence[F]) -> list[F]:
    """Sorted by the code size of the longest chain of dependents, largest first."""
    chain: dict[F, int] = {}
    for function in reversed(functions):
        chain[function] = function.size + max((chain[user] for user in chain if function in user.below), default=0)
    return sorted(functions, key=lambda function: -chain[function])
