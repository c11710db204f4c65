"""Memory that processes of one machine have in common. It has no name in any folder, so it is gone when they are."""

from __future__ import annotations

import contextlib
import mmap
import os


def create(nbytes: int) -> tuple[str, mmap.mmap]:
    """New memory, zeros, and the path by which other processes of this user open it while this one lives.

    OSError where the system has no such memory. Pages are taken when they are written to.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("no memfd_create")
    fd = os.memfd_create("onchip-weights")  # stays open: the path leads to it
    os.ftruncate(fd, nbytes)
    return f"/proc/{os.getpid()}/fd/{fd}", _map(fd, nbytes)


def attach(path: str, nbytes: int) -> mmap.mmap:
    """The memory that another process created; OSError if it cannot be seen from here."""
    fd = os.open(path, os.O_RDWR)
    try:
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def forget(path: str) -> None:
    """Nobody will open it by this path any more; who has it keeps it."""
    os.close(int(path.rpartition("/")[2]))


def _map(fd: int, nbytes: int) -> mmap.mmap:
    found = mmap.mmap(fd, nbytes)
    with contextlib.suppress(AttributeError, OSError):  # of a system without large pages
        found.madvise(mmap.MADV_HUGEPAGE)  # rows are looked up all over it
    return found
