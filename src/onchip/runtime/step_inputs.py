"""The inputs of a step, checked before a kernel reads them: on either device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype


def checked_inputs(net: Network, inputs: Mapping[str, Array], B: int) -> dict[str, Array]:
    """B rows of each of the network's inputs, row-major; ShapeError if they are not."""
    if inputs.keys() != net.inputs.keys():
        raise InputError("wrong inputs", got=", ".join(inputs) or "none", expected=", ".join(net.inputs))
    rows: dict[str, Array] = {}
    for name, kind in net.inputs.items():
        array = inputs[name]
        if array.shape != (kind.rows(B), *kind.row_shape) or array.dtype != numpy_dtype(kind.dtype):
            got, expected = f"{array.dtype}{list(array.shape)}", f"{kind} with B = {B}"
            raise ShapeError(f"'{name}' has the wrong shape or dtype", got=got, expected=expected)
        rows[name] = np.ascontiguousarray(array)
    return rows
