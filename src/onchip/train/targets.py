"""Targets of a run: checked against the loss and the network's output, and converted for the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.network.graph import Network
from onchip.network.recipe import Array


def check_targets(net: Network, n: int, y: Any, loss: str) -> Array:
    """Check targets against n rows of the network's output and convert them for the kernels."""
    D_out = net.output.row_size
    if not isinstance(y, np.ndarray):
        raise ShapeError(
            "targets are not an array", got=type(y).__name__, expected="a NumPy array", hint="np.asarray(y)"
        )
    if n == 0:
        raise InputError("nothing to train on", got="0 rows", expected="at least 1")
    if loss == "cross_entropy":
        if y.shape != (n,) or y.dtype.kind not in "iu":
            got, expected = f"{y.dtype.name}{list(y.shape)}", f"integers [{n}]"
            hint = "one class index per row; loss 'mse' for real-valued targets"
            raise ShapeError("classes do not fit", got=got, expected=expected, hint=hint)
        y = np.array(y)  # a copy: the kernels trust every class index, and a run may last hours
        bad = np.flatnonzero((y < 0) | (y >= D_out))
        if bad.size:
            got, hint = f"{y[bad[0]]} in row {bad[0]}", "a network with one output per class, or classes counted from 0"
            raise InputError("a class is out of range", got=got, expected=f"0 to {D_out - 1}", hint=hint)
        return np.ascontiguousarray(y, np.int64)
    if y.shape != (n, D_out) or y.dtype != np.float32:
        got, expected = f"{y.dtype.name}{list(y.shape)}", f"float32[{n}, {D_out}]"
        hint = "one value per output"
        if y.dtype.kind in "iu":
            hint = "loss 'cross_entropy', if these are classes"
        elif y.size == n * D_out and y.dtype == np.float32:
            hint = f"y.reshape({n}, {D_out})"
        raise ShapeError("targets do not fit", got=got, expected=expected, hint=hint)
    return np.ascontiguousarray(y)
