"""Load, an operation of conv_fused: copies rows of the batch to NHWC images."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.kernels.cpu.compiler.jit import ALL, floats_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.conv.operation import Operation, call_at, fields_of, row_span, runs
from onchip.kernels.cpu.conv.values import View


@dataclass(frozen=True, eq=False, kw_only=True)
class Load(Operation):
    y: View
    is_nhwc: bool = False  # whether the batch is NHWC already


_load = fields_of(Load)


@linked(*(types.int64,) * 6)
def copy_lines(dst: int, dst_step: int, src: int, src_step: int, count: int, length: int) -> None:
    """Copy `count` lines of `length` elements; steps are strides in elements."""
    if dst_step == length and src_step == length:
        count, length = 1, count * length
    for n in range(count):
        y, x = floats_at(dst + n * dst_step * 4, length), floats_at(src + n * src_step * 4, length)
        for c in range(length):
            y[c] = x[c]


@linked(*(types.int64,) * 5)
def interleave(dst: int, src: int, count: int, C: int, line_stride: int) -> None:
    """dst (count, C) = transpose of src (C, count), rows line_stride elements apart; vectorised for C of 2, 3 and 4."""
    y, first = floats_at(dst, count * C), floats_at(src, count)
    second, third = floats_at(src + line_stride * 4, count), floats_at(src + 2 * line_stride * 4, count)
    fourth = floats_at(src + 3 * line_stride * 4, count)
    if C == 2:
        for n in range(count):
            y[2 * n], y[2 * n + 1] = first[n], second[n]
    elif C == 3:
        for n in range(count):
            y[3 * n], y[3 * n + 1], y[3 * n + 2] = first[n], second[n], third[n]
    elif C == 4:
        for n in range(count):
            y[4 * n], y[4 * n + 1], y[4 * n + 2], y[4 * n + 3] = first[n], second[n], third[n], fourth[n]
    else:
        for c in range(C):
            line, column = floats_at(src + c * line_stride * 4, count), floats_at(dst + c * 4, ALL)
            for n in range(count):
                column[n * C] = line[n]


@runs(Load)
def load(row: int, call: int) -> None:
    """Rows are (C, H, W), or (H, W, C) if is_nhwc."""
    op, args = _load(row, call), call_at(call)
    a, y = floats_at(args.base, ALL), op.y
    count = y.H * y.W
    top, bottom = row_span(y.H, args.part, args.parts)
    has_no_gap = y.row == y.W * y.pixel or y.H == 1
    W = (bottom - top) * y.W if has_no_gap else y.W  # contiguous rows are one
    for i in range(args.images):
        source, to = args.x + (args.first + i) * count * y.C * 4, y.offset + i * y.image
        for iy in range(top, min(top + 1, bottom) if has_no_gap else bottom):
            begin, line = args.base + (to + iy * y.row) * 4, source + iy * y.W * 4
            if op.is_nhwc or count == 1 or y.C == 1:
                copy_lines(begin, y.pixel, source + iy * y.W * y.C * 4, y.C, W, y.C)
            elif y.pixel == y.C:
                interleave(begin, line, W, y.C, count)
            else:
                for c in range(y.C):
                    channel, target = floats_at(line + c * count * 4, W), a[to + iy * y.row + c :]
                    for ix in range(W):
                        target[ix * y.pixel] = channel[ix]
