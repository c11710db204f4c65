"""Files that appear whole or not at all, and limits for files that somebody else made."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from onchip.errors import FormatError, OutputError

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
    """Open a file for reading; a missing or unreadable one is a FormatError that says so."""
    source = Path(path)
    try:
        if source.is_dir():
            raise FormatError(f"cannot read {source}", got="a folder", expected="a file", hint="name a file in it")
        return source.open("rb")
    except OSError as error:
        raise FormatError(
            f"cannot read {source}", got=error.strerror or str(error), expected="a readable file",
            hint=f"look at what is there: ls {source.parent}",
        ) from None  # fmt: skip


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
