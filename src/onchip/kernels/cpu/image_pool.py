"""Pools of conv_fused: the largest or the mean of every window of an image, or of all its pixels.

A window is read once, tap by tap, and stays in registers. Vectors run along the channels: as many lanes as the largest
power of two that C has room for, and the last vector ends with the last channel, so it may do some channels again. So
few channels are done in vectors, too, and nothing beside them is read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from onchip.kernels.cpu import emit
from onchip.kernels.cpu import image_table as t
from onchip.kernels.cpu.emit import LANES
from onchip.kernels.cpu.jit import compiled, floats_at, ints_at, linked

_ZERO = np.float32(0)
_ALL = 1 << 40  # the length of an array whose end nobody asks for
_FEW = 16  # pixels whose sum is taken before it joins the total of a mean
_TOGETHER = 4  # windows at a time: one's maximum waits for its last tap, four do not wait for each other


@intrinsic  # type: ignore[untyped-decorator]
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


@compiled()
def _taps_inside(first: int, taps: int, step: int, size: int) -> tuple[int, int]:
    """First and last + 1 of the taps at first, first + step, ... that lie in 0 .. size - 1."""
    low = min(taps, max(0, (step - 1 - first) // step))
    return low, max(low, min(taps, (size - 1 - first) // step + 1))


@compiled()
def _counted(
    low: int, high: int, counts_pads: int, padded_size: int, out: int, stride: int, taps: int, step: int
) -> int:
    """Over how many taps along an axis a mean is taken: those inside, or those inside the padded input."""
    return min(taps, (padded_size - out * stride + step - 1) // step) if counts_pads else high - low


@linked(*(types.int64,) * 3)
def pool(row: int, here: int, images: int) -> None:
    """MAX_POOL or AVG_POOL. With OTHER set, a mean counts pads: of an input O_PIXEL high and O_ROW wide in all."""
    op = ints_at(row, t.COLUMNS)
    largest = 1 if op[t.CODE] == t.MAX_POOL else 0
    lanes = 1
    while lanes < LANES and 2 * lanes <= op[t.C]:
        lanes *= 2
    # The windows from `left` to `right` lie between the left and the right edge.
    left = min(op[t.WO], (op[t.PX] + op[t.SX] - 1) // op[t.SX])
    right = max(left, min(op[t.WO], (op[t.W] - 1 + op[t.PX] - (op[t.KW] - 1) * op[t.DX]) // op[t.SX] + 1))
    for i in range(images):
        for oy in range(op[t.HO]):
            iy = oy * op[t.SY] - op[t.PY]
            low, high = _taps_inside(iy, op[t.KH], op[t.DY], op[t.H])
            tall = _counted(low, high, op[t.OTHER], op[t.O_PIXEL], oy, op[t.SY], op[t.KH], op[t.DY])
            ox = 0
            while ox < op[t.WO]:
                count = right - ox if left <= ox < right else 1
                ix = ox * op[t.SX] - op[t.PX]
                near, far = _taps_inside(ix, op[t.KW], op[t.DX], op[t.W])
                wide = _counted(near, far, op[t.OTHER], op[t.O_ROW], ox, op[t.SX], op[t.KW], op[t.DX])
                x = (
                    op[t.X] + i * op[t.X_IMAGE] + (iy + low * op[t.DY]) * op[t.X_ROW]
                    + (ix + near * op[t.DX]) * op[t.X_PIXEL]
                )  # fmt: skip
                y = op[t.Y] + i * op[t.Y_IMAGE] + oy * op[t.Y_ROW] + ox * op[t.Y_PIXEL]
                for first in range(0, op[t.C], lanes):
                    c = min(first, op[t.C] - lanes)
                    _pool_windows(
                        here + (x + c) * 4, op[t.SX] * op[t.X_PIXEL] * 4, count, high - low,
                        op[t.DY] * op[t.X_ROW] * 4, far - near, op[t.DX] * op[t.X_PIXEL] * 4, here + (y + c) * 4,
                        op[t.Y_PIXEL] * 4, np.float32(tall * wide), lanes, largest,
                    )  # fmt: skip
                ox += count


@linked(*(types.int64,) * 4)
def global_pool(row: int, here: int, images: int, partial: int) -> None:
    """GLOBAL_MAX or GLOBAL_MEAN over all pixels; sums of a few pixels first, so that long ones keep their digits.

    partial  where C numbers fit in a
    """
    op, a = ints_at(row, t.COLUMNS), floats_at(here, _ALL)
    largest = op[t.CODE] == t.GLOBAL_MAX
    few = a[partial : partial + op[t.C]]
    for i in range(images):
        y = op[t.Y] + i * op[t.Y_IMAGE]
        out = a[y : y + op[t.C]]
        for q in range(op[t.H] * op[t.W]):
            x = op[t.X] + i * op[t.X_IMAGE] + (q // op[t.W]) * op[t.X_ROW] + (q % op[t.W]) * op[t.X_PIXEL]
            given = a[x : x + op[t.C]]
            if largest:
                for c in range(op[t.C]):
                    wins = (q == 0) | (given[c] > out[c]) | (given[c] != given[c])
                    out[c] = given[c] if wins else out[c]
            else:
                if q % _FEW == 0:
                    for c in range(op[t.C]):
                        out[c] = few[c] + out[c] if q > 0 else _ZERO
                        few[c] = _ZERO
                for c in range(op[t.C]):
                    few[c] += given[c]
        if not largest:
            share = np.float32(op[t.H] * op[t.W])
            for c in range(op[t.C]):
                out[c] = (out[c] + few[c]) / share
