"""Sums, products, copies and activations of conv_fused: what is done to every pixel by itself."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.kernels.cpu.image_lowering import Lowering, Value, image_sizes
from onchip.kernels.cpu.image_operation import ALL, Activated, call_at, fields_of, finish, own_rows, pixel_at, runs
from onchip.kernels.cpu.image_values import Rim, Store, UnsupportedError, View
from onchip.kernels.cpu.jit import floats_at
from onchip.spec.layers import Concat, Elementwise
from onchip.spec.layers import Mul as MulLayer
from onchip.spec.layers.norm import factor_and_shift
from onchip.spec.network import Node
from onchip.spec.recipe import Array, Recipe, recipe_op


@dataclass(frozen=True, eq=False, kw_only=True)
class Copy(Activated):
    exact = True
    x: View


@dataclass(frozen=True, eq=False, kw_only=True)
class Activate(Activated):
    """An activation of what lies there: where no operation before takes it along."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Combine(Activated):
    """x + other or x * other; `other` has a number a channel, or one a number."""

    exact = True
    x: View
    other: View
    multiplies: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Scale(Activated):
    """x times a factor and plus a shift a channel."""

    exact = True
    x: View
    w: Recipe
    b: Recipe


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
    """Two values of one shape, or one of them a number a channel."""
    if node.weights or len(node.inputs) != 2:
        raise UnsupportedError(f"{node.layer.kind} of other than two values")
    views = [to.image(value) for value in node.inputs]
    sizes = image_sizes(to.net.types[node.name].row_shape)
    views.sort(key=lambda view: view.sizes != sizes)  # whole ones first
    x, other = views
    if x.sizes != sizes or other.sizes not in (sizes, (sizes[0], 1, 1)):
        raise UnsupportedError(f"{node.layer.kind} of these shapes")
    to.make(node, Combine, x=x, other=other, multiplies=isinstance(node.layer, MulLayer))


def lower_batch_norm(to: Lowering, node: Node) -> None:
    C = to.net.types[node.name].row_shape[0]
    names, told = tuple(node.weights.values()), {"roles": tuple(node.weights), "eps": node.layer.attributes()["eps"]}
    w, b = (Recipe.of(op, names, (C,), flop=C, **told) for op in (norm_factor, norm_shift))
    to.make(node, Scale, x=to.image(node.inputs[0]), w=w, b=b)


@recipe_op
def norm_factor(*weights: Array, roles: tuple[str, ...], eps: float) -> Array:
    return factor_and_shift(dict(zip(roles, weights, strict=True)), eps)[0]


@recipe_op
def norm_shift(*weights: Array, roles: tuple[str, ...], eps: float) -> Array:
    return factor_and_shift(dict(zip(roles, weights, strict=True)), eps)[1]


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


@runs(Copy)
def copy(row: int, call: int) -> None:
    op, at = _copy(row, call), call_at(call)
    a, x, y = floats_at(at.here, ALL), op.x, op.y
    top, bottom = own_rows(y.H, at.part, at.parts)
    for i in range(at.images):
        for oy in range(top, bottom):
            for ox in range(y.W):
                x_at, y_at = pixel_at(x, i, oy, ox), pixel_at(y, i, oy, ox)
                given, out = a[x_at : x_at + y.C], a[y_at : y_at + y.C]
                for c in range(y.C):
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
    top, bottom = own_rows(y.H, at.part, at.parts)
    z_row, z_pixel = (z.row, z.pixel) if z.H * z.W == y.H * y.W else (0, 0)
    for i in range(at.images):
        for oy in range(top, bottom):
            for ox in range(y.W):
                x_at, y_at = pixel_at(x, i, oy, ox), pixel_at(y, i, oy, ox)
                z_at = z.at + i * z.image + oy * z_row + ox * z_pixel
                given, other, out = a[x_at : x_at + y.C], a[z_at : z_at + y.C], a[y_at : y_at + y.C]
                if op.multiplies:
                    for c in range(y.C):
                        out[c] = given[c] * other[c]
                else:
                    for c in range(y.C):
                        out[c] = given[c] + other[c]
    finish(at.here, y, at.images, top, bottom, op.activation)


@runs(Scale)
def scale(row: int, call: int) -> None:
    op, at = _scale(row, call), call_at(call)
    a, x, y = floats_at(at.here, ALL), op.x, op.y
    factor, shift = floats_at(op.w, y.C), floats_at(op.b, y.C)
    top, bottom = own_rows(y.H, at.part, at.parts)
    for i in range(at.images):
        for oy in range(top, bottom):
            for ox in range(y.W):
                x_at, y_at = pixel_at(x, i, oy, ox), pixel_at(y, i, oy, ox)
                given, out = a[x_at : x_at + y.C], a[y_at : y_at + y.C]
                for c in range(y.C):
                    out[c] = given[c] * factor[c] + shift[c]
    finish(at.here, y, at.images, top, bottom, op.activation)
