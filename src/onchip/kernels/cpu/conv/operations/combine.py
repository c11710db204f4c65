"""Elementwise operations of conv_fused: sums, products, copies, activations, batch norm; and concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onchip.kernels.cpu.compiler import emit
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import ALL, code_call, compiled, floats_at
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.kernels.cpu.conv.lowering import Lowering, Value, image_sizes, is_channel_concat
from onchip.kernels.cpu.conv.operation import (
    Activated,
    Layout,
    call_at,
    fields_of,
    finish,
    pixel_at,
    row_span,
    runs,
)
from onchip.kernels.cpu.conv.operations.load import copy_lines
from onchip.kernels.cpu.conv.values import Border, Sizes, Store, UnsupportedError, View
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.activation import activate
from onchip.kernels.cpu.microkernels.tile import padded
from onchip.network.graph import Node
from onchip.network.layers import Add, Broadcast, Elementwise, Mul, Ordered, Sub
from onchip.network.layers.norm import factor_and_shift
from onchip.network.recipe import Array, Recipe, recipe_op


@dataclass(frozen=True, eq=False, kw_only=True)
class Pixelwise(Activated):
    """Where all values have the same contiguous layout, one loop covers all images and the unused gaps between them:
    a loop per short vector would not pay off."""

    exact = True
    x: View
    is_contiguous: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_contiguous", _have_same_layout(self.values()))


@dataclass(frozen=True, eq=False, kw_only=True)
class Copy(Pixelwise):
    """y = x."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Activate(Activated):
    """An activation in place, where it cannot be fused into the previous operation."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Combine(Pixelwise):
    """x + other, x * other and the like; `other` has the shape of x or one element per channel."""

    other: View
    layer: Broadcast


@dataclass(frozen=True, eq=False, kw_only=True)
class Scale(Pixelwise):
    """x * w + b; w and b are (W, C) if all rows of an image share them, else (H, W, C), padded to whole vectors."""

    w: Recipe
    b: Recipe
    row_stride: int = 0  # row stride of w and b in floats; 0: shared


def _have_same_layout(views: Sequence[View]) -> bool:
    """Whether each view covers its whole store, contiguous except between images, with equal sizes and strides."""
    first = views[0]

    def is_whole(view: View) -> bool:
        store = view.store
        return view.sizes == (store.C, store.H, store.W) and store.pixel == store.C and not any(store.border)

    def matches(view: View) -> bool:
        has_same_sizes = view.sizes == first.sizes and view.store.size == first.store.size
        return has_same_sizes and (is_whole(view) or view.sizes[1:] == (1, 1))

    return is_whole(first) and all(map(matches, views))


# -- from layers -----------------------------------------------------------------------------------------------


def lower_activation(to: Lowering, node: Node) -> None:
    assert isinstance(node.layer, Elementwise)
    if not to.is_in_place(node):
        to.make(node, Copy, x=to.image(node.inputs[0]), activation=node.layer)
        to.values[node.name].producer = None
        return
    value = to.read(node.inputs[0])
    if not to.fuse(value.producer, node.layer):
        to.emit(Activate(y=value.view, activation=node.layer))
    to.values[node.name] = Value(value.view, None, value.flat)


def lower_combine(to: Lowering, node: Node) -> None:
    """Combine values of one shape, or with one element per channel, in order; then a constant."""
    assert isinstance(node.layer, Broadcast)
    layer, sizes = node.layer, image_sizes(to.net.types[node.name].row_shape)
    views = list(map(to.image, node.inputs))
    if not isinstance(layer, Ordered):
        views.sort(key=lambda view: view.sizes != sizes)  # full-size ones first
    if any(view.sizes not in (sizes, (sizes[0], 1, 1)) for view in views) or views[0].sizes != sizes:
        raise UnsupportedError(f"{layer.kind} of inputs with neither one shape nor one element per channel")
    if node.weights and not isinstance(layer, Add | Mul | Sub):
        raise UnsupportedError(f"{layer.kind} of a constant")
    x = views[0]
    for other in views[1:]:
        to.make(node, Combine, x=x, other=other, layer=layer)
        x = to.values[node.name].view
    if node.weights:
        (role,), is_product = node.weights, isinstance(layer, Mul)
        factor = -1.0 if isinstance(layer, Sub) and role == "constant" else 1.0
        constant, row_stride = constant_of(to, node, sizes[0], factor)
        size, fill = constant.shape[0], 0.0 if is_product else -1.0 if role == "first" else 1.0
        uniform = Recipe.of(one_number, (), (size,), "float32", 0, size=size, number=fill)
        w, b = (constant, uniform) if is_product else (uniform, constant)
        to.make(node, Scale, x=x, w=w, b=b, row_stride=row_stride)


def constant_of(to: Lowering, node: Node, pixel: int, factor: float = 1.0) -> tuple[Recipe, int]:
    """A node's constant, padded to whole vectors, for rows of pixels with stride `pixel`; and its row stride: 0 if all
    rows share it."""
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
    """A constant of shape `image`, broadcast to sizes (C, H, W), as (H, W, pixel)."""
    C, H, W = sizes
    flat = aligned_zeros(size)
    whole = flat[: H * W * pixel].reshape(H, W, pixel)
    whole[..., :C] = np.float32(factor) * np.broadcast_to(constant.reshape(image), sizes).transpose(1, 2, 0)
    return flat


@recipe_op
def one_number(size: int, number: float) -> Array:
    return np.full(size, number, np.float32)


def lower_batch_norm(to: Lowering, node: Node) -> None:
    C, _, W = image_sizes(to.net.types[node.name].row_shape)
    size = padded(W * C)
    attributes = {"roles": tuple(node.weights), "eps": node.layer.attributes()["eps"], "count": W, "size": size}
    w, b = (
        Recipe.of(op, tuple(node.weights.values()), (size,), flop=C, **attributes) for op in (norm_factor, norm_shift)
    )
    to.make(node, Scale, x=to.image(node.inputs[0]), w=w, b=b)


@recipe_op
def norm_factor(*weights: Array, roles: tuple[str, ...], eps: float, count: int, size: int) -> Array:
    return _repeat_per_pixel(factor_and_shift(dict(zip(roles, weights, strict=True)), eps)[0], count, size)


@recipe_op
def norm_shift(*weights: Array, roles: tuple[str, ...], eps: float, count: int, size: int) -> Array:
    return _repeat_per_pixel(factor_and_shift(dict(zip(roles, weights, strict=True)), eps)[1], count, size)


def _repeat_per_pixel(channels: Array, count: int, size: int) -> Array:
    flat = aligned_zeros(size)
    flat[: count * len(channels)] = np.tile(channels, count)
    return flat


def lower_concat(to: Lowering, node: Node) -> None:
    if not is_channel_concat(to.net, node):
        raise UnsupportedError("a Concat along an axis other than channels")
    whole, channel = to.concat_view(node), 0
    for value in node.inputs:
        x = to.image(value)
        if x.store is not whole.store:  # else its operation wrote there directly
            to.emit(Copy(x=x, y=View(whole.store, x.sizes, channel=channel)))
        channel += x.sizes[0]


def with_border(to: Lowering, x: View, wanted: Border) -> View:
    """x with whole pixels and a zero border of at least this size: x itself, or a copy."""
    has_border = all(have >= want for have, want in zip(x.store.border, wanted, strict=True))
    if x.step == (1, 1) and x.is_whole and (not any(wanted) or (has_border and x.sizes == x.store.sizes)):
        return x
    return _emit_copy(to, x, wanted)


def contiguous(to: Lowering, x: View) -> View:
    """x without gaps between pixels and rows: x itself, or a copy."""
    return x if x.sizes == x.store.sizes and not any(x.store.border) else _emit_copy(to, x, (0, 0, 0, 0))


def _emit_copy(to: Lowering, x: View, border: Border) -> View:
    store = Store(*x.sizes, x.sizes[0], border)
    to.stores.append(store)
    to.emit(Copy(x=x, y=View(store, x.sizes)))
    return View(store, x.sizes)


# -- code ------------------------------------------------------------------------------------------------------

_call_loop = code_call(5)  # dst, two operands, count, no parameters
_copy, _activate, _combine, _scale = map(fields_of, (Copy, Activate, Combine, Scale))


@compiled(inline=True)
def _lines(x: Layout, z: Layout, y: Layout) -> tuple[int, int]:
    """Loop length, and loops per row: all pixels at once where they are contiguous, else one pixel."""
    has_no_gap = x.pixel == y.C and z.pixel == y.C and y.pixel == y.C
    return (y.W * y.C, 1) if has_no_gap else (y.C, y.W)


@compiled(inline=True)
def _contiguous_size(y: Layout, images: int) -> int:
    """Elements from the start of the first image to the end of the last."""
    return (images - 1) * y.image + y.H * y.W * y.C


@intrinsic
def _scale_vectors(typing_context: Any, dst: Any, x: Any, factor: Any, shift: Any, count: Any) -> Any:
    """dst[n] = x[n] * factor[n] + shift[n] for `count` elements, rounded up to whole vectors."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        dst, *operands, count = args

        def vector(n: Any, values: list[Any]) -> list[Any]:
            at = b.mul(n, emit.INT(4))
            x, factor, shift = (emit.load(b, b.add(address, at), emit.VECTOR) for address in operands)
            emit.store(b, b.fadd(b.fmul(x, factor), shift), b.add(dst, at))
            return values

        emit.loop(b, emit.INT(0), count, LANES, [], vector)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen


