"""Ctrl-C and SIGTERM: handled from start to exit, reported in one line, exit code 2.

This module imports only what Python has already loaded: until its handlers are set, SIGTERM kills silently. So it uses
the built-in _signal, not contextlib, threading or signal, which take 10 ms to import.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

REPEAT_S = 1.0


class StoppedError(BaseException):
    """Ctrl-C or SIGTERM. Not a KeyboardInterrupt: the option parser maps that to exit code 130, and if it passed
    through an exec(), Python kills the process with SIGINT at exit even if it was handled.
    """


class _Flag:
    _is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set


stopping = _Flag()  # set by the handler: Python drops exceptions raised in some contexts, e.g. during an import


class Stoppable:
    """Within this block Ctrl-C and SIGTERM raise StoppedError, so that partial files are removed.

    is_program  the process ends after the block, so later signals are ignored. Else the previous handlers are restored.
    """

    def __init__(self, is_program: bool) -> None:
        self._is_program = is_program
        self._previous: dict[int, Any] = {}
        self._last_raised = float("-inf")
        self._default_hook = sys.unraisablehook

    def __enter__(self) -> None:
        stopping.clear()
        sys.unraisablehook = self._hide
        for signal in (_signal.SIGINT, _signal.SIGTERM):
            if _signal.getsignal(signal) is _signal.SIG_IGN:  # nohup and & in scripts: keep ignoring it
                continue
            try:
                self._previous[signal] = _signal.signal(signal, self._stop)
            except ValueError:  # not the main thread, the only one that may set handlers
                return

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._default_hook
        for signal, handler in self._previous.items():
            _signal.signal(signal, _signal.SIG_IGN if self._is_program else handler)

    def _stop(self, *_: object) -> None:
        stopping.set()
        # Terminals and launchers may repeat a signal: the second must not interrupt the cleanup of the first.
        if time.monotonic() - self._last_raised > REPEAT_S:
            self._last_raised = time.monotonic()
            raise StoppedError

    def _hide(self, unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not StoppedError:  # the flag reports that one
            self._default_hook(unraisable)
