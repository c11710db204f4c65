"""How tables are printed, wherever one is."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.errors import printable

MAX_CELL = 400  # characters; a cell is as long as the longest of its column


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns wide enough for their cells; those in `right` are aligned to the right.

    Cells are printable and of bounded length, whatever names stand in them.
    """
    table = [[printable(cell, MAX_CELL) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[c]) for row in table) for c in range(len(head))]
    lines = []
    for row in table:
        sized = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(cell.rjust(w) if c in right else cell.ljust(w) for c, (cell, w) in sized).rstrip())
    return "\n".join(lines)
