"""Data sets from a user's files: .csv tables, .npy arrays, idx files (the format of MNIST), gzipped or not.

Bytes are pixels and are divided by 255; other values are unchanged. For "cross_entropy" labels are classes: integers
from 0 are kept, other values and words are numbered in sorted order. For the other losses labels are target values.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onchip.errors import InputError, ShapeError, printable
from onchip.files import check_memory
from onchip.formats.arrays.row_files import map_npy, open_rows
from onchip.formats.tables.csv_rows import POSITIONS, csv_columns, is_float, read_csv
from onchip.network.recipe import Array
from onchip.train.order import hold_out
from onchip.workloads.dataset import Dataset
from onchip.workloads.kept import Kept, read_once

TEST_SHARE = 0.2  # of the rows, if no test rows are given
MAX_CLASSES = 1 << 16
BYTE_SCALE = 255.0  # bytes are pixels
_ARRAYS = (".npy", ".gz", ".idx")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}(\.0*)?")
_SHOWN_WORDS = 10
_SHOWN_SIGNS = 400
_PEAK_BYTES = 8  # per element: as float32, plus a copy when test rows are split off


@dataclass(frozen=True)
class Source:
    """The source of the rows. Labels are a file, or a column of the .csv: "first", "last" or its name."""

    data: str | None = None  # a file; for a workload the name of a data set, or None
    labels: str | None = None
    test_data: str | None = None
    test_labels: str | None = None  # for a .csv, defaults to `labels`
    test_share: float | None = None  # of the rows, if there is no test_data

    def files(self) -> dict[str, str]:
        """The fields that are files, by name: neither names of data sets nor columns of a .csv."""
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


def load_table(source: Source, classes: bool, seed: int) -> Dataset:
    """Read the source. Test rows come from files too, or are a share of the rows, chosen by the seed.

    classes  labels are classes; else target values
    """
    share = source.test_share or 0.0
    if not 0 <= share < 1:
        raise InputError("bad test share", got=str(share), expected="at least 0, below 1", hint="--test-share 0.2")
    if source.test_data is None and source.test_labels is not None:
        raise InputError("labels without rows", got=f"--test-labels {source.test_labels}", expected="--test-data too")
    if source.test_data is not None and source.test_share is not None:
        raise InputError(
            "rows to test on are given twice", got=f"--test-data and --test-share {share}", expected="one of them",
            hint="leave --test-share out",
        )  # fmt: skip
    assert source.data is not None
    train, notes = _read(source.data, source.labels, classes, "--labels")
    assert train.y is not None
    if source.test_data is not None:
        labels = source.test_labels or (source.labels if _is_table(source.test_data) else None)
        test, more = _read(source.test_data, labels, classes, "--test-labels")
        x_train, y_train, x_test, y_test = train.x, train.y, test.x, _like(train, test)
        if x_test.shape[1] != x_train.shape[1]:
            got, expected = f"{x_test.shape[1]} numbers a row", f"{x_train.shape[1]}, as in {source.data}"
            raise ShapeError(f"{source.test_data} does not fit", got=got, expected=expected, hint="the same columns")
        notes += more
    else:
        rows, held = hold_out(len(train.x), share, seed)
        if not len(rows):
            got, expected = f"{len(train.x)} rows, --test-share {share}", "a row that is left to train on"
            raise InputError("nothing to train on", got=got, expected=expected, hint="--test-share 0")
        x_test, y_test = train.x[held], train.y[held]
        x_train, y_train = (train.x[rows], train.y[rows]) if len(held) else (train.x, train.y)
        notes.append(f"test: {len(held):,} of {len(train.x):,} rows ({share:.0%}), chosen by seed {seed}")
    if train.words:
        shown = ", ".join(train.words[:_SHOWN_WORDS]) + (", ..." if len(train.words) > _SHOWN_WORDS else "")
        notes.append(f"classes: {len(train.words)}: {printable(shown, _SHOWN_SIGNS)}")
    name, where = printable(Path(source.data).name), printable(str(Path(source.data).absolute().parent))
    columns: tuple[str, ...] = ()
    if _is_table(source.data):
        label = source.labels if _is_column(source.data, source.labels or "") else None
        columns = csv_columns(source.data, label)
    scale, is_table = _kind_of_rows(Path(source.data))
    return Dataset(
        name, where, None, x_train, y_train, x_test, y_test, train.words, tuple(notes), columns, scale, is_table
    )  # fmt: skip


def _is_table(data: str) -> bool:
    return Path(data).suffix.lower() == ".csv"


def _is_column(data: str, labels: str) -> bool:
    return _is_table(data) and (labels in POSITIONS or Path(labels).suffix.lower() not in _ARRAYS)


def _read(data: str, labels: str | None, classes: bool, option: str) -> tuple[Kept, list[str]]:
    """Rows (n, D_in) float32 with their labels; and messages for the user."""
    if labels is None:
        what, hint = ("a column", "last") if _is_table(data) else ("a file", "labels.npy")
        raise InputError(f"{data} needs labels", got=f"no {option}", expected=what, hint=f"{option} {hint}")
    if _is_column(data, labels):
        found, note = read_once(
            Path(data), f"label {labels}, {'classes' if classes else 'numbers'}",
            lambda: _read_csv(Path(data), labels, classes),
        )  # fmt: skip
        notes = [note]
    else:
        rows, note = _read_table(Path(data)) if _is_table(data) else read_rows(Path(data))
        found, notes = Kept(flat(rows), *_read_labels(Path(labels), classes)), [note]
    assert found.y is not None
    if len(found.x) != len(found.y) or not len(found.x):
        raise ShapeError(
            "rows and labels do not belong together", got=f"{len(found.x):,} rows, {len(found.y):,} labels",
            expected="a label for every row, and at least one", hint=f"see that {option} {labels} belongs to {data}",
        )  # fmt: skip
    return found, [note for note in notes if note]


# -- rows --------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> tuple[Array, str]:
    """Rows (n, ...) float32 of an .npy, idx or gzipped idx file, and a message; bytes are divided by 255."""
    if path.suffix.lower() != ".gz":
        return _as_float32(path), ""
    kept, note = read_once(path, "float32", lambda: Kept(_as_float32(path)))
    return kept.x, note


def flat(rows: Array) -> Array:
    """(n, ...) as (n, D)."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def _as_float32(path: Path) -> Array:
    with open_rows(path) as rows:
        check_memory(_PEAK_BYTES * math.prod(rows.shape), str(path))
        if rows.dtype == np.float32 and path.suffix.lower() == ".npy":
            return np.ascontiguousarray(map_npy(path), np.float32)  # copies only if it is not row-major
        numbers = rows.read(0, len(rows))
    with np.errstate(over="ignore"):
        values = numbers.astype(np.float32)
    if numbers.dtype == np.uint8:
        values /= np.float32(BYTE_SCALE)
    return values


