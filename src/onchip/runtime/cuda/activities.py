"""What the GPUs of this process did, found by the id under which it was launched, and turned into spans."""

from __future__ import annotations

import atexit
import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from onchip.runtime.cuda.cupti import KERNEL, Activity, Cupti, CuptiError, load_cupti
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.spans import COPY, Span


class Node(NamedTuple):
    """A kernel or memset that a launch runs."""

    entry: str  # the kernel's name, as the compiler mangled it; "": a memset
    name: str
    group: int  # of the plan


class Launch(NamedTuple):
    """A chunk of a call: a graph launch, or launches one by one."""

    tag: int
    track: str
    rows: int
    nodes: Sequence[Node]  # in the plan's order

    def spans(self, activities: Iterable[tuple[Activity, str]], ahead_ns: int) -> list[Span] | None:
        """A span per node; None if the activity of a kernel is missing.

        activities  with the names of kernels
        ahead_ns    added to each time

        Groups begin in the plan's order, as do launches of the same kernel that wait for each other. So the n-th
        activity of a kernel is its n-th node. The driver may run a memset as a kernel of its own.
        """
        waiting: dict[str, deque[Node]] = {}
        for node in self.nodes:
            waiting.setdefault(node.entry, deque()).append(node)
        found = []
        for activity, entry in sorted(activities, key=lambda each: each[0].begin_ns):
            nodes = waiting.get(entry) or waiting.get("")
            if nodes and activity.begin_ns:
                _, name, group = nodes.popleft()
                times = activity.begin_ns + ahead_ns, activity.end_ns + ahead_ns
                found.append(Span(self.track, name, group, *times, self.rows))
        is_complete = not any(nodes for entry, nodes in waiting.items() if entry)
        return found if is_complete else None


class Copy(NamedTuple):
    """A copy between host and GPU."""

    tag: int
    track: str
    name: str
    nbytes: int

    def spans(self, activities: Iterable[tuple[Activity, str]], ahead_ns: int) -> list[Span] | None:
        """As a launch's."""
        found = [activity for activity, _ in activities if activity.begin_ns]
        if not found:
            return None
        begin, end = min(each.begin_ns for each in found), max(each.end_ns for each in found)
        return [Span(self.track, self.name, COPY, begin + ahead_ns, end + ahead_ns, 0, self.nbytes)]


class Activities:
    """Records what is launched under an id, for all plans that are recorded; CUPTI serves one user per process."""

    def __init__(self, cupti: Cupti) -> None:
        self._cupti, self._lock = cupti, threading.Lock()
        self._users, self._tags = 0, itertools.count(1)
        self._found: dict[int, list[tuple[Activity, str]]] = {}  # by id
        self._tag_of: dict[int, int] = {}  # by correlation
        self._recorded: weakref.WeakSet[Gpu] = weakref.WeakSet()  # those on which a memset was seen
        self.clock = f"CUPTI {cupti.version}"

    def begin(self, gpu: Gpu) -> None:
        """Another plan on this GPU is recorded from now on. CuptiError if CUPTI does not record there."""
        with self._lock:
            if not self._users:
                self._cupti.start()
                atexit.register(self._cupti.stop)  # CUPTI must not call Python when it has ended
            self._users += 1
        if gpu not in self._recorded:
            try:
                self._check(gpu)
            except BaseException:
                self.end()
                raise
            self._recorded.add(gpu)

    def end(self) -> None:
        """A plan is no longer recorded."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._cupti.stop()
                atexit.unregister(self._cupti.stop)
                self._found.clear()
                self._tag_of.clear()

    @property
    def nbytes(self) -> int:
        """Of records that have not been read."""
        return self._cupti.nbytes

    def push(self) -> int:
        """What this thread launches until `pop` has the returned id."""
        tag = next(self._tags)
        self._cupti.push(tag)
        return tag

    def pop(self) -> None:
        self._cupti.pop()

    @contextmanager
    def tagged(self) -> Iterator[int]:
        """What this thread launches inside has this id."""
        tag = self.push()
        try:
            yield tag
        finally:
            self.pop()

    def read(self) -> int:
        """Read the records of all work that is done; returns what to add to their times for time.perf_counter_ns."""
        with self._lock:
            activities, tags = self._cupti.read()
            self._tag_of |= tags
            for activity in activities:
                tag = self._tag_of.get(activity.correlation)
                if tag is not None:  # not another library's
                    name = self._cupti.name_of(activity) if activity.kind == KERNEL else ""
                    self._found.setdefault(tag, []).append((activity, name))
            return self._cupti.ahead_ns()

    def of(self, tag: int) -> Sequence[tuple[Activity, str]]:
        """What was launched under this id, as far as it was read, with the names of kernels."""
        return self._found.get(tag, ())

    def forget(self, tags: set[int]) -> None:
        """These are not asked for again."""
        with self._lock:
            for tag in tags:
                self._found.pop(tag, None)
            self._tag_of = {correlation: tag for correlation, tag in self._tag_of.items() if tag not in tags}

    def _check(self, gpu: Gpu) -> None:
        """Whether a memset has a record: under some virtual machines and tools there are none."""
        with gpu, gpu.relaxed():
            buffer = gpu.allocate(16)
            with self.tagged() as tag:
                gpu.clear(buffer.pointer, buffer.nbytes, gpu.stream)
            gpu.synchronise()
        self.read()
        is_seen = any(activity.begin_ns for activity, _ in self.of(tag))
        self.forget({tag})
        if not is_seen:
            raise CuptiError(f"{self.clock} does not record this GPU")


@functools.cache
def _activities() -> Activities:
    return Activities(load_cupti())


def begin_activities(gpu: Gpu) -> Activities:
    """This process's activities, recorded from now on until `end`. CuptiError says why they cannot be."""
    found = _activities()
    found.begin(gpu)
    return found
