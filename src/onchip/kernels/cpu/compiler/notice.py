"""The progress message while kernels are compiled: their number and the estimated time. A bar on a terminal, else one
line; nothing if $ONCHIP_QUIET is set."""

from __future__ import annotations

import contextlib
import sys
import time

from onchip.cache import is_quiet, print_unless_quiet

_FIRST_S, _EACH_S = 1.5, 0.6  # to load Numba, and per function: estimates
_BAR = 20  # characters


class Notice:
    """Counts functions to compile, and compiled ones."""

    def __init__(self) -> None:
        self.total, self.done, self.began, self.each_s = 0, 0, 0.0, _EACH_S

    def expect(self, count: int, processes: int) -> None:
        """`count` more functions are to be compiled, by this many processes."""
        if not self.total:
            self.began = time.monotonic()
        self.total += count
        self.each_s = _EACH_S / processes
        if not _is_terminal():
            seconds = _FIRST_S + self.each_s * count
            print_unless_quiet(
                f"onchip: compiling {_kernels(count)} for this machine, once; about {seconds:.0f} s "
                "(ONCHIP_QUIET=1 hides this)",
                once="compiling",
            )
        self._draw()

    def finish_one(self) -> None:
        self.done += 1
        self._draw()

    def _draw(self) -> None:
        """Draw the bar, or clear it when all are compiled."""
        if not _is_terminal() or is_quiet():
            return
        total, done = max(self.total, self.done), self.done
        filled, left_s = _BAR * done // total, self.each_s * (total - done)
        if done:
            left_s = (time.monotonic() - self.began) / done * (total - done)
        text = f"compiling {_kernels(total)}, once: {'#' * filled:.<{_BAR}} {done} done, about {left_s:.0f} s left"
        with contextlib.suppress(OSError):
            sys.stderr.write("\r\x1b[K" + ("" if done >= total else text))
            sys.stderr.flush()


def _kernels(count: int) -> str:
    return f"{count} kernel{'' if count == 1 else 's'}"


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


notice = Notice()
