"""Where values lie that need not all be kept at once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def first_places(uses: Mapping[Name, tuple[int, int]], sizes: Mapping[Name, int]) -> dict[Name, int]:
    """Of every value the first place where none lies that is of use at the same time.

    uses  by which step a value is used first, and by which last
    """
    places: dict[Name, int] = {}
    lying: list[Name] = []  # what may still be of use, in the order of its places
    for name in sorted(uses, key=lambda name: uses[name][0]):
        lying = [other for other in lying if uses[other][1] >= uses[name][0]]
        at, before = 0, 0
        while before < len(lying) and places[lying[before]] - at < sizes[name]:
            at = places[lying[before]] + sizes[lying[before]]
            before += 1
        places[name] = at
        lying.insert(before, name)
    return {name: places[name] for name in uses}
