"""The gradient of a Linear's or a convolution's weight, and of its bias: host side of gradient/weight_grad.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int32, c_int64
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import (
    NOTHING,
    Argument,
    Input,
    Int64,
    Output,
    Scratch,
    Struct,
    UInt32,
)
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.costs import costs_of
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
TILE, THREADS = 64, 256
MIN_SPLIT, MAX_SPLIT = 128, 4096  # K per split
MAX_GRID_Y = (1 << 16) - 1


class WindowsStruct(CStruct):
    source, c_name = SOURCE.with_suffix(".cuh"), "Windows"
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
class Tile:
    """What a block computes of dw, and how deep the slices of K are."""

    BM: int
    BN: int
    depth: int
    blocks_per_sm: int  # that the splits should give

    def count(self, M: int, N: int) -> int:
        return -(-M // self.BM) * -(-N // self.BN)


@dataclass(frozen=True)
class WeightGradGemm:
    """dw (groups, M, N), and the bias' gradient (groups M): an implicit gemm, split over K."""

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

    @property
    def row_sizes(self) -> tuple[int, int]:
        """Elements of a convolution's y and x per row of the batch."""
        channels = self.N // math.prod(self.windows.taps)
        return (
            self.groups * self.M * math.prod(self.windows.sizes_out),
            self.groups * channels * math.prod(self.windows.sizes_in),
        )

    @property
    def written(self) -> int:
        """Elements of dw and of the bias' gradient."""
        return self.groups * self.M * (self.N + self.has_bias)

    @property
    def tile(self) -> Tile:
        raise NotImplementedError

    @property
    def computed(self) -> str:
        """The precision of the flop."""
        raise NotImplementedError

    def rate(self, B: int, device: Device) -> float:
        """Estimated share of the device's rate in that precision."""
        raise NotImplementedError

    def launch(self, K: int, written: str, grid: tuple[int, int, int], arguments: tuple[Argument, ...]) -> KernelLaunch:
        """written: the dtype of dw"""
        raise NotImplementedError

    def splits(self, B: int) -> tuple[int, int]:
        """The number of splits of K, and K of each."""
        K, tile = B * self.row_terms, self.tile
        tiles = tile.count(self.M, self.N) * self.groups
        wanted = max(-(-K // MAX_SPLIT), min(-(-tile.blocks_per_sm * self.units // tiles), K // MIN_SPLIT), 1)
        wanted = min(wanted, max(1, MAX_GRID_Y // self.groups))
        split = -(-K // wanted // tile.depth) * tile.depth
        return -(-K // split), split

    def busy(self, B: int) -> float:
        """The share of the SMs that have a block."""
        return min(1.0, self.tile.count(self.M, self.N) * self.groups * self.splits(B)[0] / self.units)

    def template(self, K: int) -> str:
        """The first template arguments: IS_ROWS, Index."""
        return f"{str(bool(self.vectors)).lower()}, {index_of(K + self.tile.depth)}"

    def at(self, B: int) -> Steps:
        K, count = B * self.row_terms, self.groups * self.M * self.N
        if not K * count:
            return Steps(())
        (splits, split), total = self.splits(B), accumulated(self.dtype)
        stride = self.written if splits > 1 else 0
        dw, bias = (Scratch(0), Scratch(count * DTYPE_BYTES[total])) if splits > 1 else (Output(0), Output(1))
        product = self.launch(
            K, total if splits > 1 else self.dw_dtype, (self.tile.count(self.M, self.N), self.groups * splits, 1),
            (
                Input(self.dy), Input(1 - self.dy), dw, bias if self.has_bias else NOTHING, UInt32(self.M),
                UInt32(self.N), UInt32(-(-self.N // self.tile.BN)), UInt32(self.groups), Int64(K), Int64(split),
                Int64(stride), self.windows.struct(*self.row_sizes),
            ),
        )  # fmt: skip
        if splits == 1:
            return Steps((product,))
        y2 = Output(1) if self.has_bias else NOTHING
        added = sum_rows((total, self.dw_dtype), splits, stride, Scratch(0), Output(0), y2, count)
        return Steps((product, added), scratch_bytes=splits * stride * DTYPE_BYTES[total])


@dataclass(frozen=True)
class WeightGradLowering(WeightGradGemm):
    """weight_grad(dy, x, dw, bias, M, N, tiles_n, groups, K, split_k, split_stride, windows)"""

    tile = Tile(TILE, TILE, depth=16, blocks_per_sm=2)
    computed = "fp32"

    def rate(self, B: int, device: Device) -> float:
        """Counts tile overhang and idle SMs."""
        full = self.M * self.N / (self.tile.count(self.M, self.N) * TILE**2)
        return costs_of(device).weight_grad.simt_share * full * self.busy(B)

    def launch(self, K: int, written: str, grid: tuple[int, int, int], arguments: tuple[Argument, ...]) -> KernelLaunch:
        program = Program(SOURCE, f"weight_grad<{self.template(K)}, {FLOATS[self.dtype]}, {FLOATS[written]}>")
        return KernelLaunch(program, LaunchConfig(grid, (THREADS, 1, 1), 0), arguments, Budget(96))


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
        assert isinstance(node.layer, WeightGrad)
        x, dy = node.inputs
        if x == dy:
            yield Refusal(self.name, node.name, "x and dy are one value")
            return
        for nodes in dict.fromkeys(((node.name,), (node.name, *_bias_nodes(net, start)))):
            gemm = self.gemm(_lowering(net, node, device, has_bias=len(nodes) > 1), job.precision)
            flop = sum(net.row_flop(net.by_name[name]) for name in nodes)
            moved = net.types[x].row_bytes + net.types[dy].row_bytes
            splits, nbytes = gemm.splits(job.batch)[0], DTYPE_BYTES[gemm.dw_dtype] * gemm.written
            cost = Cost(
                flop, moved, nbytes * (1 if splits == 1 else 1 + 2 * splits), 1 + (splits > 1), gemm.computed,
                gemm.rate(job.batch, device),
            )  # fmt: skip
            label = f"{self.name}<{node.layer.of.kind},{gemm.M},{gemm.N}{',bias' if gemm.has_bias else ''}>"
            yield self.claim(net, node, gemm, nodes=nodes, cost=cost, label=label)

    def gemm(self, lowering: WeightGradLowering, precision: str) -> WeightGradGemm:
        return lowering


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
