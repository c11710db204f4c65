"""Atomic file writes, and checks for input files from elsewhere."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from onchip.errors import FormatError, InputError, OutputError

try:
    import fcntl
except ImportError:  # Windows: no locks, and temporary files of a killed writer are not removed
    fcntl = None  # type: ignore[assignment]

StrPath = str | os.PathLike[str]

# The header, JSON block or protobuf of a *small* network is far below this.
MAX_HEADER_BYTES = 64 << 20


@contextlib.contextmanager
def atomic_write(path: StrPath) -> Iterator[IO[bytes]]:
    """Yield a binary file that becomes `path` if the block succeeds and is deleted if it raises.

    The temporary file is in the same folder (a rename across file systems is a copy). It is synced to disk, then
    renamed over `path`. On any exception, including Ctrl-C, `path` is unchanged. A symbolic link is replaced; its
    target stays. Temporary files of killed writers are removed.
    """
    target = Path(path)
    _check_is_file(target)
    _remove_stale(target)
    try:
        file, name = _make_temporary(target)
    except OSError as error:
        raise write_error(target, error) from None
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())  # mkstemp creates 0600; users expect the mode that open() creates
            os.replace(name, target)  # before the file is closed, which releases its lock
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise write_error(target, error) from None
        raise


def _check_is_file(target: Path) -> None:
    """Raise OutputError for an existing path that is not a regular file; a rename would destroy /dev/null."""
    try:
        mode = target.stat().st_mode
    except OSError:  # it does not exist; other problems surface when it is written
        return
    if not stat.S_ISREG(mode):
        got = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        hint = f"a file in it, such as {target}/out" if stat.S_ISDIR(mode) else "the name of a file"
        raise OutputError(f"cannot write {target}", got=got, expected="a file name", hint=hint)


# A writer locks its temporary file until the rename, and the system releases the locks of a process that dies. So a
# temporary file that can be locked has no live writer.


def _make_temporary(target: Path) -> tuple[IO[bytes], str]:
    while True:
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        file = os.fdopen(fd, "w+b")
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks: leftovers are not removed there either
                fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return file, name
        file.close()  # another writer removed it as a leftover before it was locked


def _remove_stale(target: Path) -> None:
    """Remove the temporary files of killed writers of `target`; those of live writers stay."""
    if fcntl is None:
        return
    pattern = re.compile(re.escape(f".{target.name}.") + r"[a-z0-9_]{8}\.tmp")  # the names that mkstemp chooses
    with contextlib.suppress(OSError):  # a folder that cannot be listed
        for stale in [target.parent / name for name in os.listdir(target.parent) if pattern.fullmatch(name)]:
            with contextlib.suppress(OSError), stale.open("r+b") as file:  # a lock on NFS needs write permission
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stale.unlink()


# -- files that persist between runs -------------------------------------------------------------------------

# Their names are predictable: anyone who can write to the folder may have put something else there.


def open_owned(path: Path, create: bool = True) -> io.FileIO:
    """Open a file that a later run continues, for reading and writing; `create` it if it does not exist.

    Raise OutputError unless it is a regular file that the user owns, with one name. Writing through a link would
    overwrite its target, opening a pipe would block, and another user could change the contents.
    """
    # O_NONBLOCK: opening must not block before the file type is known.
    flags = os.O_RDWR | (os.O_CREAT if create else 0)
    flags |= sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    try:
        file = io.FileIO(os.open(path, flags, 0o666), "r+")
        try:
            got = _why_not_own(os.fstat(file.fileno()), path)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        got = "a symbolic link" if path.is_symlink() else ""
        if not got:
            raise write_error(path, error) from None
    else:
        if not got:
            return file
        file.close()
    expected, hint = "a regular file of yours without hard links, or none", f"another output, or remove it: rm {path}"
    raise OutputError(f"cannot write {path}", got=got, expected=expected, hint=hint)


def _why_not_own(found: os.stat_result, path: Path) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "a device or a pipe"
    if found.st_nlink > 1:
        return f"a file with {found.st_nlink} names (hard links)"
    return "" if found.st_uid == new_owner(path.parent) else "a file of another user"


def new_owner(folder: Path) -> int:
    """The owner of a new file in the folder; on some network file systems it differs from the user's id."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid


