"""Max and mean pools of conv_fused: over windows, or over all pixels of an image.

A window is read once, tap by tap, and accumulated in registers. Vector lanes hold channels: the largest power of two up
to C. The last vector ends with the last channel and may recompute some channels, so even few channels are vectorised
and nothing outside them is read or written.
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
    Layout,
    Window,
    call_at,
    fields_of,
    finish,
    row_span,
    runs,
)
from onchip.kernels.cpu.conv.values import UnsupportedError, View
from onchip.network.graph import Node
from onchip.network.layers import AvgPool1d, AvgPool2d, GlobalMax, GlobalMean, MaxPool1d, MaxPool2d
from onchip.network.layers.conv import geometry

_ZERO = np.float32(0)
_CHUNK = 16  # pixels per partial sum of a mean
_UNROLL = 4  # windows at a time: four independent chains hide the latency of max and add


@dataclass(frozen=True, eq=False, kw_only=True)
class Pool(Activated):
    exact = True
    x: View
    window: Window

    def flop(self) -> int:
        return math.prod(self.y.sizes) * self.window.KH * self.window.KW


@dataclass(frozen=True, eq=False, kw_only=True)
class MaxPool(Pool):
    """The maximum of every window."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AvgPool(Pool):
    """The mean of every window."""

    order = "windows in order"
    counts_pads: bool
    height: int  # of x with its pads
    width: int


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalPool(Activated):
    """The maximum or the mean of all pixels."""

    exact = True
    x: View
    sums: View  # partial sums


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalMaxPool(GlobalPool):
    pass


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalMeanPool(GlobalPool):
    order = "partial sums of a few pixels, in order"


# -- from layers -----------------------------------------------------------------------------------------------


def lower_pool(to: Lowering, node: Node) -> None:
    layer, x = node.layer, to.image(node.inputs[0])
    window = window_of(node, layer.attributes()["kernel"])
    if isinstance(layer, MaxPool1d | MaxPool2d):
        to.make(node, MaxPool, x=x, window=window)
        return
    assert isinstance(layer, AvgPool1d | AvgPool2d)
    _, pads, _ = geometry(layer)
    pads_y, pads_x = (0, sum(pads)) if len(pads) == 2 else (pads[0] + pads[2], pads[1] + pads[3])
    padded = {"height": x.sizes[1] + pads_y, "width": x.sizes[2] + pads_x}
    to.make(node, AvgPool, x=x, window=window, counts_pads=layer.count_pads, **padded)


def lower_global_pool(to: Lowering, node: Node) -> None:
    x = to.image(node.inputs[0])
    assert isinstance(node.layer, GlobalMax | GlobalMean)
    rank = len(to.net.types[node.inputs[0]].shape)
    if {axis % rank for axis in node.layer.axes} != set(range(2, rank)) or rank == 2:
        raise UnsupportedError("a reduction that is not over all pixels")
    kind = GlobalMaxPool if isinstance(node.layer, GlobalMax) else GlobalMeanPool
    to.make(node, kind, x=x, sums=to.allocate("", (x.sizes[0], 1, 1)))


# -- code ------------------------------------------------------------------------------------------------------