@runs(Copy)
def copy(row: int, call: int) -> None:
    op, args = _copy(row, call), call_at(call)
    x, y = op.x, op.y
    if op.is_contiguous and args.parts == 1:
        size = _contiguous_size(y, args.images)
        copy_lines(args.base + y.offset * 4, size, args.base + x.offset * 4, size, 1, size)
        activate(args.base + y.offset * 4, 1, size, 0, op.activation)
        return
    top, bottom = row_span(y.H, args.part, args.parts)
    has_no_gap = x.row == x.W * x.pixel and y.row == y.W * y.pixel
    lines = max(1, bottom - top) if has_no_gap else 1
    for i in range(args.images):
        for oy in range(top, bottom, lines):
            dst, src = args.base + pixel_at(y, i, oy, 0) * 4, args.base + pixel_at(x, i, oy, 0) * 4
            copy_lines(dst, y.pixel, src, x.pixel, lines * y.W, y.C)
    finish(args.base, y, args.images, top, bottom, op.activation)


@runs(Activate)
def activate_in_place(row: int, call: int) -> None:
    op, args = _activate(row, call), call_at(call)
    top, bottom = row_span(op.y.H, args.part, args.parts)
    finish(args.base, op.y, args.images, top, bottom, op.activation)


@runs(Combine)
def combine(row: int, call: int) -> None:
    op, args = _combine(row, call), call_at(call)
    x, z, y = op.x, op.other, op.y
    if op.is_contiguous and args.parts == 1:
        size = _contiguous_size(y, args.images)
        dst, first, second = args.base + y.offset * 4, args.base + x.offset * 4, args.base + z.offset * 4
        _call_loop(op.layer, dst, first, second, size, 0)
        activate(args.base + y.offset * 4, 1, size, 0, op.activation)
        return
    is_same = z.H == y.H and z.W == y.W
    length, count = _lines(x, z, y) if is_same else (y.C, y.W)
    z_row, z_pixel = (z.row, z.pixel) if is_same else (0, 0)
    top, bottom = row_span(y.H, args.part, args.parts)
    for i in range(args.images):
        for oy in range(top, bottom):
            for ox in range(count):
                z0 = z.offset + i * z.image + oy * z_row + ox * z_pixel
                _call_loop(
                    op.layer, args.base + pixel_at(y, i, oy, ox) * 4, args.base + pixel_at(x, i, oy, ox) * 4,
                    args.base + z0 * 4, length, 0,
                )  # fmt: skip
    finish(args.base, y, args.images, top, bottom, op.activation)


