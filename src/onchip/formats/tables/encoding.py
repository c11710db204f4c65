"""From the columns of a table to the values that a network reads, as training learned it.

A column of numbers is one value, a column of few different texts one 0 or 1 per text (one-hot). Missing values are
replaced by the mean or the median of the training rows, in text by the most common one; or they are errors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.errors import InputError, printable
from onchip.formats.tables.csv_layout import is_float
from onchip.formats.tables.raw_table import RawTable, renumber
from onchip.network.meaning import Column
from onchip.network.reading import show
from onchip.network.recipe import Array

MISSING = ("error", "mean", "median", "drop")
MAX_VALUES = 64  # distinct texts of a column that is one-hot
_SHOWN_VALUES, _SHOWN_CHARACTERS = 6, 120
_DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([ T]\d.*)?|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})( \d.*)?|\d{1,2}:\d{2}(:\d{2})?.*"
)


@dataclass(frozen=True, eq=False)
class Encoded:
    x: Array  # (n, D) float32
    unknown: dict[str, tuple[int, str]]  # texts that training did not have: rows and the first text, by column

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"{printable(name)}: {count:,} rows have a text that no training row had, such as {show(text)}; "
            "all its values are 0"
            for name, (count, text) in self.unknown.items()
        )


def learn_columns(raw: RawTable, rows: Array, missing: str = "error") -> tuple[tuple[Column, ...], tuple[str, ...]]:
    """How to encode tables like these training rows, and what was learned, as messages.

    rows     (n,) indices of the training rows
    missing  "mean" or "median" replaces missing values; else they are errors
    """
    columns, notes = [], []
    for j, (name, texts) in enumerate(zip(raw.names, raw.texts, strict=True)):
        cells = raw.cells[rows, j]
        is_missing = np.isnan(cells)
        count = int(is_missing.sum())
        shown = printable(name)
        if count == len(cells):
            raise InputError(
                f"column '{name}' has no values", got=f"{count:,} training rows without one", expected="some values",
                hint=f"--drop {name}",
            )  # fmt: skip
        if count and missing not in ("mean", "median"):
            raise InputError(
                f"column '{name}' has missing values", got=f"{count:,} of {len(cells):,} rows; the first is row "
                f"{int(np.argmax(is_missing))}", expected="a value in every row",
                hint=f"--missing mean, median or drop; or --drop {name}",
            )  # fmt: skip
        fill: float | str | None = None
        present = cells[~is_missing]
        if not texts:
            if missing in ("mean", "median"):
                fill = float(present.mean(dtype=np.float64) if missing == "mean" else np.median(present))
            if count:
                notes.append(f"{shown}: {count:,} missing values are replaced by the {missing}, {fill:.6g}")
            columns.append(Column(name, (), fill))
            continue
        counts = np.bincount(present.astype(np.int64), minlength=len(texts))
        values = tuple(sorted(text for text, found in zip(texts, counts, strict=True) if found))
        check_values(name, texts)
        if missing in ("mean", "median"):
            fill = texts[int(counts.argmax())]
        some = ", ".join(values[:_SHOWN_VALUES]) + (", ..." if len(values) > _SHOWN_VALUES else "")
        number = f"{len(values)} value" + "s" * (len(values) > 1)
        notes.append(f"{shown}: text, one-hot of {number}: {printable(some, _SHOWN_CHARACTERS)}")
        if count:
            notes.append(f"{shown}: {count:,} missing values are replaced by the most common, {show(fill)}")
        columns.append(Column(name, values, fill))
    return tuple(columns), tuple(notes)


def check_values(name: str, texts: Sequence[str]) -> None:
    """InputError unless these distinct texts of a column are few, and neither dates nor numbers with typing errors."""
    dates = sum(_DATE.fullmatch(text) is not None for text in texts)
    if dates * 2 > len(texts):
        got = next(text for text in texts if _DATE.fullmatch(text))
        hint = f"--drop {name}, or store it as a number, such as days or seconds"
        raise InputError(f"column '{name}' holds dates or times", got=show(got), expected="numbers or texts", hint=hint)
    numbers = sum(map(is_float, texts))
    if 2 * numbers >= len(texts):
        got = next(text for text in texts if not is_float(text))
        hint = f"fix these cells (an empty cell is a missing value), or --drop {name}"
        raise InputError(f"column '{name}': not a number", got=show(got), expected="numbers in all rows", hint=hint)
    if len(texts) > MAX_VALUES:
        got = f"{len(texts):,}: {', '.join(map(show, texts[:3]))}, ..."
        raise InputError(
            f"column '{name}' has too many different texts", got=got, expected=f"at most {MAX_VALUES}, or numbers",
            hint=f"--drop {name}",
        )  # fmt: skip


def is_plain(raw: RawTable, columns: Sequence[Column]) -> bool:
    """Whether the cells are the encoded rows."""
    has_fill = any(column.values or column.fill is not None for column in columns)
    return not has_fill and raw.names == tuple(column.name for column in columns)


def encode(raw: RawTable, columns: Sequence[Column]) -> Encoded:
    """The values that a network reads, from a table that has these columns.

    InputError for a missing value that no fill replaces.
    """
    positions = {name: j for j, name in enumerate(raw.names)}
    x = np.zeros((len(raw.cells), sum(column.width for column in columns)), np.float32)
    unknown: dict[str, tuple[int, str]] = {}
    at = 0
    for column in columns:
        j = positions[column.name]
        cells, texts = raw.cells[:, j], raw.texts[j]
        if column.values:
            index = {value: i for i, value in enumerate(column.values)}
            cells = renumber(cells, [index.get(text, len(index)) for text in texts])
        missing = np.isnan(cells)
        if missing.any():
            if column.fill is None:
                got, hint = (
                    f"{missing.sum():,} rows; the first is row {int(missing.argmax())}",
                    "rows without missing values",
                )
                raise InputError(f"column '{column.name}' has missing values", got=got, expected="a value", hint=hint)
            fill = column.values.index(str(column.fill)) if column.values else column.fill
            cells = np.where(missing, np.float32(fill), cells)
        if not column.values:
            x[:, at] = cells
        else:
            codes = cells.astype(np.int64)
            known = np.flatnonzero(codes < len(column.values))
            x[known, at + codes[known]] = 1
            if others := len(codes) - len(known):
                first = int(np.argmax(codes == len(column.values)))
                unknown[column.name] = others, texts[int(raw.cells[first, j])]
        at += column.width
    return Encoded(x, unknown)


def rows_with_missing(raw: RawTable) -> Array:
    """(n,) bool"""
    return np.asarray(np.isnan(raw.cells).any(axis=1))


def raw_frame(frame: Any, columns: Sequence[Column]) -> RawTable:
    """These columns of a data frame, of pandas or a similar library."""
    cells = np.empty((len(frame), len(columns)), np.float32)
    all_texts: list[tuple[str, ...]] = []
    for j, column in enumerate(columns):
        values = frame[column.name].to_numpy()
        index: dict[str, int] = {}
        try:
            if column.values:
                texts = [None if _is_missing(value) else str(value).strip() or None for value in values.tolist()]
                cells[:, j] = [np.nan if text is None else index.setdefault(text, len(index)) for text in texts]
            else:
                cells[:, j] = [np.nan if _is_missing(value) else value for value in values.tolist()]
        except (TypeError, ValueError):
            odd = next(value for value in values.tolist() if not isinstance(value, int | float))
            got, hint = show(odd), "the columns that the network was trained on"
            raise InputError(f"column '{column.name}' is not numeric", got=got, expected="numbers", hint=hint) from None
        all_texts.append(tuple(index))
    return RawTable(tuple(column.name for column in columns), cells, tuple(all_texts))


def _is_missing(value: object) -> bool:
    """None, NaN, or pandas' NA and NaT, which differ from themselves or have no truth value."""
    try:
        return value is None or bool(value != value)
    except TypeError:
        return True