@intrinsic
def _pool_windows(
    typing_context: Any, x: Any, x_step: Any, count: Any, H: Any, x_h: Any, K: Any, x_k: Any, out: Any, out_step: Any,
    divisor: Any, lanes: Any, is_max: Any,
) -> Any:  # fmt: skip
    """`lanes` channels of `count` windows of H lines of K taps; addresses and strides are in bytes.

    x_step and out_step are strides between windows, x_h and x_k between lines and between taps.
    lanes   a power of two, LANES at most
    is_max  1: maximum (NaN propagates; -inf for no taps); 0: sum, line by line, divided by `divisor`
    """
    signature = types.void(*(types.int64,) * 9, types.float32, types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *values, lanes, is_max = args
        widths = [1 << i for i in range(LANES.bit_length())]
        emit.switch(
            builder,
            builder.add(builder.mul(lanes, emit.INT(2)), is_max),
            {2 * width + which: _windows(builder, values, width, bool(which)) for width in widths for which in (0, 1)},
        )
        return context.get_dummy_value()

    return signature, codegen


def _windows(b: Any, values: list[Any], width: int, is_max: bool) -> Callable[[], None]:
    x, x_step, count, H, x_h, K, x_k, out, out_step, divisor = values
    kind = ir.VectorType(emit.FLOAT, width)
    start = ir.Constant(kind, [float("-inf") if is_max else 0.0] * width)

    def join(a: Any, c: Any) -> Any:
        if not is_max:
            return b.fadd(a, c)
        return b.select(b.or_(b.fcmp_ordered(">", c, a), b.fcmp_unordered("uno", c, c)), c, a)

    def emit_windows(windows: int) -> Callable[[Any, list[Any]], list[Any]]:
        def step(i: Any, _: list[Any]) -> list[Any]:
            firsts = [b.add(x, b.mul(b.add(i, emit.INT(j)), x_step)) for j in range(windows)]

            def line(h: Any, totals: list[Any]) -> list[Any]:
                begin = b.mul(h, x_h)

                def tap(k: Any, sums: list[Any]) -> list[Any]:
                    at = b.add(begin, b.mul(k, x_k))
                    return [join(s, emit.load(b, b.add(f, at), kind)) for s, f in zip(sums, firsts, strict=True)]

                if is_max:
                    return emit.loop(b, emit.INT(0), K, 1, totals, tap)
                sums = emit.loop(b, emit.INT(0), K, 1, [start] * windows, tap)
                return [b.fadd(total, line_sum) for total, line_sum in zip(totals, sums, strict=True)]

            for j, total in enumerate(emit.loop(b, emit.INT(0), H, 1, [start] * windows, line)):
                result = total if is_max else b.fdiv(total, emit.splat(b, divisor, width))
                emit.store(b, result, b.add(out, b.mul(b.add(i, emit.INT(j)), out_step)))
            return []

        return step

    def body() -> None:
        whole = b.and_(count, emit.INT(-_UNROLL))
        emit.loop(b, emit.INT(0), whole, _UNROLL, [], emit_windows(_UNROLL))
        emit.loop(b, whole, count, 1, [], emit_windows(1))

    return body


@linked(*(types.int64,) * 9, types.float32, types.int64, types.int64)
def pool_windows(
    x: int, x_step: int, count: int, H: int, x_h: int, K: int, x_k: int, out: int, out_step: int, divisor: np.float32,
    lanes: int, is_max: int,
) -> None:  # fmt: skip
    """Not inlined: in a loop, LLVM would precompute the addresses of all widths in every iteration."""
    _pool_windows(x, x_step, count, H, x_h, K, x_k, out, out_step, divisor, lanes, is_max)


@compiled()
def taps_inside(first: int, taps: int, step: int, size: int) -> tuple[int, int]:
    """First and last + 1 of the taps at first, first + step, ... that fall into 0 .. size - 1."""
    if step == 1:  # a division would take as long as a window
        near = min(taps, max(0, -first))
        return near, max(near, min(taps, size - first))
    low = min(taps, max(0, (step - 1 - first) // step))
    return low, max(low, min(taps, (size - 1 - first) // step + 1))


@compiled()
def _tap_count(
    low: int, high: int, counts_pads: int, padded_size: int, out: int, stride: int, taps: int, step: int
) -> int:
    """The number of taps in a mean, along one axis: those inside x, or inside the padded x."""
    return min(taps, (padded_size - out * stride + step - 1) // step) if counts_pads else high - low


@compiled()
def _pool(
    args: Call, x: Layout, y: Layout, k: Window, activation: int, is_max: int, counts_pads: int, height: int, width: int
) -> None:
    lanes = 1
    while lanes < LANES and 2 * lanes <= x.C:
        lanes *= 2
    # Windows left .. right - 1 do not cross the left or the right edge.
    left = min(y.W, (k.PX + k.SX - 1) // k.SX)
    right = max(left, min(y.W, (x.W - 1 + k.PX - (k.KW - 1) * k.DX) // k.SX + 1))
    top, bottom = row_span(y.H, args.part, args.parts)
    for i in range(args.images):
        for oy in range(top, bottom):
            iy = oy * k.SY - k.PY
            low, high = taps_inside(iy, k.KH, k.DY, x.H)
            taps_y = _tap_count(low, high, counts_pads, height, oy, k.SY, k.KH, k.DY)
            ox = 0
            while ox < y.W:
                count = right - ox if left <= ox < right else 1
                ix = ox * k.SX - k.PX
                near, far = taps_inside(ix, k.KW, k.DX, x.W)
                taps_x = _tap_count(near, far, counts_pads, width, ox, k.SX, k.KW, k.DX)
                src = x.offset + i * x.image + (iy + low * k.DY) * x.row + (ix + near * k.DX) * x.pixel
                dst = y.offset + i * y.image + oy * y.row + ox * y.pixel
                for first in range(0, x.C, lanes):
                    c = min(first, x.C - lanes)
                    pool_windows(
                        args.base + (src + c) * 4, k.SX * x.pixel * 4, count, high - low, k.DY * x.row * 4, far - near,
                        k.DX * x.pixel * 4, args.base + (dst + c) * 4, y.pixel * 4, np.float32(taps_y * taps_x), lanes,
                        is_max,
                    )  # fmt: skip
                ox += count
    finish(args.base, y, args.images, top, bottom, activation)


_max_pool, _avg_pool, _global_max, _global_mean = map(fields_of, (MaxPool, AvgPool, GlobalMaxPool, GlobalMeanPool))


@runs(MaxPool)
def max_pool(row: int, call: int) -> None:
    op, args = _max_pool(row, call), call_at(call)
    _pool(args, op.x, op.y, op.window, op.activation, 1, 0, 0, 0)


@runs(AvgPool)
def avg_pool(row: int, call: int) -> None:
    op, args = _avg_pool(row, call), call_at(call)
    _pool(args, op.x, op.y, op.window, op.activation, 0, op.counts_pads, op.height, op.width)


@runs(GlobalMaxPool)
def global_max_pool(row: int, call: int) -> None:
    op, args = _global_max(row, call), call_at(call)
    if args.part > 0:
        return
    a, x, y = floats_at(args.base, ALL), op.x, op.y
    for i in range(args.images):
        begin = y.offset + i * y.image
        dst = a[begin : begin + x.C]
        for q in range(x.H * x.W):
            pixel = x.offset + i * x.image + (q // x.W) * x.row + (q % x.W) * x.pixel
            src = a[pixel : pixel + x.C]
            for c in range(x.C):
                is_new = (q == 0) | (src[c] > dst[c]) | (src[c] != src[c])
                dst[c] = src[c] if is_new else dst[c]
    finish(args.base, y, args.images, 0, 1, op.activation)


@runs(GlobalMeanPool)
def global_mean_pool(row: int, call: int) -> None:
    """Partial sums bound the rounding error of long sums."""
    op, args = _global_mean(row, call), call_at(call)
    if args.part > 0:
        return
    a, x, y = floats_at(args.base, ALL), op.x, op.y
    partial = a[op.sums.offset : op.sums.offset + x.C]
    divisor = np.float32(x.H * x.W)
    for i in range(args.images):
        begin = y.offset + i * y.image
        dst = a[begin : begin + x.C]
        for q in range(x.H * x.W):
            pixel = x.offset + i * x.image + (q // x.W) * x.row + (q % x.W) * x.pixel
            src = a[pixel : pixel + x.C]
            if q % _CHUNK == 0:
                for c in range(x.C):
                    dst[c] = partial[c] + dst[c] if q > 0 else _ZERO
                    partial[c] = _ZERO
            for c in range(x.C):
                partial[c] += src[c]
        for c in range(x.C):
            dst[c] = (dst[c] + partial[c]) / divisor
    finish(args.base, y, args.images, 0, 1, op.activation)
