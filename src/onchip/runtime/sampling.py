"""Which calls of an engine are recorded: few enough that recording takes less than LIMIT of the time of all calls."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum

LIMIT = 0.03  # of the time of all calls, for recording
AIM = 0.015  # of that time: costs vary, and are higher for rare calls
AFTER_NS = 20_000  # a recorded call also costs this: its record is read later, and later calls find cold caches
FIRST = 2  # calls that are recorded first and not compared: they compile what records, or build a graph
PAIRS = 5  # then recorded and plain calls alternate
KEPT = 9  # last times of each kind: the shortest are compared, as other load only makes calls longer
AGAIN = 16  # recorded calls before a plain one is timed again


class Turn(Enum):
    """What to do with a call."""

    RECORD = "record it, and time it"
    TIME = "time it as a plain call"
    SKIP = "a plain call"


def _last_times() -> deque[float]:
    return deque(maxlen=KEPT)


@dataclass
class _Batch:
    """Calls with one number of rows. Times are in ns."""

    first: int  # calls of FIRST to go
    recorded: deque[float] = field(default_factory=_last_times)
    plain: deque[float] = field(default_factory=_last_times)
    between: deque[float] = field(default_factory=_last_times)  # per skipped call: with the caller's own time
    untimed: int = 0  # recorded calls since a plain one was timed
    every: int = 1  # calls of which one is recorded
    left: int = 0  # calls to skip before the next recorded one
    skipped: int = 0  # since a call was recorded or timed
    end_ns: int = 0  # of that call

    def learn(self) -> None:
        """Choose `every`. Skipped calls are faster than timed ones: in a loop, caches are warm and a GPU has work."""
        plain = min(*self.plain, *self.between)
        cost = min(self.recorded) - plain + AFTER_NS
        self.every = max(1, math.ceil(cost / (AIM * max(1, plain))))


class Sampling:
    """Learns from the calls of an engine what it costs to record one, for each number of rows. Thread-safe."""

    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._unrecorded: Counter[int] = Counter()  # by rows: calls for which no recorded call stands yet
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Another plan records from now on: its first calls are not compared."""
        with self._lock:
            for batch in self._batches.values():
                batch.first = FIRST

    def turn(self, rows: int) -> Turn:
        """What to do with the next call. `skipped` or `took` follows, unless the call fails."""
        with self._lock:
            batch = self._batches.get(rows) or self._batches.setdefault(rows, _Batch(FIRST))
            if batch.first:
                return Turn.RECORD
            if batch.left:
                return Turn.SKIP
            return Turn.TIME if batch.untimed >= (1 if len(batch.plain) < PAIRS else AGAIN) else Turn.RECORD

    def left(self, rows: int) -> int:
        """How many of the next calls are skipped."""
        with self._lock:
            batch = self._batches[rows]
            return 0 if batch.first else batch.left

    def skipped(self, rows: int, count: int = 1) -> None:
        """So many calls were skipped."""
        with self._lock:
            batch = self._batches[rows]
            batch.left = max(0, batch.left - count)
            batch.skipped += count
            self._unrecorded[rows] += count

    def took(self, rows: int, turn: Turn, begin_ns: int, end_ns: int) -> None:
        """A call was recorded or timed."""
        with self._lock:
            batch = self._batches[rows]
            if batch.skipped:
                batch.between.append((begin_ns - batch.end_ns) / batch.skipped)
            batch.skipped, batch.end_ns = 0, end_ns
            if turn is Turn.TIME:
                self._unrecorded[rows] += 1
                batch.plain.append(end_ns - begin_ns)
                batch.untimed = 0
                if len(batch.plain) >= PAIRS:
                    batch.learn()
            elif batch.first:
                batch.first -= 1
            else:
                batch.recorded.append(end_ns - begin_ns)
                batch.untimed += 1
                batch.left = batch.every - 1

    def stands_for(self, rows: int) -> int:
        """How many calls one that was recorded stands for: itself, and those since the one before it."""
        with self._lock:
            return 1 + self._unrecorded.pop(rows, 0)

    def add_unrecorded(self, rows: int, count: int) -> None:
        """So many calls were not recorded."""
        with self._lock:
            self._unrecorded[rows] += count

    def take_unrecorded(self) -> Counter[int]:
        """By rows: calls since the last recorded one. From now on they are counted."""
        with self._lock:
            found, self._unrecorded = self._unrecorded, Counter()
            return found
