"""Pools of conv_fused: the largest or the mean of every window of an image, or of all its pixels.

A window is read once, tap by tap, and stays in registers. Vectors run along the channels: as many lanes as the largest
power of two that C has room for, and the last vector ends with the last channel, so it may do some channels again. So
few channels are done in vectors, too, and nothing beside them is read or written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import ALL, compiled, floats_at, linked
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.kernels.cpu.conv.lowering import Lowering, window_of
from onchip.kernels.cpu.conv.operation import (
    Activated,
    Call,
    Place,
    Window,
    call_at,
    fields_of,
    finish,
    own_rows,
    runs,
)
from onchip.kernels.cpu.conv.values import UnsupportedError, View
from onchip.network.graph import Node
from onchip.network.layers import AvgPool1d, AvgPool2d, GlobalMax, GlobalMean, MaxPool1d, MaxPool2d
from onchip.network.layers.conv import geometry

_ZERO = np.float32(0)
_FEW = 16  # pixels whose sum is taken before it joins the total of a mean
_TOGETHER = 4  # windows at a time: one's maximum waits for its last tap, four do not wait for each other


@dataclass(frozen=True, eq=False, kw_only=True)
class Pool(Activated):
    exact = True
    x: View
    window: Window

    def flop(self) -> int:
        return math.prod(self.y.sizes) * self.window.KH * self.window.KW


@dataclass(frozen=True, eq=False, kw_only=True)
class MaxPool(Pool):
    """The largest number of every window."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AvgPool(Pool):
    """The mean of every window."""

    order = "windows in order"
    counts_pads: bool
    tall: int  # x with its pads
    wide: int


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalPool(Activated):
    """The largest number or the mean of all pixels."""

    exact = True
    x: View
    sums: View  # of a few pixels


@dataclass(frozen=True, eq=False, kw_only=True)
class LargestPixel(GlobalPool):
    pass


@dataclass(frozen=True, eq=False, kw_only=True)
class MeanPixel(GlobalPool):
    order = "some pixels at a time, in order"


# -- from layers -----------------------------------------------------------------------------------------------


def lower_pool(to: Lowering, node: Node) -> None:
    layer, x = node.layer, to.image(node.inputs[0])
    window = window_of(node, layer.attributes()["kernel"])
    if isinstance(layer, MaxPool1d | MaxPool2d):
        to.make(node, MaxPool, x=x, window=window)
        return
    assert isinstance(layer, AvgPool1d | AvgPool2d)
    _, pads, _ = geometry(layer)
    tall, wide = (0, sum(pads)) if len(pads) == 2 else (pads[0] + pads[2], pads[1] + pads[3])
    padded = {"tall": x.sizes[1] + tall, "wide": x.sizes[2] + wide}
    to.make(node, AvgPool, x=x, window=window, counts_pads=layer.count_pads, **padded)


def lower_global_pool(to: Lowering, node: Node) -> None:
    x = to.image(node.inputs[0])
    assert isinstance(node.layer, GlobalMax | GlobalMean)
    rank = len(to.net.types[node.inputs[0]].shape)
    if {axis % rank for axis in node.layer.axes} != set(range(2, rank)) or rank == 2:
        raise UnsupportedError("a reduction over other axes than the pixels")
    kind = LargestPixel if isinstance(node.layer, GlobalMax) else MeanPixel
    to.make(node, kind, x=x, sums=to.own("", (x.sizes[0], 1, 1)))


# -- code ------------------------------------------------------------------------------------------------------


