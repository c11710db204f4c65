"""Data sets from a user's files: .csv tables, .npy arrays, idx files (the format of MNIST), gzipped or not.

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
from onchip.formats.tables.csv_rows import POSITIONS, csv_columns, is_float, read_csv
from onchip.network.recipe import Array
from onchip.train.order import hold_out
from onchip.train.rows import as_ids, check_finite
from onchip.workloads.dataset import Dataset
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
    """Where rows and labels come from. Labels are a file, or a column of the .csv: "first", "last" or its name."""

    data: str | None = None  # a file; or, for a workload, a data set's name or None
    labels: str | None = None
    test_data: str | None = None
    test_labels: str | None = None  # for a .csv, defaults to `labels`
    test_share: float | None = None  # of the rows, if there is no test_data
    column: str | None = None  # of texts, in a table
    skip_bad: bool | None = None  # count lines that are no texts, instead of an error

    def files(self) -> dict[str, str]:
        """The fields that name files (not data sets or columns of a .csv), by field name."""
        pairs = (("data", self.data, "labels", self.labels),
                 ("test_data", self.test_data, "test_labels", self.test_labels))  # fmt: skip
        found = {}
        for name, data, labels_name, labels in pairs:
            if data is not None and is_file(data):
                found[name] = data
                if labels is not None and not _is_column(data, labels):
                    found[labels_name] = labels
        return found


def is_file(data: str) -> bool:
    """Whether this is a file, not a data set's name."""
    return bool(Path(data).suffix) or os.sep in data or Path(data).exists()


