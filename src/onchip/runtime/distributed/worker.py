"""A thread that runs chunks while the main thread handles messages, progress and Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Worker(threading.Thread):
    """Starts its work at once. A daemon: a hanging one does not keep the process alive."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def raise_error(self) -> None:
        """Raise the exception of the work, if it failed."""
        if self._error is not None:
            raise self._error
