"""The gradients of max and average pooling: host side of gradient/pool_grad.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int64
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.chain import in_layouts
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Output, Struct
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.fast_divide import Divider, divider, index_of
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.common.window import THREADS, AxisStruct, StridesStruct, Windows
from onchip.kernels.cuda.gradient.kernel import OneDtypeKernel
from onchip.kernels.window import POOLS, Axis, axes_of
from onchip.network.graph import Network, Node
from onchip.network.layers import InputGrad, Layer, MaxPool1d, MaxPool2d
from onchip.network.types import DTYPE_BYTES, TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")


class PoolGradStruct(CStruct):
    source, c_name = SOURCE, "PoolGrad"
    _fields_ = (
        ("channels", Divider), ("rows", Divider), ("columns", Divider), ("stride_h", Divider), ("stride_w", Divider),
        ("h", AxisStruct), ("w", AxisStruct), ("x", StridesStruct), ("y", StridesStruct), ("count", c_int64),
    )  # fmt: skip


@dataclass(frozen=True)
class PoolGradLowering:
    """pool_grad(x, y, dy, dx, pool)"""

    mode: str  # "Max", "Mean" or "MeanWithPads"
    dtype: str
    C: int
    h: Axis
    w: Axis
    is_nhwc: bool

    @property
    def vector(self) -> int:
        """Channels per thread."""
        return 4 if self.is_nhwc and self.C % 4 == 0 and self.dtype != "float64" else 1

    def at(self, B: int) -> Steps:
        sizes = self.C // self.vector, self.h.size, self.w.size
        count = B * math.prod(sizes)
        if not count:
            return Steps(())
        channels, rows, columns = map(divider, sizes)
        pool = PoolGradStruct.of(
            channels=channels, rows=rows, columns=columns, stride_h=divider(self.h.stride),
            stride_w=divider(self.w.stride), h=AxisStruct.of(**vars(self.h)), w=AxisStruct.of(**vars(self.w)),
            x=self._strides(self.h.size, self.w.size), y=self._strides(self.h.count, self.w.count), count=count,
        )  # fmt: skip
        template = f"{self.mode}, {FLOATS[self.dtype]}, {index_of(count)}, {str(self.is_nhwc).lower()}, {self.vector}"
        y: tuple[Argument, ...] = (Input(1), Input(2)) if self.mode == "Max" else (NOTHING, Input(1))
        return Steps((
            KernelLaunch(
                Program(SOURCE, f"pool_grad<{template}>"), grid_1d(math.ceil(count / THREADS), THREADS),
                (Input(0), *y, Output(0), pool), Budget(64, spill_bytes=32 if DTYPE_BYTES[self.dtype] == 2 else 0),
            ),
        ))  # fmt: skip

    def _strides(self, H: int, W: int) -> Struct:
        channel, row, column = (1, W * self.C, self.C) if self.is_nhwc else (H * W, W, 1)
        return StridesStruct.of(image=self.C * H * W, channel=channel, row=row, column=column)


class PoolGradKernel(OneDtypeKernel):
    name = "pool_grad"
    layers = (InputGrad,)

    def applies(self, net: Network, start: int) -> bool:
        return isinstance(_pool(net.nodes[start]), POOLS)

    def label(self, net: Network, node: Node) -> str:
        pool = _pool(node)
        return f"{pool.kind.lower()}_grad<{','.join(map(str, pool.attributes()['kernel']))}>"

    def cost(self, net: Network, node: Node) -> Cost:
        """A mean's x is not read."""
        read = node.inputs if isinstance(_pool(node), MaxPool1d | MaxPool2d) else node.inputs[1:]
        return Cost(net.row_flop(node), sum(net.types[value].row_bytes for value in (*read, node.name)))

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        pool, x, dy = _pool(node), net.types[node.inputs[0]], net.types[node.inputs[-1]]
        lowering = _lowering(pool, x, dy)
        windows = Windows(lowering.C, lowering.C, lowering.h, lowering.w, False, 4, (), (1, 1), device.units)
        if why := windows.why_not():
            yield Refusal(self.name, node.name, why)
            return
        for claim in in_layouts(net, node, self.claim(net, node, None, order="the taps of each element in order")):
            yield replace(claim, facts=replace(lowering, is_nhwc=bool(claim.writes)))


def _pool(node: Node) -> Layer:
    layer = node.layer
    assert isinstance(layer, InputGrad)
    return layer.of


def _lowering(pool: Layer, x: TensorType, dy: TensorType) -> PoolGradLowering:
    (C, *sizes), (_, *counts), attributes = x.row_shape, dy.row_shape, pool.attributes()
    h, w = axes_of(pool, tuple(sizes), tuple(counts), attributes["kernel"])
    mean = "MeanWithPads" if attributes.get("count_pads") else "Mean"
    return PoolGradLowering("Max" if isinstance(pool, MaxPool1d | MaxPool2d) else mean, x.dtype, C, h, w, False)


def _instance(name: str, mode: str, is_nhwc: bool, C: int = 64, B: int = 1000, dtype: str = "float32") -> Instance:
    axis = Axis(16, 8, 2, 2, 0, 1, 16)
    return instance(name, PoolGradLowering(mode, dtype, C, axis, axis, is_nhwc), B)


INSTANCES = (
    _instance("max", "Max", False), _instance("max, NHWC", "Max", True), _instance("mean", "Mean", False),
    _instance("mean, NHWC", "Mean", True), _instance("mean with pads", "MeanWithPads", False),
    _instance("odd channels, NHWC", "Max", True, 3), _instance("very many", "Max", False, B=1 << 18),
    _instance("max, NHWC, float16", "Max", True, dtype="float16"),
    _instance("mean, bfloat16", "Mean", False, dtype="bfloat16"),
    _instance("max of doubles", "Max", False, dtype="float64"),
    _instance("mean of doubles", "Mean", True, dtype="float64"),
)  # fmt: skip
