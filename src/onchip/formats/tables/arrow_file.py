"""Parquet and Arrow (Feather) files through pyarrow: opened without being read, and read a row group at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onchip.errors import FormatError, InputError, MissingPackageError
from onchip.files import open_input
from onchip.formats.tables.raw_table import MAX_TEXTS, POSITIONS, RawTable, Wanted, pick_columns, shown_names
from onchip.formats.tables.table_files import TableFile
from onchip.network.names import did_you_mean
from onchip.network.reading import naming_file, show
from onchip.network.recipe import Array


def load_pyarrow(what: str) -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise MissingPackageError(what, "pyarrow", "parquet") from None
    return pyarrow


@contextlib.contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Report pyarrow's errors in the block as those of this file."""
    pyarrow = load_pyarrow(str(path))
    with naming_file(path):
        try:
            yield
        except FormatError:
            raise
        except pyarrow.ArrowException as error:
            got, hint = str(error).splitlines()[0], "write or copy it again"
            expected = "a complete .parquet or .arrow file"
            raise FormatError("cannot be read", got=got, expected=expected, hint=hint) from None


@dataclass(frozen=True)
class ArrowFile:
    """A Parquet or Arrow file: its columns, and the number of rows of each piece (row group or record batch)."""

    file: TableFile
    names: tuple[str, ...]  # of its columns, then of the keys of its folder
    pieces: tuple[int, ...]

    def read(self, piece: int, columns: Sequence[str]) -> Any:
        """These columns of a piece as a pyarrow.Table."""
        with _arrow_errors(self.file.path), _open(self.file.path) as opened:
            return self._read(opened, piece, columns)

    def tables(self, columns: Sequence[str]) -> Iterator[Any]:
        """These columns of every piece."""
        with _arrow_errors(self.file.path), _open(self.file.path) as opened:
            for piece in range(len(self.pieces)):
                yield self._read(opened, piece, columns)

    def _read(self, opened: Any, piece: int, columns: Sequence[str]) -> Any:
        pyarrow, keys = load_pyarrow("Parquet"), dict(self.file.keys)
        stored = [name for name in columns if name not in keys]
        if hasattr(opened, "read_row_group"):
            table = opened.read_row_group(piece, columns=stored)
        else:
            table = pyarrow.Table.from_batches([opened.get_batch(piece)]).select(stored)
        for at, name in enumerate(columns):
            if name in keys:
                table = table.add_column(at, name, pyarrow.array([keys[name]] * self.pieces[piece], pyarrow.string()))
        return table


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    """A ParquetFile, or a reader of Arrow record batches."""
    with open_input(path) as checked:
        is_parquet = checked.read(4) == b"PAR1"
    if is_parquet:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as opened:
            yield opened
    else:
        pyarrow = load_pyarrow(str(path))
        with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_file(mapped) as opened:
            yield opened


def open_arrow(file: TableFile) -> ArrowFile:
    """Read the columns' names and the sizes of the pieces."""
    with _arrow_errors(file.path), _open(file.path) as opened:
        keys = tuple(name for name, _ in file.keys)
        if hasattr(opened, "read_row_group"):
            meta = opened.metadata
            pieces = tuple(meta.row_group(i).num_rows for i in range(meta.num_row_groups))
            names = tuple(opened.schema_arrow.names)
        else:
            pieces = tuple(opened.get_batch(i).num_rows for i in range(opened.num_record_batches))
            names = tuple(opened.schema.names)
        return ArrowFile(file, (*(name for name in names if name not in keys), *keys), pieces)


def read_arrow(file: TableFile, wanted: Wanted) -> RawTable:
    """All rows of a file as numbers and texts."""
    opened = open_arrow(file)
    with naming_file(file.path):
        label = _label_column(opened.names, wanted.label)
        taken = [opened.names[i] for i in pick_columns(opened.names, wanted, label, "the file")]
    read = [*taken, *([] if label is None else [opened.names[label]])]
    pyarrow = load_pyarrow(str(file.path))
    tables = list(opened.tables(read))
    if not sum(opened.pieces):
        raise FormatError(f"{file.path}: the table has no rows", got="0 rows", expected="one or more")
    with _arrow_errors(file.path):
        table = pyarrow.concat_tables(tables)
    cells, texts = raw_columns(table, taken, wanted, file)
    if label is None:
        return RawTable(tuple(taken), cells, texts)
    name = opened.names[label]
    with _arrow_errors(file.path):
        labels, words = _labels(table.column(name), name, wanted.words)
    return RawTable(tuple(taken), cells, texts, labels, words, name)


