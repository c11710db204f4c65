"""Columns of a table before they are encoded for a network, and what to read of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.network.meaning import Column
from onchip.network.names import did_you_mean
from onchip.network.reading import show
from onchip.network.recipe import Array

POSITIONS = {"first": 0, "last": -1}  # label columns given by position
MAX_TEXTS = 1 << 16  # distinct texts of a column: far more than are encoded, few enough to hold
SHOWN_NAMES = 12


@dataclass(frozen=True)
class Wanted:
    """What to read of a table."""

    label: str | None = None  # the label column: "first", "last" or its name; None: there is none
    words: bool = True  # labels may be any text; else they are numbers
    columns: tuple[Column, ...] = ()  # if not empty: only these, by name, in this order
    drop: tuple[str, ...] = ()  # names of columns that are not read
    text: frozenset[str] = frozenset()  # columns whose cells are texts, also where they look like numbers
    numbers: bool = False  # every column holds numbers only: text and missing values are errors
    incomplete: bool = False  # missing values are no errors, also if no fill replaces them

    @cached_property
    def _by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns}

    def is_text(self, name: str) -> bool:
        return name in self.text or (name in self._by_name and bool(self._by_name[name].values))

    def is_number(self, name: str) -> bool:
        """Whether text in this column is an error."""
        return self.numbers or (name in self._by_name and not self._by_name[name].values)

    def needs_value(self, name: str) -> bool:
        """Whether a missing value is an error."""
        has_no_fill = name in self._by_name and self._by_name[name].fill is None
        return self.numbers or (has_no_fill and not self.incomplete)


@dataclass(frozen=True, eq=False)
class RawTable:
    """Rows as in a file: a text is an index into the distinct texts of its column, a missing value is NaN.

    cells   (n, C) float32, without the label column
    texts   (C,): the distinct texts of each column; () for a column of numbers
    labels  (n,) int64 indices into `words`, or float32 if numbers were requested; None: no label column
    """

    names: tuple[str, ...]
    cells: Array
    texts: tuple[tuple[str, ...], ...]
    labels: Array | None = None
    words: tuple[str, ...] = ()  # the distinct labels, as in the file
    label: str = ""  # name of the label column
    has_header: bool = True  # else the names are made up

    @property
    def text_columns(self) -> frozenset[str]:
        return frozenset(name for name, texts in zip(self.names, self.texts, strict=True) if texts)

    def take(self, rows: Array) -> RawTable:
        """Some rows, by index."""
        return replace(self, cells=self.cells[rows], labels=None if self.labels is None else self.labels[rows])


def pick_columns(names: Sequence[str], wanted: Wanted, label: int | None, where: str) -> tuple[int, ...]:
    """The positions of the columns to read, in their order; FormatError unless their names are unique and exist.

    label  position of the label column
    where  the names are found, such as "line 1", in messages
    """
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    if unknown := [name for name in wanted.drop if name not in positions]:
        shown = shown_names(names)
        hint = did_you_mean(unknown[0], names) or "the names of columns: --drop city,name"
        raise InputError(f"no column '{unknown[0]}' to drop", got=unknown[0], expected=shown, hint=hint)
    chosen = tuple(column.name for column in wanted.columns)
    all_but = [name for i, name in enumerate(names) if i != label and name not in wanted.drop]
    if label is not None and names[label] in wanted.drop:
        got, hint = f"--drop {names[label]}", "another column, or omit --drop"
        raise InputError("the label column cannot be dropped", got=got, expected="columns besides it", hint=hint)
    if several := [name for name in chosen or (*all_but, *wanted.drop) if len(positions.get(name, ())) > 1]:
        at = " and ".join(str(position + 1) for position in positions[several[0]][:2])
        raise FormatError(
            f"two columns are called {show(several[0])}", got=f"columns {at} of {where}",
            expected="unique names", hint="rename or remove one of them",
        )  # fmt: skip
    if not chosen:
        if not all_but:
            raise FormatError(
                "no column is left", got="all are dropped", expected="one or more", hint="a shorter --drop"
            )
        return tuple(positions[name][0] for name in all_but)
    if len(set(chosen)) < len(chosen):
        name = next(name for name, count in Counter(chosen).items() if count > 1)
        raise FormatError(
            f"the network has two columns called {show(name)}", got=f"one column {show(name)}",
            expected="unique names", hint="train it again on a table with unique column names",
        )  # fmt: skip
    if missing := [name for name in chosen if name not in positions]:
        hint = did_you_mean(missing[0], names) or "a table with the columns that the network was trained on"
        expected = ", ".join(chosen[:SHOWN_NAMES])
        raise FormatError(f"no column '{missing[0]}'", got=shown_names(names), expected=expected, hint=hint)
    return tuple(positions[name][0] for name in chosen)


def shown_names(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")


def concatenate(tables: Sequence[RawTable]) -> RawTable:
    """The rows of several tables with the same columns, which are texts in all of them or in none."""
    if len(tables) == 1:
        return tables[0]
    first, cells = tables[0], []
    all_texts = [_union([table.texts[j] for table in tables]) for j in range(len(first.names))]
    for table in tables:
        part = np.array(table.cells)
        for j, texts in enumerate(table.texts):
            if texts and texts != all_texts[j][: len(texts)]:
                index = {text: i for i, text in enumerate(all_texts[j])}
                part[:, j] = renumber(part[:, j], [index[text] for text in texts])
        cells.append(part)
    labels, words = None, _union([table.words for table in tables])
    if first.labels is not None:
        index = {word: i for i, word in enumerate(words)}
        numbers = [np.array([index[word] for word in table.words], np.int64) for table in tables]
        parts = [(table.labels, number) for table, number in zip(tables, numbers, strict=True)]
        labels = np.concatenate([number[part] if words else part for part, number in parts])
    return replace(first, cells=np.concatenate(cells), texts=tuple(all_texts), labels=labels, words=words)


def _union(groups: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The distinct texts in order of appearance."""
    return tuple(dict.fromkeys(text for group in groups for text in group))


def renumber(column: Array, index: Sequence[int]) -> Array:
    """(n,) float32 positions replaced by index[position]; NaN stays."""
    table = np.array([*index, np.nan], np.float32)
    return table[np.where(np.isnan(column), len(index), column).astype(np.int64)]
