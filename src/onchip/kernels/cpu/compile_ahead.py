"""Compiling on a second core: a process that compiles what the first will ask for next, into the cache that both read.

Idea    LLVM and Numba hold Python's lock, so threads would take turns. The first miss of the cache starts one other
        process. It goes through the same tree of functions from the other end, and both look into the cache before
        they compile; a lock on the function's key keeps them, and any other process with the same cache, from doing
        the same work twice.
Floor   Half of what one process takes, and a second for the other one to start.
Limits  Functions whose argument types are known without a call: linked ones, and those of OFTEN. The rest is the first
        process's. Without a second core, a place to keep code, or locks there is no other process.
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
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from onchip.kernels.cpu.compile_ahead import compile_ahead
compile_ahead(json.loads(sys.argv[2]))"""
_WAIT_S, _LOOK_S = 30.0, 0.02  # for another process's work: at most, and how often it is looked for
_HELPER = 0  # the byte that the one other process locks; a function's is another
OFTEN = ("launches.run_one", "launches.run_launches", "threads._serve", "threads._wake_up")

_locks: dict[Path, int] = {}  # files, opened once: to close one would end all locks that this process has on it
_announced: dict[Any, None] = {}
_started: list[subprocess.Popen[bytes] | None] = []  # at most one


def lock_function(folder: Path | None, key: str) -> bool:
    """Have a function to oneself until `unlock_function`; False where another process has it for too long."""
    place = 1 + int(key[:12], 16)
    end = time.monotonic() + _WAIT_S
    while (locked := _lock(folder, place)) is False and time.monotonic() < end:
        time.sleep(_LOOK_S)
    return bool(locked)


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


def announce_kernels(kernels: Iterable[Any]) -> None:
    """That these will be bound: the code of most is the function `_run` of their module."""
    found = (getattr(sys.modules[type(kernel).__module__], "_run", None) for kernel in kernels)
    announce(function for function in found if function is not None)


def announced() -> list[Any]:
    return [getattr(thing, "code", thing) for thing in _announced]


def _name_of(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def start_helper(function: Callable[..., Any], folder: Path | None) -> None:
    """Have another process compile what `function` and what was announced need. Once; where there is a core for it."""
    if _started or folder is None or fcntl is None or not sys.executable or _core_count() < 2:
        return
    _started.append(None)
    names, nowhere = [*map(_name_of, _announced), _name_of(function)], subprocess.DEVNULL
    command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), json.dumps(names)]
    with contextlib.suppress(OSError):  # no room for another process: then not
        _started[0] = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)


@atexit.register
def _end_helper() -> None:
    """What it has not done is done by who needs it."""
    for process in _started:
        if process is not None:
            process.kill()
            process.wait()


def often() -> list[Any]:
    """The functions that every network needs."""
    names = (path.partition(".") for path in OFTEN)
    return [getattr(importlib.import_module(f"onchip.kernels.cpu.{file}"), name) for file, _, name in names]


def _core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_ahead(names: Sequence[str]) -> None:
    """In the other process: the linked functions that these need, from the last to the first, then OFTEN."""
    from onchip.kernels.cpu import jit

    _started.append(None)  # it has none of its own
    os.environ["ONCHIP_QUIET"] = "1"
    if not _lock(jit.cache_folder(), _HELPER):
        return  # one at a time is enough, whoever started it
    parent, needed = os.getppid(), dict[jit.LinkedFunction, None]()
    for path in names:
        module, _, name = path.partition(":")
        if "." not in name:  # not one that stands in another
            thing = getattr(importlib.import_module(module), name)
            needed |= dict.fromkeys(jit.linked_below(getattr(thing, "code", thing)))
            if path == names[-1]:
                needed.pop(thing, None)  # the first process is at it
    for task in (*reversed(needed), *often()):
        if os.getppid() != parent:  # it has ended
            return
        task.link()
