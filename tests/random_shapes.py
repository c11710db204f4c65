"""Makers of layers that move, choose, repeat or convert numbers: each adds one of its kind where it fits."""

from __future__ import annotations

import itertools

from networks import YES_NO, row_shapes
from onchip.network.layers import (
    Cast,
    Concat,
    Gather,
    Interleave,
    Layer,
    LinearResize,
    MaxPool1d,
    MaxPool2d,
    NearestResize,
    Pad,
    Permute,
    Reshape,
    Slice,
    Tile,
)  # fmt: skip
from random_growth import FLOATS, Growing


def concat(grow: Growing, kind: type[Layer]) -> None:
    if (first := grow.some(lambda v: bool(grow.row(v)))) is None:
        return
    axis = grow.axis(first)
    at = axis - 1 if axis > 0 else axis

    def cut(value: str) -> tuple[object, ...]:
        row = list(grow.row(value))
        if len(row) == len(grow.row(first)):
            row[at] = 0
        return grow.types[value].dtype, *row

    others = [value for value in grow.types if cut(value) == cut(first)]
    values = [first, *(grow.pick(others) for _ in range(grow.pick((0, 1, 1, 1, 2, 3))))]
    if grow.pick(YES_NO):
        values.reverse()
    grow.add(Concat(axis), *values)


def interleave(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some(lambda v: len(grow.row(v)) in (2, 3))) is None:
        return
    stride = tuple(grow.pick((1, 2, 2, 3)) for _ in grow.row(value)[1:])
    alike = [v for v in grow.types if grow.types[v] == grow.types[value]]
    shorter: dict[tuple[bool, ...], str] = {}
    if grow.is_float(value) and all(n > 1 for n in grow.row(value)[1:]) and grow.pick(YES_NO):
        # The last phase of every axis may have one number fewer: a window of two has.
        pool = MaxPool1d if len(stride) == 1 else MaxPool2d
        for short in itertools.product(YES_NO, repeat=len(stride)):
            if any(short):
                shorter[short] = grow.add(pool(tuple(1 + s for s in short), (1,) * len(stride)), value)
    phases = []
    for phase in Interleave(stride).phases():
        is_last = tuple(s > 1 and p == s - 1 for p, s in zip(phase, stride, strict=True))
        phases.append(shorter.get(is_last) or grow.pick(alike))
    grow.add(Interleave(stride), *phases)


def permute(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some(lambda v: bool(grow.row(v)))) is not None:
        axes = list(range(1, 1 + len(grow.row(value))))
        grow.add(Permute((0, *(axes.pop(grow.pick(range(len(axes)))) for _ in grow.row(value)))), value)


def reshape(grow: Growing, kind: type[Layer]) -> None:
    value = grow.some(lambda v: True)
    row = list(grow.pick(row_shapes(grow.types[value].row_size)))
    if grow.pick(YES_NO):
        row[grow.pick(range(len(row)))] = -1
    grow.add(Reshape(tuple(row)), value)


def select(grow: Growing, kind: type[Layer]) -> None:
    """Behind any value; what is padded is zeros or ones, which are ids and numbers of every dtype."""
    if (value := grow.some(lambda v: bool(grow.row(v)))) is None:
        return
    row, pick = grow.row(value), grow.pick
    if kind is Slice:
        steps = [pick((1, 1, 2, -1, -2)) for _ in row]
        taken = [range(n)[slice(pick((None, None, n // 2)), None, step)] for n, step in zip(row, steps, strict=True)]
        grow.add(Slice(tuple(r.start for r in taken), tuple(map(len, taken)), tuple(steps)), value)
    elif kind is Gather:
        axis = grow.axis(value)
        n = row[axis - 1 if axis > 0 else axis]
        grow.add(Gather(axis, tuple(pick(range(n)) for _ in range(pick((1, 2, 5))))), value)
    elif kind is Pad:
        pads = tuple(pick((0, 0, 1, 2)) for _ in (*row, *row))
        grow.add(Pad(pads, pick(("constant", "constant", "reflect", "edge", "wrap")), pick((0.0, 1.0))), value)
    else:
        grow.add(Tile(tuple(pick((1, 1, 2, 3)) for _ in row)), value)


def resize(grow: Growing, kind: type[Layer]) -> None:
    value = grow.some_float(1, 2, 3) if kind is LinearResize else grow.some(lambda v: bool(grow.row(v)))
    if value is None:
        return
    row = grow.row(value)
    sizes = tuple(grow.pick((n, n, 2 * n, n + 1, max(1, n // 2))) for n in row)
    options = [grow.pick(("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"))]
    if kind is NearestResize:
        options.append(grow.pick(("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")))
    grow.add(kind(sizes, tuple(size / n for n, size in zip(row, sizes, strict=True)), *options), value)


def cast(grow: Growing, kind: type[Layer]) -> None:
    if (value := grow.some(lambda v: v not in grow.steps)) is not None:
        grow.add(Cast(grow.pick(("float32", "float32", *FLOATS))), value)
