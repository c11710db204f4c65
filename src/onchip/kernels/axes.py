"""Reductions along axes as reductions along the middle axis of (outer, N, inner)."""

from __future__ import annotations

import math
from collections.abc import Sequence


def middle_of(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, int, int] | None:
    """An array of this shape as (outer, N, inner), N the elements along the axes; None if these are not adjacent.

    axes  sorted
    """
    sized = [axis for axis in axes if shape[axis] != 1] or [axes[0]]
    between = range(sized[0], sized[-1] + 1)
    if any(shape[axis] != 1 and axis not in axes for axis in between):
        return None
    return math.prod(shape[: sized[0]]), math.prod(shape[axis] for axis in between), math.prod(shape[sized[-1] + 1 :])


def axes_last(rank: int, axes: Sequence[int]) -> tuple[int, ...]:
    """All axes, these last."""
    return (*(axis for axis in range(rank) if axis not in axes), *axes)
