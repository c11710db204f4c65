"""A callable for data tools: Ray Data's map_batches, Dask's map_partitions, Spark's mapInPandas, a plain loop."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.formats.load import load_file
from onchip.formats.tables.csv_writer import result_names, top_classes
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.runtime.engine import Engine
from onchip.runtime.engine import compile as compile_network


def predictor(path: str | os.PathLike[str], *, keep: Iterable[str] = (), **options: Any) -> Predictor:
    """A function from batches of a table to batches of results, which can be pickled and sent to workers.

    A batch is a data frame, a dictionary of columns, a pyarrow.Table or an array (n, ...); the result is of the same
    kind, with the columns label and probability, or y0, y1, ... of a network without class names. An iterator of
    batches gives an iterator. Each process compiles the network once, with the first batch.

    path     of a network with one input and one output; every worker must see the file
    keep     columns of the batch that the result begins with, such as ids
    options  of `onchip.compile`: device="cpu", threads=1
    """
    net = load_file(path)
    for what, names in (("input", net.inputs), ("output", net.outputs)):
        if len(names) != 1:
            got, hint = ", ".join(names), "onchip.compile, whose engines pickle"
            raise InputError(f"'{net.name}' has {len(names)} {what}s", got=got, expected="one", hint=hint)
    return Predictor(os.path.abspath(path), tuple(keep), options)


class Predictor:
    """See `predictor`."""

    def __init__(self, path: str, keep: tuple[str, ...], options: dict[str, Any]) -> None:
        self.path, self.keep, self.options = path, keep, dict(options)
        self._engine: Engine | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}  # compiled in each process

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = compile_network(load_file(self.path), **self.options)
        return self._engine

    def __call__(self, batch: Any) -> Any:
        if isinstance(batch, np.ndarray):
            return self.engine(batch)
        if isinstance(batch, Iterator):
            return map(self, batch)
        if isinstance(batch, dict):
            return self._results(batch, batch)
        if hasattr(batch, "to_pydict"):  # pyarrow
            columns = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in batch.column_names}
            return type(batch).from_pydict(self._results(columns, {name: batch.column(name) for name in columns}))
        if hasattr(batch, "columns"):
            columns = {name: batch[name] for name in batch.columns}
            return type(batch)(self._results(columns, columns))
        expected = "a data frame, a dictionary of columns, a pyarrow.Table or an array"
        raise InputError("not a batch of rows", got=type(batch).__name__, expected=expected, hint="np.asarray(batch)")

    def _results(self, columns: dict[Any, Any], kept: dict[Any, Any]) -> dict[Any, Any]:
        """The kept columns, then those of the results."""
        if missing := [name for name in self.keep if name not in columns]:
            got, hint = ", ".join(map(str, columns)), "keep=(), or the names of columns"
            raise InputError(f"no column '{missing[0]}' to keep", got=got, expected=", ".join(self.keep), hint=hint)
        net = self.engine.plan.network
        y: Array = self.engine(_Frame(columns) if net.meaning.table else self._rows(columns, net))
        names, classes = result_names((len(y), *y.shape[1:]), net.meaning.classes, 1), net.meaning.classes
        if classes:
            best = [row[0] for row in top_classes(y, classes, 1)]
            values = [
                np.array([label for label, _ in best], object),
                np.array([share for _, share in best], np.float64),
            ]
        else:
            values = list(y.reshape(len(y), len(names)).T)
        return {**{name: kept[name] for name in self.keep}, **dict(zip(names, values, strict=True))}

    def _rows(self, columns: dict[Any, Any], net: Network) -> Array:
        """The columns that the network reads, (n, D); without names in the network all but the kept ones, in order."""
        names = net.meaning.columns or tuple(name for name in columns if name not in self.keep)
        if missing := [name for name in names if name not in columns]:
            got, hint = ", ".join(map(str, columns)), "the columns that the network was trained on"
            raise InputError(f"no column '{missing[0]}'", got=got, expected=", ".join(names), hint=hint)
        arrays = [np.asarray(columns[name]) for name in names]
        if len(arrays) == 1 and arrays[0].ndim > 1:  # a column of images or vectors
            return arrays[0]
        return np.stack([array.astype(net.input.dtype, copy=False) for array in arrays], axis=1)


class _Frame:
    """Columns with the few methods of a data frame that an engine uses."""

    def __init__(self, columns: dict[Any, Any]) -> None:
        self.columns, self._arrays = list(columns), columns

    def __getitem__(self, name: str) -> _Column:
        return _Column(self._arrays[name])

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values()), ()))

    def to_numpy(self) -> Array:
        return np.array([np.asarray(array) for array in self._arrays.values()], object).T


class _Column:
    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)

    def to_numpy(self) -> Array:
        return self._values
