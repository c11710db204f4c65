"""LinearResize: host side of pool/resize.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_uint32
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.common.arguments import Input, Int64, Output, UInt32, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.fast_divide import MAX_ELEMENTS, Divider, divider, index_of
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.kernels.selection import ResizeParts, axis_taps, may_be_nhwc, resize_parts
from onchip.network.graph import Network, Node
from onchip.network.layers import LinearResize
from onchip.network.recipe import Array, Recipe, recipe_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.layout import CHANNELS_LAST, ROWS

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, BLOCKS_PER_SM = 256, 4
MAX_PER_THREAD = 8  # outputs per thread


class Axes(CStruct):
    source, c_name = SOURCE, "Axes"
    _fields_ = (
        ("n1", Divider), ("n2", Divider), ("chunks", Divider), ("run", Divider), ("n3", c_uint32),
        ("is_resized", c_uint32 * 3),
    )  # fmt: skip


def _layer(sizes: tuple[int, ...], scales: tuple[float, ...], coordinates: str) -> LinearResize:
    return LinearResize(sizes, scales, coordinates)  # type: ignore[arg-type]


@recipe_op
def resize_taps(
    sizes: tuple[int, ...], scales: tuple[float, ...], coordinates: str, row_shape: tuple[int, ...], layout: str
) -> Array:
    """(n1 + n2 + n3, 2): offsets of the two taps."""
    axes = axis_taps(_layer(sizes, scales, coordinates), row_shape, layout)
    return np.concatenate([np.stack((taps.low, taps.high), 1) * step for taps, step in axes]).astype(np.int32)


@recipe_op
def resize_shares(
    sizes: tuple[int, ...], scales: tuple[float, ...], coordinates: str, row_shape: tuple[int, ...], layout: str
) -> Array:
    """(n1 + n2 + n3,): weight of the second tap."""
    axes = axis_taps(_layer(sizes, scales, coordinates), row_shape, layout)
    return np.concatenate([taps.share for taps, _ in axes])


@dataclass(frozen=True)
class ResizeLowering:
    """resize(x, taps, weights, y, count, x_row, per_thread, axes)"""

    dtype: str
    parts: ResizeParts
    units: int

    @property
    def vector(self) -> int:
        """Contiguous elements per vector, up to 16 bytes."""
        return math.gcd(self.parts.run, 16 // DTYPE_BYTES[self.dtype])

    @property
    def per_store(self) -> int:
        """Outputs along the third axis per store, if contiguous."""
        return math.gcd(self.parts.sizes[2], 16 // DTYPE_BYTES[self.dtype]) if self.parts.run == 1 else 1

    def threads(self, B: int, per_thread: int) -> int:
        n1, n2, n3 = self.parts.sizes
        return B * self.parts.outer * n1 * n2 * math.ceil(n3 / per_thread) * (self.parts.run // self.vector)

    def per_thread(self, B: int) -> int:
        """Outputs per thread along the third axis: fewer if the grid would be too small."""
        per_thread = max(MAX_PER_THREAD, self.per_store)
        while per_thread > self.per_store and self.threads(B, per_thread) < self.units * THREADS * BLOCKS_PER_SM:
            per_thread //= 2
        return per_thread

    def at(self, B: int) -> Steps:
        parts, V, per_thread = self.parts, self.vector, self.per_thread(B)
        count = self.threads(B, per_thread)
        if not count:
            return Steps(())
        program = Program(SOURCE, f"resize<{FLOATS[self.dtype]}, {index_of(count)}, {V}, {self.per_store}>")
        n1, n2, n3 = parts.sizes
        axes = Axes.of(
            n1=divider(n1), n2=divider(n2), chunks=divider(math.ceil(n3 / per_thread)), run=divider(parts.run // V),
            n3=n3, is_resized=parts.is_resized,
        )  # fmt: skip
        arguments = (
            Input(0), Weight("taps"), Weight("shares"), Output(0), Int64(count), Int64(parts.x_row),
            UInt32(per_thread), axes,
        )  # fmt: skip
        return Steps((KernelLaunch(program, grid_1d(-(-count // THREADS)), arguments, Budget(registers=80)),))


class ResizeKernel(CudaKernel):
    name = "resize"
    layers = (LinearResize,)

    def label(self, net: Network, node: Node) -> str:
        return f"{self.name}<linear>"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer, x, y = node.layer, net.types[node.inputs[0]], net.types[node.name]
        assert isinstance(layer, LinearResize)
        if x.row_size >= MAX_ELEMENTS:
            yield Refusal(self.name, node.name, f"supports rows of fewer than {MAX_ELEMENTS:,} elements, not {x}")
            return
        acc_dtype = "float64" if x.dtype == "float64" else "float32"
        for layout in (ROWS, CHANNELS_LAST) if may_be_nhwc(net, node) else (ROWS,):
            if (parts := resize_parts(layer, x, layout)) is None:
                continue
            options, count = {**layer.attributes(), "row_shape": x.row_shape, "layout": layout}, sum(parts.sizes)
            recipes = {
                "taps": Recipe.of(resize_taps, (), (count, 2), "int32", **options),
                "shares": Recipe.of(resize_shares, (), (count,), acc_dtype, **options),
            }
            costs = costs_of(device).resize
            yield self.claim(
                net, node, ResizeLowering(x.dtype, parts, device.units), layout, recipes=recipes, order="axis by axis",
                cost=Cost(
                    net.row_flop(node), x.row_bytes + y.row_bytes, recipe_bytes(recipes),
                    precision="fp32", rate=costs.rows_share if layout == ROWS else costs.channels_last_share,
                ),
            )  # fmt: skip


def _instance(dtype: str, run: int) -> Instance:
    lowering = ResizeLowering(dtype, ResizeParts(8, 64, (1, 32, 32), run, (False, True, True)), 132)
    return instance(f"{dtype}, runs of {run}", lowering, B=64)


INSTANCES = tuple(
    _instance(dtype, run)
    for dtype, run in (("float32", 1), ("float32", 8), ("float16", 8), ("float16", 1), ("float16", 3), ("float64", 2))
)
