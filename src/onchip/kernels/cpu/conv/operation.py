"""An operation of conv_fused: a frozen dataclass of named fields, and the row of int64 that its compiled code reads.

Each operation, or family of operations, has a file: its fields, its lowering from layers, its cost, its compiled code
and how threads share it. conv/program.py lists which file lowers which layers.

    class Scale(Activated):                 x: View; w: Recipe; b: Recipe
    _scale = fields_of(Scale)
    @runs(Scale)
    def scale(row: int, call: int) -> None: op, args = _scale(row, call), call_at(call); ... op.x.row, args.images

A row starts with the code's address, the images per group and the segment's last operation; then the fields in order: a
View as its Layout, a Recipe as the address of the computed weights, an activation as its code. One compiled interpreter
(dispatch.py) runs the rows of any network: it calls each operation by address, with a Call.
"""

from __future__ import annotations

import dataclasses
import math
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, get_type_hints

import numpy as np

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.jit import address_of, compiled, floats_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.kernels.cpu.conv.values import View
from onchip.kernels.cpu.microkernels.activation import activate, code_of
from onchip.kernels.cpu.microkernels.loops import loop_of
from onchip.kernels.pointwise import IDENTITY
from onchip.network.layers import Broadcast, Elementwise
from onchip.network.recipe import Recipe

HEAD = 3  # entries of a row before the fields: address of the code, images per group, last operation of the segment
F = TypeVar("F", bound=Callable[[int, int], None])
_ZERO = np.float32(0)


class Layout(NamedTuple):
    """A View as compiled code sees it: offset and strides in floats, relative to the thread's scratch."""

    offset: int  # of pixel (0, 0) of the call's first image
    pixel: int  # strides
    row: int
    image: int
    skip_stride: int  # image stride in the tile, for images before the call's; 0: every call uses the same memory
    C: int
    H: int
    W: int


class Call(NamedTuple):
    """Arguments of one call of an operation; one per thread."""

    base: int  # address of the thread's scratch
    images: int
    first: int  # batch row of the first image
    skip: int  # images of the tile before the first; fields_of adds them to the offset of each Layout
    x: int  # addresses of the batch and of the result
    y: int
    part: int  # which part of the operation to compute, where `parts` threads share it
    parts: int


CALL_BYTES = 64  # a cache line: no false sharing between threads


class Window(NamedTuple):
    """Kernel, stride, dilation and leading pads, over rows (Y) and columns (X) of an image."""

    KH: int
    KW: int
    SY: int = 1
    SX: int = 1
    DY: int = 1
    DX: int = 1
    PY: int = 0
    PX: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation:
    """Its fields are Views, Windows, Recipes, an activation and ints."""

    code: ClassVar[Any]  # linked function of (row, call), set by `runs`
    order: ClassVar[str] = ""  # reduction order
    exact: ClassVar[bool] = False  # writes C elements per pixel; others write whole vectors, past the last channel
    reads_pads: ClassVar[bool] = False  # reads pixels of x including their channel pads, which must then be zero

    def values(self) -> list[View]:
        return [value for value in vars(self).values() if isinstance(value, View)]

    def recipes(self) -> dict[str, Recipe]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Recipe)}

    def flop(self) -> int:
        """Per image, as computed: without skipped taps, with Winograd's savings."""
        return 0

    def moves(self) -> int:
        """Elements read and written in cache, per image."""
        return sum(math.prod(view.sizes) for view in self.values())

    def weight_bytes(self) -> int:
        """Bytes of weights that every image reads."""
        return sum(recipe.nbytes for recipe in self.recipes().values())

    def row(self, group: int, last: int, weights: Mapping[str, int]) -> Iterator[int]:
        """The table row that its code reads.

        group, last  images per group, and last operation, of its segment
        weights      addresses of the computed recipes, by field
        """
        yield from (address_of(type(self).code), group, last)
        for field in dataclasses.fields(self):
            match getattr(self, field.name):
                case View() as view:
                    yield from (*view.layout(), *view.sizes)
                case Window() as window:
                    yield from window
                case Recipe():
                    yield weights[field.name]
                case Elementwise() | None as activation:
                    yield code_of(activation)
                case Broadcast() as layer:
                    yield address_of(loop_of(layer))
                case value:
                    yield int(value)


@dataclass(frozen=True, eq=False, kw_only=True)
class Activated(Operation):
    """An operation that computes y, with an optional fused activation."""

    y: View
    activation: Elementwise | None = None

    def flop(self) -> int:
        return math.prod(self.y.sizes)


# -- what compiled code reads ----------------------------------------------------------------------------------


