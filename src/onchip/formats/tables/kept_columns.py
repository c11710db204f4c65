"""Columns of the input tables that are written next to the results, such as ids: read again when the output is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onchip.errors import InputError
from onchip.formats.tables.arrow_file import load_pyarrow, open_arrow
from onchip.formats.tables.csv_layout import find_layout
from onchip.formats.tables.csv_rows import read_texts
from onchip.formats.tables.raw_table import Wanted, shown_names
from onchip.formats.tables.table_files import TableFile, table_files
from onchip.network.names import did_you_mean
from onchip.network.reading import naming_file


@dataclass(frozen=True)
class KeptColumns:
    """Some columns of tables, by name. `open` reads them from the first row on."""

    data: str
    names: tuple[str, ...]

    def check(self) -> None:
        """InputError unless every file has these columns."""
        for file in table_files(self.data):
            found = column_names(file)
            if unknown := [name for name in self.names if name not in found]:
                hint = did_you_mean(unknown[0], found) or f"--keep {found[0]}"
                expected = shown_names(found)
                raise InputError(
                    f"{file.path}: no column '{unknown[0]}' to keep", got=unknown[0], expected=expected, hint=hint
                )

    def open(self) -> KeptReader:
        return KeptReader(self._blocks())

    def types(self) -> list[Any]:
        """Of pyarrow, one per column; those of a CSV are text."""
        pyarrow, file = load_pyarrow("Parquet"), table_files(self.data)[0]
        if not file.is_arrow:
            return [pyarrow.string() for _ in self.names]
        first = open_arrow(file)
        return [column.type for column in first.read(0, self.names).columns] if first.pieces else [pyarrow.string()]

    def _blocks(self) -> Iterator[Sequence[tuple[Any, ...]]]:
        for file in table_files(self.data):
            keys = dict(file.keys)
            if file.is_arrow:
                for table in open_arrow(file).tables(self.names):
                    yield list(zip(*(column.to_pylist() for column in table.columns), strict=True))
            else:
                stored = tuple(name for name in self.names if name not in keys)
                for block in read_texts(file.path, stored):
                    rows = (iter(row) for row in block)
                    yield [tuple(keys[n] if n in keys else next(row) for n in self.names) for row in rows]


class KeptReader:
    """The kept columns, row by row."""

    def __init__(self, blocks: Iterator[Sequence[tuple[Any, ...]]]) -> None:
        self._rows = (row for block in blocks for row in block)

    def take(self, count: int) -> list[tuple[Any, ...]]:
        """The next rows."""
        return [row for _, row in zip(range(count), self._rows, strict=False)]


def column_names(file: TableFile) -> tuple[str, ...]:
    if file.is_arrow:
        return open_arrow(file).names
    path = Path(file.path)
    with naming_file(path):
        return (*find_layout(path, Wanted()).names, *(name for name, _ in file.keys))
