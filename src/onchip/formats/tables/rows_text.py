"""Rows as text: the number of rows, then their values separated by whitespace, as C's fscanf reads them.

Written files have one row per line, each value as C's "%.4f " prints it.
"""

from __future__ import annotations

import functools
import math
import os
import re
from pathlib import Path
from typing import IO

import numpy as np

from onchip.errors import FormatError
from onchip.files import open_input
from onchip.formats.arrays.row_files import RowWriter
from onchip.network.reading import naming_file, show
from onchip.network.recipe import Array

CHUNK_BYTES = 1 << 20  # of text per read
_MAX_WORD = 1000  # longer than any number that printf writes
_COUNT = re.compile(rb"\+?[0-9]{1,18}")
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_STEPS = 10_000  # "%.4f": steps of 0.0001


def read_rows_text(path: str | os.PathLike[str], width: int) -> Array:
    """All rows, (N, width) float32; a FormatError gives the line."""
    source = Path(path)
    with open_input(source) as file, naming_file(source):
        return _Reader(file, width).read()


class _Reader:
    def __init__(self, file: IO[bytes], width: int) -> None:
        self._file, self._width = file, width
        self._line = 1  # of the first unread byte
        self._rows: int | None = None  # from the first word
        self._found: list[Array] = []
        self._count = 0  # values so far

    def read(self) -> Array:
        tail = b""
        while chunk := self._file.read(CHUNK_BYTES):
            text = tail + chunk
            # The last word may continue in the next chunk.
            whole = max(text.rfind(white) for white in (b" ", b"\n", b"\t", b"\r", b"\v", b"\f")) + 1
            text, tail = text[:whole], text[whole:]
            self._parse(text)
            if len(tail) > _MAX_WORD:
                raise self._not_a_number(tail, 0)
        self._parse(tail)
        if self._rows is None:
            raise FormatError("the file is empty", got="no text", expected=self._expected(), hint="N, then N rows")
        if self._count < self._rows * self._width:
            raise self._wrong_count(f"the file ends in line {self._line}, before its last value", f"{self._count:,}")
        return np.concatenate([np.empty(0, np.float32), *self._found]).reshape(self._rows, self._width)

    def _parse(self, text: bytes) -> None:
        words, first = text.split(), 0
        if words and self._rows is None:
            self._rows = self._row_count(text, words)
            words, first = words[1:], 1
        try:
            with np.errstate(over="ignore"):
                values = np.array([float(word) for word in words], np.float64).astype(np.float32)
        except ValueError:
            values = None
        # float() also accepts "nan", "inf" and "1_000". Words are checked only if one of these may be present.
        if values is None or b"_" in text or not np.isfinite(values).all():
            for i, word in enumerate(words):
                with np.errstate(over="ignore"):
                    if not _NUMBER.fullmatch(word) or not np.isfinite(np.float32(float(word))):
                        raise self._not_a_number(text, first + i)
        assert values is not None
        if self._rows is not None and self._count + len(values) > self._rows * self._width:
            line = self._line_of(text, first + self._rows * self._width - self._count)
            raise self._wrong_count(f"line {line} has text after the last value", "more")
        self._found.append(values)
        self._count += len(values)
        self._line += text.count(b"\n")

    def _row_count(self, text: bytes, words: list[bytes]) -> int:
        if _COUNT.fullmatch(words[0]):
            return int(words[0])
        line = self._line_of(text, 0)
        got, hint = show(words[0])[1:], "the file starts with the number of rows"
        raise FormatError(f"line {line}: bad number of rows", got=got, expected="an integer", hint=hint)

    def _not_a_number(self, text: bytes, index: int) -> FormatError:
        line, word = self._line_of(text, index), text.split(maxsplit=index + 1)[index]
        return FormatError(
            f"line {line}: not a number", got=show(word)[1:], expected="a finite float32, as 1, -0.25 or 1e-3",
            hint=f"whitespace-separated numbers: see line {line}",
        )  # fmt: skip

    def _line_of(self, text: bytes, index: int) -> int:
        """The line of word `index` in a text that starts at self._line."""
        for number, line in enumerate(text.split(b"\n"), start=self._line):
            index -= len(line.split())
            if index < 0:
                return number
        return self._line + text.count(b"\n")

    def _wrong_count(self, what: str, got: str) -> FormatError:
        hint = "the file starts with the number of rows, then lists their values"
        return FormatError(what, got=f"{got} values", expected=self._expected(), hint=hint)

    def _expected(self) -> str:
        if self._rows is None:
            return f"the number of rows, then {self._width} values per row"
        return f"{self._rows * self._width:,}: {self._rows:,} rows of {self._width}"


class TextWriter(RowWriter):
    """The number of rows in the first line, then one line per row; uint8 values are written as integers."""

    def _begin(self, file: IO[bytes]) -> None:
        file.write(b"%d\n" % self.shape[0])

    def _append(self, file: IO[bytes], rows: Array) -> None:
        for row in rows.reshape(len(rows), math.prod(self.shape[1:])):
            # Values in [-1, 1] come from a lookup table: six times as fast as formatting each.
            if row.dtype == np.float32 and (np.abs(row) <= 1).all():  # false for NaN
                file.write(_small_numbers(row))
            else:
                file.write(("%.4f " * row.size % tuple(row.tolist())).encode() + b"\n")


def _small_numbers(row: Array) -> bytes:
    # A float32 times 10,000 is exact in float64, and rint rounds half to even, like printf.
    steps = np.rint(np.abs(row.astype(np.float64)) * _STEPS).astype(np.intp)
    words: bytes = _words()[steps + np.signbit(row) * (_STEPS + 1)].tobytes()
    return words.translate(None, b"\0") + b"\n"


@functools.cache
def _words() -> Array:
    """ "0.0000 " to "1.0000 ", then "-0.0000 " to "-1.0000 ", 8 bytes each, shorter ones padded with zeros."""
    return np.array([f"{sign}{i / _STEPS:.4f} " for sign in ("", "-") for i in range(_STEPS + 1)], "S8")
