"""Floors against measured times: the fraction of the floor a run reaches, and what to do if a run beats it.

A CPU's floors use measured rates. Other load on the machine lowers the rates, which makes floors too high.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

MEASURED_AGAIN = 3  # times, at most
TOO_LOW = {"floor": "the measured time: rates too low"}  # the note of a row whose floor was beaten

Key = TypeVar("Key", bound=Hashable)


class Floor(NamedTuple):
    ms: float
    note: Mapping[str, str]  # TOO_LOW, or empty


def settle_floors(
    floors_ms: Callable[[], Mapping[Key, float]],
    fastest_ms: Mapping[Key, float],
    measure_again: Callable[[], object] | None = None,
) -> dict[Key, Floor]:
    """Floors that no run beats. A floor that stays beaten after new measurements becomes the fastest run, with a note.

    floors_ms      per job, from the device's current rates
    fastest_ms     the fastest run per job; a job without one beats nothing
    measure_again  measures the rates and keeps the better ones; None: the rates are not measured
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
    """Percent of the floor, at most 100."""
    return min(100.0, 100 * floor_ms / ms)