def raw_columns(
    table: Any, names: Sequence[str], wanted: Wanted, file: TableFile
) -> tuple[Array, tuple[tuple[str, ...], ...]]:
    """The cells (n, C) float32 of these columns, and the texts of each, as in RawTable."""
    cells = np.empty((table.num_rows, len(names)), np.float32)
    texts: list[tuple[str, ...]] = []
    for j, name in enumerate(names):
        with _arrow_errors(file.path):
            cells[:, j], found = _raw_column(table.column(name), name, wanted, is_key=name in dict(file.keys))
        texts.append(found)
    return cells, tuple(texts)


def _raw_column(column: Any, name: str, wanted: Wanted, is_key: bool) -> tuple[Array, tuple[str, ...]]:
    """(n,) float32, and the distinct texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    is_number = any(getattr(pa.types, f"is_{name}")(kind) for name in ("integer", "floating", "decimal", "boolean"))
    if is_key and not wanted.is_text(name):
        with contextlib.suppress(pa.ArrowInvalid):
            column, is_text, is_number = pc.cast(column, pa.float64()), False, True
    if not is_text and not is_number and not pa.types.is_null(kind):
        what = "dates or times" if pa.types.is_temporal(kind) else f"{kind}"
        raise InputError(
            f"column '{name}' holds {what}", got=str(kind), expected="numbers, or few different texts",
            hint=f"--drop {name}" + (", or store it as a number, such as days" if pa.types.is_temporal(kind) else ""),
        )  # fmt: skip
    if column.null_count and wanted.needs_value(name):
        raise _missing(column, name)
    if is_text and wanted.is_number(name):
        got = show(next(value for value in column.to_pylist() if value is not None))
        raise FormatError(
            f"column '{name}' is text", got=got, expected="numbers", hint="the columns of the training rows"
        )
    if not (is_text or wanted.is_text(name)):
        values = np.asarray(pc.cast(column, pa.float64(), safe=False).to_numpy(), np.float64)
        with np.errstate(over="ignore"):
            numbers = values.astype(np.float32)
        if (bad := np.flatnonzero(np.isinf(numbers))).size:
            expected = "finite float32 values"
            raise FormatError(
                f"row {bad[0]}, column '{name}': not finite", got=f"{values[bad[0]]:g}", expected=expected
            )
        if wanted.needs_value(name) and (bad := np.flatnonzero(np.isnan(numbers))).size:
            raise FormatError(f"row {bad[0]}, column '{name}': not a number", got="NaN", expected="a number")
        return numbers, ()
    codes, words = _encoded(column)
    if len(words) > MAX_TEXTS:
        raise FormatError(
            f"column '{name}' has too many different texts",
            got=f"{len(words):,}: {', '.join(map(show, words[:3]))}, ...",
            expected="numbers, or few different values", hint=f"--drop {name}",
        )  # fmt: skip
    return codes.astype(np.float32), words


def _encoded(column: Any) -> tuple[Array, tuple[str, ...]]:
    """Indices (n,) of the texts in a column, NaN where missing, and the distinct texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    coded = pc.dictionary_encode(_strings(column))
    coded = coded.unify_dictionaries().chunks if isinstance(coded, pa.ChunkedArray) else [coded]
    codes = [np.asarray(chunk.indices.to_numpy(zero_copy_only=False), np.float64) for chunk in coded]
    return np.concatenate([np.empty(0), *codes]), tuple(coded[0].dictionary.to_pylist()) if coded else ()


def _strings(column: Any) -> Any:
    """A column as trimmed strings, null where they are empty."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        column = pc.cast(column, column.type.value_type)
    trimmed = pc.utf8_trim_whitespace(pc.cast(column, pa.string()))
    return pc.if_else(pc.equal(trimmed, ""), None, trimmed)


def _labels(column: Any, name: str, words: bool) -> tuple[Array, tuple[str, ...]]:
    """As in RawTable."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.null_count:
        raise _missing(column, name)
    if words:
        codes, found = _encoded(column)
        return codes.astype(np.int64), found
    try:
        return np.asarray(pc.cast(column, pa.float64(), safe=False).to_numpy()).astype(np.float32), ()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        got, hint = str(column.type), "another --labels, or --loss cross_entropy for classes"
        raise InputError(f"label column '{name}' is not numeric", got=got, expected="numbers", hint=hint) from None


def _missing(column: Any, name: str) -> FormatError:
    row = column.is_null().index(True).as_py()
    got, hint = f"{column.null_count:,}, the first in row {row}", "complete rows"
    return FormatError(f"column '{name}' has missing values", got=got, expected="a value in every row", hint=hint)


def _label_column(names: Sequence[str], label: str | None) -> int | None:
    if label is None:
        return None
    if label in POSITIONS:
        return POSITIONS[label] % len(names)
    if label not in names:
        expected = f"first, last, or one of: {shown_names(names)}"
        hint = did_you_mean(label, names) or "last"
        raise InputError("no column has this name", got=label, expected=expected, hint=hint)
    return names.index(label)
