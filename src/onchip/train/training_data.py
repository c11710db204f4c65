"""Rows, targets and weights of a call of `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.tokens import check_token_ids
from onchip.runtime.engine import id_limits
from onchip.runtime.io.host_rows import check_rows
from onchip.train.row_weights import check_sample_weight
from onchip.train.rows import as_rows, as_targets, check_finite
from onchip.train.targets import check_targets


@dataclass(frozen=True, eq=False)
class TrainingData:
    """What to train on; with validation_data, its rows follow those of x."""

    x: Any
    y: Any
    sample_weight: Any
    rows: Array | None = None  # indices to train on; None: all that are not held out
    held: Array | None = None  # indices to validate on; None: chosen by the options

    def checked(self, net: Network, loss: str) -> TrainingData:
        x = rows_of(self.x, net)
        y = check_targets(net, len(x), as_targets(self.y, loss, net.output.dtype), loss)
        return replace(self, x=x, y=y, sample_weight=check_sample_weight(self.sample_weight, len(x)))

    @property
    def validation_share(self) -> float:
        """The share of the rows that `held` holds out."""
        return 0.0 if self.held is None else len(self.held) / len(self.x)

    def arrays(self) -> dict[str, Array]:
        weights = {} if self.sample_weight is None else {"sample_weight": self.sample_weight}
        return {"x": self.x, "y": self.y, **weights}


def rows_of(x: Any, net: Network, what: str = "rows") -> Array:
    """Rows for the network's input; InputError for the first NaN, infinity, or id that is not in its table."""
    rows = check_rows(as_rows(x, net.input.dtype), net.input)
    check_finite(rows, what)
    for name, limit in id_limits(net).items():
        check_token_ids(rows, limit, name=name)
    return rows


def with_validation(
    data: TrainingData, validation_data: tuple[Any, Any], net: Network, options: Mapping[str, Any]
) -> TrainingData:
    """The checked data, followed by the rows to validate on, whose weights are 1."""
    if not isinstance(validation_data, tuple | list) or len(validation_data) != 2:
        is_pair = isinstance(validation_data, tuple | list)
        got = f"{len(validation_data)} values" if is_pair else type(validation_data).__name__
        expected, hint = "two arrays, rows and their targets", "validation_data=(x_held, y_held)"
        raise InputError("bad validation_data", got=got, expected=expected, hint=hint)
    if options["validation"]:
        got, hint = f"validation={options['validation']} and validation_data", "omit one of them"
        raise InputError("two sources of validation rows", got=got, expected="one of them", hint=hint)
    parts = [rows_of(data.x, net), rows_of(validation_data[0], net, "rows to validate on")]
    if not len(parts[1]):
        raise InputError("nothing to validate on", got="0 rows", expected="at least one", hint="validation=0.1")
    targets = [as_targets(each, options["loss"], net.output.dtype) for each in (data.y, validation_data[1])]
    targets = [check_targets(net, len(s), each, options["loss"]) for s, each in zip(parts, targets, strict=True)]
    count, held = map(len, parts)
    weights = check_sample_weight(data.sample_weight, count)
    if weights is not None:
        weights = np.concatenate([weights, np.ones(held, np.float32)])
    x, y = np.concatenate(parts), np.concatenate(targets)
    return TrainingData(x, y, weights, np.arange(count), np.arange(count, count + held))
