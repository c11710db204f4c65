"""Files that appear whole or not at all, and limits for files that somebody else made."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from onchip.errors import FormatError, InputError, OutputError

# A header, a JSON block or a protobuf that describes a *small* network is far below this.
MAX_HEADER_BYTES = 64 << 20


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a binary file that becomes `path` when the block ends well, and vanishes when it does not.

    The temporary file lives in the same folder (a rename across file systems is a copy), is flushed to
    the disk, then renamed over `path`. On any exception, Ctrl-C included, `path` is as it was before.
    """
    target = Path(path)
    try:
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise write_error(target, error) from None
    try:
        with os.fdopen(fd, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes 0600; the user expects what open() gives
        os.replace(name, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise write_error(target, error) from None
        raise


def write_error(target: Path, error: OSError) -> OutputError:
    reason = error.strerror or str(error)
    hint = "choose another folder"
    if error.errno == errno.ENOSPC:
        hint = "free some space, or choose a folder on another disk"
    elif error.errno == errno.ENOENT:
        hint = f"create the folder first: mkdir -p {target.parent}"
    return OutputError(f"cannot write {target}", got=reason, expected="a writable folder with room", hint=hint)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise OutputError now if `path` cannot be created, rather than after an hour of work."""
    target = Path(path)
    if target.is_dir():
        raise OutputError(
            f"cannot write {target}", got="a folder", expected="a file name", hint=f"a name in it, as {target}/out"
        )
    try:
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise write_error(target, error) from None
    os.close(fd)
    os.unlink(name)


def open_input(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file for reading; a missing or unreadable one is a FormatError that says so.

    So is what is no regular file: a pipe may never begin, a device may never end, and neither can be mapped.
    """
    source = Path(path)
    try:
        mode = source.stat().st_mode
        if stat.S_ISDIR(mode):
            raise FormatError(f"cannot read {source}", got="a folder", expected="a file", hint="name a file in it")
        if not stat.S_ISREG(mode):
            got, hint = "a device, a pipe or a socket", "write what it gives into a file first"
            raise FormatError(f"cannot read {source}", got=got, expected="a file", hint=hint)
        return source.open("rb")
    except FormatError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte in it
        raise FormatError(
            f"cannot read {source}", got=getattr(error, "strerror", "") or str(error), expected="a readable file",
            hint=f"look at what is there: ls {source.parent}",
        ) from None  # fmt: skip


def free_memory() -> int:
    """Bytes that this process may still take, as far as the system tells; else more than anybody asks for."""
    free = 1 << 60
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):  # a container may have less than the machine; "max": no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(0, free)


def check_memory(needed: int, what: str) -> None:
    """InputError if this many bytes are not free: without it, the system may end the process without a word."""
    if needed > (free := free_memory()):
        raise InputError(
            f"{what} does not fit into memory", got=f"{needed:,} B needed",
            expected=f"at most {free:,} B, which are free", hint="something smaller, or a machine with more memory",
        )  # fmt: skip


def cache_dir() -> Path:
    """The user's cache folder for onchip: $ONCHIP_CACHE, else $XDG_CACHE_HOME/onchip, else ~/.cache/onchip."""
    if given := os.environ.get("ONCHIP_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onchip"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
