"""How many calls compiled code runs before Python decides what to do with the next one."""

from __future__ import annotations

import threading
import time
from array import array

from onchip.kernels.cpu.threading.launches import QUOTA_FIELDS, QUOTA_MOST, QUOTA_ROWS, QUOTA_RUN, REFUSED_NS, SLOTS
from onchip.runtime.sampling import Sampling, Turn


class Quotas:
    """Lets compiled code count the calls that are skipped: to do so in Python takes as long as a small call."""

    def __init__(self, sampling: Sampling) -> None:
        self.words = array("q", [0] * (REFUSED_NS + 1))  # for run_launches
        self._sampling, self._counted, self._lock = sampling, [0] * SLOTS, threading.Lock()

    def begin_ns(self) -> int:
        """When compiled code refused the current call; now, if it did not."""
        refused, self.words[REFUSED_NS] = self.words[REFUSED_NS], 0
        return refused or time.perf_counter_ns()

    def turn(self, B: int) -> Turn:
        """What to do with the next call of B rows."""
        with self._lock:
            self._count(B % SLOTS)
        return self._sampling.turn(B)

    def grant(self, B: int) -> None:
        """Let the calls run that are to be skipped."""
        number = B % SLOTS
        slot, words = number * QUOTA_FIELDS, self.words
        with self._lock:
            self._count(number)
            if words[slot + QUOTA_ROWS] != B:
                words[slot + QUOTA_ROWS] = words[slot + QUOTA_MOST] = words[slot + QUOTA_RUN] = 0
                words[slot + QUOTA_ROWS], self._counted[number] = B, 0
            words[slot + QUOTA_MOST] = self._counted[number] + self._sampling.left(B)

    def count(self) -> None:
        """Report the calls that have run."""
        with self._lock:
            for number in range(SLOTS):
                self._count(number)

    def _count(self, number: int) -> None:
        slot = number * QUOTA_FIELDS
        run = self.words[slot + QUOTA_RUN]
        if run > self._counted[number]:
            self._sampling.skipped(self.words[slot + QUOTA_ROWS], run - self._counted[number])
            self._counted[number] = run
