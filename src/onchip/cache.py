"""What is kept on the disk for the next time: compiled kernels, measured rates, tables that were read.

Compiled code runs in the user's name. So the cache is a folder that nobody else can write to or replace, and an entry
is used only if the user wrote it and it is whole. Where nothing can be kept the work goes on without, and says so once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from pathlib import Path

from onchip.errors import OutputError
from onchip.files import atomic_write

_DIGEST_BYTES = hashlib.sha256().digest_size
# The folders in the cache, and what they hold; `data`, which a user fills, is none of them.
FOLDERS = {
    "numba": "compiled CPU kernels", "cubin": "compiled CUDA kernels", "rates": "measured rates of this CPU",
    "tables": "data sets in binary", "failed": "sources that did not compile",
}  # fmt: skip


def cache_dir() -> Path:
    """The cache folder that the user asks for: $ONCHIP_CACHE, else $XDG_CACHE_HOME/onchip, else ~/.cache/onchip."""
    return Path(os.environ.get("ONCHIP_CACHE") or _default_dir()).absolute()


def safe_cache_dir() -> Path | None:
    """The cache folder to use: the one asked for, or the user's default where others could write to that one.

    None where nothing can be kept. Says so if it is not the one asked for.
    """
    asked = cache_dir()
    try:
        return _make_safe(asked)
    except _UnsafeError as reason:
        with contextlib.suppress(_UnsafeError, OSError):
            default = _make_safe(_default_dir().absolute())
            say_once(f"cache: {default} is used instead of {asked}: {reason}")
            return default
        _say_not_kept(asked, str(reason))
    except OSError as error:
        _say_not_kept(asked, error.strerror or str(error))
    return None


def private_folder(name: str) -> Path | None:
    """A folder in the cache, of FOLDERS, that only the user can enter; None where there can be none, which is said."""
    assert name in FOLDERS
    root = safe_cache_dir()
    if root is None:
        return None
    folder = root / name
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not (stat.S_ISDIR(found.st_mode) and _is_mine(found)):
            _say_not_kept(folder, "it is a link, or belongs to somebody else")
            return None
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        _say_not_kept(root, error.strerror or str(error))
        return None
    return folder


def write_entry(folder: Path | None, key: str, content: bytes) -> None:
    """Keep `content` under a name in a private folder, if there is one. A full or read-only disk is said, no error."""
    if folder is None:
        return
    try:
        with atomic_write(folder / key) as file:
            file.write(_digest(key, content) + content)
        (folder / key).chmod(0o600)
    except (OutputError, OSError) as error:
        _say_not_kept(folder.parent, error.got if isinstance(error, OutputError) else error.strerror or str(error))


def read_entry(folder: Path | None, key: str) -> bytes | None:
    """What was kept, if it is whole and nobody else can have written it; the folder may once have been open to all.

    The digest covers the key: an entry that was renamed is refused.
    """
    if folder is None:
        return None
    # O_NONBLOCK: a pipe in its place would be waited for.
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    try:
        descriptor = os.open(folder / key, flags)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not (stat.S_ISREG(found.st_mode) and _is_mine(found)) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            kept = file.read()
    except OSError:
        return None
    digest, content = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
    return content if digest == _digest(key, content) else None


def kept_files() -> dict[str, list[Path]]:
    """What the cache has, by folder; nothing is made for it."""
    root = cache_dir()
    found = {}
    for name in FOLDERS:
        folder = root / name
        is_ours = folder.is_dir() and not folder.is_symlink()
        found[name] = [path for path in folder.iterdir() if path.is_file()] if is_ours else []
    return found


def clear_cache() -> int:
    """Remove all that is kept; how many files that were. Programs that run make again what they need."""
    files = [path for found in kept_files().values() for path in found]
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


# -- who can write there -------------------------------------------------------------------------------------


class _UnsafeError(Exception):
    """Somebody else could write what is read there."""


def _default_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onchip"


def _make_safe(root: Path) -> Path:
    """Make the folder if need be; _UnsafeError if others can write to it or replace it."""
    for folder in reversed((root, *root.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)  # mkdir(parents=True) would make them as open as the umask lets it
    if hasattr(os, "getuid"):
        _check_path(root)
        found = root.stat()
        if not _is_mine(found):
            raise _UnsafeError(f"{root} belongs to somebody else")
        if _others_can_write(found):
            raise _UnsafeError(f"others can write to {root}")
    return root


def _check_path(path: Path) -> None:
    """_UnsafeError if somebody else could put another folder in the place of this one, by any folder or link above."""
    trusted = (os.getuid(), os.stat("/").st_uid)  # whoever owns / can do anything: root, also where it has another name
    for folder in reversed((path, *path.parents)):
        found = folder.lstat()
        if found.st_uid not in trusted:
            raise _UnsafeError(f"{folder} belongs to somebody else")
        if stat.S_ISLNK(found.st_mode):
            _check_path(folder.parent / os.readlink(folder))
        elif _others_can_write(found) and not found.st_mode & stat.S_ISVTX:  # sticky: only owners rename, as in /tmp
            raise _UnsafeError(f"others can write to {folder}")


def _is_mine(found: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or found.st_uid == os.getuid()


def _others_can_write(found: os.stat_result) -> bool:
    by_group = found.st_mode & stat.S_IWGRP and not _is_group_of_one(found.st_gid)
    return bool(by_group or found.st_mode & stat.S_IWOTH)


def _is_group_of_one(gid: int) -> bool:
    """Whether it is the user's private group: where everybody has one, the umask lets it write."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


# -- what is said --------------------------------------------------------------------------------------------

_said: set[str] = set()


def say_compiling() -> None:
    """Once a process, before the first kernel that no cache has."""
    say_unless_quiet("onchip: compiling kernels for this machine, once (ONCHIP_QUIET=1: not said)", once="compiling")


def is_quiet() -> bool:
    """Whether $ONCHIP_QUIET is set, and not to 0."""
    return os.environ.get("ONCHIP_QUIET", "") not in ("", "0")


def say_unless_quiet(text: str, once: str = "") -> None:
    """Once a process, on stderr; nothing where $ONCHIP_QUIET is set.

    once  what it is about, where its text changes
    """
    if not is_quiet():
        say_once(text, once)


def _say_not_kept(folder: Path, reason: str) -> None:
    say_once(f"cache: nothing is kept for next time in {folder}: {reason}; set ONCHIP_CACHE to another folder")


def say_once(text: str, once: str = "") -> None:
    if (once or text) not in _said and sys.stderr is not None:
        _said.add(once or text)
        with contextlib.suppress(OSError):  # the disk of the log may be the full one
            print(text, file=sys.stderr)
