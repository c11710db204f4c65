"""Max, min, sum, mean, L2 norm and softmax along axes: host side of reduction/reduce.cu and softmax.cu.

An array is (outer, N, inner). The reduction order depends on N alone, so a row's bits do not depend on its batch.
Non-adjacent axes are permuted to the end first. A reduction over all pixels also accepts channels-last input,
(B, pixels, C), and so does an average pool whose window is the whole image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.fast_divide import parts
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import (
    EVERY_CHIP,
    FLOATS,
    Argument,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Output,
    Program,
    Scratch,
    Steps,
    UInt32,
)
from onchip.kernels.cuda.layout.permute import permute
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    AvgPool1d,
    AvgPool2d,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
    Layer,
    LogSoftmax,
    Softmax,
)
from onchip.network.types import DTYPE_BYTES, TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels, stored_row_axis, stored_type

ARCHITECTURES = EVERY_CHIP
FOLDER = Path(__file__).parent
THREADS, LINES, BLOCKS_PER_SM = 256, 8, 8
MANY, MANY_LINES = 256, 32  # columns of at least MANY elements are split further: a single image has few columns
SHORT = {2: 64, 4: 64, 8: 32}  # longest row that a thread reads from shared memory, by element bytes
SHORT_THREADS, SHORT_WARPS = 128, 4  # per block
CHUNK_BYTES = 2560  # per warp, unless 32 rows are more
NEVER = 1 << 14  # more 16 B words than a chunk has
LONG = 1024  # longest row for one warp; longer rows take a block
MAX_ITEMS = {1: 32, 4: 8}  # adjacent columns per thread -> elements of each that it holds
WAVES = 32  # of blocks at most: many waves keep the tail short
REDUCTIONS: dict[type[Layer], str] = {
    GlobalMax: "Max", GlobalMin: "Min", GlobalSum: "Plus", GlobalMean: "Mean", GlobalNorm: "Norm",
}  # fmt: skip
SOFTMAXES: dict[type[Layer], str] = {Softmax: "Softmax", LogSoftmax: "LogSoftmax"}


def along(file: str, how: str, dtype: str, shape: tuple[int, int, int], units: int, x: Argument) -> KernelLaunch:
    """reduce or softmax along the middle axis of (outer, N, inner)

    _short (x, y, outer, N, together, closed)   _lanes, _rows (x, y, outer, N)   _columns (x, y, outer, N, inner)
    """
    outer, N, inner = shape
    lanes = THREADS if N > LONG else 32
    given, threads, shared_bytes, waves = f"{how}, {FLOATS[dtype]}", THREADS, 0, 1
    sizes: tuple[Argument, ...] = (Int64(outer), Int64(N))
    if inner > 1:
        V, lines, items = columns_for(dtype, N, inner)
        if file == "reduce":  # it holds no column in registers
            V, lines = _neighbours(dtype, inner), MANY_LINES if N >= MANY else lines
        name = f"{file}_columns<{given}, {V}, {lines}{f', {items}' if file == 'softmax' else ''}>"
        sizes, blocks, waves = tuple(map(Int64, shape)), -(-outer * inner * lines // (THREADS * V)), WAVES
    elif SHORT[DTYPE_BYTES[dtype]] >= N:
        row_bytes = N * DTYPE_BYTES[dtype]
        V, is_even = math.gcd(16, row_bytes) // DTYPE_BYTES[dtype], row_bytes % 32 == 0
        name = f"{file}_short<{given}, {V}{f', {_held(N)}' if file == 'softmax' else ''}>"
        together = 32 * max(1, CHUNK_BYTES // (32 * row_bytes))
        sizes = Int64(outer), UInt32(N), UInt32(together), parts(row_bytes // 16 if is_even else NEVER)
        threads, blocks, waves = SHORT_THREADS, -(-outer // (SHORT_WARPS * together)), WAVES
        shared_bytes = SHORT_WARPS * together * (row_bytes + 16 * is_even)
    elif file == "reduce":
        name, blocks = f"reduce_rows<{given}, {lanes}, {_neighbours(dtype, N)}>", -(-outer * lanes // THREADS)
    elif THREADS * MAX_ITEMS[1] < N:
        name, blocks = f"softmax_rows<{given}>", outer
    else:
        name = f"softmax_lanes<{given}, {lanes}, {_held(-(-N // lanes))}>"
        sizes, blocks = (Int64(outer), UInt32(N)), -(-outer * lanes // THREADS)
    program = Program(FOLDER / f"{file}.cu", name)
    config = LaunchConfig((min(blocks, units * BLOCKS_PER_SM * waves), 1, 1), (threads, 1, 1), shared_bytes)
    budget = Budget(registers=128, spill_bytes=16)  # on sm_100, with four blocks per SM
    return KernelLaunch(program, config, (x, Output(0), *sizes), budget)


def columns_for(dtype: str, N: int, inner: int) -> tuple[int, int, int]:
    """Adjacent columns per thread, threads per column, and elements of each that a thread holds; 0: none.

    Several columns if they are aligned and if a column that fits in registers still does.
    """
    lines = 1 if MAX_ITEMS[4] >= N else LINES
    held = -(-N // lines)
    V = 1 if MAX_ITEMS[4] < held <= MAX_ITEMS[1] else _neighbours(dtype, inner)
    return V, lines, _held(held) if held <= MAX_ITEMS[V] else 0


def _held(N: int) -> int:
    """N rounded up to a power of two: few sizes, so few kernels to compile."""
    return 1 << (N - 1).bit_length()


def _neighbours(dtype: str, size: int) -> int:
    """Elements per load from contiguous runs of this size."""
    return 4 if size % 4 == 0 and DTYPE_BYTES[dtype] <= 4 else 1


@dataclass(frozen=True)
class ReduceLowering:
    """A reduction over axes, or a softmax along one."""

    file: str
    how: str
    dtype: str
    row_shape: tuple[int, ...]
    axes: tuple[int, ...]  # of the whole array, batch first
    units: int

    @property
    def order(self) -> tuple[int, ...]:
        """All axes, the reduced ones last."""
        rank = 1 + len(self.row_shape)
        return (*(axis for axis in range(rank) if axis not in self.axes), *self.axes)

    def middle(self, B: int) -> tuple[int, int, int] | None:
        """The array as (outer, N, inner), if the axes are adjacent."""
        shape = (B, *self.row_shape)
        wide = [axis for axis in self.axes if shape[axis] != 1] or [self.axes[0]]
        between = range(wide[0], wide[-1] + 1)
        if any(shape[axis] != 1 and axis not in self.axes for axis in between):
            return None
        return (
            math.prod(shape[: wide[0]]), math.prod(shape[axis] for axis in between), math.prod(shape[wide[-1] + 1 :])
        )  # fmt: skip

    def at(self, B: int) -> Steps:
        count = B * math.prod(self.row_shape)
        if not count:
            return Steps(())
        if (middle := self.middle(B)) is not None:
            return Steps((along(self.file, self.how, self.dtype, middle, self.units, Input(0)),))
        item_bytes, N = DTYPE_BYTES[self.dtype], math.prod((B, *self.row_shape)[axis] for axis in self.axes)
        shape, dtypes = (B, *self.row_shape), (self.dtype, self.dtype)
        turned = permute(dtypes, shape, self.order, self.units, Input(0), Scratch(0))
        rows = along(self.file, self.how, self.dtype, (count // N, N, 1), self.units, Scratch(0))
        return Steps((turned, rows), count * item_bytes)


class ReduceKernel:
    name = "reduce"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)  # computes in float32, or in float64

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer = node.layer
        x, y = net.types[node.inputs[0]], net.types[node.name]
        is_whole = _is_whole_window(layer, x)
        if not (is_whole or isinstance(layer, (*REDUCTIONS, *SOFTMAXES))) or job.is_training:
            return
        if x.dtype not in FLOATS or device.arch not in ARCHITECTURES:
            why = f"computes on {', '.join(FLOATS)} on {', '.join(ARCHITECTURES)}"
            yield Refusal(self.name, node.name, f"{why}, not {x} on {device.arch}")
            return
        is_softmax = isinstance(layer, tuple(SOFTMAXES))
        pixels = tuple(range(2, len(x.shape)))
        given = (layer.attributes()["axis"],) if is_softmax else layer.attributes().get("axes", pixels)
        axes = tuple(sorted(axis % len(x.shape) for axis in given))
        file, how = (
            ("softmax", SOFTMAXES[type(layer)]) if is_softmax else ("reduce", REDUCTIONS.get(type(layer), "Mean"))
        )
        for layout in _layouts(net, node, axes):
            lies = stored_type(x, layout)
            walked = tuple(sorted(1 + stored_row_axis(axis, len(x.shape), layout) for axis in axes))
            lowering = ReduceLowering(file, how, x.dtype, lies.row_shape, walked, device.units)
            is_moved = lowering.middle(2) is None
            moved = 2 * x.row_bytes if is_moved else 0
            is_last = layout == CHANNELS_LAST
            yield Claim(
                self.name, f"{layer.kind.lower()}<{','.join(map(str, axes))}>", (node.name,),
                Cost(net.row_flop(node), x.row_bytes + y.row_bytes + moved, launches=2 if is_moved else 1),
                "one layer by itself", facts=lowering,
                order="" if how in ("Max", "Min") else "in threads, then in a tree",
                reads={node.inputs[0]: Use(layout)} if is_last else {},
                writes={node.name: layout} if is_last and is_softmax else {},
            )  # fmt: skip


def _layouts(net: Network, node: Node, axes: tuple[int, ...]) -> Iterator[str]:
    """Layouts of x: channels-last if y is too, or if only channels remain in y."""
    x, y = net.types[node.inputs[0]], net.types[node.name]
    if not _is_whole_window(node.layer, x):  # else a pool kernel claims it
        yield ROWS
    may_be_nhwc = axes == tuple(range(2, len(x.shape))) or (x == y and net.readers(node.name))
    if may_be_nhwc and has_channels(x) and node.inputs[0] not in net.inputs:
        yield CHANNELS_LAST


def _is_whole_window(layer: Layer, x: TensorType) -> bool:
    """Whether it is a global mean expressed as an average pool."""
    return isinstance(layer, AvgPool1d | AvgPool2d) and layer.kernel == x.row_shape[1:] and not any(layer.pads)


def _instance(name: str, file: str, how: str, dtype: str, *shape: int) -> Instance:
    outer, N, inner = shape
    return Instance(name, lambda device: along(file, how, dtype, (outer, N, inner), device.units, Input(0)))


INSTANCES = (
    _instance("mean of short rows", "reduce", "Mean", "float32", 1000, 49, 1),
    _instance("mean of rows", "reduce", "Mean", "float32", 1000, 196, 1),
    _instance("mean of aligned columns", "reduce", "Mean", "float32", 10, 49, 2048),
    _instance("mean of long rows", "reduce", "Mean", "float16", 10, 5000, 1),
    _instance("largest of rows", "reduce", "Max", "bfloat16", 1000, 7, 1),
    _instance("largest of short rows", "reduce", "Max", "float64", 1000, 32, 1),
    _instance("largest of columns", "reduce", "Max", "float32", 10, 20, 30),
    _instance("mean of columns", "reduce", "Mean", "float64", 10, 20, 30),
    _instance("mean of many pixels", "reduce", "Mean", "float16", 10, 1024, 64),
    _instance("smallest of rows", "reduce", "Min", "float32", 1000, 196, 1),
    _instance("sum of rows", "reduce", "Plus", "float32", 1000, 196, 1),
    _instance("norm of short rows", "reduce", "Norm", "float32", 1000, 49, 1),
    _instance("norm of columns", "reduce", "Norm", "float64", 10, 20, 30),
    _instance("softmax of short rows", "softmax", "Softmax", "float32", 1000, 10, 1),
    _instance("softmax of short aligned rows", "softmax", "Softmax", "float32", 1000, 64, 1),
    _instance("softmax of short odd rows", "softmax", "Softmax", "float32", 1000, 49, 1),
    _instance("log-softmax of few numbers", "softmax", "LogSoftmax", "float32", 1000, 15, 1),
    _instance("softmax of short float16 rows", "softmax", "Softmax", "float16", 1000, 10, 1),
    _instance("log-softmax of short float64 rows", "softmax", "LogSoftmax", "float64", 1000, 31, 1),
    _instance("softmax of columns", "softmax", "Softmax", "float32", 10, 64, 1024),
    _instance("softmax of short columns", "softmax", "Softmax", "float32", 10, 8, 1024),
    _instance("largest of short columns", "reduce", "Max", "float16", 10, 8, 1024),
    _instance("softmax of float16 columns", "softmax", "Softmax", "float16", 10, 64, 1024),
    _instance("softmax of bfloat16 columns", "softmax", "Softmax", "bfloat16", 10, 128, 1024),
    _instance("softmax of float64 columns", "softmax", "Softmax", "float64", 10, 256, 1024),
    _instance("softmax of rows", "softmax", "Softmax", "float64", 1000, 1000, 1),
    _instance("softmax of long rows", "softmax", "Softmax", "float16", 10, 5000, 1),
    _instance("softmax of long float64 rows", "softmax", "Softmax", "float64", 10, 5000, 1),
    _instance("softmax of very long rows", "softmax", "Softmax", "float32", 10, 50000, 1),
    _instance("log-softmax of columns", "softmax", "LogSoftmax", "float32", 10, 200, 30),
    _instance("log-softmax of long columns", "softmax", "LogSoftmax", "float32", 10, 2000, 30),
    _instance("softmax of float32 rows", "softmax", "Softmax", "float32", 1000, 1000, 1),
    _instance("log-softmax of rows", "softmax", "LogSoftmax", "bfloat16", 1000, 100, 1),
)
