"""Calls that a few threads share with the one that waits for them: the host's copies."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

from onchip.runtime.cpu.backend import core_count

MOST_THREADS = 8  # with the one that waits: one core copies some 10 GB/s, a bus takes 55


class Work:
    """One call, made by the first thread that comes to it: one of the pool, or the one that waits for it.

    So nobody waits for a thread to wake up (some 30 us) while there is something to do. The call must not fail.
    """

    __slots__ = ("_arguments", "_done", "_function", "_taken")

    def __init__(self, function: Callable[..., object], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments
        self._taken, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def do(self) -> None:
        """Make the call, unless another thread does or did."""
        if self._taken.acquire(blocking=False):
            try:
                self._function(*self._arguments)
            finally:
                self._done.release()

    def wait(self) -> None:
        """Return when the call was made."""
        self.do()
        with self._done:
            pass

    def drop(self) -> None:
        """Return when the call was made or never will be."""
        if not self._taken.acquire(blocking=False):
            with self._done:
                pass


def offer(work: Work) -> None:
    """Let the pool's threads do it; whoever wants it done still has to wait for it."""
    if waiting := _pool():
        waiting.put(work)


@functools.cache
def _pool() -> queue.SimpleQueue[Work] | None:
    """What the pool's threads take from; None where there are none. To put costs 1 us here, a Future some 20."""
    count = min(MOST_THREADS, core_count()) - 1
    waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
    for i in range(count):
        threading.Thread(target=_serve, args=(waiting,), name=f"onchip-copy-{i}", daemon=True).start()
    return waiting if count else None


def _serve(waiting: queue.SimpleQueue[Work]) -> None:
    while True:
        waiting.get().do()  # no name for it: it would keep the arrays until the next one comes
