"""Rows of tables for a network: encoded as in its training, Parquet and Arrow files a row group at a time."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from onchip.cache import print_once
from onchip.errors import ShapeError
from onchip.formats.tables.arrow_file import ArrowFile, open_arrow, raw_columns
from onchip.formats.tables.encoding import encode
from onchip.formats.tables.raw_table import RawTable, Wanted, pick_columns
from onchip.formats.tables.read_table import read_table
from onchip.formats.tables.table_files import TableFile, table_files
from onchip.network.meaning import Column, Meaning
from onchip.network.reading import naming_file
from onchip.network.recipe import Array
from onchip.network.types import TensorType, numpy_dtype


def open_table(data: str, expected: TensorType, meaning: Meaning) -> TableRows:
    """The rows of one or several tables; those of CSV files are read now.

    meaning  of the network: its columns, and what replaces text and missing values
    """
    wanted = Wanted(columns=meaning.table_columns, numbers=not meaning.table)
    return TableRows(table_files(data), wanted, meaning.table, expected)


class TableRows:
    """Encoded rows, (n, D) in the dtype of the network's input; `parts` names each file and its number of rows."""

    def __init__(
        self, files: Sequence[TableFile], wanted: Wanted, table: tuple[Column, ...], expected: TensorType
    ) -> None:
        self._asked = (tuple(files), wanted, table, expected)
        self._expected, self._table, self._wanted = expected, table, wanted
        self._files = tuple(files)
        self.dtype: np.dtype[Any] = numpy_dtype(expected.dtype)
        self._reported: set[str] = set()
        self._pieces: list[tuple[ArrowFile, int] | Array] = []  # a piece of a file, or rows in memory
        counts, rows_of = [0], []
        width = sum(column.width for column in table) or len(wanted.columns)
        for file in files:
            if file.is_arrow:
                opened = open_arrow(file)
                self._names(opened)  # missing columns are errors now
                self._pieces += [(opened, i) for i in range(len(opened.pieces))]
                counts += opened.pieces
                width = width or len(opened.names)
                rows_of.append(sum(opened.pieces))
            else:
                x = self._as_rows(read_table(file, wanted), file)
                self._pieces.append(x)
                counts.append(len(x))
                width = width or x.shape[1]
                rows_of.append(len(x))
        self._starts = list(itertools.accumulate(counts))
        self.shape: tuple[int, ...] = (self._starts[-1], width)
        names = [file.relative or file.path.name for file in files]
        self.parts = tuple(zip(names, rows_of, strict=True))
        self._cached: tuple[int, Array] | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        """Rows start .. stop - 1, which may span several pieces."""
        found = [np.empty((0, self.shape[1]), self.dtype)]
        piece = bisect.bisect_right(self._starts, start) - 1
        while start < stop and piece < len(self._pieces):
            begin, end = self._starts[piece], self._starts[piece + 1]
            found.append(self._piece(piece)[start - begin : stop - begin])
            start, piece = max(start, end), piece + 1
        return np.concatenate(found)

    def _piece(self, piece: int) -> Array:
        """The rows of a piece; the last one is kept, since chunks are smaller."""
        source = self._pieces[piece]
        if isinstance(source, np.ndarray):
            return source
        if self._cached is None or self._cached[0] != piece:
            self._cached = piece, self._read_piece(*source)
        return self._cached[1]

    def _read_piece(self, opened: ArrowFile, piece: int) -> Array:
        names = self._names(opened)
        cells, texts = raw_columns(opened.read(piece, names), names, self._wanted, opened.file)
        return self._as_rows(RawTable(tuple(names), cells, texts), opened.file)

    def _names(self, opened: ArrowFile) -> list[str]:
        with naming_file(opened.file.path):
            return [opened.names[i] for i in pick_columns(opened.names, self._wanted, None, "the file")]

    def _as_rows(self, raw: RawTable, file: TableFile) -> Array:
        x = raw.cells
        if self._table:
            encoded = encode(raw, self._table)
            x = encoded.x
            for name, note in zip(encoded.unknown, encoded.notes, strict=True):
                if name not in self._reported:  # once per column, not per row group
                    print_once(f"input: {file.path}: {note}")
                    self._reported.add(name)
        if "int" not in self._expected.dtype:
            return x.astype(self.dtype, copy=False)
        if (bad := np.flatnonzero(x != np.rint(x))).size:
            got, hint = f"{x.flat[bad[0]]:g}", "ids, or counts"
            raise ShapeError(f"{file.path}: not a whole number", got=got, expected=str(self._expected), hint=hint)
        return x.astype(self.dtype)

    def close(self) -> None:
        self._cached = None

    def __enter__(self) -> TableRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        if any(isinstance(piece, np.ndarray) for piece in self._pieces):
            raise TypeError("rows in memory cannot be pickled")
        return TableRows, self._asked
