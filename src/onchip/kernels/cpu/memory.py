"""Memory planning: values whose uses do not overlap share memory."""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np

from onchip.network.recipe import Array

Name = TypeVar("Name", bound=Hashable)


def first_fit_offsets(uses: Mapping[Name, tuple[int, int]], sizes: Mapping[Name, int]) -> dict[Name, int]:
    """The lowest offset of each value at which it overlaps none in use at the same time.

    uses  the first and the last step that uses a value
    """
    offsets: dict[Name, int] = {}
    free: list[tuple[int, float]] = [(0, math.inf)]  # free ranges, in order
    ends: list[tuple[int, int, int]] = []  # (last step, begin, end) of values: a heap
    for name in sorted(uses, key=lambda name: uses[name][0]):
        first, last = uses[name]
        while ends and ends[0][0] < first:
            _release(free, *heapq.heappop(ends)[1:])
        if not sizes[name]:
            offsets[name] = 0
            continue
        gap = next(i for i, (start, end) in enumerate(free) if end - start >= sizes[name])
        start, end = free[gap]
        offsets[name], stop = start, start + sizes[name]
        free[gap : gap + 1] = [(stop, end)] if stop < end else []
        heapq.heappush(ends, (last, start, stop))
    return {name: offsets[name] for name in uses}


def _release(free: list[tuple[int, float]], start: int, end: float) -> None:
    """Add a range to the free ones, in order, merged with its neighbours."""
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


def unset_memory(nbytes: int) -> Array:
    """Bytes of any value, aligned to a cache line."""
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]