def load_table(source: Source, classes: bool, seed: int, dtype: str = "float32") -> Dataset:
    """Read the source. Test rows come from `test_data`, or are a share of the rows, chosen by the seed.

    classes  whether labels are classes, not target values
    dtype    of the rows: float32, or that of ids
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
    train, notes = _read(source.data, source.labels, classes, "--labels", dtype)
    assert train.y is not None
    if source.test_data is not None:
        labels = source.test_labels or (source.labels if _is_csv(source.test_data) else None)
        test, test_notes = _read(source.test_data, labels, classes, "--test-labels", dtype)
        x_train, y_train, x_test, y_test = train.x, train.y, test.x, _renumbered(train, test)
        if x_test.shape[1] != x_train.shape[1]:
            got, expected = f"{x_test.shape[1]} columns", f"{x_train.shape[1]}, as in {source.data}"
            raise ShapeError(f"{source.test_data} does not match", got=got, expected=expected, hint="the same columns")
        notes += test_notes
    else:
        train_rows, test_rows = hold_out(len(train.x), share, seed)
        if not len(train_rows):
            got, expected = f"{len(train.x)} rows, --test-share {share}", "at least one training row"
            raise InputError("nothing to train on", got=got, expected=expected, hint="--test-share 0")
        x_test, y_test = train.x[test_rows], train.y[test_rows]
        x_train, y_train = (train.x[train_rows], train.y[train_rows]) if len(test_rows) else (train.x, train.y)
        notes.append(f"test: {len(test_rows):,} of {len(train.x):,} rows ({share:.0%}), chosen by seed {seed}")
    if train.words:
        shown = ", ".join(train.words[:_SHOWN_NAMES]) + (", ..." if len(train.words) > _SHOWN_NAMES else "")
        notes.append(f"classes: {len(train.words)}: {printable(shown, _SHOWN_CHARACTERS)}")
    name, folder = printable(Path(source.data).name), printable(str(Path(source.data).absolute().parent))
    columns: tuple[str, ...] = ()
    if _is_csv(source.data):
        label = source.labels if _is_column(source.data, source.labels or "") else None
        columns = csv_columns(source.data, label)
    scale, is_table, row_shape = _kind_of_rows(Path(source.data), dtype)
    return Dataset(
        name, folder, None, x_train, y_train, x_test, y_test, train.words, tuple(notes), columns, scale, is_table,
        row_shape,
    )  # fmt: skip


def _is_csv(data: str) -> bool:
    return Path(data).suffix.lower() == ".csv"


def _is_column(data: str, labels: str) -> bool:
    return _is_csv(data) and (labels in POSITIONS or Path(labels).suffix.lower() not in _ARRAYS)


def _read(data: str, labels: str | None, classes: bool, option: str, dtype: str) -> tuple[CachedTable, list[str]]:
    """Rows (n, D_in) of this dtype with their labels, and notes for the user."""
    if labels is None:
        what, hint = ("a column", "last") if _is_csv(data) else ("a file", "labels.npy")
        raise InputError(f"{data} needs labels", got=f"no {option}", expected=what, hint=f"{option} {hint}")
    if _is_column(data, labels):
        table, note = read_cached(
            Path(data), f"label {labels}, {'classes' if classes else 'numbers'}",
            lambda: _read_labelled_csv(Path(data), labels, classes),
        )  # fmt: skip
        table, notes = replace(table, x=_as_ids(table.x, Path(data), dtype)), [note]
    else:
        rows, note = _read_csv_rows(Path(data), dtype) if _is_csv(data) else read_rows(Path(data), dtype)
        table, notes = CachedTable(flat(rows), *_read_labels(Path(labels), classes)), [note]
    assert table.y is not None
    if len(table.x) != len(table.y) or not len(table.x):
        raise ShapeError(
            "rows and labels do not match", got=f"{len(table.x):,} rows, {len(table.y):,} labels",
            expected="one label per row, at least one row", hint=f"check that {option} {labels} belongs to {data}",
        )  # fmt: skip
    check_finite(table.x, f"rows of {data}")  # by their numbers in the file
    check_finite(table.y, f"targets of {labels if not _is_column(data, labels) else data}")
    return table, [note for note in notes if note]


# -- rows --------------------------------------------------------------------------------------------------


def read_rows(path: Path, dtype: str = "float32") -> tuple[Array, str]:
    """Rows (n, ...) of an .npy, idx or idx.gz file, and a note for the user; as float32, uint8 is divided by 255."""
    read = _as_float32 if dtype == "float32" else partial(_read_ids, dtype=dtype)
    if path.suffix.lower() != ".gz":
        return read(path), ""
    table, note = read_cached(path, dtype, lambda: CachedTable(read(path)))
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
    return as_ids(x, dtype, f"{path}: the rows", most=_MAX_CSV_ID if _is_csv(str(path)) else None)


def _kind_of_rows(path: Path, dtype: str) -> tuple[float, bool, tuple[int, ...]]:
    """What the rows of a file were divided by (0: nothing), whether they are a table, and the shape of one; () in a
    .csv."""
    if _is_csv(str(path)):
        return 0.0, dtype == "float32", ()
    with open_rows(path) as rows:
        is_bytes, is_float = rows.dtype == np.uint8, dtype == "float32"
        is_table = is_float and len(rows.shape) == 2 and not is_bytes
        return BYTE_SCALE if is_bytes and is_float else 0.0, is_table, tuple(rows.shape[1:])


def _read_csv_rows(path: Path, dtype: str) -> tuple[Array, str]:
    table, note = read_cached(path, "rows", lambda: CachedTable(read_csv(path).values))
    return _as_ids(table.x, path, dtype), note


def _read_labelled_csv(path: Path, label: str, classes: bool) -> CachedTable:
    rows = read_csv(path, label, words=classes)
    assert rows.labels is not None
    if not classes:
        return CachedTable(rows.values, rows.labels.reshape(-1, 1))
    return CachedTable(rows.values, *_classes(rows.labels, path))


# -- labels ------------------------------------------------------------------------------------------------


def _read_labels(path: Path, classes: bool) -> tuple[Array, tuple[str, ...]]:
    """(n,) classes or (n, D_out) values, and class names: empty if labels are the class indices."""
    if _is_csv(str(path)):
        raise InputError(
            "labels in a separate .csv", got=str(path), expected="an .npy or idx file, or a column of the table",
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
    return _classes(labels.reshape(-1), path)


def _classes(labels: Array, path: Path) -> tuple[Array, tuple[str, ...]]:
    """Class indices (n,) int64 of labels that are numbers or text, and class names: empty if labels are the indices."""
    distinct, codes = np.unique(labels, return_inverse=True)
    names = [str(label) for label in distinct.tolist()]
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


def _check_count(count: int, path: Path) -> None:
    if count > MAX_CLASSES:
        raise InputError(
            f"{path}: too many classes", got=f"{count:,}", expected=f"at most {MAX_CLASSES:,}",
            hint="--loss mse for regression, or another label column",
        )  # fmt: skip


def _renumbered(train: CachedTable, test: CachedTable) -> Array:
    """The test labels, renumbered to the classes of the training data."""
    assert train.y is not None
    assert test.y is not None
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


def _class_count(table: CachedTable) -> int:
    assert table.y is not None
    return len(table.words) or int(table.y.max()) + 1
