"""Formatting of tables, as text and HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from onchip.errors import printable

MAX_CELL = 400  # characters; a column is as wide as its longest cell


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns as wide as their cells; those in `right` are right-aligned.

    Cells are printable and of bounded length, whatever names they contain.
    """
    table = [[printable(cell, MAX_CELL) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[c]) for row in table) for c in range(len(head))]
    lines = []
    for row in table:
        sized = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(cell.rjust(w) if c in right else cell.ljust(w) for c, (cell, w) in sized).rstrip())
    return "\n".join(lines)


def fitted_columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int, right: Sequence[int] = ()
) -> str:  # fmt: skip
    """Like columns if that fits `width`; else a paragraph per row, beginning with its first cell, wrapped to that
    width.
    """
    text = columns(head, rows, right)
    if max(map(len, text.splitlines())) <= width:
        return text
    lines = []
    for first, *cells in rows:
        details = ", ".join(f"{name} {cell}".strip() for name, cell in zip(head[1:], cells, strict=True) if cell)
        lines.append(textwrap.fill(printable(f"{first}: {details}"), width, subsequent_indent="   "))
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Text as HTML, for notebooks."""
    import html  # imported here: slow, and only notebooks need it

    return html.escape(text)


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; escapes the cells."""
    titles = "".join(f"<th>{escaped(cell)}</th>" for cell in head)
    lines = ("".join(f"<td>{escaped(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def size_text(nbytes: int) -> str:
    """1.5 MiB."""
    unit, step = next(((u, s) for u, s in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if nbytes >= 1 << s), ("B", 0))
    return f"{nbytes / (1 << step):.{1 if step else 0}f} {unit}"


def rate_text(per_s: float, unit: str) -> str:
    """69.2 GB/s, 146 Tflop/s."""
    prefix, scale = ("T", 1e12) if per_s >= 999.5e9 else ("G", 1e9)
    return f"{per_s / scale:.3g} {prefix}{unit}/s"


def plural(count: int, what: str) -> str:
    """1 epoch, 2 epochs."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
