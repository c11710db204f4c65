"""The gradient of a Linear's or a convolution's weight, and of its bias: host side of gradient/weight_grad.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int32, c_int64
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Input, Int64, Output, Scratch, Struct, UInt32
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.fast_divide import Divider, divider, index_of
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.gradient.batch_sum import accumulated, sum_rows
from onchip.kernels.cuda.gradient.kernel import OneDtypeKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchSum, Convolution, GlobalSum, Linear, TransposedConvolution, WeightGrad
from onchip.network.layers.conv import conv_groups, geometry
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
TILE, TILE_K, THREADS = 64, 16, 256
MIN_SPLIT, MAX_SPLIT = 128, 4096  # K per split
MAX_GRID_Y = (1 << 16) - 1
BLOCKS_PER_SM = 2  # that the splits should give


class WindowsStruct(CStruct):
    source, c_name = SOURCE, "Windows"
    _fields_ = (
        ("positions", Divider), ("width_out", Divider), ("taps", Divider), ("taps_w", Divider), ("stride_h", c_int32),
        ("stride_w", c_int32), ("dilation_h", c_int32), ("dilation_w", c_int32), ("before_h", c_int32),
        ("before_w", c_int32), ("height", c_int32), ("width", c_int32), ("y_row", c_int64), ("x_row", c_int64),
    )  # fmt: skip


@dataclass(frozen=True)
class Windows:
    """Which elements of x a position of y reads. Pairs are (H, W)."""

    sizes_out: tuple[int, int] = (1, 1)
    sizes_in: tuple[int, int] = (1, 1)
    taps: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    before: tuple[int, int] = (0, 0)

    def struct(self, y_row: int, x_row: int) -> Struct:
        return WindowsStruct.of(
            positions=divider(math.prod(self.sizes_out)), width_out=divider(self.sizes_out[1]),
            taps=divider(math.prod(self.taps)), taps_w=divider(self.taps[1]), stride_h=self.stride[0],
            stride_w=self.stride[1], dilation_h=self.dilation[0], dilation_w=self.dilation[1],
            before_h=self.before[0], before_w=self.before[1], height=self.sizes_in[0], width=self.sizes_in[1],
            y_row=y_row, x_row=x_row,
        )  # fmt: skip


@dataclass(frozen=True)
class WeightGradLowering:
    """dw (groups, M, N), and the bias' gradient (groups M)."""

    M: int  # channels of y per group
    N: int  # channels of x per group, times taps
    groups: int
    vectors: int  # per row of the batch, of a Linear; 0: a convolution
    windows: Windows
    dy: int  # the index of the input; the other is x
    has_bias: bool
    units: int
    dtype: str = "float32"  # of x and dy
    dw_dtype: str = "float32"  # and of the bias' gradient

    @property
    def row_terms(self) -> int:
        return self.vectors or math.prod(self.windows.sizes_out)

    def splits(self, B: int) -> tuple[int, int]:
        """The number of splits of K, and K of each."""
        K = B * self.row_terms
        tiles = -(-self.M // TILE) * -(-self.N // TILE) * self.groups
        wanted = max(-(-K // MAX_SPLIT), min(-(-BLOCKS_PER_SM * self.units // tiles), K // MIN_SPLIT), 1)
        wanted = min(wanted, max(1, MAX_GRID_Y // self.groups))
        split = -(-K // wanted // TILE_K) * TILE_K
        return -(-K // split), split

    def at(self, B: int) -> Steps:
        K, count, biases = B * self.row_terms, self.groups * self.M * self.N, self.groups * self.M
        if not K * count:
            return Steps(())
        splits, split = self.splits(B)
        stride = (count + biases * self.has_bias) if splits > 1 else 0
        dw, bias = (
            (Scratch(0), Scratch(count * DTYPE_BYTES[accumulated(self.dtype)]))
            if splits > 1
            else (Output(0), Output(1))
        )
        tiles_n = -(-self.N // TILE)
        grid = (tiles_n * -(-self.M // TILE), self.groups * splits, 1)
        C = self.N // math.prod(self.windows.taps)
        rows = biases * math.prod(self.windows.sizes_out), self.groups * C * math.prod(self.windows.sizes_in)
        total = accumulated(self.dtype)
        types = FLOATS[self.dtype], FLOATS[total if splits > 1 else self.dw_dtype]
        name = f"weight_grad<{str(bool(self.vectors)).lower()}, {index_of(K + TILE_K)}, {', '.join(types)}>"
        product = KernelLaunch(
            Program(SOURCE, name), LaunchConfig(grid, (THREADS, 1, 1), 0),
            (
                Input(self.dy), Input(1 - self.dy), dw, bias if self.has_bias else NOTHING, UInt32(self.M),
                UInt32(self.N), UInt32(tiles_n), UInt32(self.groups), Int64(K), Int64(split), Int64(stride),
                self.windows.struct(*rows),
            ),
            Budget(96),
        )  # fmt: skip
        if splits == 1:
            return Steps((product,))
        y2 = Output(1) if self.has_bias else NOTHING
        added = sum_rows((total, self.dw_dtype), splits, stride, Scratch(0), Output(0), y2, count)
        return Steps((product, added), scratch_bytes=splits * stride * DTYPE_BYTES[total])


class WeightGradKernel(OneDtypeKernel):
    name = "weight_grad"
    writes_other_dtypes = True
    layers = (WeightGrad,)
    order = "splits of K, each in order"

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        assert isinstance(layer, WeightGrad)
        return layer.role == "weight" and isinstance(layer.of, Linear | Convolution | TransposedConvolution)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        x, dy = node.inputs
        if x == dy:
            yield Refusal(self.name, node.name, "x and dy are one value")
            return
        for nodes in dict.fromkeys(((node.name,), (node.name, *_bias_nodes(net, start)))):
            lowering = _lowering(net, node, device, has_bias=len(nodes) > 1)
            flop = sum(net.row_flop(net.by_name[name]) for name in nodes)
            moved = net.types[x].row_bytes + net.types[dy].row_bytes
            splits = lowering.splits(job.batch)[0]
            written = DTYPE_BYTES[lowering.dw_dtype] * lowering.groups * lowering.M * (lowering.N + lowering.has_bias)
            cost = Cost(flop, moved, written * (1 if splits == 1 else 1 + 2 * splits), 1 + (splits > 1), "fp32")
            yield self.claim(net, node, lowering, nodes=nodes, cost=cost, label=_label(net, node, lowering))


def _label(net: Network, node: Node, lowering: WeightGradLowering) -> str:
    assert isinstance(node.layer, WeightGrad)
    return f"weight_grad<{node.layer.of.kind},{lowering.M},{lowering.N}{',bias' if lowering.has_bias else ''}>"


def _bias_nodes(net: Network, start: int) -> tuple[str, ...]:
    """The nodes after net.nodes[start] that sum dy over the batch and all positions: the gradient of the bias."""
    node = net.nodes[start]
    assert isinstance(node.layer, WeightGrad)
    dy, names = node.inputs[1], list[str]()
    if isinstance(node.layer.of, TransposedConvolution) or net.types[dy].dtype != net.types[node.name].dtype:
        return ()
    rank = len(net.types[dy].shape)
    positions = range(1, rank - 1) if isinstance(node.layer.of, Linear) else range(2, rank)
    for following in net.nodes_from(start + 1):
        if following.inputs != (dy,):
            break
        names.append(following.name)
        if isinstance(following.layer, BatchSum):
            return tuple(names) if len(net.types[dy].row_shape) == 1 else ()
        is_private = len(net.readers(following.name)) == 1 and following.name not in net.kept
        if following.layer != GlobalSum(tuple(positions)) or not is_private:
            break
        dy = following.name
    return ()


def _lowering(net: Network, node: Node, device: Device, has_bias: bool) -> WeightGradLowering:
    assert isinstance(node.layer, WeightGrad)
    layer, (x, dy) = node.layer.of, (net.types[value] for value in node.inputs)
    dtypes = x.dtype, net.types[node.name].dtype
    if isinstance(layer, Linear):
        M, N = dy.shape[-1], x.shape[-1]
        vectors = x.row_size // int(N)
        return WeightGradLowering(int(M), int(N), 1, vectors, Windows(), 1, has_bias, device.units, *dtypes)
    stride, pads, dilation = geometry(layer)
    groups, rank, taps = conv_groups(layer), len(stride), net.types[node.name].shape[3:]
    is_transposed = isinstance(layer, TransposedConvolution)
    image, positions = (dy, x) if is_transposed else (x, dy)  # dw of a transposed one: x has the positions
    windows = Windows(
        _pair(positions.shape[2:], 1), _pair(image.shape[2:], 1), _pair(taps, 1), _pair(stride, 1),
        _pair(dilation, 1), _pair(pads[:rank], 0),
    )  # fmt: skip
    M, C = int(positions.shape[1]) // groups, int(image.shape[1]) // groups
    return WeightGradLowering(
        M, C * math.prod(map(int, taps)), groups, 0, windows, 0 if is_transposed else 1, has_bias, device.units, *dtypes
    )


def _pair(sizes: tuple[int | str, ...], missing: int) -> tuple[int, int]:
    """(H, W) of one or two axes."""
    first, second = (*(missing,) * (2 - len(sizes)), *map(int, sizes))
    return first, second


INSTANCES = (
    instance("Linear", WeightGradLowering(320, 784, 1, 1, Windows(), 1, True, 132), 4096),
    instance("convolution", WeightGradLowering(16, 54, 1, 0, Windows((28, 28), (28, 28), (3, 3)), 1, True, 132), 64),
    instance("many", WeightGradLowering(16, 54, 1, 0, Windows((28, 28), (28, 28), (3, 3)), 1, True, 132), 1 << 22),
    instance("doubles", WeightGradLowering(320, 784, 1, 1, Windows(), 1, True, 132, "float64", "float64"), 4096),
    instance(
        "float16 to float32", WeightGradLowering(10, 784, 1, 1, Windows(), 1, True, 132, "float16", "float32"), 64
    ),
)