@runs(Scale)
def scale(row: int, call: int) -> None:
    op, args = _scale(row, call), call_at(call)
    a, x, y = floats_at(args.base, ALL), op.x, op.y
    if op.is_contiguous and args.parts == 1 and (y.H == 1 or op.row_stride > 0):
        for i in range(args.images):  # rounding up writes into the gap after each image
            dst_offset, src_offset = pixel_at(y, i, 0, 0) * 4, pixel_at(x, i, 0, 0) * 4
            _scale_vectors(args.base + dst_offset, args.base + src_offset, op.w, op.b, y.H * y.W * y.C)
        activate(args.base + y.offset * 4, 1, _contiguous_size(y, args.images), 0, op.activation)
        return
    length, count = _lines(x, x, y)
    top, bottom = row_span(y.H, args.part, args.parts)
    for i in range(args.images):
        for oy in range(top, bottom):
            for ox in range(count):
                x_at, y_at, begin = pixel_at(x, i, oy, ox), pixel_at(y, i, oy, ox), (oy * op.row_stride + ox * y.C) * 4
                src, dst = a[x_at : x_at + length], a[y_at : y_at + length]
                factor, shift = floats_at(op.w + begin, length), floats_at(op.b + begin, length)
                for c in range(length):
                    dst[c] = src[c] * factor[c] + shift[c]
    finish(args.base, y, args.images, top, bottom, op.activation)
