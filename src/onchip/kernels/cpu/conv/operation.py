"""What an operation of conv_fused is: a frozen dataclass of named fields, and the row of int64 that its code reads.

An operation stands in a file of its own, or with its family: its fields, how layers become it, what it costs, its
compiled code and how several threads share it. conv/program.py lists which layers are lowered by which file.

    class Scale(Activated):                 x: View; w: Recipe; b: Recipe
    _scale = fields_of(Scale)
    @runs(Scale)
    def scale(row: int, call: int) -> None: op, at = _scale(row, call), call_at(call); ... op.x.row, op.w, at.images

A row begins with the address of the code, how many images go through it together and up to which operation; then the
fields follow in their order, a View as its Place, a Recipe as the address of the weights that it made, an activation as
its code. One compiled interpreter (dispatch.py) walks over the rows of any network: each operation is called by its
address, with a Call.
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
from onchip.kernels.pointwise import IDENTITY
from onchip.network.layers import Elementwise
from onchip.network.recipe import Recipe

HEAD = 3  # numbers of a row in front of the fields: the address of the code; images of a group; its last operation
F = TypeVar("F", bound=Callable[[int, int], None])
_ZERO = np.float32(0)


class Place(NamedTuple):
    """Where a value lies, as compiled code sees it: floats of the thread's scratch, from `here` on."""

    at: int  # pixel (0, 0) of the first image of the call
    pixel: int  # from one to the next
    row: int
    image: int
    skipped: int  # from image to image of the tile, for those before the call's; 0: the same memory serves every call
    C: int
    H: int
    W: int


class Call(NamedTuple):
    """What an operation is called for; a thread's own."""

    here: int  # the address of the thread's scratch
    images: int
    first: int  # of the images: its row in the batch
    skip: int  # images of the tile before the first: Places begin behind them
    x: int  # the address of the batch
    y: int
    part: int  # of the work, where threads share an operation: it does part 0 to parts - 1
    parts: int


CALL_BYTES = 64  # a line of the cache, so that threads do not wait for each other's


class Window(NamedTuple):
    """Kernel, stride, dilation and the pads before it, along columns and rows of an image."""

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

    code: ClassVar[Any]  # a linked function of its row and its Call: `runs` puts it there
    order: ClassVar[str] = ""  # of its sums
    exact: ClassVar[bool] = False  # it writes C numbers a pixel; the others whole vectors, past the last channel
    reads_pads: ClassVar[bool] = False  # it reads whole pixels of x, with what pads them, which must be zero then

    def values(self) -> list[View]:
        return [value for value in vars(self).values() if isinstance(value, View)]

    def recipes(self) -> dict[str, Recipe]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Recipe)}

    def flop(self) -> int:
        """What is really computed for an image: no product with a pad where taps are skipped, fewer in pairs."""
        return 0

    def moves(self) -> int:
        """Numbers of an image that it reads and writes in cache."""
        return sum(math.prod(view.sizes) for view in self.values())

    def weight_bytes(self) -> int:
        """Of what every image needs all of."""
        return sum(recipe.nbytes for recipe in self.recipes().values())

    def row(self, group: int, last: int, weights: Mapping[str, int]) -> Iterator[int]:
        """The numbers that its code reads.

        group, last  images that go together up to the operation `last`
        weights      the addresses of what its recipes made
        """
        yield from (address_of(type(self).code), group, last)
        for field in dataclasses.fields(self):
            match getattr(self, field.name):
                case View() as view:
                    yield from (*view.place(), *view.sizes)
                case Window() as window:
                    yield from window
                case Recipe():
                    yield weights[field.name]
                case Elementwise() | None as activation:
                    yield code_of(activation)
                case number:
                    yield int(number)


@dataclass(frozen=True, eq=False, kw_only=True)
class Activated(Operation):
    """One that makes y, and may take an activation along."""

    y: View
    activation: Elementwise | None = None

    def flop(self) -> int:
        return math.prod(self.y.sizes)


# -- what compiled code reads ----------------------------------------------------------------------------------


# By classes that can be imported: code on the disk that gets one as an argument has to find the same class again.
_PARTS: dict[type, type[Any]] = {View: Place, Window: Window}


