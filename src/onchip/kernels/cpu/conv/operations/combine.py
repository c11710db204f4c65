"""Sums, products, copies and activations of conv_fused: what is done to every pixel by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import ALL, compiled, floats_at
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.kernels.cpu.conv.lowering import Lowering, Value, image_sizes, is_of_channels
from onchip.kernels.cpu.conv.operation import (
    Activated,
    Place,
    call_at,
    fields_of,
    finish,
    own_rows,
    pixel_at,
    runs,
)
from onchip.kernels.cpu.conv.operations.load import copy_lines
from onchip.kernels.cpu.conv.values import Rim, Sizes, Store, UnsupportedError, View
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.activation import activate
from onchip.kernels.cpu.microkernels.function import COMBINATIONS
from onchip.kernels.cpu.microkernels.function import combine as combine_numbers
from onchip.kernels.cpu.microkernels.tile import padded
from onchip.network.graph import Node
from onchip.network.layers import Add, Elementwise, Mul, Ordered, Sub
from onchip.network.layers.norm import factor_and_shift
from onchip.network.recipe import Array, Recipe, recipe_op


@dataclass(frozen=True, eq=False, kw_only=True)
class Pixelwise(Activated):
    """Of values that lie alike, one piece from the first number of the first image to the last of the last: what lies
    between two images is nobody's. A vector of some numbers is not worth a loop of its own."""

    exact = True
    x: View
    is_one_piece: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_one_piece", _lie_alike(self.values()))


@dataclass(frozen=True, eq=False, kw_only=True)
class Copy(Pixelwise):
    """x, elsewhere."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Activate(Activated):
    """An activation of what lies there: where no operation before takes it along."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Combine(Pixelwise):
    """x + other, x * other and the like; `other` has a number a channel, or one a number."""

    other: View
    how: int  # of COMBINATIONS


@dataclass(frozen=True, eq=False, kw_only=True)
class Scale(Pixelwise):
    """x times a factor and plus a shift: numbers of a row of pixels (W, C), for each row the same or its own, in all
    whole vectors."""

    w: Recipe
    b: Recipe
    next_row: int = 0  # floats from the numbers of a row to those of the next


def _lie_alike(views: Sequence[View]) -> bool:
    """Whether they have all of their stores, without a gap but between images, at the same places of each."""
    first = views[0]

    def is_whole(view: View) -> bool:
        store = view.store
        return view.sizes == (store.C, store.H, store.W) and store.pixel == store.C and not any(store.rim)

    def is_read_alike(view: View) -> bool:
        is_alike = view.sizes == first.sizes and view.store.size == first.store.size
        return is_alike and (is_whole(view) or view.sizes[1:] == (1, 1))

    return is_whole(first) and all(map(is_read_alike, views))


# -- from layers -----------------------------------------------------------------------------------------------


def lower_activation(to: Lowering, node: Node) -> None:
    assert isinstance(node.layer, Elementwise)
    if not to.joins(node):
        to.make(node, Copy, x=to.image(node.inputs[0]), activation=node.layer)
        to.values[node.name].maker = None
        return
    value = to.read(node.inputs[0])
    if not to.join(value.maker, node.layer):
        to.emit(Activate(y=value.view, activation=node.layer))
    to.values[node.name] = Value(value.view, None, value.flat)


def lower_combine(to: Lowering, node: Node) -> None:
    """Values of one shape, or some with a number a channel, one after the other; then a constant."""
    layer, sizes = node.layer, image_sizes(to.net.types[node.name].row_shape)
    views = list(map(to.image, node.inputs))
    if not isinstance(layer, Ordered):
        views.sort(key=lambda view: view.sizes != sizes)  # whole ones first
    if any(view.sizes not in (sizes, (sizes[0], 1, 1)) for view in views) or views[0].sizes != sizes:
        raise UnsupportedError(f"{layer.kind} of these shapes")
    if node.weights and not isinstance(layer, Add | Mul | Sub):
        raise UnsupportedError(f"{layer.kind} of a constant")
    x, how = views[0], COMBINATIONS.index(type(layer))
    for other in views[1:]:
        to.make(node, Combine, x=x, other=other, how=how)
        x = to.values[node.name].view
    if node.weights:
        (role,), is_product = node.weights, isinstance(layer, Mul)
        factor = -1.0 if isinstance(layer, Sub) and role == "constant" else 1.0
        given, next_row = constant_of(to, node, sizes[0], factor)
        size, other_number = given.shape[0], 0.0 if is_product else -1.0 if role == "first" else 1.0
        none = Recipe.of(one_number, (), (size,), "float32", 0, size=size, number=other_number)
        w, b = (given, none) if is_product else (none, given)
        to.make(node, Scale, x=x, w=w, b=b, next_row=next_row)


