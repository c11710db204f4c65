"""The first lines of a CSV table: its separator, header and label column; and where a wrong cell is.

The separator is a comma, a semicolon or a tab. The first line is a header if none of its cells, except the label, is a
number. Columns are identified by name, so the names of those read must be unique.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.formats.tables.raw_table import POSITIONS, Wanted, pick_columns, shown_names
from onchip.network.reading import show

MAX_LINE = 4 << 20  # characters: a million cells
SAMPLE = 20  # lines that decide the separator


@dataclass(frozen=True)
class Layout:
    """Table layout from the first lines."""

    names: tuple[str, ...]  # of the header; else "column 1", ...
    has_header: bool
    label: int | None
    taken: tuple[int, ...]  # column indices, in output order
    separator: str = ","

    @property
    def width(self) -> int:
        return len(self.names)

    @property
    def skip(self) -> int:
        """Lines before the first row."""
        return int(self.has_header)


def open_text(source: Path) -> TextIO:
    if source.suffix.lower() == ".gz":
        return io.TextIOWrapper(gzip.open(source), encoding="utf-8-sig", newline="")
    return source.open(encoding="utf-8-sig", newline="")


def lines_of(file: TextIO) -> Iterator[str]:
    """The lines of a file; raises if one exceeds MAX_LINE."""
    for number in itertools.count(1):
        if not (line := file.readline(MAX_LINE)):
            return
        if len(line) == MAX_LINE:
            got, expected = f"{MAX_LINE:,} characters or more", "a line of separated cells"
            raise FormatError(f"line {number} is too long", got=got, expected=expected)
        yield line


def find_layout(source: Path, wanted: Wanted) -> Layout:
    """The layout of a table, restricted to the wanted columns."""
    with open_text(source) as file:
        sample = list(itertools.islice(lines_of(file), SAMPLE)) or [""]
    text = sample[0]
    separator = _separator(sample)
    try:
        first = [cell.strip() for cell in next(csv.reader([text], delimiter=separator), [])]
    except csv.Error as error:
        raise FormatError("line 1 is not CSV", got=str(error), expected="comma-separated cells") from None
    if not any(first):
        raise FormatError("the table is empty", got="an empty first line", expected="comma-separated cells")
    label = _label_column(first, wanted.label)
    features = [cell for i, cell in enumerate(first) if i != label]
    if not features:
        hint, got = "add a column of numbers", f"one column: {show(first[0])}"
        raise FormatError("no column besides the label", got=got, expected="two or more", hint=hint)
    is_named = wanted.label is not None and wanted.label not in POSITIONS
    # Not is_number: a first line of NaNs is a row, which is then rejected, not a header.
    has_header = is_named or not any(is_float(_plain(cell, separator)) for cell in features)
    if has_header:
        return Layout(tuple(first), True, label, pick_columns(first, wanted, label, "line 1"), separator)
    numbers = itertools.count(1)
    names = tuple("label" if i == label else f"column {next(numbers)}" for i in range(len(first)))
    if wanted.columns and wanted.columns[0].name not in names:  # trained on a table with a header
        count = len(first) - (label is not None)
        if len(wanted.columns) != count:
            expected = f"{len(wanted.columns)}: {', '.join(column.name for column in wanted.columns)}"
            raise FormatError("the table has no header, and other columns", got=f"{count} columns", expected=expected)
        taken = tuple(i for i in range(len(first)) if i != label)
        named = dict(zip(taken, (column.name for column in wanted.columns), strict=True))
        return Layout(tuple(named.get(i, name) for i, name in enumerate(names)), False, label, taken, separator)
    return Layout(names, False, label, pick_columns(names, wanted, label, "the table"), separator)


def _separator(sample: list[str]) -> str:
    """The tab or semicolon that is in the first line, and equally often in most others; else the comma."""
    for sign in "\t;":
        try:
            counts = [len(row) for row in csv.reader(sample, delimiter=sign) if row]
        except csv.Error:
            continue
        if counts and counts[0] > 1 and 2 * counts.count(counts[0]) > len(counts):
            return sign
    return ","


def _plain(cell: str, separator: str) -> str:
    """A number with a decimal comma, as tables separated by semicolons have, with a point."""
    return cell.replace(",", ".") if separator == ";" else cell


def _label_column(first: list[str], label: str | None) -> int | None:
    if label is None:
        return None
    if label in POSITIONS:
        return POSITIONS[label] % len(first)
    if first.count(label) != 1:
        what = "several columns have this name" if label in first else "no column has this name"
        expected = f"first, last, or one of the first line: {shown_names(first)}"
        raise InputError(what, got=label, expected=expected, hint="last")
    return first.index(label)


def is_float(cell: str) -> bool:
    """A number, finite or not."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def is_number(cell: str, separator: str = ",") -> bool:
    """Whether it is finite in float32, and spelled as NumPy reads it."""
    try:
        with np.errstate(over="ignore"):
            return "_" not in cell and bool(np.isfinite(np.float32(float(_plain(cell, separator)))))
    except ValueError:
        return False


# -- errors ------------------------------------------------------------------------------------------------


def first_error(
    source: Path, layout: Layout, is_wrong: Callable[[int, str], tuple[str, str, str] | None]
) -> FormatError:
    """Find the first wrong cell. Slow, cell by cell; runs only for bad files.

    is_wrong  (column index, cell) -> what is wrong, got, expected
    """
    reason = "cells that cannot be read"
    with open_text(source) as file:
        reader = csv.reader(lines_of(file), delimiter=layout.separator)
        try:
            for row in reader:
                if not row or reader.line_num <= layout.skip:
                    continue
                if len(row) != layout.width:
                    expected = f"{layout.width}, as in the first line"
                    return _error(reader.line_num, layout, -1, "wrong number of cells", f"{len(row)}", expected)
                for i, cell in enumerate(row):
                    if found := is_wrong(i, cell):
                        return _error(reader.line_num, layout, i, *found)
        except csv.Error as error:
            reason = f"line {reader.line_num}: {error}"
    return FormatError("not a numeric table", got=reason, expected="separated numbers")


def _error(line: int, layout: Layout, column: int, what: str, got: str, expected: str) -> FormatError:
    where, hint = f"line {line}", f"fix or remove line {line}"
    if column >= 0:
        where += f", column {column + 1}"
        if layout.has_header:
            where += f" ({show(layout.names[column])[1:-1]})"
    return FormatError(f"{where}: {what}", got=got, expected=expected, hint=hint)