def open_locked(path: Path) -> io.FileIO | None:
    """open_owned with an exclusive lock that lasts until the file is closed; None if another process holds it."""
    while True:
        file = open_owned(path)
        if not _lock(file):
            file.close()
            return None
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
                return file
        file.close()  # the previous holder has just removed or renamed it


def _lock(file: io.FileIO) -> bool:
    """False if another process holds the lock."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def write_error(target: Path, error: OSError) -> OutputError:
    reason = error.strerror or str(error)
    hint = "choose another folder"
    if error.errno == errno.ENOSPC:
        hint = "free some space, or choose a folder on another disk"
    elif error.errno == errno.ENOENT:
        hint = f"create the folder first: mkdir -p {target.parent}"
    return OutputError(f"cannot write {target}", got=reason, expected="a writable folder with free space", hint=hint)


def check_writable(path: StrPath) -> None:
    """Raise OutputError now if `path` cannot be created, rather than after an hour of work."""
    target = Path(path)
    _check_is_file(target)
    try:
        file, name = _make_temporary(target)
    except OSError as error:
        raise write_error(target, error) from None
    with file:
        os.unlink(name)


def check_outputs(reads: Mapping[str, StrPath | None], writes: Mapping[str, StrPath | None]) -> None:
    """Raise InputError if an output file is also an input or another output: one of the two would be lost.

    Keys are the names that users see, such as "--log"; a value of None is skipped. Paths are compared by file
    identity, so links and case-insensitive spellings of the same file are found.
    """
    named: dict[object, str] = {}
    for fd, stream in ((1, "standard output"), (2, "standard error")):
        with contextlib.suppress(OSError):  # closed
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode):
                named[found.st_dev, found.st_ino] = stream
    named |= {_identity(path): name for name, path in reads.items() if path is not None}
    for name, path in writes.items():
        if path is None:
            continue
        other = named.setdefault(_identity(path), name)
        if other != name:
            raise InputError(
                f"{name} would overwrite {other}", got=f"{path}, the same file for both",
                expected="a different file for each output", hint=f"another name for {name}",
            )  # fmt: skip


def _identity(path: StrPath) -> object:
    """Equal for two names of the same file, which need not exist yet."""
    try:
        found = os.stat(path)
        return found.st_dev, found.st_ino
    except OSError:
        return os.path.realpath(path)


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def open_input(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file for reading; raise FormatError if it is missing or unreadable.

    Also raise FormatError for anything but a regular file (a pipe may block, a device may never end, and neither can
    be mapped) and for the pointer that Git LFS leaves instead of a file it did not fetch.
    """
    source = Path(path)
    try:
        mode = source.stat().st_mode
        if stat.S_ISDIR(mode):
            raise FormatError(f"cannot read {source}", got="a folder", expected="a file", hint="name a file in it")
        if not stat.S_ISREG(mode):
            got, hint = "a device, a pipe or a socket", "write its contents to a file first"
            raise FormatError(f"cannot read {source}", got=got, expected="a file", hint=hint)
        file = source.open("rb")
        if os.pread(file.fileno(), len(_LFS_POINTER), 0) == _LFS_POINTER:
            file.close()
            raise FormatError(
                f"{source} is a Git LFS pointer, not the file", got="a few lines of text",
                expected="the file itself",
                hint=(f"git lfs install && git lfs pull --include '{source.name}', in its repository",
                      "or download it: from Hugging Face by a link with /resolve/, from GitHub by 'Download raw file'"),
            )  # fmt: skip
        return file
    except FormatError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that contains a zero byte
        raise FormatError(
            f"cannot read {source}", got=getattr(error, "strerror", "") or str(error), expected="a readable file",
            hint=f"list the folder: ls {source.parent}",
        ) from None  # fmt: skip


def free_memory() -> int:
    """Bytes that this process can still allocate, as far as the system reports it; else a very large number."""
    free = 1 << 60
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):  # a container may have less than the machine; "max": no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(0, free)


def check_memory(needed: int, what: str, hint: str = "something smaller, or a machine with more memory") -> None:
    """Raise InputError if this many bytes are not free: otherwise the system may kill the process without a message."""
    if needed > (free := free_memory()):
        raise InputError(
            f"{what} does not fit into memory", got=f"{needed:,} B needed",
            expected=f"at most {free:,} B, which are free", hint=hint,
        )  # fmt: skip


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
