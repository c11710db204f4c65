"""The floor beside a time that was measured: how near a run comes, and what to do where one beats it.

A CPU's floors are made of rates that were measured. Other work on the machine makes them too low, and floors too high.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

MEASURED_AGAIN = 3  # times at most
TOO_LOW = {"floor": "the time itself: rates too low"}  # what a row says of a floor that was beaten

Key = TypeVar("Key", bound=Hashable)


class Floor(NamedTuple):
    ms: float
    note: Mapping[str, str]  # TOO_LOW, or nothing


def settle_floors(
    floors_ms: Callable[[], Mapping[Key, float]],
    fastest_ms: Mapping[Key, float],
    measure_again: Callable[[], object] | None = None,
) -> dict[Key, Floor]:
    """Floors that no run beats. One that is beaten whatever is measured ends at the fastest run, with a note.

    floors_ms      by job, of the device's rates as they are known by now
    fastest_ms     the fastest run of each job; a job without one beats nothing
    measure_again  measures the rates and keeps them if they are better; None: they are no measured ones
    """

    def is_beaten(floors: Mapping[Key, float]) -> bool:
        return any(fastest_ms.get(key, floor) < floor for key, floor in floors.items())

    found, left = floors_ms(), MEASURED_AGAIN
    while measure_again is not None and left > 0 and is_beaten(found):
        measure_again()
        found, left = floors_ms(), left - 1
    settled = {}
    for key, floor in found.items():
        least = min(floor, fastest_ms.get(key, floor))
        settled[key] = Floor(least, TOO_LOW if least < floor else {})
    return settled


def floor_percent(floor_ms: float, ms: float) -> float:
    """Never above 100: a floor that was beaten is none."""
    return min(100.0, 100 * floor_ms / ms)
