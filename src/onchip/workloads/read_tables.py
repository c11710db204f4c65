"""Rows and labels of a user's tables, and what training learns of them: texts, missing values, columns to drop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onchip.errors import InputError, ShapeError, printable
from onchip.formats.tables.csv_rows import read_csv
from onchip.formats.tables.encoding import MISSING, encode, is_plain, learn_columns, rows_with_missing
from onchip.formats.tables.raw_table import RawTable, Wanted, concatenate, shown_names
from onchip.formats.tables.read_table import read_table, reordered
from onchip.formats.tables.table_files import table_files
from onchip.network.meaning import Column
from onchip.network.names import known_name
from onchip.network.recipe import Array
from onchip.workloads.table_cache import CachedTable, read_cached


def parse_names(text: str | None) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))


def read_raw(data: str, wanted: Wanted) -> tuple[RawTable, tuple[str, ...]]:
    """All rows of the tables that `data` names, and notes."""
    files = table_files(data)
    while True:
        tables = [read_table(file, wanted) for file in files]
        for file, table in zip(files, tables, strict=True):
            if set(table.names) != set(tables[0].names):
                raise ShapeError(
                    f"{file.path} has other columns", got=shown_names(table.names),
                    expected=f"{shown_names(tables[0].names)}, as in {files[0].path}", hint="tables with equal columns",
                )  # fmt: skip
        text = frozenset(name for table in tables for name in table.text_columns)
        if all(table.text_columns == text for table in tables):
            break
        wanted = replace(wanted, text=wanted.text | text)  # text in one file, so it is text in all
    names = tables[0].names
    tables = [table if table.names == names else reordered(table, names) for table in tables]
    notes = (f"{printable(data)}: {len(files):,} files",) if len(files) > 1 else ()
    return concatenate(tables), notes


def read_raw_cached(data: str, wanted: Wanted) -> tuple[RawTable, list[str]]:
    """`read_raw`; CSV files are converted once and cached."""
    files = table_files(data)
    if any(file.is_arrow or file.keys for file in files):
        raw, found = read_raw(data, wanted)
        return raw, list(found)
    notes = list[str]()

    def read() -> CachedTable:
        raw, found = read_raw(data, wanted)
        notes.extend(found)
        return CachedTable.of(raw)

    table, note = read_cached([file.path for file in files], repr(wanted), read)
    return table.raw(), [*notes, *([note] if note else [])]


@dataclass(frozen=True, eq=False)
class Encoding:
    """How a table becomes rows of a network."""

    columns: tuple[Column, ...]
    is_plain: bool  # all columns are numbers, and nothing is missing
    has_header: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of the values of a row; () for a plain table without a header."""
        if self.is_plain and not self.has_header:
            return ()
        return tuple(name for column in self.columns for name in column.features)

    @property
    def table(self) -> tuple[Column, ...]:
        """What to store with the network: () if the names say it all."""
        return () if self.is_plain else self.columns

    def apply(self, raw: RawTable, what: str) -> tuple[Array, list[str]]:
        """Rows (n, D) float32, and notes."""
        if self.is_plain and is_plain(raw, self.columns):
            return raw.cells, []
        encoded = encode(raw, self.columns)
        return encoded.x, [f"{what}: {note}" for note in encoded.notes]


def check_missing(missing: str | None) -> str:
    return known_name(missing or "error", MISSING, "--missing", "--missing mean")


def rows_to_keep(raw: RawTable) -> tuple[Array, list[str]]:
    """Indices of the rows without missing values, and a note."""
    bad = rows_with_missing(raw)
    if bad.all():
        raise InputError(
            "every row has a missing value", got=f"{len(bad):,} rows", expected="complete rows",
            hint="--missing mean, or --drop the columns with missing values",
        )  # fmt: skip
    count = int(bad.sum())
    return np.flatnonzero(~bad), [f"missing: {count:,} of {len(bad):,} rows are dropped"] if count else []


def learn_encoding(data: str, raw: RawTable, rows: Array, wanted: Wanted, missing: str) -> tuple[Encoding, list[str]]:
    """What the training rows, by index, say of the columns, and notes."""
    try:
        columns, notes = learn_columns(raw, rows, missing)
    except InputError as error:
        raise _located(data, error, raw, wanted) from None
    return Encoding(columns, is_plain(raw, columns), raw.has_header), list(notes)


def _located(data: str, error: InputError, raw: RawTable, wanted: Wanted) -> InputError:
    """The same error with the file; of a cell in a CSV that is not a number, with its line."""
    files = table_files(data)
    name = next((name for name in raw.names if error.what.startswith(f"column '{name}'")), None)
    if name is not None and "not a number" in error.what and not files[0].is_arrow and not files[0].keys:
        for file in files:
            try:
                read_csv(file.path, replace(wanted, columns=(Column(name, fill=0.0),), drop=(), text=frozenset()))
            except InputError as found:
                hint = f"{found.hint}, or --drop {name}"
                return type(found)(found.what, got=found.got, expected=found.expected, hint=hint)
    return type(error)(f"{Path(data)}: {error.what}", got=error.got, expected=error.expected, hint=error.hint)
