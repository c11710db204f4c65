"""Load, an operation of conv_fused: rows of the batch become images with channels last."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.kernels.cpu.image_operation import Operation, call_at, fields_of, runs
from onchip.kernels.cpu.image_values import View
from onchip.kernels.cpu.jit import ALL, floats_at


@dataclass(frozen=True, eq=False, kw_only=True)
class Load(Operation):
    y: View
    last: bool = False  # the batch lies with channels last already


_load = fields_of(Load)


@runs(Load)
def load(row: int, call: int) -> None:
    """Rows (C, H, W), or (H, W, C) with channels last; one thread does it."""
    op, at = _load(row, call), call_at(call)
    if at.part > 0:
        return
    a, y = floats_at(at.here, ALL), op.y
    count = y.H * y.W
    for i in range(at.images):
        if op.last or count == 1:
            for iy in range(y.H):
                line = floats_at(at.x + ((at.first + i) * count + iy * y.W) * y.C * 4, y.W * y.C)
                target = a[y.at + i * y.image + iy * y.row :]
                for ix in range(y.W):
                    for c in range(y.C):
                        target[ix * y.pixel + c] = line[ix * y.C + c]
            continue
        for c in range(y.C):
            source = floats_at(at.x + ((at.first + i) * y.C + c) * count * 4, count)
            for iy in range(y.H):
                target = a[y.at + i * y.image + iy * y.row + c :]
                line = source[iy * y.W : (iy + 1) * y.W]
                for ix in range(y.W):
                    target[ix * y.pixel] = line[ix]