@intrinsic
def _pool_windows(
    typing_context: Any, x: Any, x_step: Any, count: Any, H: Any, x_h: Any, K: Any, x_k: Any, out: Any, out_step: Any,
    share: Any, lanes: Any, largest: Any,
) -> Any:  # fmt: skip
    """`lanes` channels of `count` windows of H lines of K taps; addresses and strides are in bytes.

    x_step and out_step lead from a window to the next, x_h and x_k from line to line and from tap to tap.
    lanes    a power of two, LANES at most
    largest  1: the largest (a NaN wins; -inf of none); 0: the sum, line by line, over the share
    """
    signature = types.void(*(types.int64,) * 9, types.float32, types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *places, lanes, largest = args
        widths = [1 << i for i in range(LANES.bit_length())]
        emit.switch(
            builder,
            builder.add(builder.mul(lanes, emit.INT(2)), largest),
            {2 * width + which: _windows(builder, places, width, bool(which)) for width in widths for which in (0, 1)},
        )
        return context.get_dummy_value()

    return signature, codegen


def _windows(b: Any, places: list[Any], width: int, largest: bool) -> Callable[[], None]:
    x, x_step, count, H, x_h, K, x_k, out, out_step, share = places
    kind = ir.VectorType(emit.FLOAT, width)
    start = ir.Constant(kind, [float("-inf") if largest else 0.0] * width)

    def join(a: Any, c: Any) -> Any:
        if not largest:
            return b.fadd(a, c)
        return b.select(b.or_(b.fcmp_ordered(">", c, a), b.fcmp_unordered("uno", c, c)), c, a)

    def some(windows: int) -> Callable[[Any, list[Any]], list[Any]]:
        def turn(i: Any, _: list[Any]) -> list[Any]:
            firsts = [b.add(x, b.mul(b.add(i, emit.INT(j)), x_step)) for j in range(windows)]

            def line(h: Any, totals: list[Any]) -> list[Any]:
                begin = b.mul(h, x_h)

                def tap(k: Any, sums: list[Any]) -> list[Any]:
                    at = b.add(begin, b.mul(k, x_k))
                    return [join(s, emit.load(b, b.add(f, at), kind)) for s, f in zip(sums, firsts, strict=True)]

                if largest:
                    return emit.loop(b, emit.INT(0), K, 1, totals, tap)
                sums = emit.loop(b, emit.INT(0), K, 1, [start] * windows, tap)
                return [b.fadd(total, line_sum) for total, line_sum in zip(totals, sums, strict=True)]

            for j, total in enumerate(emit.loop(b, emit.INT(0), H, 1, [start] * windows, line)):
                made = total if largest else b.fdiv(total, emit.splat(b, share, width))
                emit.store(b, made, b.add(out, b.mul(b.add(i, emit.INT(j)), out_step)))
            return []

        return turn

    def body() -> None:
        whole = b.and_(count, emit.INT(-_TOGETHER))
        emit.loop(b, emit.INT(0), whole, _TOGETHER, [], some(_TOGETHER))
        emit.loop(b, whole, count, 1, [], some(1))

    return body


@linked(*(types.int64,) * 9, types.float32, types.int64, types.int64)
def pool_windows(
    x: int, x_step: int, count: int, H: int, x_h: int, K: int, x_k: int, out: int, out_step: int, share: np.float32,
    lanes: int, largest: int,
) -> None:  # fmt: skip
    """A function of its own: in a loop LLVM would make the addresses of all its shapes ready in front, each time."""
    _pool_windows(x, x_step, count, H, x_h, K, x_k, out, out_step, share, lanes, largest)


@compiled()
def taps_inside(first: int, taps: int, step: int, size: int) -> tuple[int, int]:
    """First and last + 1 of the taps at first, first + step, ... that lie in 0 .. size - 1."""
    if step == 1:  # without a division, which takes as long as a window
        near = min(taps, max(0, -first))
        return near, max(near, min(taps, size - first))
    low = min(taps, max(0, (step - 1 - first) // step))
    return low, max(low, min(taps, (size - 1 - first) // step + 1))


@compiled()
def _counted(
    low: int, high: int, counts_pads: int, padded_size: int, out: int, stride: int, taps: int, step: int
) -> int:
    """Over how many taps along an axis a mean is taken: those inside, or those inside the padded input."""
    return min(taps, (padded_size - out * stride + step - 1) // step) if counts_pads else high - low


@compiled()
def _pool(
    at: Call, x: Place, y: Place, k: Window, activation: int, largest: int, counts_pads: int, tall_x: int, wide_x: int
) -> None:
    lanes = 1
    while lanes < LANES and 2 * lanes <= x.C:
        lanes *= 2
    # The windows from `left` to `right` lie between the left and the right edge.
    left = min(y.W, (k.PX + k.SX - 1) // k.SX)
    right = max(left, min(y.W, (x.W - 1 + k.PX - (k.KW - 1) * k.DX) // k.SX + 1))
    top, bottom = own_rows(y.H, at.part, at.parts)
    for i in range(at.images):
        for oy in range(top, bottom):
            iy = oy * k.SY - k.PY
            low, high = taps_inside(iy, k.KH, k.DY, x.H)
            tall = _counted(low, high, counts_pads, tall_x, oy, k.SY, k.KH, k.DY)
            ox = 0
            while ox < y.W:
                count = right - ox if left <= ox < right else 1
                ix = ox * k.SX - k.PX
                near, far = taps_inside(ix, k.KW, k.DX, x.W)
                wide = _counted(near, far, counts_pads, wide_x, ox, k.SX, k.KW, k.DX)
                given = x.at + i * x.image + (iy + low * k.DY) * x.row + (ix + near * k.DX) * x.pixel
                out = y.at + i * y.image + oy * y.row + ox * y.pixel
                for first in range(0, x.C, lanes):
                    c = min(first, x.C - lanes)
                    pool_windows(
                        at.here + (given + c) * 4, k.SX * x.pixel * 4, count, high - low, k.DY * x.row * 4, far - near,
                        k.DX * x.pixel * 4, at.here + (out + c) * 4, y.pixel * 4, np.float32(tall * wide), lanes,
                        largest,
                    )  # fmt: skip
                ox += count
    finish(at.here, y, at.images, top, bottom, activation)


_max_pool, _avg_pool, _largest, _mean = map(fields_of, (MaxPool, AvgPool, LargestPixel, MeanPixel))


@runs(MaxPool)
def max_pool(row: int, call: int) -> None:
    op, at = _max_pool(row, call), call_at(call)
    _pool(at, op.x, op.y, op.window, op.activation, 1, 0, 0, 0)


@runs(AvgPool)
def avg_pool(row: int, call: int) -> None:
    op, at = _avg_pool(row, call), call_at(call)
    _pool(at, op.x, op.y, op.window, op.activation, 0, op.counts_pads, op.tall, op.wide)


@runs(LargestPixel)
def largest_pixel(row: int, call: int) -> None:
    op, at = _largest(row, call), call_at(call)
    if at.part > 0:
        return
    a, x, y = floats_at(at.here, ALL), op.x, op.y
    for i in range(at.images):
        begin = y.at + i * y.image
        out = a[begin : begin + x.C]
        for q in range(x.H * x.W):
            pixel = x.at + i * x.image + (q // x.W) * x.row + (q % x.W) * x.pixel
            given = a[pixel : pixel + x.C]
            for c in range(x.C):
                wins = (q == 0) | (given[c] > out[c]) | (given[c] != given[c])
                out[c] = given[c] if wins else out[c]
    finish(at.here, y, at.images, 0, 1, op.activation)


@runs(MeanPixel)
def mean_pixel(row: int, call: int) -> None:
    """Sums of a few pixels first, so that long ones keep their digits."""
    op, at = _mean(row, call), call_at(call)
    if at.part > 0:
        return
    a, x, y = floats_at(at.here, ALL), op.x, op.y
    few = a[op.sums.at : op.sums.at + x.C]
    share = np.float32(x.H * x.W)
    for i in range(at.images):
        begin = y.at + i * y.image
        out = a[begin : begin + x.C]
        for q in range(x.H * x.W):
            pixel = x.at + i * x.image + (q // x.W) * x.row + (q % x.W) * x.pixel
            given = a[pixel : pixel + x.C]
            if q % _FEW == 0:
                for c in range(x.C):
                    out[c] = few[c] + out[c] if q > 0 else _ZERO
                    few[c] = _ZERO
            for c in range(x.C):
                few[c] += given[c]
        for c in range(x.C):
            out[c] = (out[c] + few[c]) / share
    finish(at.here, y, at.images, 0, 1, op.activation)
