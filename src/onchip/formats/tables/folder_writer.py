"""Results as a folder: a table for each input table, under the same name."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from onchip.errors import OutputError
from onchip.files import check_writable, write_error
from onchip.formats.arrays.row_files import RowWriter
from onchip.formats.tables.csv_writer import CsvWriter
from onchip.formats.tables.kept_columns import KeptColumns
from onchip.formats.tables.parquet_writer import ParquetWriter
from onchip.formats.tables.table_files import ARROW
from onchip.network.recipe import Array


def check_folder(path: Path) -> None:
    """OutputError unless the folder can be created: it does not exist or is empty."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        got = "a folder with files" if path.is_dir() else "a file"
        raise OutputError(f"cannot write {path}", got=got, expected="a new or empty folder", hint="another name")
    check_writable(path.absolute().parent / f"{path.name}.partial")


class FolderWriter(RowWriter):
    """Writes the results of several tables; the folder appears when all rows are written.

    parts  name of each table within the folder, and its number of rows
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        shape: tuple[int, ...],
        dtype: Any,
        parts: Sequence[tuple[str, int]],
        classes: Sequence[str] = (),
        top: int = 1,
        kept: KeptColumns | None = None,
    ) -> None:
        super().__init__(path, shape, dtype)
        self._parts, self._classes, self._top, self._kept = tuple(parts), tuple(classes), top, kept

    def _begin(self, file: IO[bytes]) -> None:
        raise NotImplementedError  # there is no file

    _append = _begin  # type: ignore[assignment]

    def __enter__(self) -> Self:
        target = self.path.absolute()
        check_folder(self.path)
        try:
            self._temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        except OSError as error:
            raise write_error(self.path, error) from None
        self._reader = None if self._kept is None else self._kept.open()
        self._waiting, self._open = list(self._parts), None
        return self

    _open: RowWriter | None

    def write(self, rows: Array) -> None:
        at = 0
        while at < len(rows):
            if self._open is None:
                self._begin_part()
            assert self._open is not None
            count = min(len(rows) - at, self._open.shape[0] - self._open.rows)
            self._open.write(rows[at : at + count])
            self.rows, at = self.rows + count, at + count
            if self._open.rows == self._open.shape[0]:
                self._end_part()

    def _begin_part(self) -> None:
        name, rows = self._waiting.pop(0)
        is_arrow = name.lower().endswith(ARROW)
        stem = name[: -len(".gz")] if name.lower().endswith(".gz") else name
        path = (self._temporary / stem).with_suffix(".parquet" if is_arrow else ".csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        make: Any = ParquetWriter if is_arrow else CsvWriter
        shape = (rows, *self.shape[1:])
        writer = make(path, shape, self.dtype, self._classes, self._top, self._kept, self._reader)
        self._open = writer.__enter__()

    def _end_part(self) -> None:
        assert self._open is not None
        ended, self._open = self._open, None
        ended.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._open is not None:
                self._open.__exit__(kind, error, trace)
            self._check_count(kind)
            if kind is None:
                while self._waiting:  # tables without rows
                    self._begin_part()
                    self._end_part()
                os.chmod(self._temporary, 0o777 & ~_umask())
                os.replace(self._temporary, self.path.absolute())
        except OSError as failed:
            raise write_error(self.path, failed) from None
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
