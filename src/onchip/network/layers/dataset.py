"""Steps over a data set that stays on the device: their rows, values from a table, a log and counters.

`position` (2,) int64 is the number of the step, and the position in `order` at which its rows begin. An index outside
its array counts as the nearest one inside, so that no kernel accesses other memory: the caller checks what it writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import Arrays, StepLayer, Types, Weights, WeightTypes, as_sizes
from onchip.network.recipe import Array
from onchip.network.types import TensorType

STEP, FIRST_ROW = range(2)  # of a position


class RowIds(StepLayer):
    """The data set's rows of this step: any (B, ...), of which only B is read -> (B,), order[first row + b]."""

    crosses_rows: ClassVar[bool] = True  # by the place of a row in the batch
    required: ClassVar[tuple[str, ...]] = ("order", "position")

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        _need_position(weights)
        order = weights["order"]
        if order.dtype != "int64" or len(order.shape) != 1 or not order.shape[0]:
            raise ShapeError("order is a list of row ids", got=str(order), expected="int64[ids]")
        return TensorType(inputs[0].shape[:1], "int64")

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        at = np.arange(len(xs[0])) + w["position"][FIRST_ROW]
        ids: Array = w["order"][np.clip(at, 0, len(w["order"]) - 1)]
        return ids


class DataRows(StepLayer):
    """ids (B,), data (N, ...) of any dtype -> (B, ...): rows of the data."""

    required: ClassVar[tuple[str, ...]] = ("data",)

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (ids,), data = inputs, weights["data"]
        if ids.dtype != "int64" or ids.row_shape:
            raise ShapeError("rows are read by id", got=str(ids), expected="int64[B]")
        if not data.shape or not data.shape[0]:
            raise ShapeError("no rows to read", got=str(data), expected="[N, ...]")
        return TensorType((ids.shape[0], *data.shape[1:]), data.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (ids,), data = xs, w["data"]
        rows: Array = data[np.clip(ids, 0, len(data) - 1)]
        return rows


class StepRow(StepLayer):
    """The row of a table that belongs to this step: any value, which is not read, table (S, ...) -> (1, ...)."""

    crosses_rows: ClassVar[bool] = True
    required: ClassVar[tuple[str, ...]] = ("table", "position")

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        _need_position(weights)
        table = weights["table"]
        if not table.shape or not table.shape[0]:
            raise ShapeError("a table has a row per step", got=str(table), expected="[S, ...]")
        return TensorType((1, *table.shape[1:]), table.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        at = int(np.clip(w["position"][STEP], 0, len(w["table"]) - 1))
        return w["table"][at : at + 1]


class Logged(StepLayer):
    """One number (1,), log (S,) -> (1, S): the log with the number at this step's element; as it was past its end."""

    crosses_rows: ClassVar[bool] = True
    required: ClassVar[tuple[str, ...]] = ("log", "position")

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        _need_position(weights)
        (x,), log = inputs, weights["log"]
        if x.row_shape or x.is_batched or log.dtype != x.dtype or len(log.shape) != 1:
            raise ShapeError("a log has a number per step", got=f"{x}, log {log}", expected=f"{x.dtype}[1], [S]")
        return TensorType((1, *log.shape), log.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        log, at = w["log"].copy(), int(w["position"][STEP])
        if 0 <= at < len(log):
            log[at] = xs[0][0]
        return log[np.newaxis]


@dataclass(frozen=True, eq=False, repr=False)
class Counted(StepLayer):
    """Counters (n,) int64 after a step: counters + per_step + B per_row. Of the input, any (B, ...), only B is read."""

    per_step: tuple[int, ...]
    per_row: tuple[int, ...]
    crosses_rows: ClassVar[bool] = True
    required: ClassVar[tuple[str, ...]] = ("counters",)

    def __post_init__(self) -> None:
        as_sizes(self, per_step=0, per_row=0)

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        counters = weights["counters"]
        if counters.dtype != "int64" or not counters.shape == (len(self.per_step),) == (len(self.per_row),):
            raise ShapeError("not the counters of a step", got=str(counters), expected=f"int64[{len(self.per_step)}]")
        return TensorType((1, *counters.shape), "int64")

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        counters: Array = w["counters"] + np.array(self.per_step) + len(xs[0]) * np.array(self.per_row)
        return counters[np.newaxis].astype(np.int64)


def _need_position(weights: WeightTypes) -> None:
    position = weights["position"]
    if position.dtype != "int64" or position.shape != (2,):
        raise ShapeError("position is the step and its first row", got=str(position), expected="int64[2]")
