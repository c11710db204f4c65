"""Constants that estimates take from measurements, as data.

A table is a frozen dataclass, one per kernel. A field is a constant: its default is the value, the end of its name the
unit, and its metadata say what it means and where it comes from.
"""

from __future__ import annotations

from dataclasses import field
from typing import TypeVar

T = TypeVar("T")


def fitted(value: T, what: str, source: str) -> T:
    """A field of a table.

    what    its meaning, after its name and unit
    source  result files below benchmarks/results that hold its estimates, or what was measured, or "estimated"
    """
    return field(default_factory=lambda: value, metadata={"what": what, "source": source})
