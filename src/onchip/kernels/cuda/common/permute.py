"""Permute the axes of an array in one launch, with an optional Cast: host side of common/permute.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_int64, c_uint32
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Argument, Input, Int64, Output, Struct, UInt32
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.fast_divide import MAX_ELEMENTS, Divider, divider, index_of, small_divider
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, grid_1d
from onchip.network.types import DTYPE_BYTES

SOURCE = Path(__file__).with_suffix(".cu")
# A copy depends on the element size only, not on the dtype.
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "uint4"}
THREADS, PER_THREAD, BLOCKS_PER_SM = 256, 4, 8
TILE, SLOTS, MAX_LINES = 4096, 4160, 1024  # per tile: elements, shared-memory slots, lines or columns
SIDE, SMALL = 64, 2048  # preferred tile side; longest row of permute_small
MAX_BLOCKS = 1 << 20  # a block per tile or chunk; beyond this, several per block
MAX_AXES, MAX_GROUP_AXES = 6, 4  # per array; per strided index
MAX_CHANNELS = 4  # of permute_few


class Axes(CStruct):
    source, c_name = SOURCE, "Axes"
    _fields_ = (
        ("n1", Divider), ("n2", Divider), ("n3", Divider), ("is_single", c_uint32), ("s0", c_int64), ("s1", c_int64),
        ("s2", c_int64), ("s3", c_int64),
    )  # fmt: skip


def permute(
    dtypes: tuple[str, str],
    shape: Sequence[int],
    axes: Sequence[int],
    units: int,
    x: Argument,
    y: Argument,
    is_aligned: bool = True,
) -> KernelLaunch:
    """Permute the axes of an array of this shape, converting dtypes[0] to dtypes[1].

    is_aligned  x and y are 16-byte aligned; required if the last axis stays last
    """
    shape, axes = merge_axes(shape, axes)
    assert len(shape) <= MAX_AXES, f"{len(shape)} separate axes, at most {MAX_AXES}"
    if not axes or axes[-1] == len(axes) - 1:
        is_narrow = bool(axes) and shape[-1] * DTYPE_BYTES[dtypes[0]] % 8 != 0
        if is_narrow and _has_small_rows(shape, axes):
            return _small(dtypes, shape, axes, x, y)
        return _rows(dtypes, shape, axes, units, x, y)
    if is_aligned and (few := _few(dtypes, shape, axes, x, y)) is not None:
        return few
    groups = _groups(shape, axes)
    lines, columns = (math.prod(shape[axis] for axis in group) for group in groups)
    if lines * columns < TILE // 4 and _has_small_rows(shape, axes):
        return _small(dtypes, shape, axes, x, y)
    vector = min(4, *(16 // DTYPE_BYTES[dtype] for dtype in dtypes)) if is_aligned else 1
    return _tiles(dtypes, shape, axes, groups, vector, x, y)


def _rows(
    dtypes: tuple[str, str], shape: tuple[int, ...], axes: tuple[int, ...], units: int, x: Argument, y: Argument
) -> KernelLaunch:
    """permute_rows(x, y, count, n1..n5, s0..s4)"""
    x_dtype, y_dtype = dtypes
    if x_dtype != y_dtype:
        names = FLOATS[x_dtype], FLOATS[y_dtype]
    else:  # the widest words that divide a contiguous run
        word = math.gcd(16, DTYPE_BYTES[x_dtype] * (shape[-1] if shape else 1))
        names = (WORDS[word],) * 2
        shape = (*shape[:-1], (shape[-1] if shape else 1) * DTYPE_BYTES[x_dtype] // word)
    if len(shape) < 2:  # a copy: the first axis may have any size
        shape, axes = (math.prod(shape), 1), (0, 1)
    strides = _strides(shape)
    first, *others = axes
    missing = (1,) * (MAX_AXES - len(axes))
    sizes = (*missing, *(shape[axis] for axis in others))
    steps = (strides[first], *missing, *(strides[axis] for axis in others))
    count = math.prod(shape)
    program = Program(SOURCE, f"permute_rows<{', '.join(names)}, {index_of(count)}>")
    arguments = (x, y, Int64(count), *map(divider, sizes), *map(Int64, steps[:-1]))
    return KernelLaunch(
        program, grid_1d(min(-(-count // (THREADS * PER_THREAD)), units * BLOCKS_PER_SM)), arguments, Budget(80)
    )


def _few(
    dtypes: tuple[str, str], shape: tuple[int, ...], axes: tuple[int, ...], x: Argument, y: Argument
) -> KernelLaunch | None:
    """permute_few(x, y, groups, pixels): NCHW <-> NHWC with few channels; None for any other permutation."""
    item_bytes = DTYPE_BYTES[dtypes[0]]
    if dtypes[0] != dtypes[1] or axes not in ((1, 0), (0, 2, 1)):
        return None
    to_nhwc = shape[-2] < shape[-1]
    K, pixels = sorted(shape[-2:])
    image_groups, rest = divmod(pixels * item_bytes, 16)
    if K > MAX_CHANNELS or rest or image_groups >= MAX_ELEMENTS:
        return None
    groups = image_groups * math.prod(shape[:-2])
    names = f"{WORDS[item_bytes]}, {index_of(groups)}, {K}, {str(to_nhwc).lower()}"
    return KernelLaunch(
        Program(SOURCE, f"permute_few<{names}>"), grid_1d(min(-(-groups // THREADS), MAX_BLOCKS)),
        (x, y, Int64(groups), divider(image_groups)), Budget(registers=48, spill_bytes=24),  # sm_90 does not spill
    )  # fmt: skip


def _has_small_rows(shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether rows are short and only the axes within a row are permuted."""
    return 1 < len(axes) <= 1 + MAX_GROUP_AXES and axes[0] == 0 and math.prod(shape[1:]) <= SMALL


