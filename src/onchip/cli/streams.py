"""The program's standard streams, in whatever state it is started: closed, full, or with nobody at the other end.

Data that cannot be written to stdout is an error. Talk that cannot be written to stderr is dropped: the work counts.
"""

from __future__ import annotations

import io
import os
import sys


class StdoutError(OSError):
    """Data could not be written to stdout."""


class _Data(io.FileIO):
    failed = False

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.failed:  # that was said; Python writes what is left once more when it ends
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self.failed = True
            raise StdoutError(error.errno, error.strerror) from None


class _Talk(io.FileIO):
    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return super().write(data) or len(data)  # None: a terminal that takes no more just now
        except OSError:
            return len(data)


def open_streams() -> None:
    """Make stdin, stdout and stderr streams that can be used, whatever they are.

    Each that is closed becomes /dev/null: else the next file that is opened would have its number, and what a library
    prints would end up in it. For stdout it is opened to read only, so that data is refused as by a closed one.
    """
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flags), True)  # the lowest number that is free: fd
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - stays open
    sys.stdout = _text(_Data(1, "w", closefd=False), sys.stdout)
    sys.stderr = _text(_Talk(2, "w", closefd=False), sys.stderr)


def _text(raw: io.FileIO, before: object) -> io.TextIOWrapper:
    """A text stream to `raw`, encoded and flushed as the one before, where there was one."""
    if not isinstance(before, io.TextIOWrapper):
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    by_line = before.line_buffering or before.write_through
    return io.TextIOWrapper(io.BufferedWriter(raw), before.encoding, before.errors, line_buffering=by_line)
