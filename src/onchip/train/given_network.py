"""A network that a caller gives to be trained, and rows in the form that it reads."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.formats.load import load_file
from onchip.network.graph import Network, check_network
from onchip.network.recipe import Array
from onchip.network.types import TensorType
from onchip.train.rows import as_array, as_ids


def load_given(network: Any) -> Network:
    """A Network, or that of a file; InputError if it cannot be trained on rows and targets."""
    if isinstance(network, str | os.PathLike):
        network = load_file(network)
    check_network(network)
    check_trainable(network)
    return network  # type: ignore[no-any-return]


def check_trainable(net: Network) -> None:
    """InputError unless the network has one input, one output and parameters."""
    for what, names in (("input", net.inputs), ("output", net.outputs)):
        if len(names) != 1:
            raise InputError(
                f"network '{net.name}' has {len(names)} {what}s", got=", ".join(names), expected=f"one {what}",
                hint=f"a network with one {what}, or onchip.fit, which trains several",
            )  # fmt: skip
    check_parameters(net)


def check_parameters(net: Network) -> None:
    """InputError unless the network has weights."""
    if not net.parameters:
        raise InputError(
            "nothing to train", got=f"network '{net.name}' without parameters", expected="weights that can change",
            hint="a network with a Linear",
        )  # fmt: skip


def flatten_rows(X: Any, expected: TensorType) -> Any:
    """X (n, ...) of the expected row shape as (n, row size), anything of one or two axes unchanged; else ShapeError."""
    if len(expected.row_shape) == 1:
        return X
    shape = X.shape if hasattr(X, "shape") else np.asarray(X).shape
    if len(shape) <= 2:
        return X
    if tuple(shape[1:]) != expected.row_shape:
        raise ShapeError(
            "the rows do not fit the network", got=str(list(shape)), hint="X.reshape or X.transpose",
            expected=f"[n, {', '.join(map(str, expected.row_shape))}] or [n, {expected.row_size}]",
        )  # fmt: skip
    return np.asarray(as_array(X)).reshape(shape[0], expected.row_size)


def check_row_size(x: Array, net: Network) -> None:
    """ShapeError unless x is (n, row size of the network's input)."""
    if x.shape[1] != net.input.row_size:
        raise ShapeError(
            f"the rows do not fit network '{net.name}'", got=f"{x.shape[1]} values per row",
            expected=f"{net.input.row_size}: it reads {net.input}", hint=f"a network for {x.shape[1]} inputs",
        )  # fmt: skip


def shape_targets(y: Array, net: Network) -> Array:
    """Reshape target values to the network's output, if they have its size; classes stay as they are."""
    is_fit = y.ndim == 2 and y.shape[1] == net.output.row_size
    return y.reshape(len(y), *net.output.row_shape) if is_fit else y


def shape_rows(x: Array, expected: TensorType) -> Array:
    """(n, row size) of any numeric dtype as rows of the expected shape, ids as its integers."""
    if "int" in expected.dtype:
        x = as_ids(x, expected.dtype, "the rows")
    return x.reshape(len(x), *expected.row_shape)
