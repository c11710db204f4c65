"""Sums, products, copies and activations of conv_fused: what is done to every pixel by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onchip.kernels.cpu import emit
from onchip.kernels.cpu.activation import activate
from onchip.kernels.cpu.emit import LANES
from onchip.kernels.cpu.image_lowering import Lowering, Value, image_sizes
from onchip.kernels.cpu.image_operation import (
    Activated,
    Place,
    call_at,
    fields_of,
    finish,
    own_rows,
    pixel_at,
    runs,
)
from onchip.kernels.cpu.image_values import Rim, Sizes, Store, UnsupportedError, View
from onchip.kernels.cpu.jit import ALL, compiled, floats_at
from onchip.kernels.cpu.late_numba import intrinsic, types
from onchip.kernels.cpu.tile import aligned_zeros, padded
from onchip.spec.layers import Concat, Elementwise
from onchip.spec.layers import Mul as MulLayer
from onchip.spec.layers.norm import factor_and_shift
from onchip.spec.network import Node
from onchip.spec.recipe import Array, Recipe, recipe_op


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
    """x + other or x * other; `other` has a number a channel, or one a number."""

    other: View
    multiplies: bool


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
    sizes = image_sizes(to.net.types[node.name].row_shape)
    views = sorted(map(to.image, node.inputs), key=lambda view: view.sizes != sizes)  # whole ones first
    if any(view.sizes not in (sizes, (sizes[0], 1, 1)) for view in views) or views[0].sizes != sizes:
        raise UnsupportedError(f"{node.layer.kind} of these shapes")
    x, multiplies = views[0], isinstance(node.layer, MulLayer)
    for other in views[1:]:
        to.make(node, Combine, x=x, other=other, multiplies=multiplies)
        x = to.values[node.name].view
    if "constant" in node.weights:
        name, (C, H, W) = node.weights["constant"], sizes
        rank, shape = len(to.net.types[node.name].row_shape), to.net.weights[name].shape
        shape = (1,) * (rank - len(shape)) + shape
        lines = H if rank == 3 and shape[1] > 1 else 1
        size = padded(lines * W * C)
        image = (*shape[:1], *(1,) * (3 - rank), *shape[1:])
        given = Recipe.of(constant_in_rows, (name,), (size,), "float32", 0, size=size, image=image, sizes=(C, lines, W))
        none = Recipe.of(one_number, (), (size,), "float32", 0, size=size, number=float(not multiplies))
        w, b = (given, none) if multiplies else (none, given)
        to.make(node, Scale, x=x, w=w, b=b, next_row=W * C if lines > 1 else 0)


@recipe_op
def constant_in_rows(constant: Array, size: int, image: tuple[int, ...], sizes: Sizes) -> Array:
    """A constant that is seen as an image, of as many numbers or of some that broadcast, as (H, W, C)."""
    C, H, W = sizes
    placed = aligned_zeros(size)
    placed[: H * W * C].reshape(H, W, C)[:] = np.broadcast_to(constant.reshape(image), sizes).transpose(1, 2, 0)
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
    assert isinstance(node.layer, Concat)
    if node.layer.axis % len(to.net.types[node.name].shape) != 1:
        raise UnsupportedError("a Concat of other than channels")
    whole = to.own(node.name, image_sizes(to.net.types[node.name].row_shape), exact=True)
    channel = 0
    for value in node.inputs:
        x = to.image(value)
        to.emit(Copy(x=x, y=View(whole.store, x.sizes, channel=channel)))
        channel += x.sizes[0]
    to.values[node.name] = Value(whole, None)


def rimmed(to: Lowering, x: View, wanted: Rim) -> View:
    """x with a rim of zeros: itself, or a copy."""
    if all(have >= want for have, want in zip(x.store.rim, wanted, strict=True)) and x.step == (1, 1):
        return x
    store = Store(*x.sizes, x.sizes[0], wanted)
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
    a, x, y = floats_at(at.here, ALL), op.x, op.y
    if op.is_one_piece and at.parts == 1:
        size = _piece(y, at.images)
        given, out = a[x.at : x.at + size], a[y.at : y.at + size]
        for c in range(size):
            out[c] = given[c]
        activate(at.here + y.at * 4, 1, size, 0, op.activation)
        return
    length, count = _lines(x, x, y)
    top, bottom = own_rows(y.H, at.part, at.parts)
    for i in range(at.images):
        for oy in range(top, bottom):
            for ox in range(count):
                x_at, y_at = pixel_at(x, i, oy, ox), pixel_at(y, i, oy, ox)
                given, out = a[x_at : x_at + length], a[y_at : y_at + length]
                for c in range(length):
                    out[c] = given[c]
    finish(at.here, y, at.images, top, bottom, op.activation)


@runs(Activate)
def activate_there(row: int, call: int) -> None:
    op, at = _activate(row, call), call_at(call)
    top, bottom = own_rows(op.y.H, at.part, at.parts)
    finish(at.here, op.y, at.images, top, bottom, op.activation)


@runs(Combine)
def combine(row: int, call: int) -> None:
    op, at = _combine(row, call), call_at(call)
    a, x, z, y = floats_at(at.here, ALL), op.x, op.other, op.y
    if op.is_one_piece and at.parts == 1:
        size = _piece(y, at.images)
        given, other, out = a[x.at : x.at + size], a[z.at : z.at + size], a[y.at : y.at + size]
        if op.multiplies:
            for c in range(size):
                out[c] = given[c] * other[c]
        else:
            for c in range(size):
                out[c] = given[c] + other[c]
        activate(at.here + y.at * 4, 1, size, 0, op.activation)
        return
    is_same = z.H == y.H and z.W == y.W
    length, count = _lines(x, z, y) if is_same else (y.C, y.W)
    z_row, z_pixel = (z.row, z.pixel) if is_same else (0, 0)
    top, bottom = own_rows(y.H, at.part, at.parts)
    for i in range(at.images):
        for oy in range(top, bottom):
            for ox in range(count):
                x_at, y_at = pixel_at(x, i, oy, ox), pixel_at(y, i, oy, ox)
                z_at = z.at + i * z.image + oy * z_row + ox * z_pixel
                given, other, out = a[x_at : x_at + length], a[z_at : z_at + length], a[y_at : y_at + length]
                if op.multiplies:
                    for c in range(length):
                        out[c] = given[c] * other[c]
                else:
                    for c in range(length):
                        out[c] = given[c] + other[c]
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
