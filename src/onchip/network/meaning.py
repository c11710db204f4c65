"""What the rows and results of a network mean to its user. It is stored with the network and changes no result."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from onchip.errors import FormatError
from onchip.network.reading import is_text, real, show

MAX_TEXT = 4 << 20  # characters, in a file


@dataclass(frozen=True)
class Column:
    """A column of a table, and the values that the network reads in its place."""

    name: str
    values: tuple[str, ...] = ()  # of text: one 0 or 1 per value, in this order; (): a number, read as it is
    fill: float | str | None = None  # replaces a missing value; None: a missing value is an error

    @property
    def width(self) -> int:
        """How many values of a row are read from this column."""
        return len(self.values) or 1

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the values that the network reads."""
        return tuple(f"{self.name}={value}" for value in self.values) or (self.name,)


@dataclass(frozen=True)
class Meaning:
    columns: tuple[str, ...] = ()  # names of the columns of the table whose rows the network reads
    classes: tuple[str, ...] = ()  # names of its outputs, which are logits
    scale: float = 0.0  # training divided byte rows by this; 0: rows were not bytes
    words: tuple[str, ...] = ()  # a vocabulary: the network reads texts as ids of its words (text/vocabulary.py)
    tokeniser: str = ""  # the rule by which texts become words
    # How the rows are computed from a table with text or missing values: `columns` are the names of the values. ():
    # the table holds `columns` themselves, all numbers.
    table: tuple[Column, ...] = ()
    estimator: str = ""  # JSON of the estimator whose network this is; see train/saved_estimators.py

    @property
    def table_columns(self) -> tuple[Column, ...]:
        """The columns to read from a table with a header; (): all, in the file's order."""
        return self.table or tuple(Column(name) for name in self.columns)

    def to_text(self) -> str:
        """JSON of the known fields; "" if there are none."""
        known = {name: value for name, value in asdict(self).items() if value}
        return json.dumps(known) if known else ""

    @classmethod
    def from_text(cls, text: str) -> Meaning:
        """Parse the text of a file; FormatError if it is not valid."""
        try:
            parsed = json.loads(text) if len(text) <= MAX_TEXT else None
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            got, expected = show(text), f"a JSON object of at most {MAX_TEXT:,} characters"
            raise FormatError("the network's description is damaged", got=got, expected=expected)
        scale = real(parsed.get("scale", 0.0), "the scale in the network's description")
        tokeniser, estimator = parsed.get("tokeniser", ""), parsed.get("estimator", "")
        for value, what in (tokeniser, "tokeniser"), (estimator, "estimator"):
            if not isinstance(value, str):
                raise FormatError(f"bad {what} in the network's description", got=show(value), expected="a string")
        columns, classes, words = (_strings(parsed, key) for key in ("columns", "classes", "words"))
        return cls(columns, classes, scale, words, tokeniser, _table(parsed), estimator)

    def check(self, inputs: int, outputs: int) -> None:
        """FormatError if the numbers of columns and classes are not those of the network's inputs and outputs."""
        read = sum(column.width for column in self.table)
        counts = ("columns", len(self.columns), inputs), ("classes", len(self.classes), outputs)
        for what, found, count in (*counts, ("values of a table", read, inputs)):
            if found and found != count:
                got, expected = f"{found} {what}", str(count)
                raise FormatError("the network's description does not fit", got=got, expected=expected)


def _strings(parsed: dict[str, Any], key: str) -> tuple[str, ...]:
    names = parsed.get(key, [])
    # JSON can spell a lone surrogate, which can be neither printed nor written.
    if not (isinstance(names, list) and all(isinstance(name, str) and is_text(name) for name in names)):
        raise FormatError(f"bad {key} in the network's description", got=show(names), expected="a list of strings")
    return tuple(names)


def _table(parsed: dict[str, Any]) -> tuple[Column, ...]:
    entries = parsed.get("table", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _bad_table(entries)
    found = []
    for entry in entries:
        name, values, fill = entry.get("name"), _strings(entry, "values"), entry.get("fill")
        is_number = type(fill) in (int, float) and math.isfinite(fill) and not values
        if not (isinstance(name, str) and is_text(name) and len(set(values)) == len(values)):
            raise _bad_table(entry)
        if not (fill is None or is_number or (isinstance(fill, str) and fill in values)):
            raise _bad_table(entry)
        found.append(Column(name, values, fill))
    if len({column.name for column in found}) < len(found):
        raise _bad_table([column.name for column in found])
    return tuple(found)


def _bad_table(got: object) -> FormatError:
    expected = "columns with unique names, and unique values; a fill is a number or one of the values"
    return FormatError("bad table in the network's description", got=show(got), expected=expected)
