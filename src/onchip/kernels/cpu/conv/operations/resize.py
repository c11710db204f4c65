"""Resize, an operation of conv_fused: every pixel of y is a pixel of x, or a weighted mean of two or four."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import floats_at
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.kernels.cpu.conv.lowering import Lowering
from onchip.kernels.cpu.conv.operation import Activated, call_at, fields_of, finish, pixel_at, row_span, runs
from onchip.kernels.cpu.conv.values import UnsupportedError, View
from onchip.network.graph import Node
from onchip.network.layers import LinearResize, NearestResize
from onchip.network.layers.resize import Coordinates, Rounding
from onchip.network.recipe import Array, Recipe, recipe_op

_MAX_SIZE = 1 << 24  # per axis: float32 stores indices up to this exactly


@dataclass(frozen=True, eq=False, kw_only=True)
class Resize(Activated):
    exact = True
    order = "the mean of two rows, then of two pixels"
    x: View
    rows: Recipe  # (3, H): per row of y, two rows of x and the weight of the second
    pixels: Recipe  # (3, W): the same per column
    has_two_rows: bool  # False: y uses the first row only
    has_two_pixels: bool

    def flop(self) -> int:
        C, H, W = self.y.sizes
        return C * H * W * (9 if self.has_two_rows and self.has_two_pixels else 3)


# -- from layers -----------------------------------------------------------------------------------------------


def lower_resize(to: Lowering, node: Node) -> None:
    layer, x = node.layer, to.image(node.inputs[0])
    assert isinstance(layer, LinearResize | NearestResize)
    x_shape = to.net.types[node.inputs[0]].row_shape
    taps = (layer.source_indices if isinstance(layer, NearestResize) else layer.taps)(x_shape)
    if len(x_shape) < 2 or taps[0] is not None or max(*x_shape, *layer.sizes) > _MAX_SIZE:
        raise UnsupportedError(f"a resize of channels, or of an axis above {_MAX_SIZE:,}")
    rounding = layer.rounding if isinstance(layer, NearestResize) else None

    def recipe_of(axis: int) -> tuple[Recipe, bool]:
        n, size, scale = (x_shape[axis], layer.sizes[axis], layer.scales[axis]) if axis else (1, 1, 1.0)
        options = n, size, scale, layer.coordinates, rounding
        recipe = Recipe.of(places_between, (), (3, size), told=options)
        return recipe, axis > 0 and rounding is None and taps[axis] is not None

    (rows, has_two_rows), (pixels, has_two_pixels) = map(recipe_of, (0, 1) if len(x_shape) == 2 else (1, 2))
    to.make(node, Resize, x=x, rows=rows, pixels=pixels, has_two_rows=has_two_rows, has_two_pixels=has_two_pixels)


@recipe_op
def places_between(told: tuple[int, int, float, Coordinates, Rounding | None]) -> Array:
    """(3, size) float32: per output index, the two input indices to interpolate and the weight of the second.

    told  of one axis: sizes of x and y, and the layer's scale, coordinates and rounding
    """
    n, size, scale, coordinates, rounding = told
    if rounding is not None:
        (nearest,) = NearestResize((size,), (scale,), coordinates, rounding).source_indices((n,))
        low = high = np.arange(n) if nearest is None else nearest
        weight = np.zeros(size)
    else:
        (taps,) = LinearResize((size,), (scale,), coordinates).taps((n,))
        low, high, weight = (
            (np.arange(n), np.arange(n), np.zeros(n)) if taps is None else (taps.low, taps.high, taps.share)
        )
    return np.stack((low, high, weight)).astype(np.float32)


# -- code ------------------------------------------------------------------------------------------------------


@intrinsic
def _interpolate_row(
    typing_context: Any, above: Any, below: Any, x_pixel: Any, table: Any, out: Any, y_pixel: Any, count: Any,
    channels: Any, row_weight: Any, has_two_rows: Any, has_two_pixels: Any, lanes: Any,
) -> Any:  # fmt: skip
    """Interpolate a row of `count` pixels of y between two rows of x; addresses and strides are in bytes.

    table       address of Resize.pixels
    row_weight  of the row below
    lanes       a power of two, at most LANES and `channels`: the last vector ends at the last channel
    """
    signature = types.void(*(types.int64,) * 8, types.float32, *(types.int64,) * 3)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *operands, lanes = args
        widths = [1 << i for i in range(LANES.bit_length())]
        emit.switch(builder, lanes, {width: _emit_interpolation(builder, operands, width) for width in widths})
        return context.get_dummy_value()

    return signature, codegen


def _emit_interpolation(b: Any, operands: list[Any], width: int) -> Callable[[], None]:
    above, below, x_pixel, table, out, y_pixel, count, channels, row_weight, has_two_rows, has_two_pixels = operands
    vector_type, one, float_bytes = ir.VectorType(emit.FLOAT, width), emit.FLOAT(1.0), emit.INT(4)

    def body() -> None:
        two_rows, two_pixels = (b.icmp_signed("!=", flag, emit.INT(0)) for flag in (has_two_rows, has_two_pixels))

        def lerp(first: Any, second: Any, weight: Any) -> Any:
            w_first, w_second = emit.splat(b, b.fsub(one, weight), width), emit.splat(b, weight, width)
            return b.fadd(b.fmul(first, w_first), b.fmul(second, w_second))

        def pixel(i: Any, _: list[Any]) -> list[Any]:
            def entry(k: int) -> Any:
                return emit.load(b, b.add(table, b.mul(float_bytes, b.add(i, b.mul(count, emit.INT(k))))), emit.FLOAT)

            left, right = (b.mul(b.fptosi(entry(k), emit.INT), x_pixel) for k in range(2))
            weight, dst = entry(2), b.add(out, b.mul(i, y_pixel))

            def vector(first: Any, _: list[Any]) -> list[Any]:
                last = b.sub(channels, emit.INT(width))
                at = b.mul(b.select(b.icmp_signed("<", first, last), first, last), float_bytes)

                def mix_rows(offset: Any) -> Any:
                    upper, lower = (emit.load(b, b.add(b.add(row, offset), at), vector_type) for row in (above, below))
                    return b.select(two_rows, lerp(upper, lower, row_weight), upper)

                x_left, x_right = mix_rows(left), mix_rows(right)
                emit.store(b, b.select(two_pixels, lerp(x_left, x_right, weight), x_left), b.add(dst, at))
                return []

            return emit.loop(b, emit.INT(0), channels, width, [], vector)

        emit.loop(b, emit.INT(0), count, 1, [], pixel)

    return body


_resize = fields_of(Resize)


@runs(Resize)
def resize(row: int, call: int) -> None:
    op, args = _resize(row, call), call_at(call)
    x, y = op.x, op.y
    lanes = 1
    while lanes < LANES and 2 * lanes <= y.C:
        lanes *= 2
    rows = floats_at(op.rows, 3 * y.H)
    top, bottom = row_span(y.H, args.part, args.parts)
    for i in range(args.images):
        for oy in range(top, bottom):
            above, below = pixel_at(x, i, int(rows[oy]), 0), pixel_at(x, i, int(rows[y.H + oy]), 0)
            _interpolate_row(
                args.base + above * 4, args.base + below * 4, x.pixel * 4, op.pixels,
                args.base + pixel_at(y, i, oy, 0) * 4, y.pixel * 4, y.W, y.C, rows[2 * y.H + oy], op.has_two_rows,
                op.has_two_pixels, lanes,
            )  # fmt: skip
    finish(args.base, y, args.images, top, bottom, op.activation)
