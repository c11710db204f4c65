"""Ctrl-C and SIGTERM: heard from the first moment to the last, said in one line, exit code 2.

This file loads nothing that Python has not loaded by itself: until its handlers are set, SIGTERM kills without a word.
So no contextlib, no threading and no signal, which need 10 ms, but the built-in module beneath the latter.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SAME_STOP_S = 1.0


class StoppedError(BaseException):
    """Ctrl-C or SIGTERM. Not a KeyboardInterrupt: the option parser turns that into exit code 130, and Python, if it
    passed through an exec(), kills the process with SIGINT at its very end, however well it was handled."""


class _Flag:
    _is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set


stopping = _Flag()  # set by the handler: Python drops what it raises in some corners, as in an import


class Stoppable:
    """In this block Ctrl-C and SIGTERM raise StoppedError, so that what is half-written is removed on the way out.

    is_program  the process ends after the block: a signal that comes then changes nothing any more. Else the handlers
                of before are set again.
    """

    def __init__(self, is_program: bool) -> None:
        self._is_program = is_program
        self._before: dict[int, Any] = {}
        self._last_raised = float("-inf")
        self._said = sys.unraisablehook

    def __enter__(self) -> None:
        stopping.clear()
        sys.unraisablehook = self._hide
        for number in (_signal.SIGINT, _signal.SIGTERM):
            if _signal.getsignal(number) is _signal.SIG_IGN:  # nohup and & in scripts: who ignores it means it
                continue
            try:
                self._before[number] = _signal.signal(number, self._stop)
            except ValueError:  # not in the main thread: only there may handlers be set
                return

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._said
        for number, handler in self._before.items():
            _signal.signal(number, _signal.SIG_IGN if self._is_program else handler)

    def _stop(self, *_: object) -> None:
        stopping.set()
        # Terminals and launchers send a signal twice and more: the second must not cut short the way out of the first.
        if time.monotonic() - self._last_raised > _SAME_STOP_S:
            self._last_raised = time.monotonic()
            raise StoppedError

    def _hide(self, unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not StoppedError:  # that one is known by its flag
            self._said(unraisable)
