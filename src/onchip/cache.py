"""The on-disk cache: compiled kernels, measured rates, parsed tables.

Compiled code runs with the user's permissions. So the cache is a folder that no other user can write to or replace, and
an entry is used only if the user wrote it and its digest matches. Without a usable folder, nothing is cached and a
message is printed once.
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
# The folders of the cache and their contents. `data`, which the user fills, is not one of them.
FOLDERS = {
    "numba": "compiled CPU kernels", "cubin": "compiled CUDA kernels", "rates": "measured rates of this CPU",
    "tables": "data sets in binary", "failed": "sources that did not compile",
}  # fmt: skip


def cache_dir() -> Path:
    """The requested cache folder: $ONCHIP_CACHE, else $XDG_CACHE_HOME/onchip, else ~/.cache/onchip."""
    return Path(os.environ.get("ONCHIP_CACHE") or _default_dir()).absolute()


def safe_cache_dir() -> Path | None:
    """The cache folder to use: the requested one, or the user's default if others could write to the requested one.

    None if neither is usable. Prints a message if it is not the requested one.
    """
    requested = cache_dir()
    try:
        return _make_safe(requested)
    except _UnsafeError as reason:
        with contextlib.suppress(_UnsafeError, OSError):
            default = _make_safe(_default_dir().absolute())
            print_once(f"cache: using {default} instead of {requested}: {reason}")
            return default
        _print_not_cached(requested, str(reason))
    except OSError as error:
        _print_not_cached(requested, error.strerror or str(error))
    return None


def private_folder(name: str) -> Path | None:
    """A folder of FOLDERS in the cache with mode 0700; None, with a printed message, if it cannot be created."""
    assert name in FOLDERS
    root = safe_cache_dir()
    if root is None:
        return None
    folder = root / name
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not (stat.S_ISDIR(found.st_mode) and _is_owned(found)):
            _print_not_cached(folder, "it is a link, or belongs to another user")
            return None
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        _print_not_cached(root, error.strerror or str(error))
        return None
    return folder


def write_entry(folder: Path | None, key: str, content: bytes) -> None:
    """Store `content` under `key` in a private folder, if there is one. A full or read-only disk prints a message."""
    if folder is None:
        return
    try:
        with atomic_write(folder / key) as file:
            file.write(_digest(key, content) + content)
        (folder / key).chmod(0o600)
    except (OutputError, OSError) as error:
        _print_not_cached(folder.parent, error.got if isinstance(error, OutputError) else error.strerror or str(error))


def read_entry(folder: Path | None, key: str) -> bytes | None:
    """The stored content, if it is complete and no other user can have written it; else None.

    The digest covers the key: a renamed entry is refused.
    """
    if folder is None:
        return None
    # O_NONBLOCK: opening a pipe would block.
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    try:
        descriptor = os.open(folder / key, flags)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not (stat.S_ISREG(found.st_mode) and _is_owned(found)) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            stored = file.read()
    except OSError:
        return None
    digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    return content if digest == _digest(key, content) else None


def cached_files() -> dict[str, list[Path]]:
    """The files in the cache, by folder; creates nothing."""
    root = cache_dir()
    found = {}
    for name in FOLDERS:
        folder = root / name
        is_ours = folder.is_dir() and not folder.is_symlink()
        found[name] = [path for path in folder.iterdir() if path.is_file()] if is_ours else []
    return found


def clear_cache() -> int:
    """Remove every cached file and return their number. Running programs recreate what they need."""
    files = [path for found in cached_files().values() for path in found]
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


# -- permissions ---------------------------------------------------------------------------------------------


class _UnsafeError(Exception):
    """Another user could write to this folder."""


def _default_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onchip"


def _make_safe(root: Path) -> Path:
    """Create the folder if needed; raise _UnsafeError if others can write to it or replace it."""
    for folder in reversed((root, *root.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)  # mkdir(parents=True) would create parents with the umask's mode
    if hasattr(os, "getuid"):
        _check_path(root)
        found = root.stat()
        if not _is_owned(found):
            raise _UnsafeError(f"{root} belongs to another user")
        if _others_can_write(found):
            raise _UnsafeError(f"others can write to {root}")
    return root


def _check_path(path: Path) -> None:
    """Raise _UnsafeError if another user could replace this folder through any parent folder or link."""
    trusted = (os.getuid(), os.stat("/").st_uid)  # the owner of / is root, also where it has another uid
    for folder in reversed((path, *path.parents)):
        found = folder.lstat()
        if found.st_uid not in trusted:
            raise _UnsafeError(f"{folder} belongs to another user")
        if stat.S_ISLNK(found.st_mode):
            _check_path(folder.parent / os.readlink(folder))
        elif _others_can_write(found) and not found.st_mode & stat.S_ISVTX:  # sticky: only owners rename, as in /tmp
            raise _UnsafeError(f"others can write to {folder}")


def _is_owned(found: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or found.st_uid == os.getuid()


def _others_can_write(found: os.stat_result) -> bool:
    by_group = found.st_mode & stat.S_IWGRP and not _is_group_of_one(found.st_gid)
    return bool(by_group or found.st_mode & stat.S_IWOTH)


def _is_group_of_one(gid: int) -> bool:
    """Whether it is the user's private group. Where every user has one, the umask leaves it writable."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


# -- messages ------------------------------------------------------------------------------------------------

printed: set[str] = set()


def print_compiling() -> None:
    """Print once per process, before the first kernel that is not cached."""
    print_unless_quiet("onchip: compiling kernels for this machine, once (ONCHIP_QUIET=1 hides this)", once="compiling")


def is_quiet() -> bool:
    """Whether $ONCHIP_QUIET is set, and not to 0."""
    return os.environ.get("ONCHIP_QUIET", "") not in ("", "0")


def print_unless_quiet(text: str, once: str = "") -> None:
    """Print on stderr once per process; nothing if $ONCHIP_QUIET is set.

    once  identifies the message, where its text varies
    """
    if not is_quiet():
        print_once(text, once)


def _print_not_cached(folder: Path, reason: str) -> None:
    print_once(f"cache: nothing is cached in {folder}: {reason}; set ONCHIP_CACHE to another folder")


def print_once(text: str, once: str = "") -> None:
    if (once or text) not in printed and sys.stderr is not None:
        printed.add(once or text)
        with contextlib.suppress(OSError):  # stderr may be a file on the full disk
            print(text, file=sys.stderr)