def _words(kind: type[Any]) -> Any:
    """The type of a named tuple of ints."""
    return types.NamedUniTuple(types.int64, len(kind._fields), kind)


def _load(builder: Any, where: Any, i: int) -> Any:
    return emit.load(builder, builder.add(where, emit.INT(8 * i)), emit.INT)


@intrinsic
def call_at(typing_context: Any, call: Any) -> Any:
    """The Call at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers = [_load(builder, args[0], i) for i in range(len(Call._fields))]
        return context.make_tuple(builder, _words(Call), numbers)

    return _words(Call)(types.int64), codegen


def fields_of(kind: type[Operation]) -> Any:
    """A function for compiled code: the fields of an operation, by name, from its row and its Call.

    They are values, not memory, so that loops know them not to change while they write.
    """
    hints, names = get_type_hints(kind), [field.name for field in dataclasses.fields(kind)]
    made_of, values = [_PARTS.get(hints[name]) for name in names], namedtuple(kind.__name__, names)

    @intrinsic
    def fields(typing_context: Any, row: Any, call: Any) -> Any:
        parts = [types.int64 if part is None else _words(part) for part in made_of]
        whole = types.NamedTuple(parts, values)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            row, call = args
            skip, at, made = _load(builder, call, Call._fields.index("skip")), HEAD, []
            for part in parts:
                if part is types.int64:
                    made.append(_load(builder, row, at))
                    at += 1
                    continue
                numbers = [_load(builder, row, at + i) for i in range(len(part))]
                if part.instance_class is Place:
                    first, step = Place._fields.index("at"), Place._fields.index("skipped")
                    numbers[first] = builder.add(numbers[first], builder.mul(skip, numbers[step]))
                made.append(context.make_tuple(builder, part, numbers))
                at += len(part)
            return context.make_tuple(builder, whole, made)

        return whole(types.int64, types.int64), codegen

    return fields


def runs(kind: type[Operation]) -> Callable[[F], F]:
    """Decorate the code of an operation. It gets the addresses of its row and of its Call."""

    def decorate(function: F) -> F:
        kind.code = linked(types.int64, types.int64)(function)
        return function

    return decorate


@compiled(inline=True)
def put_call(call: int, here: int, images: int, first: int, skip: int, x: int, y: int, part: int, parts: int) -> None:
    told = ints_at(call, 8)
    told[0], told[1], told[2], told[3], told[4], told[5], told[6], told[7] = (
        here,
        images,
        first,
        skip,
        x,
        y,
        part,
        parts,
    )


# -- what several operations do --------------------------------------------------------------------------------


@compiled(inline=True)
def pixel_at(place: Place, i: int, row: int, pixel: int) -> int:
    """Where a pixel of image i lies."""
    return place.at + i * place.image + row * place.row + pixel * place.pixel


@compiled()
def own_rows(H: int, part: int, parts: int) -> tuple[int, int]:
    """First and last + 1 of the rows of an output that a part makes."""
    if parts == 1:
        return 0, H
    share = (H + parts - 1) // parts
    return min(H, part * share), min(H, (part + 1) * share)


@compiled()
def clear_pads(here: int, y: Place, padded: int, images: int, top: int, bottom: int) -> None:
    """Zero what pads the channels of some rows of y: an infinity times a zero weight would be a NaN there."""
    if padded <= y.C:
        return
    for i in range(images):
        for oy in range(top, bottom):
            for ox in range(y.W):
                pads = floats_at(here + (y.at + i * y.image + oy * y.row + ox * y.pixel + y.C) * 4, padded - y.C)
                for c in range(len(pads)):
                    pads[c] = _ZERO


@compiled()
def finish(here: int, y: Place, images: int, top: int, bottom: int, activation: int) -> None:
    """The activation of some rows of y, in place, a row of pixels at a time.

    Pixels follow each other, and what pads them is activated with them: long loops cost less than exact ones.
    """
    if activation == IDENTITY:
        return
    if bottom - top == 1:
        activate(here + (y.at + top * y.row) * 4, images, (y.W - 1) * y.pixel + y.C, y.image, activation)
        return
    for i in range(images):
        for oy in range(top, bottom):
            activate(
                here + (y.at + i * y.image + oy * y.row) * 4, 1, (y.W - 1) * y.pixel + y.C, 0, activation
            )  # fmt: skip
