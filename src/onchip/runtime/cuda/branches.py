"""Which groups of a step must wait for which: those that share memory. Others are branches of its graph.

Gradients of weights are read by the update alone, so they run beside the gradients of the layers before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Range = tuple[str, int, int]  # begin and end; "" for addresses, else the name of an array of the caller's


@dataclass(frozen=True)
class Accesses:
    """The memory of a group."""

    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    weights: tuple[Range, ...] = ()  # which its kernels may read before the launch that they wait for has ended


@dataclass(frozen=True)
class Place:
    """Where a group is in a graph."""

    after: tuple[int, ...]  # the groups that it waits for: each earlier one that it shares memory with is before these
    overlaps: bool = True  # it may begin before the only one that it waits for has ended (LaunchConfig)


def in_sequence(count: int) -> list[Place]:
    return [Place((i - 1,) if i else ()) for i in range(count)]


def in_branches(groups: Sequence[Accesses]) -> list[Place]:
    """Sets of groups are ints, with bit i for group i."""
    places, before, ended = list[Place](), list[int](), list[int]()
    for i, group in enumerate(groups):
        after, known, writers = list[int](), 0, 0
        for j in reversed(range(i)):
            if _meet(group.weights, groups[j].writes):
                writers |= 1 << j
            if not known >> j & 1 and _conflict(group, groups[j]):
                after.append(j)
                known |= before[j] | 1 << j
        # A launch that overlaps with its predecessor begins when that one has begun, which may itself overlap.
        overlaps = len(after) == 1 and not writers & ~ended[after[0]]
        places.append(Place(tuple(after), overlaps))
        before.append(known)
        ended.append(ended[after[0]] if overlaps else known)
    return places


def ends_of(places: Sequence[Place]) -> Iterator[int]:
    """The groups that no other waits for."""
    waited = {earlier for place in places for earlier in place.after}
    return (i for i in range(len(places)) if i not in waited)


def _conflict(one: Accesses, other: Accesses) -> bool:
    return (
        _meet((*one.reads, *one.weights, *one.writes), other.writes)
        or _meet(one.writes, other.reads)
        or _meet(one.writes, other.weights)
    )


def _meet(some: Sequence[Range], others: Sequence[Range]) -> bool:
    return any(a == c and begin < stop and start < end for a, begin, end in some for c, start, stop in others)
