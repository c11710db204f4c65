"""GPU memory of training runs: shared rows, and memory per network, with the same layout for all networks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onchip.kernels.cuda.common.training import TARGETS, StoredRows, TrainingLowering
from onchip.kernels.training import SharedData
from onchip.network.recipe import Array
from onchip.runtime.cuda.gpu import Buffer, BufferPart, Gpu

SLICE_BYTES = 64 << 20  # of rows per copy
_ALIGNMENT = 512

Memory = dict[str, Buffer]  # the lowering's State by name


def send_data(gpu: Gpu, lowering: TrainingLowering, x: Array, y: Array, shared: SharedData) -> Memory:
    """The rows, as the kernel stores them, and their targets: copied once for all runs that share them."""
    rows = lowering.stored_rows(x, shared)

    def send() -> Buffer:
        buffer = gpu.reserve(rows.shape[0] * rows.shape[1] * np.dtype(rows.dtype).itemsize)
        write_rows(gpu, buffer, rows)
        return buffer

    buffer = shared.get((rows.name, gpu.index, rows.layout), send)
    return {rows.name: buffer, TARGETS: shared.get((TARGETS, gpu.index), lambda: gpu.upload(y))}


def allocate_memory(gpu: Gpu, lowering: TrainingLowering, orders: Sequence[int], n: int) -> tuple[int, list[Memory]]:
    """One allocation with memory for each network: the stride in bytes between networks, and each one's buffers.

    orders  lengths of the row orders that they will train or evaluate on
    n       rows of x
    """
    offsets: dict[str, tuple[int, int]] = {}
    stride = 0
    for name, nbytes in lowering.memory(orders, n).items():
        offsets[name] = stride, nbytes
        stride += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    whole = gpu.reserve(stride * lowering.networks)
    with gpu:
        gpu.clear(whole.pointer, whole.nbytes, gpu.stream)
        gpu.synchronise()
    memories: list[Memory] = [
        {name: BufferPart(whole, i * stride + offset, nbytes) for name, (offset, nbytes) in offsets.items()}
        for i in range(lowering.networks)
    ]
    for memory in memories:
        for rows in lowering.constants():
            write_rows(gpu, memory[rows.name], rows)
    return stride, memories


def write_rows(gpu: Gpu, buffer: Buffer, stored: StoredRows) -> None:
    """Write rows slice by slice."""
    count, width = stored.shape
    row_bytes = np.dtype(stored.dtype).itemsize * width
    most = max(1, SLICE_BYTES // row_bytes)
    with gpu:
        for first in range(0, count, most):
            rows = np.zeros((min(most, count - first), width), stored.dtype)
            stored.fill(rows, first)
            gpu.write(buffer, rows, gpu.stream, first * row_bytes)
            gpu.synchronise()
