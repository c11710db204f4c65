"""Shared by convolutions and pools: kernel, strides, dilations, pads and auto_pad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op
from onchip.formats.onnx.ops.graph_reader import MAX_ROW, GraphReader
from onchip.network.layers import Layer, Pad
from onchip.network.layers.conv import geometry
from onchip.network.reading import show


@dataclass(frozen=True)
class Window:
    """One value per axis each; pads has two, all begins, then all ends."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def span(self, axis: int) -> int:
        """The extent of a window along an axis."""
        return self.dilation[axis] * (self.kernel[axis] - 1) + 1


def auto_pad(op: Op) -> bytes:
    """b"NOTSET", b"VALID", b"SAME_UPPER" or b"SAME_LOWER"."""
    mode = op.attribute("auto_pad", b"NOTSET") or b"NOTSET"
    if mode not in (b"NOTSET", b"VALID", b"SAME_UPPER", b"SAME_LOWER"):
        raise FormatError(f"{op}: bad attribute 'auto_pad'", got=show(mode), expected="NOTSET, VALID or SAME_...")
    return mode


def split_pad(mode: bytes, total: Sequence[int]) -> tuple[int, ...]:
    """Split the total padding per axis: an odd element goes to the end, or to the beginning for SAME_LOWER."""
    before = [(n + 1) // 2 if mode == b"SAME_LOWER" else n // 2 for n in total]
    return (*before, *(n - b for n, b in zip(total, before, strict=True)))


def read_window(graph: GraphReader, op: Op, x: str, kernel: Sequence[int] = ()) -> Window:
    """The window of a convolution with this kernel, or of a pool, which has kernel_shape; resolves auto_pad."""
    graph.need_channels(op, x, 3)
    rank = len(kernel) or len(graph.types[x].shape) - 2
    if rank not in (1, 2, 3) or len(graph.types[x].shape) != rank + 2:
        expected = f"[B, C and {len(kernel) or '1 to 3'} more axes]"
        raise FormatError(f"{op}: windows over one, two or three axes only", got=str(graph.types[x]), expected=expected)
    sizes = op.sizes("kernel_shape", list(kernel), rank)
    if kernel and sizes != list(kernel):
        raise FormatError(f"{op}: kernel_shape and weight do not fit", got=show(sizes), expected=show(list(kernel)))
    stride, dilation = op.sizes("strides", [1] * rank, rank), op.sizes("dilations", [1] * rank, rank)
    if min(*sizes, *stride, *dilation) < 1:
        got = f"kernel {sizes}, strides {stride}, dilations {dilation}"
        raise FormatError(f"{op}: bad window", got=got, expected="ints of at least 1")
    pads, mode = op.sizes("pads", [0] * 2 * rank, 2 * rank), auto_pad(op)
    window = Window(tuple(sizes), tuple(stride), tuple(dilation), tuple(pads) if mode == b"NOTSET" else (0,) * 2 * rank)
    if mode in (b"NOTSET", b"VALID") or op.kind == "ConvTranspose":
        return window
    total = []
    for axis, size in enumerate(int(d) for d in graph.types[x].shape[2:]):
        steps = (size - 1) // window.stride[axis]  # windows after the first, as many as fit the unpadded strides
        total.append(max(0, steps * window.stride[axis] + window.span(axis) - size))
    return Window(window.kernel, window.stride, window.dilation, split_pad(mode, total))


def check_padded(graph: GraphReader, op: Op, x: str, pads: Sequence[int]) -> None:
    """Raise FormatError if the padded input, which some kernels materialise, would exceed the size limit."""
    size, rank = 1, len(pads) // 2
    for axis, d in enumerate(int(d) for d in graph.types[x].shape[2:]):
        size *= d + pads[axis] + pads[rank + axis]
    if size * int(graph.types[x].shape[1]) > MAX_ROW:
        got = f"{graph.types[x]}, pads {show(list(pads))}"
        raise FormatError(f"{op}: rows are too large", got=got, expected=f"at most {MAX_ROW:,} elements per row")


def window_attributes(layer: Layer, kernel: Sequence[int]) -> dict[str, Any]:
    """The same attributes for ONNX."""
    stride, pads, dilation = geometry(layer)
    named = {"kernel_shape": kernel, "strides": stride, "pads": pads, "dilations": dilation}
    return {name: [int(n) for n in sizes] for name, sizes in named.items()}


# -- zero padding, merged into the pads of the windows that read it ------------------------------------------------


def unpadded(graph: GraphReader, op: Op) -> tuple[str, tuple[int, ...]]:
    """The value that a window reads, and the zeros of a preceding Pad that its own pads can absorb."""
    x = graph.value(op)
    node, rank = graph.nodes.get(x), len(graph.types[x].shape) - 1
    layer = node.layer if node is not None else None
    if node is not None and isinstance(layer, Pad) and (layer.mode, layer.value) == ("constant", 0.0) and rank > 1:
        before, after = layer.pads[:rank], layer.pads[rank:]
        is_around_pixels = before[0] == after[0] == 0 and min(layer.pads) >= 0
        # auto_pad applies to the padded input; an average may count those zeros but not its own pads.
        adds_up = op.kind != "AveragePool" or op.attribute("count_include_pad", 0) or not any(op.sizes("pads", []))
        if is_around_pixels and adds_up and auto_pad(op) in (b"NOTSET", b"VALID"):
            return node.inputs[0], (*before[1:], *after[1:])
    return x, (0,) * 2 * (rank - 1)


def sum_pads(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(m + n for m, n in zip(a, b, strict=True))
