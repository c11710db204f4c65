"""Results as CSV, one line per row: values or, if the classes have names, labels and probabilities."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from onchip.errors import InputError
from onchip.formats.arrays.row_files import RowWriter
from onchip.formats.tables.kept_columns import KeptColumns, KeptReader
from onchip.network.recipe import Array

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # the last four are full-width forms
_QUOTED = set(',;"\t\r\n')  # some locales' spreadsheets separate by ;
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)  # exempt: -1 is a common label


class CsvWriter(RowWriter):
    """A header, then one line per row: its values, or with `classes` the most likely classes and their probabilities.

    A label that a spreadsheet would run as a formula, such as =cmd(), gets a ' prefix.

    classes  names of the logits in a row
    top      how many of them to write
    kept     columns of the input, which come first; reader: where to read them, if not from the first row on
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        shape: tuple[int, ...],
        dtype: Any,
        classes: Sequence[str] = (),
        top: int = 1,
        kept: KeptColumns | None = None,
        reader: KeptReader | None = None,
    ) -> None:
        super().__init__(path, shape, dtype)
        self.classes, self.top, self._kept, self._reader = tuple(classes), top, kept, reader

    def _begin(self, file: IO[bytes]) -> None:
        head = result_names(self.shape, self.classes, self.top)
        if self._kept is not None:
            head = [*map(as_cell, self._kept.names), *head]
            self._reader = self._reader or self._kept.open()
        self._write_lines(file, [head])

    def _append(self, file: IO[bytes], rows: Array) -> None:
        if self.classes:
            predictions = top_classes(rows, self.classes, self.top)
            lines = [[cell for label, p in row for cell in (as_cell(label), f"{p:.6g}")] for row in predictions]
        else:
            form = "{:.9g}" if rows.dtype.kind == "f" else "{}"
            lines = [[form.format(value) for value in row] for row in rows.reshape(len(rows), -1).tolist()]
        if self._reader is not None:
            kept = self._reader.take(len(rows))
            lines = [[*map(_kept_cell, first), *line] for first, line in zip(kept, lines, strict=True)]
        self._write_lines(file, lines)

    def _write_lines(self, file: IO[bytes], lines: Sequence[Sequence[str]]) -> None:
        file.write("".join(",".join(line) + "\n" for line in lines).encode())


def result_names(shape: tuple[int, ...], classes: Sequence[str], top: int) -> list[str]:
    """The names of the result columns."""
    if not classes:
        return [f"y{i}" for i in range(int(np.prod(shape[1:])))]
    suffixes = [""] if top == 1 else [str(i + 1) for i in range(top)]
    return [f"{what}{suffix}" for suffix in suffixes for what in ("label", "probability")]


def _kept_cell(value: object) -> str:
    return "" if value is None else as_cell(str(value))


def as_cell(label: str) -> str:
    """A label as a CSV cell, with a ' prefix if spreadsheets would run it as a formula."""
    text = f"'{label}" if label.startswith(_FORMULA) and not _NUMBER.fullmatch(label) else label
    # Not csv.writer: it leaves a carriage return unquoted, which would start a new line, or a formula.
    return '"' + text.replace('"', '""') + '"' if set(text) & _QUOTED else text


def top_classes(logits: Array, classes: Sequence[str], top: int) -> list[list[tuple[str, float]]]:
    """The `top` most likely classes per row with their probabilities; ties in class order."""
    rows = logits.reshape(len(logits), len(classes)).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        probabilities = np.exp(rows - rows.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
    return [[(classes[k], float(p[k])) for k in row] for row, p in zip(order.tolist(), probabilities, strict=True)]


def check_top(top: int, classes: Sequence[str]) -> None:
    """Raise InputError unless there are at least `top` named classes."""
    if not classes:
        hint = "a network that onchip train wrote as .onnx"
        raise InputError("the network has no class names", got=f"--top {top}", expected="class names", hint=hint)
    if not 1 <= top <= len(classes):
        got, expected = str(top), f"1 to {len(classes)}, the number of classes"
        raise InputError("bad number of classes to show", got=got, expected=expected, hint="--top 1")
