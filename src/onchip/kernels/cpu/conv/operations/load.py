"""Load, an operation of conv_fused: rows of the batch become images with channels last."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.kernels.cpu.compiler.jit import ALL, floats_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.conv.operation import Operation, call_at, fields_of, own_rows, runs
from onchip.kernels.cpu.conv.values import View


@dataclass(frozen=True, eq=False, kw_only=True)
class Load(Operation):
    y: View
    last: bool = False  # the batch lies with channels last already


_load = fields_of(Load)


@linked(*(types.int64,) * 6)
def copy_lines(to: int, to_step: int, source: int, source_step: int, count: int, length: int) -> None:
    """`count` runs of `length` numbers; from one to the next so many numbers."""
    if to_step == length and source_step == length:
        count, length = 1, count * length
    for n in range(count):
        target, line = floats_at(to + n * to_step * 4, length), floats_at(source + n * source_step * 4, length)
        for c in range(length):
            target[c] = line[c]


@linked(*(types.int64,) * 5)
def weave(to: int, source: int, count: int, C: int, apart: int) -> None:
    """to (count, C) = source (C, count), its lines `apart` numbers from one to the next; 2, 3 and 4 lines are vector
    code."""
    y, first = floats_at(to, count * C), floats_at(source, count)
    second, third = floats_at(source + apart * 4, count), floats_at(source + 2 * apart * 4, count)
    fourth = floats_at(source + 3 * apart * 4, count)
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
            line, made = floats_at(source + c * apart * 4, count), floats_at(to + c * 4, ALL)
            for n in range(count):
                made[n * C] = line[n]


@runs(Load)
def load(row: int, call: int) -> None:
    """Rows (C, H, W), or (H, W, C) with channels last."""
    op, at = _load(row, call), call_at(call)
    a, y = floats_at(at.here, ALL), op.y
    count = y.H * y.W
    top, bottom = own_rows(y.H, at.part, at.parts)
    has_no_gap = y.row == y.W * y.pixel or y.H == 1
    W = (bottom - top) * y.W if has_no_gap else y.W  # rows that lie one behind the other are one
    for i in range(at.images):
        source, to = at.x + (at.first + i) * count * y.C * 4, y.at + i * y.image
        for iy in range(top, min(top + 1, bottom) if has_no_gap else bottom):
            begin, line = at.here + (to + iy * y.row) * 4, source + iy * y.W * 4
            if op.last or count == 1 or y.C == 1:
                copy_lines(begin, y.pixel, source + iy * y.W * y.C * 4, y.C, W, y.C)
            elif y.pixel == y.C:
                weave(begin, line, W, y.C, count)
            else:
                for c in range(y.C):
                    given, target = floats_at(line + c * count * 4, W), a[to + iy * y.row + c :]
                    for ix in range(W):
                        target[ix * y.pixel] = given[ix]
