"""Where values lie that need not all be kept at once."""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np

from onchip.network.recipe import Array

Name = TypeVar("Name", bound=Hashable)


def first_places(uses: Mapping[Name, tuple[int, int]], sizes: Mapping[Name, int]) -> dict[Name, int]:
    """Of every value the first place where none lies that is of use at the same time.

    uses  by which step a value is used first, and by which last
    """
    places: dict[Name, int] = {}
    free: list[tuple[int, float]] = [(0, math.inf)]  # from where to where nothing lies, in order
    ends: list[tuple[int, int, int]] = []  # by when values are used last, and where they lie: a heap
    for name in sorted(uses, key=lambda name: uses[name][0]):
        first, last = uses[name]
        while ends and ends[0][0] < first:
            _release(free, *heapq.heappop(ends)[1:])
        if not sizes[name]:
            places[name] = 0
            continue
        gap = next(i for i, (start, end) in enumerate(free) if end - start >= sizes[name])
        start, end = free[gap]
        places[name], behind = start, start + sizes[name]
        free[gap : gap + 1] = [(behind, end)] if behind < end else []
        heapq.heappush(ends, (last, start, behind))
    return {name: places[name] for name in uses}


def _release(free: list[tuple[int, float]], start: int, end: float) -> None:
    """Add a gap to those that are free, in order; gaps that touch are one."""
    i = bisect.bisect(free, (start, end))
    if i < len(free) and free[i][0] == end:
        end = free.pop(i)[1]
    if i and free[i - 1][1] == start:
        i -= 1
        start = free.pop(i)[0]
    free.insert(i, (start, end))


def aligned_zeros(size: int, dtype: type = np.float32) -> Array:
    """A flat array aligned to a 64-byte cache line, so that no vector straddles two lines."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.zeros(size * itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * itemsize].view(dtype)
