"""How tables are printed, wherever one is."""

from __future__ import annotations

from collections.abc import Sequence


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns wide enough for their cells; those in `right` are aligned to the right."""
    widths = [max(len(row[c]) for row in [head, *rows]) for c in range(len(head))]
    lines = []
    for row in [head, *rows]:
        sized = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(cell.rjust(w) if c in right else cell.ljust(w) for c, (cell, w) in sized).rstrip())
    return "\n".join(lines)