def constant_of(to: Lowering, node: Node, pixel: int, factor: float = 1.0) -> tuple[Recipe, int]:
    """A node's constant, in whole vectors, for the numbers of a row of pixels that lie `pixel` floats apart, and how
    far it is from row to row: 0 if it is the same for all."""
    (name,), row = node.weights.values(), to.net.types[node.name].row_shape
    C, H, W = image_sizes(row)
    rank, shape = len(row), to.net.weights[name].shape
    shape = (1,) * (rank - len(shape)) + shape
    lines = H if rank == 3 and shape[1] > 1 else 1
    size = padded(lines * W * pixel)
    image = (*shape[:1], *(1,) * (3 - rank), *shape[1:])
    recipe = Recipe.of(
        constant_in_rows, (name,), (size,), "float32", 0, size=size, image=image, sizes=(C, lines, W), pixel=pixel,
        factor=factor,
    )  # fmt: skip
    return recipe, W * pixel if lines > 1 else 0


@recipe_op
def constant_in_rows(
    constant: Array, size: int, image: tuple[int, ...], sizes: Sizes, pixel: int, factor: float
) -> Array:
    """A constant that is seen as an image, of as many numbers or of some that broadcast, as (H, W, pixel)."""
    C, H, W = sizes
    placed = aligned_zeros(size)
    whole = placed[: H * W * pixel].reshape(H, W, pixel)
    whole[..., :C] = np.float32(factor) * np.broadcast_to(constant.reshape(image), sizes).transpose(1, 2, 0)
    return placed


@recipe_op
def one_number(size: int, number: float) -> Array:
    return np.full(size, number, np.float32)


def lower_batch_norm(to: Lowering, node: Node) -> None:
    C, _, W = image_sizes(to.net.types[node.name].row_shape)
    size = padded(W * C)
    told = {"roles": tuple(node.weights), "eps": node.layer.attributes()["eps"], "count": W, "size": size}
    w, b = (Recipe.of(op, tuple(node.weights.values()), (size,), flop=C, **told) for op in (norm_factor, norm_shift))
    to.make(node, Scale, x=to.image(node.inputs[0]), w=w, b=b)


@recipe_op
def norm_factor(*weights: Array, roles: tuple[str, ...], eps: float, count: int, size: int) -> Array:
    return _in_pixels(factor_and_shift(dict(zip(roles, weights, strict=True)), eps)[0], count, size)


@recipe_op
def norm_shift(*weights: Array, roles: tuple[str, ...], eps: float, count: int, size: int) -> Array:
    return _in_pixels(factor_and_shift(dict(zip(roles, weights, strict=True)), eps)[1], count, size)


def _in_pixels(channels: Array, count: int, size: int) -> Array:
    placed = aligned_zeros(size)
    placed[: count * len(channels)] = np.tile(channels, count)
    return placed


def lower_concat(to: Lowering, node: Node) -> None:
    if not is_of_channels(to.net, node):
        raise UnsupportedError("a Concat of other than channels")
    whole, channel = to.whole(node), 0
    for value in node.inputs:
        x = to.image(value)
        if x.store is not whole.store:  # else it was written there
            to.emit(Copy(x=x, y=View(whole.store, x.sizes, channel=channel)))
        channel += x.sizes[0]


def rimmed(to: Lowering, x: View, wanted: Rim) -> View:
    """x in whole pixels with a rim of zeros, where one is wanted: itself, or a copy."""
    has_rim = all(have >= want for have, want in zip(x.store.rim, wanted, strict=True))
    if x.step == (1, 1) and x.is_whole and (not any(wanted) or (has_rim and x.sizes == x.store.sizes)):
        return x
    return _copied(to, x, wanted)


def gapless(to: Lowering, x: View) -> View:
    """x as one piece: itself, or a copy."""
    return x if x.sizes == x.store.sizes and not any(x.store.rim) else _copied(to, x, (0, 0, 0, 0))


def _copied(to: Lowering, x: View, rim: Rim) -> View:
    store = Store(*x.sizes, x.sizes[0], rim)
    to.stores.append(store)
    to.emit(Copy(x=x, y=View(store, x.sizes)))
    return View(store, x.sizes)


# -- code ------------------------------------------------------------------------------------------------------

_copy, _activate, _combine, _scale = map(fields_of, (Copy, Activate, Combine, Scale))


@compiled(inline=True)
def _lines(x: Place, z: Place, y: Place) -> tuple[int, int]:
    """The length of what is done at a time, and how often in a row: all pixels where they have no gap, or one."""
    has_no_gap = x.pixel == y.C and z.pixel == y.C and y.pixel == y.C
    return (y.W * y.C, 1) if has_no_gap else (y.C, y.W)