def _small(
    dtypes: tuple[str, str], shape: tuple[int, ...], axes: tuple[int, ...], x: Argument, y: Argument
) -> KernelLaunch:
    """permute_small(x, y, count, chunk, row, inner)"""
    count, size = math.prod(shape), math.prod(shape[1:])
    chunk = TILE // size * size
    steps = _strides(shape)
    inner = _axes([(shape[axis], steps[axis]) for axis in axes[1:]])
    return KernelLaunch(
        Program(SOURCE, f"permute_small<{', '.join(_types(dtypes))}>"), grid_1d(min(-(-count // chunk), MAX_BLOCKS)),
        (x, y, Int64(count), UInt32(chunk), small_divider(size), inner), Budget(registers=64),
    )  # fmt: skip


def _tiles(
    dtypes: tuple[str, str],
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    groups: tuple[list[int], list[int]],
    vector: int,  # elements per vector, at most
    x: Argument,
    y: Argument,
) -> KernelLaunch:
    """permute_tiles(x, y, tiles, Na, Nb, right, down, by_x, by_y, lines, columns, outer_x, outer_y)"""
    a, b = groups
    outer = [axis for axis in range(len(shape)) if axis not in (*a, *b)]
    in_x, in_y = _strides(shape), dict(zip(axes, _strides([shape[axis] for axis in axes]), strict=True))
    Na, Nb = (math.prod(shape[axis] for axis in group) for group in groups)
    R, C = tile_for(Na, Nb)
    right, down = -(-Na // R), -(-Nb // C)
    tiles = math.prod(shape[axis] for axis in outer) * right * down
    # Vectors stay aligned: all other strides are multiples of the length of a line, or of a column.
    VX, VY = (vector if N % vector == 0 else 1 for N in (Nb, Na))
    names = ", ".join(_types(dtypes))
    arguments = (
        x, y, Int64(tiles), Int64(Na), Int64(Nb), divider(right), divider(down),
        small_divider(C // VX), small_divider(R // VY),
        _axes([(shape[axis], in_x[axis]) for axis in a]), _axes([(shape[axis], in_y[axis]) for axis in b]),
        _axes([(shape[axis], in_x[axis]) for axis in outer]), _axes([(shape[axis], in_y[axis]) for axis in outer]),
    )  # fmt: skip
    program = Program(SOURCE, f"permute_tiles<{names}, {index_of(max(tiles, Na + R, Nb + C))}, {VX}, {VY}>")
    budget = Budget(registers=80, spill_bytes=8 if "float64" in dtypes and dtypes[0] != dtypes[1] else 0)
    return KernelLaunch(program, grid_1d(min(tiles, MAX_BLOCKS)), arguments, budget)


def _groups(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The axes of a tile's columns (the last axes of y) and of its lines (the last axes of x), numbered as in x.

    The smaller group is extended by its next axis until both have SIDE elements; the groups share no axis.
    """
    orders = list(axes), list(range(len(axes)))
    groups = [orders[0].pop()], [orders[1].pop()]
    while True:
        sizes = [math.prod(shape[axis] for axis in group) for group in groups]
        for i in sorted(range(2), key=lambda i: sizes[i]):
            can_grow = bool(orders[i]) and orders[i][-1] not in groups[1 - i] and len(groups[i]) < MAX_GROUP_AXES
            if sizes[i] < SIDE and can_grow:
                groups[i].insert(0, orders[i].pop())
                break
        else:
            return groups


def tile_for(Na: int, Nb: int) -> tuple[int, int]:
    """Lines and columns per tile: square unless one is short; sized so that the last tile is not nearly empty."""
    R, C = min(SIDE, Na), min(SIDE, Nb)
    if C < SIDE:
        R = min(TILE // C, SLOTS // (C | 1), MAX_LINES) // 8 * 8
    elif R < SIDE:
        C = min(TILE // R, SLOTS // R - 1, MAX_LINES) // 8 * 8
    return _even_size(Na, R), _even_size(Nb, C)


def _even_size(N: int, most: int) -> int:
    """Tile size of at most `most` that divides N about evenly; a multiple of 8 (a sector is 32 bytes)."""
    return N if most >= N else -(-N // -(-N // most) // 8) * 8


def _types(dtypes: tuple[str, str]) -> tuple[str, str]:
    x_dtype, y_dtype = dtypes
    is_copy = x_dtype == y_dtype
    return (WORDS[DTYPE_BYTES[x_dtype]],) * 2 if is_copy else (FLOATS[x_dtype], FLOATS[y_dtype])


def _strides(shape: Sequence[int]) -> list[int]:
    """Row-major strides."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _axes(axes: Sequence[tuple[int, int]]) -> Struct:
    """The Axes of (size, stride) pairs, outermost first. The first may have any size."""
    (_, s0), *others = axes or [(1, 0)]
    missing = [(1, 0)] * (MAX_GROUP_AXES - 1 - len(others))
    (n1, s1), (n2, s2), (n3, s3) = *missing, *others
    sizes = {"n1": divider(n1), "n2": divider(n2), "n3": divider(n3)}
    return Axes.of(**sizes, is_single=len(axes) <= 1, s0=s0, s1=s1, s2=s2, s3=s3)


def merge_axes(shape: Sequence[int], axes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same permutation with fewer axes: adjacent ones merged, those of size 1 dropped."""
    sized = [axis for axis in axes if shape[axis] != 1]
    runs: list[list[int]] = []
    for axis in sized:
        is_next = bool(runs) and all(shape[between] == 1 for between in range(runs[-1][-1] + 1, axis))
        if is_next and axis > runs[-1][-1]:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    order = sorted(range(len(runs)), key=lambda i: runs[i][0])
    merged = tuple(math.prod(shape[axis] for axis in runs[i]) for i in order)
    return merged, tuple(order.index(i) for i in range(len(runs)))


def _instance(x_dtype: str, y_dtype: str, *axes: int, shape: tuple[int, ...] = (8, 64, 32, 32)) -> Instance:
    name = f"{x_dtype} to {y_dtype}, {shape}, {axes}"
    return Instance(name, lambda device: permute((x_dtype, y_dtype), shape, axes, device.units, Input(0), Output(0)))


_FOUR_CHANNELS = (8, 4, 32), (8, 32, 4)
INSTANCES = (
    *(_instance(dtype, dtype, 0, 3, 2, 1) for dtype in ("float32", "float16", "uint8", "float64")),
    *(_instance(dtype, dtype, 0, 2, 1, 3) for dtype in ("float32", "float16", "uint8", "float64")),
    *(_instance(dtype, dtype, 0, 3, 2, 1, shape=(8, 33, 31, 35)) for dtype in ("float32", "uint8", "float64")),
    *(_instance(dtype, dtype, 0, 3, 2, 1, shape=(1 << 31, 64, 1, 33)) for dtype in ("float32", "float64")),
    *(_instance(dtype, dtype, 0, 3, 2, 1, shape=(8, 3, 5, 7)) for dtype in ("float16", "float64")),
    *(_instance(dtype, dtype, 0, 2, 3, 1, shape=(8, 3, 32, 32)) for dtype in ("float32", "float16", "uint8")),
    *(_instance(dtype, dtype, 0, 3, 1, 2, shape=(8, 32, 32, 3)) for dtype in ("float32", "float16", "uint8")),
    *(_instance(dtype, dtype, 0, 2, 1, shape=shape) for dtype in ("float16", "float64") for shape in _FOUR_CHANNELS),
    _instance("bfloat16", "float32", 0, 3, 2, 1),
    _instance("float32", "float16", 0, 1, 2, 3),
    _instance("float64", "float32", 0, 3, 2, 1),
    _instance("bfloat16", "float64", 0, 1, 2, 3),
)
