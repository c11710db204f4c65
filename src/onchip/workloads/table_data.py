"""Data sets from a user's files: tables (.csv, .parquet, ...), .npy arrays, idx files (the format of MNIST).

uint8 pixels are divided by 255; rows of ids stay integers. With "cross_entropy", labels are classes: integers from 0 up
are class indices, other integers and text are numbered in sorted order. With other losses, labels are target values.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from onchip.errors import InputError, ShapeError, printable
from onchip.files import check_memory
from onchip.formats.arrays.row_files import map_npy, open_rows
from onchip.formats.tables.csv_layout import is_float
from onchip.formats.tables.raw_table import POSITIONS, RawTable, Wanted
from onchip.formats.tables.table_files import is_table, table_files
from onchip.network.meaning import Column
from onchip.network.recipe import Array
from onchip.train.order import hold_out
from onchip.train.rows import as_ids, check_finite
from onchip.workloads.dataset import Dataset
from onchip.workloads.read_tables import (
    Encoding,
    check_missing,
    learn_encoding,
    parse_names,
    read_raw_cached,
    rows_to_keep,
)
from onchip.workloads.table_cache import CachedTable, read_cached

TEST_SHARE = 0.2  # of the rows, if no test rows are given
MAX_CLASSES = 1 << 16
BYTE_SCALE = 255.0  # uint8 values are pixels
_ARRAYS = (".npy", ".gz", ".idx")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}(\.0*)?")
_SHOWN_NAMES = 10
_SHOWN_CHARACTERS = 400
_PEAK_ARRAYS = 2  # per element: as read, plus a copy when test rows are split off
_MAX_CSV_ID = (1 << 24) - 1  # .csv cells are read as float32, which holds all integers up to here


@dataclass(frozen=True)
class Source:
    """Where rows and labels come from. Labels are a file, or a column of the table: "first", "last" or its name."""

    data: str | None = None  # a file, or several tables; or, for a workload, a data set's name or None
    labels: str | None = None
    test_data: str | None = None
    test_labels: str | None = None  # for a .csv, defaults to `labels`
    test_share: float | None = None  # of the rows, if there is no test_data
    column: str | None = None  # of texts, in a table
    skip_bad: bool | None = None  # count lines that are no texts, instead of an error
    drop: str | None = None  # columns of a table that are not read, with commas
    missing: str | None = None  # how missing values of a table are replaced: one of MISSING; None: "error"

    def files(self) -> dict[str, str]:
        """The fields that name files (not data sets or columns of a .csv), by field name."""
        pairs = (("data", self.data, "labels", self.labels),
                 ("test_data", self.test_data, "test_labels", self.test_labels))  # fmt: skip
        found = dict[str, str]()
        for name, data, labels_name, labels in pairs:
            if data is not None and is_file(data):
                files = [str(file.path) for file in table_files(data)] if is_table(data) else [data]
                found |= {name if len(files) == 1 else f"{name} ({file})": file for file in files}
                if labels is not None and not _is_column(data, labels):
                    found[labels_name] = labels
        return found


def is_file(data: str) -> bool:
    """Whether this is a file, not a data set's name."""
    return bool(Path(data).suffix) or os.sep in data or Path(data).exists()


