"""Memory shared by the processes of one machine. It is anonymous, so it is freed when they end."""

from __future__ import annotations

import contextlib
import mmap
import os


def create(nbytes: int) -> tuple[str, mmap.mmap]:
    """New zeroed memory, and the path by which other processes of this user open it while this one lives.

    OSError if the system does not support it. Pages are allocated on first write.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("no memfd_create")
    fd = os.memfd_create("onchip-weights")  # stays open: the path refers to it
    os.ftruncate(fd, nbytes)
    return f"/proc/{os.getpid()}/fd/{fd}", _map(fd, nbytes)


def attach(path: str, nbytes: int) -> mmap.mmap:
    """The memory that another process created; OSError if it is not visible here."""
    fd = os.open(path, os.O_RDWR)
    try:
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def forget(path: str) -> None:
    """Close the path to other processes; existing mappings stay valid."""
    os.close(int(path.rpartition("/")[2]))


def _map(fd: int, nbytes: int) -> mmap.mmap:
    found = mmap.mmap(fd, nbytes)
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        found.madvise(mmap.MADV_HUGEPAGE)  # accesses are random
    return found
