"""Where the values of conv_fused lie, and the program that image_program.py writes: operations over those places.

Values lie with their channels last and, where they are written in whole vectors, with channels padded to whole vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from onchip.kernels.cpu import dot, tile
from onchip.kernels.cpu import image_table as ops
from onchip.kernels.cpu.activation import code_of
from onchip.kernels.cpu.emit import LANES
from onchip.kernels.cpu.tile import padded
from onchip.spec.layers import Elementwise
from onchip.spec.recipe import Array, Recipe

SUM_TERMS = 128  # of a sum in registers: longer ones are added up in parts, which keeps their digits
_PASSES = 3  # how often a layer goes over what it touches
_LINE_FLOATS = 16  # of a cache line

Sizes = tuple[int, int, int]  # C, H, W of one image
Rim = tuple[int, int, int, int]  # top, left, bottom, right
_OF_PIXELS = (ops.WINDOWS, ops.DOT, ops.DENSE, ops.NARROW)  # they read whole pixels, with what pads them
# The order of the sums of an operation.
_ORDERS = {
    ops.TAPS: f"taps in order, {tile.ORDER}",
    ops.WINDOWS: f"rows of windows, some {SUM_TERMS} terms at a time, {tile.ORDER}",
    ops.DENSE: tile.ORDER,
    ops.NARROW: dot.ORDER,
    ops.DOT: f"windows in {LANES} lanes, then these in pairs",
    ops.PAIRS_OUT: "two outputs at a time from three or four products",
    ops.AVG_POOL: "windows in order",
    ops.GLOBAL_MEAN: "some pixels at a time, in order",
    ops.NORMALISE: "softmax in order",
}
_IN_VECTORS = (ops.TAPS, ops.WINDOWS, ops.DENSE)  # they write whole vectors, past the last channel


class UnsupportedError(Exception):
    """A layer, or the way it is used, has no operation; the run ends before it."""

    at = 0  # its number in the run


@dataclass(eq=False)
class Store:
    """Memory for one value of one image, with a rim of zeros where a reader wants one."""

    C: int
    H: int
    W: int
    pixel: int  # floats from pixel to pixel
    rim: Rim = (0, 0, 0, 0)
    offset: int = 0  # where its first image begins, in floats

    @property
    def row(self) -> int:
        return (self.W + self.rim[1] + self.rim[3]) * self.pixel

    @property
    def size(self) -> int:
        """Floats from image to image: an odd number of cache lines, so that the same pixel of several images does not
        meet itself in one set of the cache."""
        lines = -(-(self.H + self.rim[0] + self.rim[2]) * self.row // _LINE_FLOATS)
        return (lines | 1) * _LINE_FLOATS


@dataclass(frozen=True, eq=False)
class View:
    """Where a value lies: a store, or every s-th pixel of it, or some of its channels."""

    store: Store
    sizes: Sizes
    start: tuple[int, int] = (0, 0)  # row and pixel
    step: tuple[int, int] = (1, 1)
    channel: int = 0

    def place(self) -> tuple[int, int, int, int]:
        """Offset of its first number, and the strides of pixels, rows and images, in floats."""
        s = self.store
        offset = s.offset + (s.rim[0] + self.start[0]) * s.row + (s.rim[1] + self.start[1]) * s.pixel + self.channel
        return offset, self.step[1] * s.pixel, self.step[0] * s.row, s.size


@dataclass(eq=False)
class Operation:
    code: int
    x: View | None
    y: View | None
    fields: dict[int, int] = field(default_factory=dict)
    other: View | None = None
    activation: Elementwise | None = None
    layer: str = ""  # operations of one layer: the phases of a transposed convolution with what is behind them


@dataclass(eq=False)
class Value:
    view: View
    maker: Operation | None  # which an activation behind it may join
    flat: bool = False  # seen as a row of C * H * W numbers


@dataclass(eq=False)
class Program:
    operations: tuple[Operation, ...]
    stores: tuple[Store, ...]
    recipes: dict[str, Recipe]  # "w3" and "b3" are those of operation 3
    source: str  # the value it reads

    @property
    def image_floats(self) -> int:
        """Of scratch for one image."""
        return sum(store.size for store in self.stores)

    def shared_floats(self) -> int:
        """Of scratch for all images together: partial sums."""
        sums = [op.y.sizes[0] for op in self.operations if op.code == ops.GLOBAL_MEAN and op.y is not None]
        return max([0, *(padded(C) for C in sums)])

    @property
    def image_flop(self) -> int:
        """What is really computed for an image: no product with a pad where taps are skipped, fewer in pairs."""
        return sum(_flop(op) for op in self.operations)

    @property
    def order(self) -> str:
        return "; ".join(dict.fromkeys(_ORDERS[op.code] for op in self.operations if op.code in _ORDERS))

    @property
    def image_moves(self) -> int:
        """Numbers of an image that the operations read and write, one after the other; a Linear's are in its pace."""
        moving = (op for op in self.operations if op.code not in (ops.DENSE, ops.NARROW))
        views = (view for op in moving for view in (op.x, op.y, op.other) if view is not None)
        return sum(math.prod(view.sizes) for view in views)

    @property
    def weight_bytes(self) -> int:
        """Of what every image needs all of: tables, of which it looks some rows up, do not count."""
        tables = {f"w{i}" for i, op in enumerate(self.operations) if op.code == ops.LOOK_UP}
        return sum(recipe.nbytes for name, recipe in self.recipes.items() if name not in tables)

    def groups(self, images: int, fast_bytes: int) -> list[int]:
        """For every operation, how many images of a tile go through its layer together.

        Few, so that what the layer touches stays in the cache; but weights that do not stay there come from afar once
        for every group. The choice with the fewest bytes from afar an image wins, and the larger of equals.
        """
        chosen: dict[str, int] = {}
        layers: dict[str, list[tuple[int, Operation]]] = {}
        for i, op in enumerate(self.operations):
            layers.setdefault(op.layer, []).append((i, op))
        for layer, mine in layers.items():
            stores = {view.store for _, op in mine for view in (op.x, op.y, op.other) if view is not None}
            touched = 4 * sum(store.size for store in stores)
            weights = sum(self.recipes[f"w{i}"].nbytes for i, _ in mine if f"w{i}" in self.recipes)
            afar: dict[int, float] = {}
            for group in {min(images, 1 << shift) for shift in range(images.bit_length() + 1)}:
                fetched = weights / group if weights > fast_bytes // 2 else 0.0
                spilled = _PASSES * touched if group * touched > fast_bytes // 2 else 0.0
                afar[group] = fetched + (spilled if group > 1 else 0.0)
            chosen[layer] = min(afar, key=lambda group: (afar[group], -group))
        return [chosen[op.layer] for op in self.operations]

    def lies_at_ends(self) -> tuple[bool, bool]:
        """Whether what it reads, and what it makes, may lie with channels last as well as in rows."""
        codes = [op.code for op in self.operations]
        return ops.LOAD in codes, ops.STORE in codes

    def table(self, images: int, fast_bytes: int, last_in: bool = False, last_out: bool = False) -> Array:
        """A row an operation, for `images` images at a time; addresses of weights are still to be put in.

        last_in, last_out  what it reads, and what it makes, lies with channels last
        """
        codes = {ops.LOAD: ops.LOAD_ROWS} if last_in else {}
        codes |= {ops.STORE: ops.STORE_ROWS} if last_out else {}
        at = 0
        for store in self.stores:
            store.offset = at
            at += -(-store.size * images // LANES) * LANES
        rows = np.zeros((len(self.operations), ops.COLUMNS), np.int64)
        rows[:, ops.GROUP] = self.groups(images, fast_bytes)
        whole_pixels = {op.x.store for op in self.operations if op.code in _OF_PIXELS and op.x is not None}
        for row, op in zip(rows, self.operations, strict=True):
            row[ops.CODE], row[ops.ACT] = codes.get(op.code, op.code), code_of(op.activation)
            if op.x is not None:
                row[ops.X : ops.X + 4] = op.x.place()
                row[ops.C], row[ops.H], row[ops.W] = op.x.sizes
            if op.y is not None:
                row[ops.Y : ops.Y + 4] = op.y.place()
                row[ops.N], row[ops.HO], row[ops.WO] = op.y.sizes
                if op.code in _IN_VECTORS and op.y.store in whole_pixels:
                    row[ops.PADDED] = op.y.store.pixel
            if op.other is not None:
                row[ops.OTHER : ops.OTHER + 4] = op.other.place()
            for column, number in op.fields.items():
                row[column] = number
        return rows


def _flop(op: Operation) -> int:
    f = op.fields
    if op.x is None or op.y is None:
        return 0
    (C, H, W), (N, HO, WO) = op.x.sizes, op.y.sizes
    if op.code in (ops.DENSE, ops.NARROW):
        return 2 * C * H * W * N * HO * WO
    if op.code == ops.TAPS:
        lines = _inside(f[ops.KH], H, HO, f[ops.SY], f[ops.PY], f[ops.DY])
        return 2 * C * N * lines * _inside(f[ops.KW], W, WO, f[ops.SX], f[ops.PX], f[ops.DX])
    if op.code in (ops.WINDOWS, ops.DOT):
        return 2 * C * N * HO * WO * f[ops.KH] * f[ops.KW]
    return N * HO * WO * f.get(ops.KH, 1) * f.get(ops.KW, 1)


def _inside(taps: int, size_in: int, size_out: int, stride: int, before: int, dilation: int) -> int:
    """Pairs of an output and a tap that fall inside the input, along an axis."""
    pairs = 0
    for k in range(taps):
        first = max(0, -(-(before - k * dilation) // stride))
        last = min(size_out - 1, (size_in - 1 + before - k * dilation) // stride)
        pairs += max(0, last - first + 1)
    return pairs
