"""Results as Parquet: the columns of csv_writer, with their types."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from onchip.formats.arrays.row_files import RowWriter
from onchip.formats.tables.arrow_file import load_pyarrow
from onchip.formats.tables.csv_writer import result_names, top_classes
from onchip.formats.tables.kept_columns import KeptColumns, KeptReader
from onchip.network.recipe import Array


class ParquetWriter(RowWriter):
    """The kept columns, then the values of a row, or its most likely classes and their probabilities.

    classes  names of the logits in a row
    top      how many of them to write
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
        load_pyarrow(str(path))
        self.classes, self.top, self._kept, self._reader = tuple(classes), top, kept, reader

    def _begin(self, file: IO[bytes]) -> None:
        import pyarrow.parquet

        if self._kept is not None and self._reader is None:
            self._reader = self._kept.open()
        kept = [] if self._kept is None else list(zip(self._kept.names, self._kept.types(), strict=True))
        if self.classes:
            types = [pyarrow.string(), pyarrow.float64()] * self.top
        else:
            types = [pyarrow.from_numpy_dtype(self.dtype)] * int(np.prod(self.shape[1:]))
        names = result_names(self.shape, self.classes, self.top)
        schema = pyarrow.schema([*kept, *zip(names, types, strict=True)])
        self._writer = pyarrow.parquet.ParquetWriter(file, schema)

    def _append(self, file: IO[bytes], rows: Array) -> None:
        import pyarrow

        schema, columns = self._writer.schema, []
        if self._reader is not None:
            taken = self._reader.take(len(rows))
            columns = [list(column) for column in zip(*taken, strict=True)] if taken else [[] for _ in self._kept_names]
        if self.classes:
            best = top_classes(rows, self.classes, self.top)
            columns += [[row[i][part] for row in best] for i in range(self.top) for part in (0, 1)]
        else:
            columns += list(rows.reshape(len(rows), int(np.prod(self.shape[1:]))).T)
        arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        self._writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))

    @property
    def _kept_names(self) -> tuple[str, ...]:
        return () if self._kept is None else self._kept.names

    def _check_count(self, kind: type[BaseException] | None, *rest: object) -> None:
        if hasattr(self, "_writer"):
            self._writer.close()  # the file stays open: the caller renames it
        super()._check_count(kind, *rest)
