"""Texts in files: one per line, or cells of a .csv or .tsv with a header. UTF-8."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from onchip.errors import FormatError, InputError, printable
from onchip.files import open_input
from onchip.network.names import did_you_mean
from onchip.network.reading import naming_file, show

MAX_LINE = 1 << 20  # bytes
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TEXT_COLUMN = "text"  # if no column is named
_POSITIONS = {"first": 0, "last": -1}
_BOM = b"\xef\xbb\xbf"
_SHOWN_NAMES = 12


class Record(NamedTuple):
    """A row of a file: a line, or the lines that a quoted cell spans."""

    offset: int  # of its first byte
    line: int  # its first line, from 1
    cells: tuple[str, ...]  # the requested columns; of a file of lines, the line
    problem: tuple[str, str, str] | None = None  # what is wrong, got, expected; then there are no cells


@dataclass(frozen=True)
class RecordLayout:
    """How to read the records of a file."""

    path: Path
    delimiter: str = ""  # "": lines
    columns: tuple[int, ...] = ()  # indices of the requested columns
    width: int = 0  # cells per record
    begin: tuple[int, int] = (0, 0)  # offset of the first record, and the lines before it

    def records(self, file: IO[bytes], begin: tuple[int, int] | None = None) -> Iterator[Record]:
        """The records of the open file, from an offset and the number of lines before it."""
        lines = _Lines(file, *(begin or self.begin))
        return self._cells(lines) if self.delimiter else _whole_lines(lines)

    def first_cells(self, block: str) -> list[str]:
        """The first requested column of the records in a block of the file; fewer if they have problems."""
        if not self.delimiter:
            return block.removesuffix("\n").split("\n")
        rows, cells = csv.reader(io.StringIO(block, newline=""), delimiter=self.delimiter), list[str]()
        with contextlib.suppress(csv.Error):
            cells += (row[self.columns[0]] for row in rows if len(row) == self.width)
        return cells

    def _cells(self, lines: _Lines) -> Iterator[Record]:
        reader = csv.reader(lines, delimiter=self.delimiter)
        while True:
            offset, line = lines.offset, lines.count + 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except (csv.Error, _LineError) as error:  # the reader cannot continue
                reader = csv.reader(lines, delimiter=self.delimiter)
                yield Record(offset, line, (), ("a line that cannot be read", str(error), "a row of cells"))
                continue
            if not row:  # an empty line
                continue
            if len(row) != self.width:
                problem = "wrong number of cells", str(len(row)), f"{self.width}, as in the header"
                yield Record(offset, line, (), problem)
                continue
            yield _checked(offset, line, tuple(row[i] for i in self.columns))


class _LineError(Exception):
    """A line is longer than MAX_LINE."""


class _Lines:
    """The lines of a binary file as str; bytes that are not UTF-8 become lone surrogates."""

    def __init__(self, file: IO[bytes], offset: int, count: int) -> None:
        self.offset, self.count, self._file = offset, count, file
        file.seek(offset)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if not (line := self._file.readline(MAX_LINE)):
            raise StopIteration
        size, part = len(line), line
        while len(part) == MAX_LINE and not part.endswith(b"\n"):
            part = self._file.readline(MAX_LINE)
            size += len(part)
        if self.offset == 0 and line.startswith(_BOM):
            line = line.removeprefix(_BOM)
        self.offset, self.count = self.offset + size, self.count + 1
        if size > MAX_LINE:
            raise _LineError(f"{size:,} bytes in a line, more than {MAX_LINE:,}")
        return line.decode("utf-8", "surrogateescape")


def _whole_lines(lines: _Lines) -> Iterator[Record]:
    while True:
        offset, line = lines.offset, lines.count + 1
        try:
            text = next(lines)
        except StopIteration:
            return
        except _LineError as error:
            yield Record(offset, line, (), ("a line is too long", str(error), "one text per line"))
            continue
        yield _checked(offset, line, (text.rstrip("\r\n"),))


def _checked(offset: int, line: int, cells: tuple[str, ...]) -> Record:
    try:
        for cell in cells:
            if not cell.isascii():
                cell.encode()
    except UnicodeEncodeError as error:
        byte = ord(error.object[error.start]) & 0xFF
        return Record(offset, line, (), ("not UTF-8 text", f"byte {byte:02x}", "text in UTF-8"))
    return Record(offset, line, cells)


def record_error(record: Record, skip: str = "") -> FormatError:
    """The error about a record with a problem; `skip` names an option that skips such records."""
    assert record.problem is not None
    what, got, expected = record.problem
    hint = f"fix or remove line {record.line}" + (f", or {skip}" if skip else "")
    return FormatError(f"line {record.line}: {what}", got=got, expected=expected, hint=hint)


def record_layout(
    path: str | os.PathLike[str], columns: Sequence[str | None] = (None,), is_table: bool | None = None
) -> RecordLayout:  # fmt: skip
    """The layout of a file of texts.

    columns  to read: names in the header, "first" or "last"; None: the column called "text", or the only one
    is_table whether it is a .csv, if the suffix does not count
    """
    source = Path(path)
    with open_input(source) as file, naming_file(source):
        delimiter = DELIMITERS.get(source.suffix.lower(), "") if is_table is None else "," * is_table
        if not delimiter:
            if named := [column for column in columns if column is not None]:
                got, hint = f"column {named[0]}", "leave the column out, or a .csv"
                raise InputError("a file of lines has no columns", got=got, expected="a .csv or .tsv", hint=hint)
            return RecordLayout(source)
        lines = _Lines(file, 0, 0)
        try:
            header = [name.strip() for name in next(csv.reader(lines, delimiter=delimiter), [])]
        except (csv.Error, _LineError) as error:
            raise FormatError("line 1 is no header", got=str(error), expected="names of columns") from None
        if not header:
            raise FormatError(
                "the table is empty", got="no first line", expected="a line with the names of the columns"
            )
        found = tuple(_find_column(header, column) for column in columns)
        return RecordLayout(source, delimiter, found, len(header), (lines.offset, lines.count))


def _find_column(header: Sequence[str], column: str | None) -> int:
    if column is None and len(header) == 1:
        return 0
    if column in _POSITIONS and column not in header:
        return _POSITIONS[column] % len(header)
    wanted = TEXT_COLUMN if column is None else column
    if header.count(wanted) == 1:
        return header.index(wanted)
    shown = ", ".join(map(printable, header[:_SHOWN_NAMES])) + (", ..." if len(header) > _SHOWN_NAMES else "")
    what = "two columns are called" if wanted in header else "no column"
    hint = did_you_mean(wanted, header) or f"--column {printable(header[0])}"
    raise InputError(f"{what} {show(wanted)}", got=f"the first line: {shown}", expected="one of its names", hint=hint)