@compiled(inline=True)
def _piece(y: Place, images: int) -> int:
    """Numbers from the first of the first image to the last of the last."""
    return (images - 1) * y.image + y.H * y.W * y.C


@intrinsic
def _scale_vectors(typing_context: Any, to: Any, x: Any, factor: Any, shift: Any, count: Any) -> Any:
    """to[n] = x[n] * factor[n] + shift[n] for `count` numbers, and more up to whole vectors."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to, *given, count = args

        def vector(n: Any, values: list[Any]) -> list[Any]:
            at = b.mul(n, emit.INT(4))
            x, factor, shift = (emit.load(b, b.add(where, at), emit.VECTOR) for where in given)
            emit.store(b, b.fadd(b.fmul(x, factor), shift), b.add(to, at))
            return values

        emit.loop(b, emit.INT(0), count, LANES, [], vector)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen


@runs(Copy)
def copy(row: int, call: int) -> None:
    op, at = _copy(row, call), call_at(call)
    x, y = op.x, op.y
    if op.is_one_piece and at.parts == 1:
        size = _piece(y, at.images)
        copy_lines(at.here + y.at * 4, size, at.here + x.at * 4, size, 1, size)
        activate(at.here + y.at * 4, 1, size, 0, op.activation)
        return
    top, bottom = own_rows(y.H, at.part, at.parts)
    has_no_gap = x.row == x.W * x.pixel and y.row == y.W * y.pixel
    lines = max(1, bottom - top) if has_no_gap else 1
    for i in range(at.images):
        for oy in range(top, bottom, lines):
            to, source = at.here + pixel_at(y, i, oy, 0) * 4, at.here + pixel_at(x, i, oy, 0) * 4
            copy_lines(to, y.pixel, source, x.pixel, lines * y.W, y.C)
    finish(at.here, y, at.images, top, bottom, op.activation)


@runs(Activate)
def activate_there(row: int, call: int) -> None:
    op, at = _activate(row, call), call_at(call)
    top, bottom = own_rows(op.y.H, at.part, at.parts)
    finish(at.here, op.y, at.images, top, bottom, op.activation)


@runs(Combine)
def combine(row: int, call: int) -> None:
    op, at = _combine(row, call), call_at(call)
    x, z, y = op.x, op.other, op.y
    if op.is_one_piece and at.parts == 1:
        size = _piece(y, at.images)
        combine_numbers(at.here + y.at * 4, at.here + x.at * 4, at.here + z.at * 4, size, op.how)
        activate(at.here + y.at * 4, 1, size, 0, op.activation)
        return
    is_same = z.H == y.H and z.W == y.W
    length, count = _lines(x, z, y) if is_same else (y.C, y.W)
    z_row, z_pixel = (z.row, z.pixel) if is_same else (0, 0)
    top, bottom = own_rows(y.H, at.part, at.parts)
    for i in range(at.images):
        for oy in range(top, bottom):
            for ox in range(count):
                z_at = z.at + i * z.image + oy * z_row + ox * z_pixel
                combine_numbers(
                    at.here + pixel_at(y, i, oy, ox) * 4, at.here + pixel_at(x, i, oy, ox) * 4, at.here + z_at * 4,
                    length, op.how,
                )  # fmt: skip
    finish(at.here, y, at.images, top, bottom, op.activation)


@runs(Scale)
def scale(row: int, call: int) -> None:
    op, at = _scale(row, call), call_at(call)
    a, x, y = floats_at(at.here, ALL), op.x, op.y
    if op.is_one_piece and at.parts == 1 and (y.H == 1 or op.next_row > 0):
        for i in range(at.images):  # with the numbers up to a whole vector behind each
            to, source = pixel_at(y, i, 0, 0) * 4, pixel_at(x, i, 0, 0) * 4
            _scale_vectors(at.here + to, at.here + source, op.w, op.b, y.H * y.W * y.C)
        activate(at.here + y.at * 4, 1, _piece(y, at.images), 0, op.activation)
        return
    length, count = _lines(x, x, y)
    top, bottom = own_rows(y.H, at.part, at.parts)
    for i in range(at.images):
        for oy in range(top, bottom):
            for ox in range(count):
                x_at, y_at, begin = pixel_at(x, i, oy, ox), pixel_at(y, i, oy, ox), (oy * op.next_row + ox * y.C) * 4
                given, out = a[x_at : x_at + length], a[y_at : y_at + length]
                factor, shift = floats_at(op.w + begin, length), floats_at(op.b + begin, length)
                for c in range(length):
                    out[c] = given[c] * factor[c] + shift[c]
    finish(at.here, y, at.images, top, bottom, op.activation)
