"""Resize, an operation of conv_fused: every pixel is one of x, or the mean of the two or four that it lies between."""

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
from onchip.kernels.cpu.conv.operation import Activated, call_at, fields_of, finish, own_rows, pixel_at, runs
from onchip.kernels.cpu.conv.values import UnsupportedError, View
from onchip.network.graph import Node
from onchip.network.layers import LinearResize, NearestResize
from onchip.network.layers.resize import Coordinates, Rounding
from onchip.network.recipe import Array, Recipe, recipe_op

_MOST = 1 << 24  # rows and pixels: their numbers are floats


@dataclass(frozen=True, eq=False, kw_only=True)
class Resize(Activated):
    exact = True
    order = "the mean of two rows, then of two pixels"
    x: View
    rows: Recipe  # (3, H): of a row of y the two of x that it lies between, and the share of the second
    pixels: Recipe  # (3, W)
    has_two_rows: bool  # else it is the first of them
    has_two_pixels: bool

    def flop(self) -> int:
        C, H, W = self.y.sizes
        return C * H * W * (9 if self.has_two_rows and self.has_two_pixels else 3)


# -- from layers -----------------------------------------------------------------------------------------------


def lower_resize(to: Lowering, node: Node) -> None:
    layer, x = node.layer, to.image(node.inputs[0])
    assert isinstance(layer, LinearResize | NearestResize)
    given = to.net.types[node.inputs[0]].row_shape
    whole = (layer.places if isinstance(layer, NearestResize) else layer.taps)(given)
    if len(given) < 2 or whole[0] is not None or max(*given, *layer.sizes) > _MOST:
        raise UnsupportedError("a resize of other than pixels")
    rounding = layer.rounding if isinstance(layer, NearestResize) else None

    def along(axis: int) -> tuple[Recipe, bool]:
        n, size, scale = (given[axis], layer.sizes[axis], layer.scales[axis]) if axis else (1, 1, 1.0)
        told = n, size, scale, layer.coordinates, rounding
        made = Recipe.of(places_between, (), (3, size), told=told)
        return made, axis > 0 and rounding is None and whole[axis] is not None

    (rows, has_two_rows), (pixels, has_two_pixels) = map(along, (0, 1) if len(given) == 2 else (1, 2))
    to.make(node, Resize, x=x, rows=rows, pixels=pixels, has_two_rows=has_two_rows, has_two_pixels=has_two_pixels)


@recipe_op
def places_between(told: tuple[int, int, float, Coordinates, Rounding | None]) -> Array:
    """(3, size) float32: of every place along an axis the two that it lies between, and the share of the second.

    told  how many there are in x, and in y; then as a layer has it, for one axis
    """
    n, size, scale, coordinates, rounding = told
    if rounding is not None:
        (near,) = NearestResize((size,), (scale,), coordinates, rounding).places((n,))
        low = high = np.arange(n) if near is None else near
        share = np.zeros(size)
    else:
        (taps,) = LinearResize((size,), (scale,), coordinates).taps((n,))
        low, high, share = (
            (np.arange(n), np.arange(n), np.zeros(n)) if taps is None else (taps.low, taps.high, taps.share)
        )
    return np.stack((low, high, share)).astype(np.float32)


# -- code ------------------------------------------------------------------------------------------------------


@intrinsic
def _mix_pixels(
    typing_context: Any, above: Any, below: Any, x_pixel: Any, places: Any, out: Any, y_pixel: Any, count: Any,
    channels: Any, down: Any, has_two_rows: Any, has_two_pixels: Any, lanes: Any,
) -> Any:  # fmt: skip
    """A row of `count` pixels of y from two rows of x; addresses and strides are in bytes.

    lanes  a power of two, LANES and `channels` at most: the last vector ends with the last channel
    """
    signature = types.void(*(types.int64,) * 8, types.float32, *(types.int64,) * 3)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *given, lanes = args
        widths = [1 << i for i in range(LANES.bit_length())]
        emit.switch(builder, lanes, {width: _mixed(builder, given, width) for width in widths})
        return context.get_dummy_value()

    return signature, codegen


def _mixed(b: Any, given: list[Any], width: int) -> Callable[[], None]:
    above, below, x_pixel, places, out, y_pixel, count, channels, down, has_two_rows, has_two_pixels = given
    kind, one, size = ir.VectorType(emit.FLOAT, width), emit.FLOAT(1.0), emit.INT(4)

    def body() -> None:
        two_rows, two_pixels = (
            b.icmp_signed("!=", requested, emit.INT(0)) for requested in (has_two_rows, has_two_pixels)
        )

        def mean(first: Any, second: Any, share: Any) -> Any:
            near, far = emit.splat(b, b.fsub(one, share), width), emit.splat(b, share, width)
            return b.fadd(b.fmul(first, near), b.fmul(second, far))

        def pixel(i: Any, _: list[Any]) -> list[Any]:
            def told(k: int) -> Any:
                return emit.load(b, b.add(places, b.mul(size, b.add(i, b.mul(count, emit.INT(k))))), emit.FLOAT)

            left, right = (b.mul(b.fptosi(told(k), emit.INT), x_pixel) for k in range(2))
            along, to = told(2), b.add(out, b.mul(i, y_pixel))

            def vector(first: Any, _: list[Any]) -> list[Any]:
                last = b.sub(channels, emit.INT(width))
                at = b.mul(b.select(b.icmp_signed("<", first, last), first, last), size)

                def beside(side: Any) -> Any:
                    upper, lower = (emit.load(b, b.add(b.add(row, side), at), kind) for row in (above, below))
                    return b.select(two_rows, mean(upper, lower, down), upper)

                one_side, other = beside(left), beside(right)
                emit.store(b, b.select(two_pixels, mean(one_side, other, along), one_side), b.add(to, at))
                return []

            return emit.loop(b, emit.INT(0), channels, width, [], vector)

        emit.loop(b, emit.INT(0), count, 1, [], pixel)

    return body


_resize = fields_of(Resize)


@runs(Resize)
def resize(row: int, call: int) -> None:
    op, at = _resize(row, call), call_at(call)
    x, y = op.x, op.y
    lanes = 1
    while lanes < LANES and 2 * lanes <= y.C:
        lanes *= 2
    rows = floats_at(op.rows, 3 * y.H)
    top, bottom = own_rows(y.H, at.part, at.parts)
    for i in range(at.images):
        for oy in range(top, bottom):
            above, below = pixel_at(x, i, int(rows[oy]), 0), pixel_at(x, i, int(rows[y.H + oy]), 0)
            _mix_pixels(
                at.here + above * 4, at.here + below * 4, x.pixel * 4, op.pixels, at.here + pixel_at(y, i, oy, 0) * 4,
                y.pixel * 4, y.W, y.C, rows[2 * y.H + oy], op.has_two_rows, op.has_two_pixels, lanes,
            )  # fmt: skip
    finish(at.here, y, at.images, top, bottom, op.activation)
