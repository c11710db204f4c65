"""DFT and STFT: a DFT is a gemm with a constant matrix, an STFT a convolution with it."""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.network.layers import Conv1d, Linear, Permute, Reshape
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype

_MAX_ELEMENTS = 1 << 22  # elements of the matrix: longer signals need an FFT


@reads("DFT")
def read_dft(graph: GraphReader, op: Op) -> None:
    """(.., n, .., 1 or 2) -> (.., K, .., 2): move the axis next to the last, merge both, apply a Linear."""
    x = graph.value(op)
    wanted = op.attribute("axis", 1) if graph.opset < 20 else graph.ints(op, 2)[0] if graph.has(op, 2) else -2
    rank, axis = len(graph.types[x].shape), graph.axis(op, x, wanted)
    n, channels = graph.types[x].shape[axis], graph.types[x].shape[-1]
    inverse, onesided = op.attribute("inverse", 0) != 0, op.attribute("onesided", 0) != 0
    if not 0 < axis < rank - 1 or channels not in (1, 2) or (inverse and onesided):
        got = f"axis {wanted} of {graph.types[x]}"
        expected = "an axis after the batch, 1 or 2 values per element, all bins"
        raise FormatError(f"{op}: bad axis", got=got, expected=expected)
    N = int(graph.constant(op, 1).reshape(())) if graph.has(op, 1) else int(n)
    matrix = _transform(graph, op, int(n), N, inverse, onesided)  # (K, 2, n, 2)
    matrix = matrix[..., : int(channels)].reshape(2 * len(matrix), -1)
    order = [*(a for a in range(rank - 1) if a != axis), axis, rank - 1]
    if order != sorted(order):
        x = graph.add_step(op, Permute(tuple(order)), (x,))
    *leading, _, _ = graph.types[x].row_shape
    flat = graph.add_step(op, Reshape((*leading, int(n) * int(channels))), (x,))
    weight = graph.weight(f"{op.outputs[0]}_waves", matrix.astype(numpy_dtype(graph.types[x].dtype)))
    y = graph.add_step(op, Linear(), (flat,), {"weight": weight})
    y = graph.add_step(op, Reshape((*leading, len(matrix) // 2, 2)), (y,))
    if order != sorted(order):
        y = graph.add_step(op, Permute(tuple(int(a) for a in np.argsort(order))), (y,))
    graph.bind_output(op, 0, y)


@reads("STFT")
def read_stft(graph: GraphReader, op: Op) -> None:
    """A signal (B, n) or (B, n, 1) -> (B, windows, K, 2)."""
    x, step = graph.value(op), int(graph.constant(op, 1).reshape(()))
    row = graph.types[x].row_shape
    if row[1:] not in ((), (1,)) or graph.one_row or step < 1:
        raise FormatError(
            f"{op}: bad signal", got=f"{graph.types[x]}, a step of {step}", expected="a real signal (B, n)"
        )
    window = graph.constant(op, 2).astype(np.float64) if graph.has(op, 2) else None
    if graph.has(op, 3):
        N = int(graph.constant(op, 3).reshape(()))
    else:
        N = len(window) if window is not None else 0
    window = np.ones(N) if window is None else window
    if not 0 < N <= row[0] or window.shape != (N,):
        raise FormatError(f"{op}: bad window", got=f"{N} of {row[0]}, {window.shape}", expected="one of the frame size")
    matrix = _transform(graph, op, N, N, False, op.attribute("onesided", 1) != 0)[..., 0] * window  # (K, 2, N)
    weight = graph.weight(f"{op.outputs[0]}_waves", matrix.reshape(-1, 1, N).astype(numpy_dtype(graph.types[x].dtype)))
    signal = graph.add_step(op, Reshape((1, row[0])), (x,))
    y = graph.add_step(op, Conv1d((step,)), (signal,), {"weight": weight})  # (B, 2 K, windows)
    split = graph.add_step(op, Reshape((len(matrix), 2, graph.types[y].row_shape[1])), (y,))
    graph.add(op, Permute((0, 3, 1, 2)), (split,))


def _transform(graph: GraphReader, op: Op, n: int, N: int, inverse: bool, onesided: bool) -> Array:
    """The DFT matrix (K, 2, n, 2): real and imaginary input to real and imaginary output of K bins; inputs beyond N are
    ignored.
    """
    K = N // 2 + 1 if onesided else N
    if N < 1 or 4 * K * n > _MAX_ELEMENTS:
        raise FormatError(f"{op}: too long", got=f"{n} to {K} bins", expected=f"a matrix below {_MAX_ELEMENTS:,}")
    graph.spend(op, 4 * K * n)
    angles = np.outer(np.arange(K), np.arange(n)) % N / N * 2 * np.pi
    cos, sin = (f(angles) * (np.arange(n) < N) / (N if inverse else 1) for f in (np.cos, np.sin))
    sin = sin if inverse else -sin
    return np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], 1)
