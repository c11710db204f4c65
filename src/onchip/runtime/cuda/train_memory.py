"""GPU memory of training runs: shared data, and memory per network, with the same layout for all networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onchip.kernels.cuda.train.large_batch.launches import TrainLowering
from onchip.kernels.training import STEP_FLOATS, SharedData, bytes_of, epochs_at_once
from onchip.network.recipe import Array
from onchip.network.training import OPTIMISERS
from onchip.runtime.cuda.gpu import Buffer, BufferPart, Gpu

SLICE_BYTES = 64 << 20  # of rows per copy
STATE_BUFFERS = ("mean", "square")  # the kernels' names for optimiser state, in the order of STATE_NAMES
_ALIGNMENT = 512

Memory = dict[str, Buffer]  # the lowering's State by name


def send_data(gpu: Gpu, lowering: TrainLowering, x: Array, y: Array, shared: SharedData) -> Memory:
    """The rows, in the first layer's layout, and their targets: copied once for all runs that share them."""
    first_layer, byte_rows = lowering.layers[0], lowering.byte_rows
    name, values, stride, one = "x", x, first_layer.stride, 1
    if byte_rows:
        found = shared.get("bytes", lambda: bytes_of(x))
        assert found is not None, "the plan requires rows of bytes"
        name, values, stride, one = "bytes", found[0], byte_rows.stride, byte_rows.one

    def fill(rows: Array, first: int) -> None:
        rows[:, : first_layer.D] = values[first : first + len(rows)]
        rows[:, first_layer.D : first_layer.terms] = one

    def send() -> Buffer:
        buffer = gpu.reserve(len(x) * stride * values.itemsize)
        write_rows(gpu, buffer, (len(x), stride), values.dtype, fill)
        return buffer

    # A network without a bias in its first layer has rows of another layout.
    rows = shared.get((name, gpu.index, first_layer.terms), send)
    return {name: rows, "targets": shared.get(("targets", gpu.index), lambda: gpu.upload(y))}


def allocate_memory(gpu: Gpu, lowering: TrainLowering, orders: Sequence[int], n: int) -> tuple[int, list[Memory]]:
    """One allocation with memory for each network: the stride in bytes between networks, and each one's buffers.

    orders  lengths of the row orders that they will train or evaluate on
    n       rows of x
    """
    offsets: dict[str, tuple[int, int]] = {}
    stride = 0
    for name, nbytes in _bytes_per_network(lowering, orders, n).items():
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
        for i, layer in enumerate(lowering.layers[:-1]):
            terms = lowering.layers[i + 1].terms

            def fill(rows: Array, first: int, N: int = layer.N, terms: int = terms) -> None:
                rows[:, N:terms] = 1  # the constant input of the next layer's bias

            shape = lowering.row_count, lowering.width(i)
            write_rows(gpu, memory[f"a{i}"], shape, np.float32, fill)
    return stride, memories


def _bytes_per_network(lowering: TrainLowering, orders: Sequence[int], n: int) -> dict[str, int]:
    """The size of each buffer of one network, by name."""
    batch, row_count, nbytes = lowering.batch, lowering.row_count, dict[str, int]()
    for i, layer in enumerate(lowering.layers):
        nbytes[f"a{i}"] = 4 * row_count * lowering.width(i)
        if not lowering.rows_pass:
            nbytes[f"dz{i}"] = nbytes[f"a{i}"]
        for name in ("w", *STATE_BUFFERS[: OPTIMISERS[lowering.training.optimiser]]):
            nbytes[f"{name}{i}"] = 4 * layer.N * layer.stride
        if slices := lowering.slices(i):
            nbytes[f"parts{i}"] = slices * 4 * layer.N * layer.stride
    if byte_rows := lowering.byte_rows:
        for name, K in (("w_split", byte_rows.terms), ("dz_split", batch)):
            nbytes[name] = byte_rows.bytes_of_parts(K)
    if lowering.training.is_weighted:
        nbytes["row_weights"] = 4 * n
    nbytes |= lowering.extra_memory()
    nbytes |= {"losses": 8 * row_count, "correct": 4 * row_count, "progress": 16}
    queued = max(epochs_at_once(rows, batch) * -(-rows // batch) for rows in orders)  # steps
    sums = 8 * max(queued * lowering.groups, -(-max(orders) // row_count))
    return nbytes | {
        "per_step_values": 4 * STEP_FLOATS * queued, "step_losses": sums, "step_correct": sums,
        "order": 8 * queued * batch,
    }  # fmt: skip


def write_rows(
    gpu: Gpu, buffer: Buffer, shape: tuple[int, int], dtype: Any, fill: Callable[[Array, int], None]
) -> None:
    """Write rows slice by slice. A slice is zeros, into which `fill(rows, index of its first row)` writes."""
    count, width = shape
    row_bytes = np.dtype(dtype).itemsize * width
    most = max(1, SLICE_BYTES // row_bytes)
    with gpu:
        for first in range(0, count, most):
            rows = np.zeros((min(most, count - first), width), dtype)
            fill(rows, first)
            gpu.write(buffer, rows, gpu.stream, first * row_bytes)
            gpu.synchronise()