def _kind_of_rows(path: Path) -> tuple[float, bool]:
    """The divisor of the rows of a file (0: none), and whether they are a table."""
    if _is_table(str(path)):
        return 0.0, True
    with open_rows(path) as rows:
        is_bytes = rows.dtype == np.uint8
        return BYTE_SCALE if is_bytes else 0.0, len(rows.shape) == 2 and not is_bytes


def _read_table(path: Path) -> tuple[Array, str]:
    kept, note = read_once(path, "rows", lambda: Kept(read_csv(path).values))
    return kept.x, note


def _read_csv(path: Path, label: str, classes: bool) -> Kept:
    rows = read_csv(path, label, words=classes)
    assert rows.labels is not None
    if not classes:
        return Kept(rows.values, rows.labels.reshape(-1, 1))
    return Kept(rows.values, *_classes(rows.labels, path))


# -- labels ------------------------------------------------------------------------------------------------


def _read_labels(path: Path, classes: bool) -> tuple[Array, tuple[str, ...]]:
    """(n,) classes or (n, D_out) values, and the class names if they are not the indices."""
    if _is_table(str(path)):
        raise InputError(
            "labels in a .csv of their own", got=str(path), expected="an .npy or idx file, or a column of the table",
            hint="put them into the table: --labels last",
        )  # fmt: skip
    with open_rows(path) as source:
        check_memory(_PEAK_BYTES * math.prod(source.shape), str(path))
        labels = source.read(0, len(source))
    if not classes:
        return flat(labels).astype(np.float32), ()
    if labels.size != len(labels):
        raise ShapeError(
            f"{path} does not hold classes", got=f"{labels.dtype.name} {labels.shape}", expected=f"({len(labels)},)",
            hint="--loss mse for rows of numbers",
        )  # fmt: skip
    return _classes(labels.reshape(-1), path)


def _classes(labels: Array, path: Path) -> tuple[Array, tuple[str, ...]]:
    """Classes (n,) int64 for labels that are numbers or words, and their names if they are not the indices."""
    distinct, codes = np.unique(labels, return_inverse=True)
    names = [str(label) for label in distinct.tolist()]
    if all(_WHOLE.fullmatch(name) for name in names):
        numbers = np.array([int(name.partition(".")[0]) for name in names], np.int64)
        if numbers.min(initial=0) >= 0:
            _check_count(int(numbers.max(initial=0)) + 1, path)
            return numbers[codes], ()
        values, of_name = np.unique(numbers, return_inverse=True)
        names, codes = [str(value) for value in values.tolist()], of_name[codes]
    elif all(is_float(name) for name in names):
        fraction = next(name for name in names if not _WHOLE.fullmatch(name))
        raise InputError(
            f"{path}: the labels are numbers, not classes", got=fraction, expected="whole numbers or words",
            hint="--loss mse learns numbers",
        )  # fmt: skip
    _check_count(len(names), path)
    return codes.astype(np.int64), tuple(names)


def _check_count(count: int, path: Path) -> None:
    if count > MAX_CLASSES:
        raise InputError(
            f"{path}: too many classes", got=f"{count:,}", expected=f"at most {MAX_CLASSES:,}",
            hint="--loss mse if these are numbers, or another label column",
        )  # fmt: skip


def _like(train: Kept, test: Kept) -> Array:
    """The test labels, renumbered to the classes of the training data."""
    assert train.y is not None
    assert test.y is not None
    if train.y.ndim == 2 or (train.words and train.words == test.words):
        return test.y
    present = np.unique(test.y).tolist()
    names = {number: _name(number, test.words) for number in present}
    known = {_name(number, train.words): number for number in range(_count(train))}
    if strange := [name for name in names.values() if name not in known]:
        raise InputError(
            "a test row has a class that no training row has", got=strange[0],
            expected=", ".join(list(known)[:_SHOWN_WORDS]), hint="see that both files name their classes alike",
        )  # fmt: skip
    table = np.zeros(max(present) + 1, np.int64)
    for number, name in names.items():
        table[number] = known[name]
    renumbered: Array = table[test.y]
    return renumbered


def _name(number: int, words: Sequence[str]) -> str:
    return words[number] if words else str(number)


def _count(kept: Kept) -> int:
    assert kept.y is not None
    return len(kept.words) or int(kept.y.max()) + 1
