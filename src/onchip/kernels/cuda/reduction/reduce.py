"""Max, min, sum, mean, L2 norm and softmax along axes: host side of reduction/reduce.cu and softmax.cu.

An array is (outer, N, inner). The reduction order depends on N alone, so a row's bits do not depend on its batch.
Non-adjacent axes are permuted to the end first. A reduction over all pixels also accepts NHWC input, (B, pixels, C);
so does an average pool whose window is the whole image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.axes import axes_last, middle_of
from onchip.kernels.cuda.common.arguments import Argument, Input, Int64, Output, Scratch, UInt32
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.fast_divide import small_divider
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.permute import permute
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
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
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels, stored_row_axis, stored_type

FOLDER = Path(__file__).parent
THREADS, LINES, BLOCKS_PER_SM = 256, 8, 8
MANY, MANY_LINES = 256, 32  # columns of at least MANY elements are split further: a single image has few columns
SHORT = {2: 64, 4: 64, 8: 32}  # longest row that a thread reads from shared memory, by element bytes
SHORT_THREADS, SHORT_WARPS = 128, 4  # per block
CHUNK_BYTES = 2560  # per warp, unless 32 rows are more
NEVER = 1 << 14  # 16 B vectors: longer than a chunk, so no row is padded
LONG = 1024  # longest row for one warp; longer rows take a block
MAX_ITEMS = {1: 32, 4: 8}  # adjacent columns per thread -> elements of each in its registers
WAVES = 32  # at most: many waves of blocks keep the tail short
REDUCTIONS: dict[type[Layer], str] = {
    GlobalMax: "Max", GlobalMin: "Min", GlobalSum: "Plus", GlobalMean: "Mean", GlobalNorm: "Norm",
}  # fmt: skip
SOFTMAXES: dict[type[Layer], str] = {Softmax: "Softmax", LogSoftmax: "LogSoftmax"}


def reduce_axis(file: str, mode: str, dtype: str, shape: tuple[int, int, int], units: int, x: Argument) -> KernelLaunch:
    """Reduce, or apply softmax, along the middle axis of (outer, N, inner).

    _short (x, y, outer, N, warp_rows, row_chunks)   _lanes, _rows (x, y, outer, N)   _columns (x, y, outer, N, inner)
    """
    outer, N, inner = shape
    lanes = THREADS if N > LONG else 32
    template, threads, shared_bytes, waves = f"{mode}, {FLOATS[dtype]}", THREADS, 0, 1
    sizes: tuple[Argument, ...] = (Int64(outer), Int64(N))
    if inner > 1:
        V, lines, items = columns_for(dtype, N, inner)
        if file == "reduce":  # needs no columns in registers
            V, lines = _vector(dtype, inner), MANY_LINES if N >= MANY else lines
        name = f"{file}_columns<{template}, {V}, {lines}{f', {items}' if file == 'softmax' else ''}>"
        sizes, blocks, waves = tuple(map(Int64, shape)), -(-outer * inner * lines // (THREADS * V)), WAVES
    elif SHORT[DTYPE_BYTES[dtype]] >= N:
        row_bytes = N * DTYPE_BYTES[dtype]
        V, is_padded = math.gcd(16, row_bytes) // DTYPE_BYTES[dtype], row_bytes % 32 == 0
        name = f"{file}_short<{template}, {V}{f', {_power_of_two(N)}' if file == 'softmax' else ''}>"
        warp_rows = 32 * max(1, CHUNK_BYTES // (32 * row_bytes))
        sizes = Int64(outer), UInt32(N), UInt32(warp_rows), small_divider(row_bytes // 16 if is_padded else NEVER)
        threads, blocks, waves = SHORT_THREADS, -(-outer // (SHORT_WARPS * warp_rows)), WAVES
        shared_bytes = SHORT_WARPS * warp_rows * (row_bytes + 16 * is_padded)
    elif file == "reduce":
        name, blocks = f"reduce_rows<{template}, {lanes}, {_vector(dtype, N)}>", -(-outer * lanes // THREADS)
    elif THREADS * MAX_ITEMS[1] < N:
        name, blocks = f"softmax_rows<{template}>", outer
    else:
        name = f"softmax_lanes<{template}, {lanes}, {_power_of_two(-(-N // lanes))}>"
        sizes, blocks = (Int64(outer), UInt32(N)), -(-outer * lanes // THREADS)
    program = Program(FOLDER / f"{file}.cu", name)
    config = LaunchConfig((min(blocks, units * BLOCKS_PER_SM * waves), 1, 1), (threads, 1, 1), shared_bytes)
    budget = Budget(registers=128, spill_bytes=16)  # on sm_100, with four blocks per SM
    return KernelLaunch(program, config, (x, Output(0), *sizes), budget)


def columns_for(dtype: str, N: int, inner: int) -> tuple[int, int, int]:
    """Adjacent columns per thread, threads per column, and elements of a column in a thread's registers; 0: none.

    Several columns if they are aligned and if columns that fit in registers still do.
    """
    lines = 1 if MAX_ITEMS[4] >= N else LINES
    per_thread = -(-N // lines)
    V = 1 if MAX_ITEMS[4] < per_thread <= MAX_ITEMS[1] else _vector(dtype, inner)
    return V, lines, _power_of_two(per_thread) if per_thread <= MAX_ITEMS[V] else 0


def _power_of_two(N: int) -> int:
    """N rounded up to a power of two: few sizes, so few kernels to compile."""
    return 1 << (N - 1).bit_length()


def _vector(dtype: str, size: int) -> int:
    """Elements per load from contiguous runs of this size."""
    return 4 if size % 4 == 0 and DTYPE_BYTES[dtype] <= 4 else 1


@dataclass(frozen=True)
class ReduceLowering:
    """A reduction over axes, or a softmax along one."""

    file: str
    mode: str
    dtype: str
    row_shape: tuple[int, ...]
    axes: tuple[int, ...]  # of the whole array, batch first
    units: int

    def middle(self, B: int) -> tuple[int, int, int] | None:
        """The array as (outer, N, inner), if the axes are adjacent."""
        return middle_of((B, *self.row_shape), self.axes)

    def at(self, B: int) -> Steps:
        count = B * math.prod(self.row_shape)
        if not count:
            return Steps(())
        if (middle := self.middle(B)) is not None:
            return Steps((reduce_axis(self.file, self.mode, self.dtype, middle, self.units, Input(0)),))
        item_bytes, N = DTYPE_BYTES[self.dtype], math.prod((B, *self.row_shape)[axis] for axis in self.axes)
        shape, dtypes = (B, *self.row_shape), (self.dtype, self.dtype)
        permuted = permute(dtypes, shape, axes_last(len(shape), self.axes), self.units, Input(0), Scratch(0))
        rows = reduce_axis(self.file, self.mode, self.dtype, (count // N, N, 1), self.units, Scratch(0))
        return Steps((permuted, rows), count * item_bytes)


class ReduceKernel(CudaKernel):
    name = "reduce"
    layers = (*REDUCTIONS, *SOFTMAXES, AvgPool1d, AvgPool2d)

    def applies(self, net: Network, start: int) -> bool:
        node = net.nodes[start]
        return not isinstance(node.layer, AvgPool1d | AvgPool2d) or _is_whole_window(net, node)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        node = net.nodes[start]
        layer, x, y = node.layer, net.types[node.inputs[0]], net.types[node.name]
        is_softmax = isinstance(layer, tuple(SOFTMAXES))
        pixels = tuple(range(2, len(x.shape)))
        requested = (layer.attributes()["axis"],) if is_softmax else layer.attributes().get("axes", pixels)
        axes = tuple(sorted(axis % len(x.shape) for axis in requested))
        file, mode = (
            ("softmax", SOFTMAXES[type(layer)]) if is_softmax else ("reduce", REDUCTIONS.get(type(layer), "Mean"))
        )
        for layout in _layouts(net, node, axes):
            stored = stored_type(x, layout)
            stored_axes = tuple(sorted(1 + stored_row_axis(axis, len(x.shape), layout) for axis in axes))
            lowering = ReduceLowering(file, mode, x.dtype, stored.row_shape, stored_axes, device.units)
            is_permuted = lowering.middle(2) is None
            moved = 2 * x.row_bytes if is_permuted else 0
            is_nhwc = layout == CHANNELS_LAST
            yield self.claim(
                net, node, lowering, label=f"{layer.kind.lower()}<{','.join(map(str, axes))}>",
                cost=Cost(net.row_flop(node), x.row_bytes + y.row_bytes + moved, launches=2 if is_permuted else 1),
                order="" if mode in ("Max", "Min") else "in threads, then in a tree",
                reads={node.inputs[0]: Use(layout)} if is_nhwc else {},
                writes={node.name: layout} if is_nhwc and is_softmax else {},
            )  # fmt: skip


def _layouts(net: Network, node: Node, axes: tuple[int, ...]) -> Iterator[str]:
    """Layouts of x: NHWC if y is NHWC, too, or has only channels."""
    x, y = net.types[node.inputs[0]], net.types[node.name]
    if not _is_whole_window(net, node):  # else a pool kernel claims it
        yield ROWS
    may_be_nhwc = axes == tuple(range(2, len(x.shape))) or (x == y and net.readers(node.name))
    if may_be_nhwc and has_channels(x) and node.inputs[0] not in net.inputs:
        yield CHANNELS_LAST


def _is_whole_window(net: Network, node: Node) -> bool:
    """Whether the layer is an average pool over the whole image, i.e. a global mean."""
    layer, x = node.layer, net.types[node.inputs[0]]
    return isinstance(layer, AvgPool1d | AvgPool2d) and layer.kernel == x.row_shape[1:] and not any(layer.pads)


def _instance(name: str, file: str, mode: str, dtype: str, *shape: int) -> Instance:
    outer, N, inner = shape
    return Instance(name, lambda device: reduce_axis(file, mode, dtype, (outer, N, inner), device.units, Input(0)))


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
    _instance("log-softmax of few elements", "softmax", "LogSoftmax", "float32", 1000, 15, 1),
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
