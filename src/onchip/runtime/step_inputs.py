"""The inputs of a step, checked before a kernel reads them: on either device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.types import TensorType, numpy_dtype
from onchip.runtime.arrays.dlpack import HOST


def checked_inputs(net: Network, inputs: Mapping[str, Array], B: int) -> dict[str, Array]:
    """B rows of each of the network's inputs, row-major; ShapeError if they are not."""
    if inputs.keys() != net.inputs.keys():
        raise InputError("wrong inputs", got=", ".join(inputs) or "none", expected=", ".join(net.inputs))
    return {name: checked_rows(name, inputs[name], kind, B) for name, kind in net.inputs.items()}


def checked_rows(name: str, array: Array, kind: TensorType, B: int) -> Array:
    """B rows of an input, row-major; ShapeError if they are not."""
    if array.shape != (kind.rows(B), *kind.row_shape) or array.dtype != numpy_dtype(kind.dtype):
        got, expected = f"{array.dtype}{list(array.shape)}", f"{kind} with B = {B}"
        raise ShapeError(f"'{name}' has the wrong shape or dtype", got=got, expected=expected)
    return np.ascontiguousarray(array)


def host_array(x: Any) -> Array | None:
    """A NumPy array, or an array of the host of another library (torch, JAX) as one; None for anything else."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "detach"):  # a torch tensor, which may require a gradient
        return np.asarray(x.detach().numpy()) if getattr(x.device, "type", "") == "cpu" else None
    query = getattr(type(x), "__dlpack_device__", None)
    return np.from_dlpack(x) if query is not None and int(query(x)[0]) == HOST else None
