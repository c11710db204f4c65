"""CSV tables: one row per line, comma-separated numbers, optionally a label column.

The first line is a header if none of its cells, except the label, is a number. Cells may be in double quotes. Columns
are identified by name, so the names of those read must be unique.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.files import open_input
from onchip.network.names import did_you_mean
from onchip.network.reading import naming_file, show
from onchip.network.recipe import Array

POSITIONS = {"first": 0, "last": -1}  # label columns given by position
MAX_LINE = 4 << 20  # characters: a million cells
_SHOWN_NAMES = 12


@dataclass(frozen=True, eq=False)
class CsvRows:
    values: Array  # (n, columns without the label) float32, finite
    labels: Array | None  # (n,) str as in the file, or float32 if numbers were requested


@dataclass(frozen=True)
class _Layout:
    """Table layout from the first line."""

    header: tuple[str, ...]
    skip: int  # lines before the first row
    width: int
    label: int | None
    taken: tuple[int, ...]  # column indices, in output order

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for i, name in enumerate(self.header) if i != self.label)


def csv_columns(path: str | os.PathLike[str], label: str | None = None) -> tuple[str, ...]:
    """Column names from the header, without the label; empty if there is no header."""
    source = Path(path)
    with open_input(source), naming_file(source):
        return _pick(_layout(source, label), ()).names


def read_csv(
    path: str | os.PathLike[str], label: str | None = None, words: bool = True, columns: Sequence[str] = ()
) -> CsvRows:
    """Read all rows of a table; a FormatError gives line and column.

    label    the label column: "first", "last" or its name in the header; None: there is none
    words    labels may be any non-empty text; else they are numbers too
    columns  if there is a header: only these, in this order; others may hold anything. Not together with a label
    """
    source = Path(path)
    with open_input(source), naming_file(source):
        try:
            layout = _pick(_layout(source, label), columns)
            found: list[str] | None = [] if words and layout.label is not None else None
            cells = _parse(source, layout, found)
        except UnicodeDecodeError as error:
            got, hint = f"byte {error.object[error.start]:02x}", "save it as UTF-8"
            raise FormatError("not UTF-8 text", got=got, expected="a table as text", hint=hint) from None
    labels: Array | None = None
    if layout.label is not None:
        labels = cells[:, layout.label].copy() if found is None else np.array(found)
        cells = np.delete(cells, layout.label, axis=1)
    return CsvRows(np.ascontiguousarray(cells), labels)


def _pick(layout: _Layout, columns: Sequence[str]) -> _Layout:
    """The layout restricted to some columns, by their unique names in the header; default: all."""
    if not layout.header:
        return layout
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(layout.header):
        positions.setdefault(name, []).append(position)
    if several := [name for name in columns or layout.header if len(positions.get(name, ())) > 1]:
        at = " and ".join(str(position + 1) for position in positions[several[0]][:2])
        raise FormatError(
            f"two columns are called {show(several[0])}", got=f"columns {at} of line 1",
            expected="unique names", hint="rename or remove one of them",
        )  # fmt: skip
    if not columns:
        return layout
    if len(set(columns)) < len(columns):
        name = next(name for name, count in Counter(columns).items() if count > 1)
        raise FormatError(
            f"the network has two columns called {show(name)}", got=f"one column {show(name)}",
            expected="unique names", hint="train it again on a table with unique column names",
        )  # fmt: skip
    if missing := [name for name in columns if name not in positions]:
        shown = ", ".join(layout.header[:_SHOWN_NAMES]) + (", ..." if len(layout.header) > _SHOWN_NAMES else "")
        hint = did_you_mean(missing[0], layout.header) or "a table with the columns that the network was trained on"
        raise FormatError(f"no column '{missing[0]}'", got=shown, expected=", ".join(columns), hint=hint)
    return replace(layout, taken=tuple(positions[name][0] for name in columns))


def _open_text(source: Path) -> TextIO:
    return source.open(encoding="utf-8-sig", newline="")


def _lines(file: TextIO) -> Iterator[str]:
    """The lines of a file; raises if one exceeds MAX_LINE."""
    for number in itertools.count(1):
        if not (line := file.readline(MAX_LINE)):
            return
        if len(line) == MAX_LINE:
            got, expected = f"{MAX_LINE:,} characters or more", "a line of comma-separated cells"
            raise FormatError(f"line {number} is too long", got=got, expected=expected)
        yield line


def _parse(source: Path, layout: _Layout, words: list[str] | None) -> Array:
    """Parse every cell as float32; label cells are appended to `words`, if given, and read as 0."""

    def take(cell: str) -> float:
        assert words is not None
        words.append(cell.strip())
        return 0.0

    with _open_text(source) as file:
        if all(line.isspace() for line in itertools.islice(_lines(file), layout.skip, None)):
            raise FormatError("the table has no rows", got="only a header", expected="one line per row")
    try:
        with _open_text(source) as file, np.errstate(over="ignore"):
            cells: Array = np.loadtxt(
                _lines(file), np.float32, comments=None, delimiter=",", skiprows=layout.skip, ndmin=2, quotechar='"',
                usecols=layout.taken if layout.taken != tuple(range(layout.width)) else None,
                converters=None if words is None or layout.label is None else {layout.label: take}, encoding=None,
            )  # fmt: skip
    except (UnicodeDecodeError, FormatError):
        raise
    except ValueError as error:
        raise _first_error(source, layout, words is not None, str(error)) from None
    # Rows may agree with each other but not with the header.
    if cells.shape[1] != len(layout.taken) or not np.isfinite(cells).all() or (words is not None and "" in words):
        raise _first_error(source, layout, words is not None, "a cell that is not finite")
    return cells


# -- first line --------------------------------------------------------------------------------------------


def _layout(source: Path, label: str | None) -> _Layout:
    with _open_text(source) as file:
        text = next(_lines(file), "")
    try:
        first = [cell.strip() for cell in next(csv.reader([text]), [])]
    except csv.Error as error:
        raise FormatError("line 1 is not CSV", got=str(error), expected="comma-separated cells") from None
    if not any(first):
        raise FormatError("the table is empty", got="an empty first line", expected="comma-separated cells")
    at = _label_column(first, label)
    features = [cell for i, cell in enumerate(first) if i != at]
    if not features:
        hint = "separate the cells by commas" if any(sign in text for sign in ";\t") else "add a column of numbers"
        got = f"one column: {show(first[0])}"
        raise FormatError("no column besides the label", got=got, expected="two or more", hint=hint)
    named = label is not None and label not in POSITIONS
    # Not _is_number: a first line of NaNs is a row, which is then rejected, not a header.
    is_header = named or not any(is_float(cell) for cell in features)
    return _Layout(tuple(first) if is_header else (), int(is_header), len(first), at, tuple(range(len(first))))


def _label_column(first: list[str], label: str | None) -> int | None:
    if label is None:
        return None
    if label in POSITIONS:
        return POSITIONS[label] % len(first)
    if first.count(label) != 1:
        what = "several columns have this name" if label in first else "no column has this name"
        shown = ", ".join(first[:_SHOWN_NAMES]) + (", ..." if len(first) > _SHOWN_NAMES else "")
        raise InputError(what, got=label, expected=f"first, last, or one of the first line: {shown}", hint="last")
    return first.index(label)


def is_float(cell: str) -> bool:
    """A number, finite or not."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_number(cell: str) -> bool:
    """Whether loadtxt accepts it and it is finite in float32."""
    try:
        with np.errstate(over="ignore"):
            return "_" not in cell and bool(np.isfinite(np.float32(float(cell))))
    except ValueError:
        return False


