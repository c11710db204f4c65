"""Targets of a run: checked against the loss and the network's output, and converted for the kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.types import TensorType, numpy_dtype
from onchip.train.losses import check_output_type
from onchip.train.options import TrainOptions
from onchip.train.rows import Rows, as_targets, by_name, check_finite


def targets_of(net: Network, n: int, y: Any, options: TrainOptions) -> Rows:
    """Targets of n rows in any form, as check_targets returns them; of several outputs by name."""
    if isinstance(options.loss, str):
        (given,) = by_name(y, net.outputs, "output").values()
        return check_targets(net, n, as_targets(given, options.loss, net.output.dtype), options.loss)
    found = dict[str, Array]()
    for each, given in zip(options.outputs, by_name(y, _names(options), "trained output").values(), strict=True):
        kind = net.types[each.output]
        try:
            found[each.output] = check_target(kind, n, as_targets(given, each.loss, kind.dtype), each.loss)
        except InputError as error:
            what = f"output '{each.output}': {error.what}"
            raise type(error)(what, got=error.got, expected=error.expected, hint=error.hint) from None
    return found


def _names(options: TrainOptions) -> tuple[str, ...]:
    return tuple(each.output for each in options.outputs)


def check_targets(net: Network, n: int, y: Any, loss: str) -> Array:
    """Check targets against n rows of the network's only output and convert them for the kernels.

    Returns classes (n,) int64 for "cross_entropy", else finite values like the output: (n, ...) in its dtype. For
    "bce_with_logits" they are from 0 to 1, and may be given as ints or bools.
    """
    return check_target(net.output, n, y, loss)


def check_target(output: TensorType, n: int, y: Any, loss: str) -> Array:
    """As check_targets, for n rows of an output."""
    check_output_type(output, loss)
    if not isinstance(y, np.ndarray):
        raise ShapeError(
            "targets are not an array", got=type(y).__name__, expected="a NumPy array", hint="np.asarray(y)"
        )
    if n == 0:
        raise InputError("nothing to train on", got="0 rows", expected="at least 1", hint="x and y with rows")
    if loss == "cross_entropy":
        return _classes(n, y, output.row_size)
    if loss == "bce_with_logits" and y.shape == (n, *output.row_shape) and y.dtype.kind in "iub":
        check_shares(y)
        return np.ascontiguousarray(y, numpy_dtype(output.dtype))
    if y.shape != (n, *output.row_shape) or y.dtype != numpy_dtype(output.dtype):
        raise ShapeError(
            "targets do not fit", got=f"{y.dtype.name}{list(y.shape)}",
            expected=f"{output.dtype}{[n, *output.row_shape]}", hint=_hint(n, y, output, loss),
        )  # fmt: skip
    check_finite(y, "targets")
    if loss == "bce_with_logits":
        check_shares(y)
    return np.ascontiguousarray(y)


def _classes(n: int, y: Array, D_out: int) -> Array:
    if y.shape != (n,) or y.dtype.kind not in "iu":
        got, expected = f"{y.dtype.name}{list(y.shape)}", f"integers [{n}]"
        hint = (
            "one class index per row; loss 'mse' for real-valued targets, 'bce_with_logits' for several labels per row"
        )
        if y.shape == (n, D_out) and D_out > 1 and ((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all():
            hint = "y.argmax(axis=1): these are one-hot"
        elif y.shape in ((n,), (n, 1)) and y.dtype.kind in "iub":
            hint = "y.astype(np.int64)" if y.ndim == 1 else "y[:, 0]"
        elif y.shape == (n,) and y.dtype.kind in "OUS":
            hint = "classes, y = np.unique(y, return_inverse=True); or onchip.Classifier, which accepts any labels"
        raise ShapeError("classes do not fit", got=got, expected=expected, hint=hint)
    y = np.array(y)  # a copy: the kernels trust every class index, and a run may last hours
    bad = np.flatnonzero((y < 0) | (y >= D_out))
    if bad.size:
        got, hint = f"{y[bad[0]]} in row {bad[0]}", "a network with one output per class, or classes counted from 0"
        raise InputError("a class is out of range", got=got, expected=f"0 to {D_out - 1}", hint=hint)
    return np.ascontiguousarray(y, np.int64)


def check_shares(y: Array) -> None:
    """InputError for the first value that is not from 0 to 1."""
    if y.size and not 0 <= y.min() <= y.max() <= 1:
        row, *position = (int(i) for i in np.argwhere((y < 0) | (y > 1))[0])
        where = f"row {row}" + (f", position {', '.join(map(str, position))}" if position else "")
        raise InputError(
            "a target is out of range", got=f"{y[(row, *position)]} in {where}", expected="0 to 1",
            hint="1 where a label applies and 0 elsewhere; loss 'mse' for other values",
        )  # fmt: skip


def _hint(n: int, y: Array, output: TensorType, loss: str) -> str:
    shape = (n, *output.row_shape)
    if y.shape == shape:
        return f"y.astype(np.{output.dtype})"
    if y.dtype.kind in "iu" and len(shape) == 2:
        return "loss 'cross_entropy', if these are classes"
    if y.size == math.prod(shape):
        return f"y.reshape{shape}"
    return "one 0 or 1 per output" if loss == "bce_with_logits" else "one value per output"
