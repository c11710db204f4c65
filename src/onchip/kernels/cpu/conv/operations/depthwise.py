"""Depthwise, an operation of conv_fused: one filter per channel; vector lanes hold channels.

Idea    A register tile holds some windows times some vectors of channels; each tap is loaded per window and multiplied
        by its channels' weights. Taps outside the image are skipped, so x needs no zero border: windows away from the
        edges are processed along a row, windows at the left and right edge down a column.
Floor   One load per FMA, so load-bound: 2 KH KW flop for 4 bytes of output.
Order   Taps of a window in order, in partial sums of about CHUNK_K; then the bias.
Limits  One output per input channel. With fewer channels than lanes, a vector holds the largest power of two of
        channels, or several windows where these are contiguous.
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
from onchip.kernels.cpu.compiler.jit import compiled, linked
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.kernels.cpu.conv.lowering import Lowering, window_of
from onchip.kernels.cpu.conv.operation import Activated, Window, call_at, fields_of, finish, pixel_at, row_span, runs
from onchip.kernels.cpu.conv.operations.pool import taps_inside
from onchip.kernels.cpu.conv.values import View
from onchip.kernels.cpu.conv.weights import weight_recipe
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.tile import padded_bias
from onchip.kernels.pointwise import RELU
from onchip.kernels.vectors import VECTOR_REGISTERS
from onchip.network.graph import Node
from onchip.network.recipe import Array, Recipe, recipe_op

CHUNK_K = 64  # taps per partial sum: shorter chains lose fewer digits
WINDOWS = 4  # per tile; twice as many for a single vector, to hide the FMA latency
VECTORS = 4 if VECTOR_REGISTERS >= 32 else 2  # per tile: sums, a tap's weights and one element of x fit in registers
_NO_FLOOR, _ZERO = np.float32(-np.inf), np.float32(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Depthwise(Activated):
    order = f"windows in order, in partial sums of about {CHUNK_K} taps"
    exact = True
    x: View
    window: Window
    w: Recipe  # (KH, KW, C)
    b: Recipe

    def flop(self) -> int:
        return 2 * math.prod(self.y.sizes) * self.window.KH * self.window.KW


def lower_depthwise(to: Lowering, node: Node, x: View) -> None:
    N, _, *kernel = to.net.weights[node.weights["weight"]].shape
    w = weight_recipe(taps_of_channels, node, N * math.prod(kernel))
    b = padded_bias(node.weights.get("bias"), N)
    to.make(node, Depthwise, x=x, window=window_of(node, tuple(kernel)), w=w, b=b)


@recipe_op
def taps_of_channels(W: Array, size: int) -> Array:
    """(C, 1, KH, KW) -> (KH, KW, C)."""
    flat = aligned_zeros(size)
    flat.reshape(-1, len(W))[:] = W.reshape(len(W), -1).T
    return flat


# -- code ------------------------------------------------------------------------------------------------------


@intrinsic
def _convolve(
    typing_context: Any, x: Any, x_step: Any, count: Any, H: Any, x_h: Any, K: Any, x_k: Any, w: Any, w_h: Any,
    w_k: Any, init: Any, init_step: Any, out: Any, out_step: Any, floor: Any, lanes: Any, vectors: Any, slides: Any,
) -> Any:  # fmt: skip
    """Convolve `count` windows of H lines of K taps, on `vectors` vectors of `lanes` channels; strides are in bytes.

    x_step, init_step and out_step are strides between windows, *_h and *_k between lines and between taps.
    lanes    a power of two, LANES at most
    vectors  VECTORS or 2, of LANES lanes; or 1; or 0: a vector holds LANES / lanes neighbouring windows, and count and
             strides are in units of these
    slides   1: K is 3 and windows are one tap apart, so neighbours share loads (with LANES lanes only); else 0
    """
    signature = types.void(*(types.int64,) * 14, types.float32, *(types.int64,) * 3)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *values, lanes, vectors, slides = args
        shapes = [(1 << i, 1, 0) for i in range(LANES.bit_length())]
        shapes += [(1 << i, 0, 0) for i in range(LANES.bit_length() - 1)]
        shapes += [(LANES, n, slide) for n in {2, VECTORS} for slide in (0, 1)] + [(LANES, 1, 1)]
        shape = builder.add(builder.mul(lanes, emit.INT(4 * VECTORS)), builder.mul(vectors, emit.INT(2)))
        cases = {(2 * VECTORS * width + n) * 2 + slide: _windows(builder, values, width, n, slide)
                 for width, n, slide in shapes}  # fmt: skip
        emit.switch(builder, builder.add(shape, slides), cases)
        return context.get_dummy_value()

    return signature, codegen


def _windows(b: Any, values: list[Any], lanes: int, vectors: int, slides: int) -> Callable[[], None]:
    x, x_step, count, H, x_h, K, x_k, w, w_h, w_k, init, init_step, out, out_step, floor = values
    width, vectors = (lanes, vectors) if vectors else (LANES, 1)
    kind = ir.VectorType(emit.FLOAT, width)
    repeated = ir.Constant(ir.VectorType(emit.INT32, width), [i % lanes for i in range(width)])

    def load(at: Any, v: int) -> Any:
        return emit.load(b, b.add(at, emit.INT(4 * width * v)), kind)

    def load_channels(at: Any, v: int) -> Any:
        """The same channels for every window of a vector."""
        if lanes == width:
            return load(at, v)
        channels = emit.load(b, at, ir.VectorType(emit.FLOAT, lanes))
        return b.shuffle_vector(channels, channels, repeated)

    def emit_windows(windows: int) -> Callable[[Any, list[Any]], list[Any]]:
        tile = [(i, v) for i in range(windows) for v in range(vectors)]

        def step(first: Any, _: list[Any]) -> list[Any]:
            indices = [b.add(first, emit.INT(i)) for i in range(windows)]
            begins = [b.add(x, b.mul(i, x_step)) for i in indices]

            def line(h: Any, sums: list[Any]) -> list[Any]:
                x_line, w_line = b.mul(h, x_h), b.add(w, b.mul(h, w_h))

                def tap(k: Any, sums: list[Any]) -> list[Any]:
                    x_at, w_at = b.add(x_line, b.mul(k, x_k)), b.add(w_line, b.mul(k, w_k))
                    weights = [load_channels(w_at, v) for v in range(vectors)]
                    for n, (i, v) in enumerate(tile):
                        value = load(b.add(begins[i], x_at), v)
                        sums[n] = emit.multiply_add(b, value, weights[v], sums[n])
                    return sums

                if not slides:
                    return emit.loop(b, emit.INT(0), K, 1, sums, tap)
                for v in range(vectors):
                    weights = [load(b.add(w_line, b.mul(w_k, emit.INT(k))), v) for k in range(3)]
                    offsets = [b.add(x_line, b.mul(x_k, emit.INT(j))) for j in range(windows + 2)]
                    shared = [load(b.add(begins[0], at), v) for at in offsets]
                    for k in range(3):
                        for i in range(windows):
                            n = i * vectors + v
                            sums[n] = emit.multiply_add(b, shared[i + k], weights[k], sums[n])
                return sums

            sums = emit.loop(b, emit.INT(0), H, 1, [ir.Constant(kind, [0.0] * width)] * len(tile), line)
            lowest = emit.splat(b, floor, width)
            for (i, v), total in zip(tile, sums, strict=True):
                total = b.fadd(load_channels(b.add(init, b.mul(indices[i], init_step)), v), total)
                clamped = b.select(b.fcmp_ordered("<", total, lowest), lowest, total)
                emit.store(b, clamped, b.add(b.add(out, b.mul(indices[i], out_step)), emit.INT(4 * width * v)))
            return []

        return step

    def remainder(windows: int, first: Any) -> Callable[[], None]:
        def body() -> None:
            emit_windows(windows)(first, [])

        return body

    def body() -> None:
        first = emit.INT(0)
        for windows in (2 * WINDOWS, WINDOWS) if vectors == 1 else (WINDOWS,):
            whole = b.and_(count, emit.INT(-windows))
            emit.loop(b, first, whole, windows, [], emit_windows(windows))
            first = whole
        emit.switch(b, b.sub(count, first), {windows: remainder(windows, first) for windows in range(1, WINDOWS)})

    return body


@linked(*(types.int64,) * 14, types.float32, *(types.int64,) * 3)
def convolve(
    x: int, x_step: int, count: int, H: int, x_h: int, K: int, x_k: int, w: int, w_h: int, w_k: int, init: int,
    init_step: int, out: int, out_step: int, floor: np.float32, lanes: int, vectors: int, slides: int,
) -> None:  # fmt: skip
    """Not inlined: in a loop, LLVM would precompute the addresses of all tile shapes in every iteration."""
    _convolve(
        x, x_step, count, H, x_h, K, x_k, w, w_h, w_k, init, init_step, out, out_step, floor, lanes, vectors, slides
    )


_depthwise = fields_of(Depthwise)


@linked(*(types.int64,) * 12)
def convolve_line(
    row: int, call: int, i: int, oy: int, ox: int, count: int, down: int, low: int, high: int, near: int, far: int,
    lanes: int,
) -> None:  # fmt: skip
    """`count` windows of image i from output (oy, ox), along the row or down the column; taps [low:high, near:far]."""
    op, args = _depthwise(row, call), call_at(call)
    x, y, k, C = op.x, op.y, op.window, op.y.C
    x_step, y_step = (k.SY * x.row * 4, y.row * 4) if down else (k.SX * x.pixel * 4, y.pixel * 4)
    floor = _ZERO if op.activation == RELU else _NO_FLOOR
    chunk_lines = k.KH if k.KH * k.KW <= CHUNK_K else max(1, CHUNK_K // k.KW)  # lines per partial sum
    slides = 1 if lanes == LANES and not down and far - near == 3 and k.SX == 1 and k.DX == 1 else 0
    source = args.base + pixel_at(x, i, oy * k.SY - k.PY, ox * k.SX - k.PX + near * k.DX) * 4
    out, x_h, x_k = args.base + pixel_at(y, i, oy, ox) * 4, k.DY * x.row * 4, k.DX * x.pixel * 4
    has_neighbours = x.pixel == C and y.pixel == C and k.SX == 1 and not down and high - low <= chunk_lines
    if lanes == C and lanes < LANES and has_neighbours and count * lanes >= LANES:
        side = LANES // lanes
        vectors = count // side
        done = vectors * side
        convolve(
            source + low * x_h, side * x_step, vectors, high - low, x_h, far - near, x_k,
            op.w + (low * k.KW + near) * C * 4, k.KW * C * 4, C * 4, op.b, 0, out, side * y_step, floor, lanes, 0, 0,
        )  # fmt: skip
        count, source, out = count - done, source + done * x_step, out + done * y_step
    first = 0
    while count > 0 and first < C:
        vectors = VECTORS if first + VECTORS * LANES <= C else 2 if first + 2 * LANES <= C else 1
        c = min(first, C - lanes)
        for h in range(low, max(high, low + 1), chunk_lines):  # a window that holds only pads yields the bias
            init, init_step = (op.b + c * 4, 0) if h == low else (out + c * 4, y_step)
            convolve(
                source + h * x_h + c * 4, x_step, count, min(chunk_lines, high - h), x_h, far - near, x_k,
                op.w + ((h * k.KW + near) * C + c) * 4, k.KW * C * 4, C * 4, init, init_step, out + c * 4, y_step,
                floor if h + chunk_lines >= high else _NO_FLOOR, lanes, vectors, slides,
            )  # fmt: skip
        first += vectors * lanes


@compiled()
def _interior(size: int, count: int, taps: int, step: int, stride: int, before: int) -> tuple[int, int]:
    """First and last + 1 of the windows that cross no edge, along one axis."""
    low = min(count, (before + stride - 1) // stride)
    return low, max(low, min(count, (size - 1 + before - (taps - 1) * step) // stride + 1))


@runs(Depthwise)
def depthwise(row: int, call: int) -> None:
    op, args = _depthwise(row, call), call_at(call)
    x, y, k = op.x, op.y, op.window
    lanes = 1
    while lanes < LANES and 2 * lanes <= y.C:
        lanes *= 2
    top, bottom = row_span(y.H, args.part, args.parts)
    left, right = _interior(x.W, y.W, k.KW, k.DX, k.SX, k.PX)
    above, below = _interior(x.H, y.H, k.KH, k.DY, k.SY, k.PY)
    above, below = max(top, min(above, bottom)), min(bottom, max(below, top))
    for i in range(args.images):
        for oy in range(top, bottom):
            low, high = taps_inside(oy * k.SY - k.PY, k.KH, k.DY, x.H)
            if left < right:
                convolve_line(row, call, i, oy, left, right - left, 0, low, high, 0, k.KW, lanes)
            if oy == above < below or not above <= oy < below:
                for ox in range(y.W):
                    if not left <= ox < right:
                        near, far = taps_inside(ox * k.SX - k.PX, k.KW, k.DX, x.W)
                        count = below - above if oy == above < below else 1
                        convolve_line(row, call, i, oy, ox, count, 1, low, high, near, far, lanes)
    if op.activation != RELU:
        finish(args.base, y, args.images, top, bottom, op.activation)