# Classes that can be imported: cached machine code with such an argument must find the same class again.
_TUPLES: dict[type, type[Any]] = {View: Layout, Window: Window}


def _tuple_type(kind: type[Any]) -> Any:
    """The type of a named tuple of ints."""
    return types.NamedUniTuple(types.int64, len(kind._fields), kind)


def _load(builder: Any, base: Any, i: int) -> Any:
    return emit.load(builder, builder.add(base, emit.INT(8 * i)), emit.INT)


@intrinsic
def call_at(typing_context: Any, call: Any) -> Any:
    """The Call at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fields = [_load(builder, args[0], i) for i in range(len(Call._fields))]
        return context.make_tuple(builder, _tuple_type(Call), fields)

    return _tuple_type(Call)(types.int64), codegen


def fields_of(kind: type[Operation]) -> Any:
    """A function for compiled code: the fields of an operation as a named tuple, from its row and its Call.

    They are loaded once, as values: LLVM then knows that stores in a loop do not change them.
    """
    hints, names = get_type_hints(kind), [field.name for field in dataclasses.fields(kind)]
    kinds, values = [_TUPLES.get(hints[name]) for name in names], namedtuple(kind.__name__, names)

    @intrinsic
    def fields(typing_context: Any, row: Any, call: Any) -> Any:
        member_types = [types.int64 if member is None else _tuple_type(member) for member in kinds]
        whole = types.NamedTuple(member_types, values)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            row, call = args
            skip, at, members = _load(builder, call, Call._fields.index("skip")), HEAD, []
            for member in member_types:
                if member is types.int64:
                    members.append(_load(builder, row, at))
                    at += 1
                    continue
                ints = [_load(builder, row, at + i) for i in range(len(member))]
                if member.instance_class is Layout:
                    first, step = Layout._fields.index("offset"), Layout._fields.index("skip_stride")
                    ints[first] = builder.add(ints[first], builder.mul(skip, ints[step]))
                members.append(context.make_tuple(builder, member, ints))
                at += len(member)
            return context.make_tuple(builder, whole, members)

        return whole(types.int64, types.int64), codegen

    return fields


def runs(kind: type[Operation]) -> Callable[[F], F]:
    """Decorator: make a function the code of an operation; it receives the addresses of its row and its Call."""

    def decorate(function: F) -> F:
        kind.code = linked(types.int64, types.int64)(function)
        return function

    return decorate


@compiled(inline=True)
def put_call(call: int, base: int, images: int, first: int, skip: int, x: int, y: int, part: int, parts: int) -> None:
    fields = ints_at(call, 8)
    fields[0], fields[1], fields[2], fields[3], fields[4], fields[5], fields[6], fields[7] = (
        base,
        images,
        first,
        skip,
        x,
        y,
        part,
        parts,
    )


# -- shared by several operations ------------------------------------------------------------------------------


@compiled(inline=True)
def pixel_at(layout: Layout, i: int, row: int, pixel: int) -> int:
    """Offset of a pixel of image i."""
    return layout.offset + i * layout.image + row * layout.row + pixel * layout.pixel


@compiled()
def row_span(H: int, part: int, parts: int) -> tuple[int, int]:
    """First and last + 1 of the output rows of a part."""
    if parts == 1:
        return 0, H
    rows = (H + parts - 1) // parts
    return min(H, part * rows), min(H, (part + 1) * rows)


@compiled()
def clear_pads(base: int, y: Layout, padded: int, images: int, top: int, bottom: int) -> None:
    """Zero the channel pads of some rows of y: their readers multiply them by zero, and infinity * 0 is NaN."""
    if padded <= y.C:
        return
    for i in range(images):
        for oy in range(top, bottom):
            for ox in range(y.W):
                pads = floats_at(base + (y.offset + i * y.image + oy * y.row + ox * y.pixel + y.C) * 4, padded - y.C)
                for c in range(len(pads)):
                    pads[c] = _ZERO


@compiled()
def finish(base: int, y: Layout, images: int, top: int, bottom: int, activation: int) -> None:
    """Apply the activation to some rows of y, in place, one row of pixels at a time.

    Channel pads are activated too: one long loop costs less than skipping them.
    """
    if activation == IDENTITY:
        return
    if bottom - top == 1:
        activate(base + (y.offset + top * y.row) * 4, images, (y.W - 1) * y.pixel + y.C, y.image, activation)
        return
    for i in range(images):
        for oy in range(top, bottom):
            activate(
                base + (y.offset + i * y.image + oy * y.row) * 4, 1, (y.W - 1) * y.pixel + y.C, 0, activation
            )  # fmt: skip
