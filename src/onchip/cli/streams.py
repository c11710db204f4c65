"""The program's standard streams, usable even if they are closed, full, or a broken pipe.

Failing to write data to stdout is an error. Messages that cannot be written to stderr are dropped.
"""

from __future__ import annotations

import io
import os
import sys


class StdoutError(OSError):
    """Data could not be written to stdout."""


class _Stdout(io.FileIO):
    failed = False

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.failed:  # already reported; Python flushes the rest again at exit
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self.failed = True
            raise StdoutError(error.errno, error.strerror) from None


class _Stderr(io.FileIO):
    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return super().write(data) or len(data)  # None: a non-blocking terminal that is full
        except OSError:
            return len(data)


def open_streams() -> None:
    """Make stdin, stdout and stderr usable streams.

    A closed one becomes /dev/null: otherwise the next opened file would get its descriptor, and output of a library
    would go into that file. For stdout, /dev/null is opened read-only, so that writes fail as on a closed stream.
    """
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flags), True)  # the lowest free descriptor: fd
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - stays open
    sys.stdout = _text(_Stdout(1, "w", closefd=False), sys.stdout)
    sys.stderr = _text(_Stderr(2, "w", closefd=False), sys.stderr)


def _text(raw: io.FileIO, previous: object) -> io.TextIOWrapper:
    """A text stream to `raw` with the encoding and buffering of the previous one, if any."""
    if not isinstance(previous, io.TextIOWrapper):
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    by_line = previous.line_buffering or previous.write_through
    return io.TextIOWrapper(io.BufferedWriter(raw), previous.encoding, previous.errors, line_buffering=by_line)
