"""Debug mode of a process: it waits after each launch, and an error names the kernel that failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from onchip.runtime.cuda.launches import Call, Graph, GraphBuilder, LaunchContext

_is_on = False
_one_at_a_time = threading.Lock()  # a fault breaks the whole context: only one kernel may be running when it shows


def check_every_launch() -> None:
    """Check every launch that this process prepares from now on; there is no way back. Call it before the first one:
    a kernel that runs unchecked may fail while a checked one is waited for, and then the wrong one is named.
    """
    global _is_on
    _is_on = True


def checks_launches() -> bool:
    return _is_on


class CheckedCall(Call):
    """A launch that waits for its kernel, except while the stream is captured."""

    def launch(self, stream: int) -> None:
        gpu = self._gpu
        with _one_at_a_time, gpu:
            super().launch(stream)
            if not gpu.is_capturing(stream):
                gpu.synchronise(stream, kernel=self.name)


class LaunchList(Graph):
    """Launches in place of a graph, which would report an error without the kernel's name."""

    def __init__(self, gpu: LaunchContext, launches: Sequence[Callable[[int], object]], keeps: object) -> None:
        """launches  called with the stream, in order"""
        self._gpu, self._launches, self._keeps = gpu, launches, keeps

    def launch(self, stream: int | None = None) -> None:
        with self._gpu:
            for launch in self._launches:
                launch(self._gpu.stream if stream is None else stream)

    def update_of(self, node: Any, launch: Call) -> Callable[[], None]:
        return lambda: None  # a call reads its current arguments


class LaunchListBuilder(GraphBuilder):
    """Builds a LaunchList. The order in which launches are added respects their dependencies."""

    def __init__(self, gpu: LaunchContext) -> None:
        self._gpu = gpu
        self._launches: list[Callable[[int], object]] = []

    def add(self, launch: Call, after: Sequence[int], overlaps: bool = True) -> int:
        return self._append(launch.launch)

    def clear(self, pointer: int, nbytes: int, after: Sequence[int]) -> int:
        return self._append(lambda stream: self._gpu.clear(pointer, nbytes, stream))

    def finish(self, keeps: object) -> Graph:
        return LaunchList(self._gpu, self._launches, keeps)

    def _append(self, launch: Callable[[int], object]) -> int:
        self._launches.append(launch)
        return len(self._launches) - 1
