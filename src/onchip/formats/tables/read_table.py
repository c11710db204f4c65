"""One file of a table, in any format, with the keys of its folder as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onchip.errors import FormatError
from onchip.formats.tables.arrow_file import read_arrow
from onchip.formats.tables.csv_rows import read_csv
from onchip.formats.tables.raw_table import RawTable, Wanted
from onchip.formats.tables.table_files import TableFile


def read_table(file: TableFile, wanted: Wanted) -> RawTable:
    """All rows of a file; a FormatError names it."""
    if file.is_arrow:
        return read_arrow(file, wanted)
    keys = dict(file.keys)
    if not keys:
        return read_csv(file.path, wanted)
    stored = tuple(column for column in wanted.columns if column.name not in keys)
    drop = tuple(name for name in wanted.drop if name not in keys)
    table = read_csv(file.path, replace(wanted, columns=stored, drop=drop))
    names = {column.name for column in wanted.columns}
    for name, text in keys.items():
        if name in table.names:
            got = "one in the file, one in the name of its folder"
            raise FormatError(f"{file.path}: two columns are called '{name}'", got=got, expected="unique names")
        if name in wanted.drop or (names and name not in names):
            continue
        is_number = text.replace(".", "", 1).isdigit() and not wanted.is_text(name)
        cell = np.full((len(table.cells), 1), float(text) if is_number else 0, np.float32)
        table = replace(
            table, names=(*table.names, name), cells=np.concatenate([table.cells, cell], axis=1),
            texts=(*table.texts, () if is_number else (text,)),
        )  # fmt: skip
    return reordered(table, [column.name for column in wanted.columns]) if names else table


def reordered(table: RawTable, names: Sequence[str]) -> RawTable:
    """The same columns in another order."""
    order = [table.names.index(name) for name in names]
    texts = tuple(table.texts[j] for j in order)
    return replace(table, names=tuple(names), cells=np.ascontiguousarray(table.cells[:, order]), texts=texts)
