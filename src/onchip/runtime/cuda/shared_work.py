"""Calls (host copies) that run on a small thread pool or on the thread that waits for them."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

from onchip.runtime.cpu.backend import core_count

MAX_THREADS = 8  # with the waiting thread; a core copies 10 GB/s, the bus 55


class Work:
    """One call, run by the first available thread: a pool thread or the waiting thread.

    The waiting thread does not wait for a pool thread to wake up (some 30 us). The call must not raise.
    """

    __slots__ = ("_arguments", "_done", "_function", "_taken")

    def __init__(self, function: Callable[..., object], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments
        self._taken, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def do(self) -> None:
        """Run the call, unless another thread runs or ran it."""
        if self._taken.acquire(blocking=False):
            try:
                self._function(*self._arguments)
            finally:
                self._done.release()

    def wait(self) -> None:
        """Return when the call is done."""
        self.do()
        with self._done:
            pass

    def drop(self) -> None:
        """Return when the call is done or will never run."""
        if not self._taken.acquire(blocking=False):
            with self._done:
                pass


def offer(work: Work) -> None:
    """Queue it for the pool; the caller must still call `wait` or `drop`."""
    if waiting := pool():
        waiting.put(work)


@functools.cache
def pool() -> queue.SimpleQueue[Work] | None:
    """The pool's queue; None if there are no threads. A put costs 1 us, a Future some 20."""
    count = min(MAX_THREADS, core_count()) - 1
    waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
    for i in range(count):
        threading.Thread(target=_serve, args=(waiting,), name=f"onchip-copy-{i}", daemon=True).start()
    return waiting if count else None


def _serve(waiting: queue.SimpleQueue[Work]) -> None:
    while True:
        waiting.get().do()  # not bound to a name, which would keep the arrays alive until the next call
