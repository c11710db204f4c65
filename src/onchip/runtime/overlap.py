"""Whether pieces of memory lie across each other: kernels write where nobody else reads or writes."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.errors import ShapeError

Span = tuple[int, int]  # where it begins, and its bytes


def is_apart(a: Span, b: Span) -> bool:
    return a[0] + a[1] <= b[0] or b[0] + b[1] <= a[0]


def check_apart(outputs: Sequence[Span], inputs: Sequence[Span]) -> None:
    """ShapeError where an output shares memory with an input or another output."""
    for i, made in enumerate(outputs):
        if not all(is_apart(made, other) for other in (*outputs[i + 1 :], *inputs)):
            raise ShapeError("out overlaps an input or another out", expected="memory of its own for each")
