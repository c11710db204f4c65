"""The rows of a step on a GPU: host arrays are copied, arrays on the GPU are read where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.types import TensorType, numpy_dtype
from onchip.runtime.arrays.adapters import ArrayAdapter, ArrayView, kind_of
from onchip.runtime.arrays.calls import ALIGN_BYTES, check_view
from onchip.runtime.cuda.gpu import Buffer, Gpu
from onchip.runtime.step_inputs import checked_rows, host_array


@dataclass(frozen=True, eq=False)
class Batch:
    """The inputs and outputs of B rows."""

    B: int
    buffers: Mapping[str, Buffer]  # of all inputs and outputs
    views: Mapping[str, ArrayView]  # inputs that are read where they are
    adapter: ArrayAdapter | None = None  # of these
    stream: int = 0  # their owner's

    @property
    def pointers(self) -> dict[str, int]:
        own = {name: buffer.pointer for name, buffer in self.buffers.items()}
        return own | {name: view.pointer for name, view in self.views.items()}


def with_rows(gpu: Gpu, net: Network, batch: Batch, rows: Mapping[str, Any]) -> Batch:
    """The batch with other rows of some inputs: those of the host are copied now."""
    B, on_gpu = batch.B, dict[str, Any]()
    for name, x in rows.items():
        if (array := host_array(x)) is None:
            on_gpu[name] = x
        else:
            gpu.write(batch.buffers[name], checked_rows(name, array, net.inputs[name], B), gpu.stream)
    if not on_gpu:
        return Batch(B, batch.buffers, {})
    adapter, views = _adapter(next(iter(on_gpu.values())), gpu), dict[str, ArrayView]()
    stream = adapter.stream(next(iter(on_gpu.values())))
    for name, x in on_gpu.items():
        if not adapter.owns(x):
            got = f"'{name}' is {type(x).__module__}.{type(x).__name__}"
            raise InputError("arrays of different kinds", got=got, expected=adapter.name, hint="arrays of one library")
        views[name] = _checked(adapter.describe(x, stream), name, net.inputs[name], B, gpu)
    return Batch(B, batch.buffers, views, adapter, stream)


def _adapter(x: Any, gpu: Gpu) -> ArrayAdapter:
    adapter = kind_of(x, gpu)
    if adapter is None:
        got = f"{type(x).__module__}.{type(x).__name__}"
        raise InputError("not an array", got=got, expected="NumPy, torch, CuPy or JAX", hint="np.asarray(x)")
    return adapter


def _checked(view: ArrayView, name: str, kind: TensorType, B: int, gpu: Gpu) -> ArrayView:
    check_view(view, kind, f"'{name}'", gpu.index)
    if view.shape[0] != kind.rows(B):
        raise ShapeError(f"'{name}' has another number of rows", got=str(view.shape[0]), expected=str(kind.rows(B)))
    if view.pointer % ALIGN_BYTES:
        got, hint = f"address {view.pointer:#x}", "x.clone(), or a batch that begins at a multiple of 16 bytes"
        raise InputError(f"'{name}' is not aligned", got=got, expected=f"{ALIGN_BYTES} bytes", hint=hint)
    return view


def new_batch(gpu: Gpu, net: Network, inputs: Mapping[str, Array], B: int) -> Batch:
    """Buffers with these host rows, and for the outputs."""
    buffers = {name: gpu.upload(array) for name, array in inputs.items()}
    buffers |= {name: gpu.reserve(net.types[name].rows(B) * net.types[name].row_bytes) for name in net.outputs}
    return Batch(B, buffers, {})


def download(gpu: Gpu, net: Network, batch: Batch) -> dict[str, Array]:
    """The outputs, by name, when they are complete."""
    kinds = {name: net.types[name] for name in net.outputs}
    arrays = {
        name: np.empty((kind.rows(batch.B), *kind.row_shape), numpy_dtype(kind.dtype)) for name, kind in kinds.items()
    }
    return {name: gpu.download(batch.buffers[name], array) for name, array in arrays.items()}
