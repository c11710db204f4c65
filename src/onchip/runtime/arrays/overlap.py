"""Overlap checks: a kernel's outputs must not share memory with its inputs or each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from onchip.errors import ShapeError

T = TypeVar("T")


def is_apart(a: int, a_bytes: int, b: int, b_bytes: int) -> bool:
    """Whether the memory at a and the memory at b have no byte in common."""
    return a + a_bytes <= b or b + b_bytes <= a


def check_apart(outputs: Sequence[T], inputs: Iterable[T], shares: Callable[[T, T], bool]) -> None:
    """Raise ShapeError if an output shares memory with an input or another output.

    shares(a, b)  whether two arrays overlap: NumPy's `may_share_memory`, or the negation of `is_apart`
    """
    for i, output in enumerate(outputs):
        for other in (*outputs[i + 1 :], *inputs):
            if shares(output, other):
                raise ShapeError("out overlaps an input or another out", expected="separate memory for each")
