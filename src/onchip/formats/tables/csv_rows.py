"""CSV tables: one row per line, cells of numbers or text, optionally a label column; .gz files are unpacked.

Columns of numbers are parsed by NumPy, a block of lines at a time. A block that NumPy refuses is parsed cell by cell:
it has missing values, decimal commas, or a column of text, which is then read as text from the first line on.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import os
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from onchip.errors import FormatError
from onchip.files import open_input
from onchip.formats.tables.csv_layout import Layout, find_layout, first_error, is_number, lines_of, open_text
from onchip.formats.tables.raw_table import MAX_TEXTS, RawTable, Wanted
from onchip.network.reading import naming_file, show
from onchip.network.recipe import Array

BLOCK, BLOCK_CELLS = 1 << 16, 1 << 22  # at most, of rows and cells parsed at a time
MISSING = ("", "na", "n/a", "nan", "null", "none", "?", "-nan")  # in a column of numbers, in any case


class _TextFoundError(Exception):
    """Columns that were read as numbers hold text."""

    def __init__(self, columns: set[int]) -> None:
        self.columns = columns


def csv_columns(path: str | os.PathLike[str], wanted: Wanted) -> tuple[tuple[str, ...], str]:
    """The names of the columns that `read_csv` reads, and of the label column, or ""."""
    source = Path(path)
    with open_input(source), naming_file(source):
        layout = find_layout(source, wanted)
    return tuple(layout.names[i] for i in layout.taken), "" if layout.label is None else layout.names[layout.label]


def read_csv(path: str | os.PathLike[str], wanted: Wanted) -> RawTable:
    """Read all rows of a table; a FormatError gives line and column."""
    source = Path(path)
    with open_input(source), naming_file(source):
        try:
            layout = find_layout(source, wanted)
            text = {i for i in layout.taken if wanted.is_text(layout.names[i])}
            while True:
                try:
                    return _Reader(source, layout, wanted, text).read()
                except _TextFoundError as found:
                    text |= found.columns
        except UnicodeDecodeError as error:
            got, hint = f"byte {error.object[error.start]:02x}", "save it as UTF-8"
            raise FormatError("not UTF-8 text", got=got, expected="a table as text", hint=hint) from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            hint = "copy or download the file again"
            raise FormatError(
                "the .gz is damaged", got=str(error), expected="a complete gzip file", hint=hint
            ) from None


def read_texts(path: Path, names: tuple[str, ...]) -> Iterator[list[tuple[str, ...]]]:
    """The cells of some columns as they are, some rows at a time: columns that are carried through, such as ids."""
    with open_input(path), naming_file(path), open_text(path) as file:
        layout = find_layout(path, Wanted())
        positions = [layout.names.index(name) for name in names]
        lines = csv.reader(lines_of(file), delimiter=layout.separator)
        rows = itertools.islice((row for row in lines if row), layout.skip, None)
        while block := list(itertools.islice(rows, BLOCK)):
            yield [tuple(row[i] for i in positions) for row in block]


class _Reader:
    """Reads a table of which these columns are text; raises _TextFoundError if others are, too."""

    def __init__(self, source: Path, layout: Layout, wanted: Wanted, text: set[int]) -> None:
        self.source, self.layout, self.wanted = source, layout, wanted
        is_label_text = wanted.words and layout.label is not None
        taken = (*layout.taken, *(() if layout.label is None else (layout.label,)))
        self.text = [i for i in taken if i in text or (is_label_text and i == layout.label)]
        self.numbers = [i for i in taken if i not in self.text]
        self.rows = max(1, min(BLOCK, BLOCK_CELLS // layout.width))
        self.texts: dict[int, dict[str, int]] = {i: {} for i in self.text}

    def read(self) -> RawTable:
        with open_text(self.source) as file, np.errstate(over="ignore"):
            lines = itertools.islice(lines_of(file), self.layout.skip, None)
            blocks = []
            while (block := self._block(lines)) is not None:
                blocks.append(block)
        if not blocks:
            raise FormatError("the table has no rows", got="only a header", expected="one line per row")
        return self._table(np.concatenate(blocks))

    def _table(self, cells: Array) -> RawTable:
        """cells  (n, columns) in the order numbers, text"""
        layout, labels, words = self.layout, None, tuple[str, ...]()
        position = {i: at for at, i in enumerate((*self.numbers, *self.text))}
        if layout.label is not None:
            labels = cells[:, position[layout.label]].copy()
            if layout.label in self.texts:
                labels, words = labels.astype(np.int64), tuple(self.texts[layout.label])
        order = [position[i] for i in layout.taken]
        if order != list(range(cells.shape[1])):
            cells = cells[:, order]
        names = tuple(layout.names[i] for i in layout.taken)
        texts = tuple(tuple(self.texts.get(i, ())) for i in layout.taken)
        label = "" if layout.label is None else layout.names[layout.label]
        return RawTable(names, np.ascontiguousarray(cells), texts, labels, words, label, layout.has_header)

    def _block(self, lines: Iterator[str]) -> Array | None:
        """The next rows, (n, columns) float32 in the order numbers, text; None after the last."""
        first = next((line for line in lines if line.strip()), None)
        if first is None:
            return None
        kept = []

        def record() -> Iterator[str]:
            for line in itertools.chain([first], lines):
                kept.append(line)
                yield line

        try:
            numbers = self._load(record(), np.float32, self.numbers)
            if numbers is not None and np.isfinite(numbers).all():
                texts = self._load(kept, str, self.text)
                self._check_widths(kept)
                codes = [] if texts is None else [self._codes(i, texts[:, j]) for j, i in enumerate(self.text)]
                return np.concatenate([numbers, *codes], axis=1)
        except (UnicodeDecodeError, FormatError):
            raise
        except ValueError:
            pass
        reader = csv.reader(itertools.chain(kept or [first], lines), delimiter=self.layout.separator)
        try:
            rows = list(itertools.islice((row for row in reader if row), self.rows))
        except csv.Error:
            raise self._error() from None
        if any(len(row) != self.layout.width for row in rows):
            raise self._error()
        return self._parse([list(column) for column in zip(*rows, strict=True)])

    def _load(self, lines: Iterator[str] | list[str], dtype: type, columns: list[int]) -> Array | None:
        """These columns of the next rows; None: there are no such columns, and no line was read."""
        if not columns:
            return None
        usecols = columns if columns != list(range(self.layout.width)) else None
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of empty lines
            return np.loadtxt(
                lines, dtype, comments=None, delimiter=self.layout.separator, ndmin=2, quotechar='"', usecols=usecols,
                max_rows=self.rows, encoding=None,
            )  # fmt: skip

    def _check_widths(self, lines: list[str]) -> None:
        """Each row has as many cells as the first line. NumPy does not check rows of which it reads some columns."""
        width, separator = self.layout.width, self.layout.separator
        if any('"' in line for line in lines):
            is_wrong = any(len(row) != width for row in csv.reader(lines, delimiter=separator) if row)
        else:
            is_wrong = any(line.count(separator) != width - 1 for line in lines if not line.isspace())
        if is_wrong:
            raise self._error()

    def _parse(self, columns: list[list[str]]) -> Array:
        """Cells, by column, as numbers and text."""
        found = [self._numbers(i, columns[i]) for i in self.numbers]
        if text := {i for i, values in zip(self.numbers, found, strict=True) if values is None}:
            if any(i == self.layout.label or self.wanted.is_number(self.layout.names[i]) for i in text):
                raise self._error()
            raise _TextFoundError(text)
        values = [each[:, None] for each in found if each is not None]
        return np.concatenate([*values, *(self._codes(i, np.array(columns[i])) for i in self.text)], axis=1)

    def _numbers(self, i: int, cells: list[str]) -> Array | None:
        """(n,) float32, NaN where missing; None if there is text."""
        stripped = [cell.strip() for cell in cells]
        if self.layout.separator == ";":
            stripped = [cell.replace(",", ".") for cell in stripped]
        missing = np.array([cell.lower() in MISSING for cell in stripped])
        if missing.any():
            if i == self.layout.label or self.wanted.needs_value(self.layout.names[i]):
                raise self._error()
            stripped = ["nan" if is_missing else cell for cell, is_missing in zip(stripped, missing, strict=True)]
        try:
            if any("_" in cell for cell in stripped):
                return None
            values = np.array(stripped).astype(np.float32)
        except ValueError:
            return None
        if np.isinf(values).any():
            raise self._error()
        return values

    def _codes(self, i: int, cells: Array) -> Array:
        """(n, 1) float32: indices of the texts (n,), NaN where they are empty."""
        texts = self.texts[i]
        codes = np.array([
            texts.setdefault(text, len(texts)) if text else -1 for text in map(str.strip, cells.tolist())
        ], np.float32)  # fmt: skip
        is_missing = codes < 0
        if is_missing.any():
            if i == self.layout.label or self.wanted.needs_value(self.layout.names[i]):
                raise self._error()
            codes[is_missing] = np.nan
        if len(texts) > MAX_TEXTS and i != self.layout.label:
            raise self._too_many(i)
        return codes[:, None]

    # -- errors --------------------------------------------------------------------------------------------

    def _too_many(self, i: int) -> FormatError:
        name = self.layout.names[i]
        shown = ", ".join(show(text) for text in itertools.islice(self.texts[i], 3))
        return FormatError(
            f"column '{name}' has too many different texts", got=f"more than {MAX_TEXTS:,}: {shown}, ...",
            expected="numbers, or few different values", hint=f"--drop {name}",
        )  # fmt: skip

    def _error(self) -> FormatError:
        """The first cell that this reader refuses."""
        layout, wanted = self.layout, self.wanted

        def is_wrong(i: int, cell: str) -> tuple[str, str, str] | None:
            is_label = i == layout.label
            is_empty = not cell.strip()
            if is_label and wanted.words:
                return ("no label", "an empty cell", "text or a number") if is_empty else None
            if i not in taken:
                return None
            got = "an empty cell" if is_empty else show(cell)
            needs_value = is_label or wanted.needs_value(layout.names[i])
            if i in self.text:
                return ("no value", got, "text") if is_empty and needs_value else None
            if is_number(cell, layout.separator) or (not needs_value and cell.strip().lower() in MISSING):
                return None
            is_text = not is_label and not wanted.is_number(layout.names[i]) and not _is_infinite(cell)
            return None if is_text else ("not a number", got, "a finite float32")

        taken = set(layout.taken) | {layout.label}
        return first_error(self.source, layout, is_wrong)


def _is_infinite(cell: str) -> bool:
    try:
        with np.errstate(over="ignore"):
            return bool(np.isinf(np.float32(float(cell))))
    except ValueError:
        return False