def load_table(
    source: Source, classes: bool, seed: int, dtype: str = "float32", given: tuple[Column, ...] = ()
) -> Dataset:
    """Read the source. Test rows come from `test_data`, or are a share of the rows, chosen by the seed.

    classes  whether labels are classes, not target values
    dtype    of the rows: float32, or that of ids
    given    how a table is encoded for a network that is trained further; (): learn it from the training rows
    """
    share = source.test_share or 0.0
    if not 0 <= share < 1:
        raise InputError("bad test share", got=str(share), expected="at least 0, below 1", hint="--test-share 0.2")
    if source.test_data is None and source.test_labels is not None:
        raise InputError("labels without rows", got=f"--test-labels {source.test_labels}", expected="--test-data too")
    if source.test_data is not None and source.test_share is not None:
        raise InputError(
            "two sources of test rows", got=f"--test-data and --test-share {share}", expected="one of them",
            hint="omit --test-share",
        )  # fmt: skip
    assert source.data is not None
    if not is_table(source.data) and (source.drop or source.missing):
        option = "--drop" if source.drop else "--missing"
        got, hint = f"{option} with {source.data}", f"omit {option}"
        raise InputError(f"{option} is for tables", got=got, expected="a .csv, .parquet or .arrow file", hint=hint)
    train, notes = _read(source.data, source.labels, classes, "--labels", dtype, _wanted(source, classes, given))
    train, dropped = train.complete(source.missing)
    notes += dropped
    if source.test_data is None:
        train_rows, test_rows = hold_out(len(train.y), share, seed)
        if not len(train_rows):
            got, expected = f"{len(train.y)} rows, --test-share {share}", "at least one training row"
            raise InputError("nothing to train on", got=got, expected=expected, hint="--test-share 0")
    else:
        train_rows, test_rows = np.arange(len(train.y)), np.empty(0, np.int64)
    encoding, learned = train.encoding(source, train_rows, given)
    notes += learned
    x, more = train.rows(encoding, dtype, source.data)
    notes += more
    if source.test_data is not None:
        labels = source.test_labels or (source.labels if is_table(source.test_data) else None)
        is_named = encoding is not None and (encoding.has_header or not encoding.is_plain)
        columns = encoding.columns if encoding is not None and is_named else ()
        wanted = Wanted(columns=columns, numbers=encoding is None, incomplete=source.missing == "drop")
        test, more = _read(source.test_data, labels, classes, "--test-labels", dtype, wanted)
        test, dropped = test.complete(source.missing)
        more += dropped
        x_test, further = test.rows(encoding, dtype, source.test_data)
        if x_test.shape[1] != x.shape[1]:
            got, expected = f"{x_test.shape[1]} columns", f"{x.shape[1]}, as in {source.data}"
            raise ShapeError(f"{source.test_data} does not match", got=got, expected=expected, hint="the same columns")
        x_train, y_train, y_test = x, train.y, _renumbered(train, test)
        notes += [*more, *further]
    else:
        x_test, y_test = x[test_rows], train.y[test_rows]
        x_train, y_train = (x[train_rows], train.y[train_rows]) if len(test_rows) else (x, train.y)
        notes.append(f"test: {len(test_rows):,} of {len(x):,} rows ({share:.0%}), chosen by seed {seed}")
    if train.words:
        shown = ", ".join(train.words[:_SHOWN_NAMES]) + (", ..." if len(train.words) > _SHOWN_NAMES else "")
        notes.append(f"classes: {len(train.words)}: {printable(shown, _SHOWN_CHARACTERS)}")
    name, folder = printable(Path(source.data).name), printable(str(Path(source.data).absolute().parent))
    names, table = (encoding.names, encoding.table) if encoding is not None else ((), ())
    scale, is_columns, row_shape = _kind_of_rows(source.data, dtype)
    return Dataset(
        name, folder, None, x_train, y_train, x_test, y_test, train.words, tuple(notes), names, scale, is_columns,
        row_shape, table,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Labelled:
    """Rows with their labels, as read: of a table before it is encoded."""

    x: Array | RawTable
    y: Array  # (n,) int64 classes, or (n, D_out) float32 values
    words: tuple[str, ...] = ()  # class names; empty: labels are the class indices

    def complete(self, missing: str | None) -> tuple[_Labelled, list[str]]:
        """With "drop", only the rows of a table without missing values, and a note."""
        if check_missing(missing) != "drop" or not isinstance(self.x, RawTable):
            return self, []
        rows, notes = rows_to_keep(self.x)
        return replace(self, x=self.x.take(rows), y=self.y[rows]), notes

    def encoding(self, source: Source, rows: Array, given: tuple[Column, ...]) -> tuple[Encoding | None, list[str]]:
        """How these rows become a network's, learned from some of them; None: they are no table."""
        if not isinstance(self.x, RawTable):
            return None, []
        if given:
            return Encoding(given, False, self.x.has_header), []
        assert source.data is not None
        wanted = _wanted(source, self.y.ndim == 1, given)
        return learn_encoding(source.data, self.x, rows, wanted, check_missing(source.missing))

    def rows(self, encoding: Encoding | None, dtype: str, data: str) -> tuple[Array, list[str]]:
        """(n, D_in) of this dtype, and notes."""
        if not isinstance(self.x, RawTable):
            return self.x, []
        x, notes = (self.x.cells, list[str]()) if encoding is None else encoding.apply(self.x, printable(data))
        return _as_ids(x, Path(data), dtype), notes


def _wanted(source: Source, classes: bool, given: tuple[Column, ...]) -> Wanted:
    label = source.labels if source.data is not None and _is_column(source.data, source.labels or "") else None
    return Wanted(label, classes, given, parse_names(source.drop), incomplete=source.missing == "drop")


def _is_column(data: str, labels: str) -> bool:
    return is_table(data) and bool(labels) and (labels in POSITIONS or Path(labels).suffix.lower() not in _ARRAYS)


def _read(
    data: str, labels: str | None, classes: bool, option: str, dtype: str, wanted: Wanted
) -> tuple[_Labelled, list[str]]:
    """Rows with their labels, and notes for the user."""
    if labels is None:
        what, hint = ("a column", "last") if is_table(data) else ("a file", "labels.npy")
        raise InputError(f"{data} needs labels", got=f"no {option}", expected=what, hint=f"{option} {hint}")
    x: Array | RawTable
    if is_table(data):
        is_column = _is_column(data, labels)
        x, notes = read_raw_cached(data, replace(wanted, label=labels if is_column else None, words=classes))
        if not is_column:
            y, words = _read_labels(Path(labels), classes)
        elif classes:
            assert x.labels is not None
            y, words = _classes(x.labels, x.words, data)
        else:
            assert x.labels is not None
            y, words = x.labels.reshape(-1, 1), ()
        count = len(x.cells)
    else:
        rows, note = read_rows(Path(data), dtype)
        x, notes, count = flat(rows), [note] if note else [], len(rows)
        y, words = _read_labels(Path(labels), classes)
    if count != len(y) or not count:
        raise ShapeError(
            "rows and labels do not match", got=f"{count:,} rows, {len(y):,} labels",
            expected="one label per row, at least one row", hint=f"check that {option} {labels} belongs to {data}",
        )  # fmt: skip
    if isinstance(x, np.ndarray):
        check_finite(x, f"rows of {data}")  # by their numbers in the file
    check_finite(y, f"targets of {labels if not _is_column(data, labels) else data}")
    return _Labelled(x, y, words), notes


# -- rows --------------------------------------------------------------------------------------------------


def read_rows(path: Path, dtype: str = "float32") -> tuple[Array, str]:
    """Rows (n, ...) of an .npy, idx or idx.gz file, and a note for the user; as float32, uint8 is divided by 255."""
    read = _as_float32 if dtype == "float32" else partial(_read_ids, dtype=dtype)
    if path.suffix.lower() != ".gz":
        return read(path), ""
    table, note = read_cached([path], dtype, lambda: CachedTable(read(path)))
    return table.x, note


def flat(rows: Array) -> Array:
    """Reshape (n, ...) to (n, D)."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def _as_float32(path: Path) -> Array:
    with open_rows(path) as rows:
        check_memory(_PEAK_ARRAYS * 4 * math.prod(rows.shape), str(path))
        if rows.dtype == np.float32 and path.suffix.lower() == ".npy":
            return np.ascontiguousarray(map_npy(path), np.float32)  # copies only if it is not row-major
        raw = rows.read(0, len(rows))
    with np.errstate(over="ignore"):
        values = raw.astype(np.float32)
    if raw.dtype == np.uint8:
        values /= np.float32(BYTE_SCALE)
    return values


def _read_ids(path: Path, dtype: str) -> Array:
    with open_rows(path) as rows:
        check_memory(_PEAK_ARRAYS * np.dtype(dtype).itemsize * math.prod(rows.shape), str(path))
        return _as_ids(rows.read(0, len(rows)), path, dtype)


def _as_ids(x: Array, path: Path, dtype: str) -> Array:
    """x as integers of this dtype, unless that is float32; InputError for the first value that is none."""
    if dtype == "float32":
        return x
    return as_ids(x, dtype, f"{path}: the rows", most=_MAX_CSV_ID if is_table(str(path)) else None)


def _kind_of_rows(data: str, dtype: str) -> tuple[float, bool, tuple[int, ...]]:
    """What the rows of a file were divided by (0: nothing), whether they are a table, and the shape of one; () in a
    table."""
    if is_table(data):
        return 0.0, dtype == "float32", ()
    with open_rows(data) as rows:
        is_bytes, is_float = rows.dtype == np.uint8, dtype == "float32"
        is_columns = is_float and len(rows.shape) == 2 and not is_bytes
        return BYTE_SCALE if is_bytes and is_float else 0.0, is_columns, tuple(rows.shape[1:])


# -- labels ------------------------------------------------------------------------------------------------


def _read_labels(path: Path, classes: bool) -> tuple[Array, tuple[str, ...]]:
    """(n,) classes or (n, D_out) values, and class names: empty if labels are the class indices."""
    if is_table(str(path)):
        raise InputError(
            "labels in a separate table", got=str(path), expected="an .npy or idx file, or a column of the table",
            hint="put them into the table: --labels last",
        )  # fmt: skip
    with open_rows(path) as source:
        check_memory(_PEAK_ARRAYS * 4 * math.prod(source.shape), str(path))
        labels = source.read(0, len(source))
    if not classes:
        return flat(labels).astype(np.float32), ()
    if labels.size != len(labels):
        raise ShapeError(
            f"{path} does not hold classes", got=f"{labels.dtype.name} {labels.shape}", expected=f"({len(labels)},)",
            hint="--loss mse for target values",
        )  # fmt: skip
    distinct, codes = np.unique(labels.reshape(-1), return_inverse=True)
    return _classes(codes, [str(label) for label in distinct.tolist()], str(path))


def _classes(codes: Array, words: Sequence[str], path: str) -> tuple[Array, tuple[str, ...]]:
    """Class indices (n,) int64 of labels that are numbers or text, and class names: empty if labels are the indices.

    codes  (n,) indices into `words`, the distinct labels
    """
    order = sorted(range(len(words)), key=words.__getitem__)
    names = [words[i] for i in order]
    codes = np.argsort(order)[codes]
    if all(_INTEGER.fullmatch(name) for name in names):
        integers = np.array([int(name.partition(".")[0]) for name in names], np.int64)
        if integers.min(initial=0) >= 0:
            _check_count(int(integers.max(initial=0)) + 1, path)
            return integers[codes], ()
        values, index_of = np.unique(integers, return_inverse=True)
        names, codes = [str(value) for value in values.tolist()], index_of[codes]
    elif all(is_float(name) for name in names):
        real = next(name for name in names if not _INTEGER.fullmatch(name))
        raise InputError(
            f"{path}: the labels are real values, not classes", got=real, expected="integers or class names",
            hint="--loss mse for regression",
        )  # fmt: skip
    _check_count(len(names), path)
    return codes.astype(np.int64), tuple(names)


def _check_count(count: int, path: str) -> None:
    if count > MAX_CLASSES:
        raise InputError(
            f"{path}: too many classes", got=f"{count:,}", expected=f"at most {MAX_CLASSES:,}",
            hint="--loss mse for regression, or another label column",
        )  # fmt: skip


def _renumbered(train: _Labelled, test: _Labelled) -> Array:
    """The test labels, renumbered to the classes of the training data."""
    if train.y.ndim == 2 or (train.words and train.words == test.words):
        return test.y
    present = np.unique(test.y).tolist()
    names = {index: _class_name(index, test.words) for index in present}
    known = {_class_name(index, train.words): index for index in range(_class_count(train))}
    if unknown := [name for name in names.values() if name not in known]:
        raise InputError(
            "a test row has a class that no training row has", got=unknown[0],
            expected=", ".join(list(known)[:_SHOWN_NAMES]), hint="check that both files use the same class names",
        )  # fmt: skip
    indices = np.zeros(max(present) + 1, np.int64)
    for index, name in names.items():
        indices[index] = known[name]
    renumbered: Array = indices[test.y]
    return renumbered


def _class_name(index: int, words: Sequence[str]) -> str:
    return words[index] if words else str(index)


def _class_count(table: _Labelled) -> int:
    return len(table.words) or int(table.y.max()) + 1
