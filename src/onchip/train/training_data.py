"""Rows, targets and weights of a call of `fit`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.tokens import check_token_ids
from onchip.runtime.engine import id_limits
from onchip.runtime.io.host_rows import check_rows
from onchip.train.options import TrainOptions
from onchip.train.row_weights import check_sample_weight
from onchip.train.rows import Rows, as_rows, by_name, check_finite, count_rows
from onchip.train.targets import targets_of


@dataclass(frozen=True, eq=False)
class TrainingData:
    """What to train on; with validation_data, its rows follow those of x."""

    x: Any
    y: Any
    sample_weight: Any
    rows: Array | None = None  # indices to train on; None: all that are not held out
    held: Array | None = None  # indices to validate on; None: chosen by the options

    def checked(self, net: Network, options: TrainOptions) -> TrainingData:
        x = rows_of(self.x, net)
        n = count_rows(x)
        y = targets_of(net, n, self.y, options)
        return replace(self, x=x, y=y, sample_weight=check_sample_weight(self.sample_weight, n))

    @property
    def validation_share(self) -> float:
        """The share of the rows that `held` holds out."""
        return 0.0 if self.held is None else len(self.held) / count_rows(self.x)

    def arrays(self) -> dict[str, Array]:
        """All arrays by name: "x" and "y", or of several "x.<input>" and "y.<output>"."""
        weights = {} if self.sample_weight is None else {"sample_weight": self.sample_weight}
        return {**_named("x", self.x), **_named("y", self.y), **weights}


def _named(prefix: str, rows: Rows) -> dict[str, Array]:
    return {f"{prefix}.{name}": array for name, array in rows.items()} if isinstance(rows, dict) else {prefix: rows}


def rows_of(x: Any, net: Network, what: str = "rows") -> Rows:
    """Rows for the network's inputs; InputError for the first NaN, infinity, or id that is not in its table."""
    limits, found = id_limits(net), dict[str, Array]()
    for name, array in by_name(x, tuple(net.inputs), "input").items():
        of = what if len(net.inputs) == 1 else f"{what} of '{name}'"
        found[name] = _rows_of_input(array, net, name, limits.get(name), of)
    if len(found) == 1:
        return next(iter(found.values()))
    counts = {name: len(array) for name, array in found.items()}
    if len(set(counts.values())) > 1:
        got = ", ".join(f"{count:,} of '{name}'" for name, count in counts.items())
        raise ShapeError("the inputs have different numbers of rows", got=got, expected="as many of each")
    return found


def _rows_of_input(x: Any, net: Network, name: str, limit: int | None, what: str) -> Array:
    try:
        rows = check_rows(as_rows(x, net.inputs[name].dtype, what), net.inputs[name])
    except ShapeError as error:
        if len(net.inputs) == 1:
            raise
        prefixed = f"'{name}': {error.what}"
        raise ShapeError(prefixed, got=error.got, expected=error.expected, hint=error.hint) from None
    check_finite(rows, what)
    if limit is not None:
        check_token_ids(rows, limit, name=name)
    return rows


def with_validation(
    data: TrainingData, validation_data: tuple[Any, Any], net: Network, options: TrainOptions
) -> TrainingData:
    """The checked data, followed by the rows to validate on, whose weights are 1."""
    if not isinstance(validation_data, tuple | list) or len(validation_data) != 2:
        is_pair = isinstance(validation_data, tuple | list)
        got = f"{len(validation_data)} values" if is_pair else type(validation_data).__name__
        expected, hint = "two arrays, rows and their targets", "validation_data=(x_held, y_held)"
        raise InputError("bad validation_data", got=got, expected=expected, hint=hint)
    if options.validation:
        got, hint = f"validation={options.validation} and validation_data", "omit one of them"
        raise InputError("two sources of validation rows", got=got, expected="one of them", hint=hint)
    parts = [rows_of(data.x, net), rows_of(validation_data[0], net, "rows to validate on")]
    count, held = map(count_rows, parts)
    if not held:
        raise InputError("nothing to validate on", got="0 rows", expected="at least one", hint="validation=0.1")
    x = _joined(*parts)
    y = _joined(targets_of(net, count, data.y, options), targets_of(net, held, validation_data[1], options))
    weights = check_sample_weight(data.sample_weight, count)
    if weights is not None:
        weights = np.concatenate([weights, np.ones(held, np.float32)])
    return TrainingData(x, y, weights, np.arange(count), np.arange(count, count + held))


def _joined(first: Rows, second: Rows) -> Rows:
    if isinstance(first, dict) and isinstance(second, dict):
        return {name: np.concatenate([array, second[name]]) for name, array in first.items()}
    return np.concatenate([first, second])
