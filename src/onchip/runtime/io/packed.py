"""Rows of several outputs as rows of bytes, so that one file holds the unfinished results of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.types import BATCH, TensorType, numpy_dtype


def stored_type(net: Network) -> TensorType:
    """The type of the rows of results: that of the output, or with several outputs the bytes of all."""
    if len(net.outputs) == 1:
        return net.output
    return TensorType((BATCH, sum(net.types[name].row_bytes for name in net.outputs)), "uint8")


def pack(arrays: Sequence[Array], out: Array) -> Array:
    """Write the rows of each output, one after another, to out (n, bytes) uint8; returns it."""
    at = 0
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(len(out), -1).view(np.uint8)
        out[:, at : at + data.shape[1]] = data
        at += data.shape[1]
    return out


def unpack(rows: Array, net: Network, name: str) -> Array:
    """The rows of an output from stored rows."""
    if len(net.outputs) == 1:
        return rows
    at = 0
    for other in net.outputs:
        row_type = net.types[other]
        if other == name:
            data = np.ascontiguousarray(rows[:, at : at + row_type.row_bytes])
            return data.view(numpy_dtype(row_type.dtype)).reshape(len(rows), *row_type.row_shape)
        at += row_type.row_bytes
    raise AssertionError(name)
