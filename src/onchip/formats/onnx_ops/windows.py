"""What convolutions and pools share: kernel, strides, dilations, pads, and the words of auto_pad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from onchip.errors import FormatError
from onchip.formats.onnx_ops.base import Op, reads
from onchip.formats.onnx_ops.graph_reader import MAX_ROW, GraphReader, Unfinished
from onchip.spec.layers import Layer
from onchip.spec.layers.conv import geometry
from onchip.spec.reading import show


@dataclass(frozen=True)
class Window:
    """A number an axis of each; pads two, all before and then all after."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def span(self, axis: int) -> int:
        """How far a window reaches along an axis."""
        return self.dilation[axis] * (self.kernel[axis] - 1) + 1


def auto_pad(op: Op) -> bytes:
    """b"NOTSET", b"VALID", b"SAME_UPPER" or b"SAME_LOWER"."""
    word = op.attribute("auto_pad", b"NOTSET") or b"NOTSET"
    if word not in (b"NOTSET", b"VALID", b"SAME_UPPER", b"SAME_LOWER"):
        raise FormatError(f"{op}: bad attribute 'auto_pad'", got=show(word), expected="NOTSET, VALID or SAME_...")
    return word


def split_pad(word: bytes, total: Sequence[int]) -> tuple[int, ...]:
    """What is padded in all along each axis, as pads: the odd one goes to the end, or to the front for SAME_LOWER."""
    before = [(n + 1) // 2 if word == b"SAME_LOWER" else n // 2 for n in total]
    return (*before, *(n - b for n, b in zip(total, before, strict=True)))


def read_window(graph: GraphReader, op: Op, x: str, kernel: Sequence[int] = ()) -> Window:
    """The window of a convolution with this kernel, or of a pool, which names its own; auto_pad is worked out."""
    graph.need_channels(op, x, 3)
    rank = len(kernel) or len(graph.types[x].shape) - 2
    if rank not in (1, 2) or len(graph.types[x].shape) != rank + 2:
        expected = f"[B, C and {len(kernel) or '1 or 2'} more]"
        raise FormatError(f"{op}: windows over one or two axes only", got=str(graph.types[x]), expected=expected)
    own = op.sizes("kernel_shape", list(kernel), rank)
    if kernel and own != list(kernel):
        raise FormatError(f"{op}: kernel_shape and weight do not fit", got=show(own), expected=show(list(kernel)))
    stride, dilation = op.sizes("strides", [1] * rank, rank), op.sizes("dilations", [1] * rank, rank)
    if min(*own, *stride, *dilation) < 1:
        got = f"kernel {own}, strides {stride}, dilations {dilation}"
        raise FormatError(f"{op}: bad window", got=got, expected="numbers of at least 1")
    pads, word = op.sizes("pads", [0] * 2 * rank, 2 * rank), auto_pad(op)
    window = Window(tuple(own), tuple(stride), tuple(dilation), tuple(pads) if word == b"NOTSET" else (0,) * 2 * rank)
    if word in (b"NOTSET", b"VALID") or op.kind == "ConvTranspose":
        return window
    total = []
    for axis, size in enumerate(int(d) for d in graph.types[x].shape[2:]):
        steps = (size - 1) // window.stride[axis]  # windows behind the first: as many as fit the unpadded strides
        total.append(max(0, steps * window.stride[axis] + window.span(axis) - size))
    return Window(window.kernel, window.stride, window.dilation, split_pad(word, total))


def check_padded(graph: GraphReader, op: Op, x: str, pads: Sequence[int]) -> None:
    """FormatError where the padded input, which some kernels make, would be larger than any value may be."""
    size, rank = 1, len(pads) // 2
    for axis, d in enumerate(int(d) for d in graph.types[x].shape[2:]):
        size *= d + pads[axis] + pads[rank + axis]
    if size * int(graph.types[x].shape[1]) > MAX_ROW:
        got = f"{graph.types[x]}, pads {show(list(pads))}"
        raise FormatError(f"{op}: rows are too large", got=got, expected=f"at most {MAX_ROW:,} numbers a row")


def window_attributes(layer: Layer, kernel: Sequence[int]) -> dict[str, Any]:
    """The same attributes for ONNX."""
    stride, pads, dilation = geometry(layer)
    named = {"kernel_shape": kernel, "strides": stride, "pads": pads, "dilations": dilation}
    return {name: [int(n) for n in sizes] for name, sizes in named.items()}


# -- Pad: zeros around a value, which become the pads of the windows that read it -----------------------------


@dataclass(frozen=True)
class Padded(Unfinished):
    pads: tuple[int, ...]
    expected: ClassVar[str] = "a Conv or AveragePool that takes in the zeros of a Pad"


@reads("Pad")
def read_pad(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    shape, mode = graph.types[x].shape, op.attribute("mode", b"constant") or b"constant"
    rank = len(shape)
    if graph.opset < 11:
        pads, is_zero = op.sizes("pads", []), op.attribute("value", 0.0) == 0
        axes = list(range(rank))
    else:
        pads = graph.ints(op, 1)
        is_zero = not graph.has(op, 2) or not graph.constant(op, 2).any()
        axes = [graph.axis(op, x, axis) for axis in graph.ints(op, 3)] if graph.has(op, 3) else list(range(rank))
    if mode != b"constant" or not is_zero:
        got = f"mode {show(mode)}" if mode != b"constant" else "another value"
        raise FormatError(f"{op}: only zeros can be padded", got=got, expected="mode constant, value 0")
    if len(pads) != 2 * len(axes) or len(set(axes)) < len(axes) or min(pads, default=0) < 0:
        raise FormatError(f"{op}: bad pads", got=show(pads), expected="two numbers an axis, none below 0")
    before, after = [0] * rank, [0] * rank
    for place, axis in enumerate(axes):
        before[axis], after[axis] = pads[place], pads[len(axes) + place]
    if not any(before + after):
        graph.pass_on(op)
        return
    graph.need_channels(op, x, 3)
    if any((before + after)[axis] for axis in (0, 1, rank, rank + 1)):
        raise FormatError(f"{op}: only axes behind the channels can be padded", got=show(pads), expected="[B, C, ...]")
    graph.begin(op, Padded(x, (*before[2:], *after[2:])))


def unpadded(graph: GraphReader, op: Op) -> tuple[str, tuple[int, ...]]:
    """The value that a window reads and the zeros that a Pad in front of it adds."""
    part = graph.unfinished.get(op.inputs[0]) if graph.has(op, 0) else None
    if isinstance(part, Padded):
        return part.x, part.pads
    x = graph.value(op)
    return x, (0,) * 2 * (len(graph.types[x].shape) - 2)


def sum_pads(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(m + n for m, n in zip(a, b, strict=True))
