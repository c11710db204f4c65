"""Compiling on a second core: a process that compiles what the first will ask for next, into the cache that both read.

Idea    LLVM and Numba hold Python's lock, so threads would take turns. The first miss of the cache starts one other
        process with the same list of functions. Each takes the function with the longest way to go, by the size of it
        and of those that wait for it, of all whose own needs are there and that the other is not at: a lock on the
        function's key tells. What one has compiled the other finds in the cache, as does any process that shares it.
Floor   Half of what one process takes, and a second for the other one to start.
Limits  Functions whose argument types are known without a call: linked ones. The rest is the first process's. Without
        a second core, a place to keep code, or locks there is no other process.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onchip.kernels.cpu.compiler.notice import notice

if TYPE_CHECKING:
    from onchip.kernels.cpu.compiler.jit import LinkedFunction

try:
    import fcntl
except ImportError:  # Windows: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
sys.modules["scipy"] = None  # which Numba would load, for nothing
from onchip.kernels.cpu.compiler.compile_ahead import compile_ahead
compile_ahead(json.loads(sys.argv[2]))"""
WAIT_S, _LOOK_S = 30.0, 0.01  # for another process's work: at most, and how often it is looked for
_FEWEST = 3  # functions: a process takes as long to start as to compile two
_HELPER = 0  # the byte that the one other process locks; a function's is another

_locks: dict[Path, int] = {}  # files, opened once: to close one would end all locks that this process has on it
_announced: dict[Any, None] = {}
_started: list[subprocess.Popen[bytes]] = []  # the last one; at most one runs
_is_helper: list[bool] = []  # this process


def lock_function(folder: Path | None, key: str, wait_s: float = 0.0) -> bool:
    """Have a function to oneself until `unlock_function`; False where another process has it for so long."""
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


def _lock(folder: Path | None, place: int) -> bool | None:
    """Whether a byte of the lock file beside the folder is this process's now; None where nothing can be locked."""
    if folder is None or fcntl is None:
        return None
    try:
        if folder not in _locks:
            _locks[folder] = os.open(folder.parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(_locks[folder], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return None
    return True


def announce(things: Iterable[Any]) -> None:
    """What will be asked for soon: functions, and operations of images, whose code is a linked function."""
    _announced.update(dict.fromkeys(things))


def queue_kernels(kernels: Iterable[Any]) -> None:
    """That these will be bound: the code of most is the function `_run` of their module."""
    found = (getattr(sys.modules[type(kernel).__module__], "_run", None) for kernel in kernels)
    announce(function for function in found if function is not None)


def announced() -> list[Any]:
    return [getattr(thing, "code", thing) for thing in _announced]


def _name_of(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def start_helper(function: Callable[..., Any], folder: Path | None, count: int) -> int:
    """Have another process compile what `function` and what was announced need, where there is a core for it and it
    would not start for too few.

    Gives how many processes compile.
    """
    if any(process.poll() is None for process in _started):
        return 2
    if _is_helper or folder is None or fcntl is None or not sys.executable or _core_count() < 2 or count < _FEWEST:
        return 1
    names, nowhere = [*map(_name_of, _announced), _name_of(function)], subprocess.DEVNULL
    command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), json.dumps(names)]
    try:
        _started[:] = [subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)]
    except OSError:  # no room for another process: then not
        return 1
    return 2


@atexit.register
def _end_helper() -> None:
    """What it has not done is done by who needs it."""
    for process in _started:
        process.kill()
        process.wait()


def _core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_together(functions: Sequence[LinkedFunction], goes_on: Callable[[], bool] = lambda: True) -> None:
    """Compile, or load, linked functions beside the processes that do the same.

    functions  each behind those that it needs
    goes_on    asked before each
    """
    left, last = _longest_way_first(functions), time.monotonic()
    while left and goes_on():
        is_alone = time.monotonic() > last + WAIT_S  # who has one for so long will not end
        made = next((function for function in left if function.try_make(is_alone)), None)
        if made is None:
            time.sleep(_LOOK_S)
        else:
            left.remove(made)
            last = time.monotonic()
            notice.finish_one()


def _longest_way_first(functions: Sequence[LinkedFunction]) -> list[LinkedFunction]:
    """By how much there is to compile until the last of those that wait for it is done, as far as sizes tell."""
    way: dict[LinkedFunction, int] = {}
    for function in reversed(functions):
        way[function] = function.size + max((way[user] for user in way if function in user.below), default=0)
    return sorted(functions, key=lambda function: -way[function])


def compile_ahead(names: Sequence[str]) -> None:
    """In the other process: the linked functions that these need."""
    from onchip.kernels.cpu.compiler import jit

    _is_helper.append(True)
    os.environ["ONCHIP_QUIET"] = "1"
    if not _lock(jit.cache_folder(), _HELPER):
        return  # one at a time is enough, whoever started it
    parent, things = os.getppid(), []
    for path in names:
        module, _, name = path.partition(":")
        if "." not in name:  # not one that stands in another
            things.append(getattr(importlib.import_module(module), name))
    needed = jit.all_linked_below([getattr(thing, "code", thing) for thing in things])
    make_together(needed, goes_on=lambda: os.getppid() == parent)
