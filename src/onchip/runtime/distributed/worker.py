"""A thread that runs chunks, while the main one talks: to other ranks, to the user, to the terminal's Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Worker(threading.Thread):
    """Does some work at once. A daemon: one that hangs does not keep the process from ending."""

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
        """What the work failed with, if it did."""
        if self._error is not None:
            raise self._error