# -- errors ------------------------------------------------------------------------------------------------


def _first_error(source: Path, layout: _Layout, words: bool, reason: str) -> FormatError:
    """Find the first wrong cell. Slow, cell by cell; runs only for bad files."""
    taken = set(layout.taken)
    with _open_text(source) as file:
        reader = csv.reader(_lines(file))
        try:
            for row in reader:
                if row and reader.line_num > layout.skip and (found := _wrong_cell(row, layout, taken, words)):
                    return _error(reader.line_num, layout, *found)
        except csv.Error as error:
            reason = f"line {reader.line_num}: {error}"
    return FormatError("not a numeric table", got=reason, expected="comma-separated numbers")


def _wrong_cell(row: list[str], layout: _Layout, taken: set[int], words: bool) -> tuple[int, str, str, str] | None:
    """Column, problem, got, expected."""
    if len(row) != layout.width:
        return -1, "wrong number of cells", f"{len(row)}", f"{layout.width}, as in the first line"
    for i, cell in enumerate(row):
        if words and i == layout.label:
            if not cell.strip():
                return i, "no label", "an empty cell", "text or a number"
        elif i in taken and not _is_number(cell):
            return i, "not a number", show(cell) if cell.strip() else "an empty cell", "a finite float32"
    return None


def _error(line: int, layout: _Layout, column: int, what: str, got: str, expected: str) -> FormatError:
    where = f"line {line}"
    if column >= 0:
        where += f", column {column + 1}" + (f" ({show(layout.header[column])[1:-1]})" if layout.header else "")
    return FormatError(f"{where}: {what}", got=got, expected=expected, hint=f"fix or remove line {line}")
