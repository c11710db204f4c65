"""From layers to operations on images: where every value lies, and what is done in which order.

A run of layers becomes a table of operations (image_ops.py) on values that lie with their channels last
(image_values.py). Layers that only say how numbers are seen cost nothing: a phase of an Interleave is written to its
place, a Flatten is the order of a Linear's columns, a Reshape behind a Linear the order of its rows, and an activation
joins the operation before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from onchip.kernels.chain import given_ids
from onchip.kernels.cpu import image_table as ops
from onchip.kernels.cpu.activation import NORMALISERS
from onchip.kernels.cpu.image_lowering import Lowering, geometry_of, image_sizes
from onchip.kernels.cpu.image_products import convolution, linear
from onchip.kernels.cpu.image_values import Program, UnsupportedError, Value, View
from onchip.kernels.cpu.tile import padded_bias
from onchip.kernels.pointwise import CPU_ACTIVATIONS
from onchip.spec.layers import (
    Add,
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Concat,
    Convolution,
    Elementwise,
    Embedding,
    GlobalMax,
    GlobalMean,
    Interleave,
    Linear,
    LogSoftmax,
    MaxPool1d,
    MaxPool2d,
    Mul,
    Permute,
    Reshape,
    Softmax,
    ToPixels,
)  # fmt: skip
from onchip.spec.layers.conv import geometry
from onchip.spec.layers.norm import factor_and_shift
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Array, Recipe, as_is, recipe_op


def lower(net: Network, nodes: Sequence[Node]) -> Program:
    """The operations of a run of nodes that reads one value and whose last value alone is read outside."""
    to = Lowering(net, nodes)
    for i, node in enumerate(nodes):
        try:
            _lower_node(to, node)
        except UnsupportedError as reason:
            reason.at = i
            raise
    if to.operations[-1].code not in (ops.STORE_ROWS, ops.STORE_PIXELS):
        to.emit(ops.STORE, to.read(nodes[-1].name).view, None)
    return Program(tuple(to.operations), tuple(to.stores), to.recipes, to.source)


def _lower_node(to: Lowering, node: Node) -> None:
    for name in node.weights.values():
        if to.net.weight_type(name).dtype != "float32":
            raise UnsupportedError(f"computes on float32, and {name} is {to.net.weight_type(name).dtype}")
    to.layer = to.home(node.name)
    handler = next((f for kinds, f in _HANDLERS if isinstance(node.layer, kinds)), None)
    if handler is None:
        raise UnsupportedError(f"no operation for {node.layer.kind}")
    handler(to, node)


def _reshape(to: Lowering, node: Node) -> None:
    value = to.read(node.inputs[0])
    sizes = to.net.types[node.name].row_shape
    if math.prod(sizes) != math.prod(value.view.sizes):
        raise UnsupportedError("a Reshape of padded rows")
    if image_sizes(sizes) == value.view.sizes:
        to.values[node.name] = Value(value.view, value.maker)
    elif len(sizes) == 1:
        to.values[node.name] = Value(value.view, value.maker, flat=True)
    else:
        raise UnsupportedError("a Reshape that moves channels")


def _activation(to: Lowering, node: Node) -> None:
    assert isinstance(node.layer, Elementwise)
    if to.joins(node):
        value = to.read(node.inputs[0])
        if value.maker is None or value.maker.activation is not None:
            value.maker = to.emit(ops.ACTIVATE, value.view, value.view)
        value.maker.activation = node.layer
        to.values[node.name] = Value(value.view, None, value.flat)
        return
    op = to.make(node, ops.COPY, to.image(node.inputs[0]))
    op.activation = node.layer
    to.values[node.name].maker = None


def _interleave(to: Lowering, node: Node) -> None:
    if len(set(node.inputs)) < len(node.inputs) or node.name not in to.values:
        raise UnsupportedError("phases that are no convolutions, or one of them twice")
    store = to.values[node.name].view.store
    for value in node.inputs:
        made = to.values.get(value)
        if made is None or made.maker is None or made.view.store is not store or len(to.readers(value)) != 1:
            raise UnsupportedError("phases that are no convolutions, or that others read, too")


def _pool(to: Lowering, node: Node) -> None:
    layer = node.layer
    x = to.image(node.inputs[0])
    kernel: tuple[int, ...] = layer.attributes()["kernel"]
    KH, KW = (1, kernel[0]) if len(kernel) == 1 else kernel
    code = ops.MAX_POOL if isinstance(layer, MaxPool1d | MaxPool2d) else ops.AVG_POOL
    fields = {ops.KH: KH, ops.KW: KW, **geometry_of(node)}
    if isinstance(layer, AvgPool1d | AvgPool2d) and layer.count_pads:
        _, pads, _ = geometry(layer)
        tall, wide = (0, sum(pads)) if len(pads) == 2 else (pads[0] + pads[2], pads[1] + pads[3])
        fields |= {ops.OTHER: 1, ops.O_PIXEL: x.sizes[1] + tall, ops.O_ROW: x.sizes[2] + wide}
    to.make(node, code, x, fields=fields)


def _global_pool(to: Lowering, node: Node) -> None:
    x = to.image(node.inputs[0])
    assert isinstance(node.layer, GlobalMax | GlobalMean)
    rank = len(to.net.types[node.inputs[0]].shape)
    if {axis % rank for axis in node.layer.axes} != set(range(2, rank)) or rank == 2:
        raise UnsupportedError("a reduction over other axes than the pixels")
    to.make(node, ops.GLOBAL_MAX if isinstance(node.layer, GlobalMax) else ops.GLOBAL_MEAN, x)


def _combine(to: Lowering, node: Node) -> None:
    """Two values of one shape, or one of them a number a channel."""
    if node.weights or len(node.inputs) != 2:
        raise UnsupportedError(f"{node.layer.kind} of other than two values")
    views = [to.image(value) for value in node.inputs]
    sizes = image_sizes(to.net.types[node.name].row_shape)
    views.sort(key=lambda view: view.sizes != sizes)  # whole ones first
    x, other = views
    if x.sizes != sizes or other.sizes not in (sizes, (sizes[0], 1, 1)):
        raise UnsupportedError(f"{node.layer.kind} of these shapes")
    op = to.make(node, ops.ADD if isinstance(node.layer, Add) else ops.MUL, x, other=other)
    if other.sizes != sizes:
        op.fields |= {ops.O_PIXEL: 0, ops.O_ROW: 0}


def _batch_norm(to: Lowering, node: Node) -> None:
    C = to.net.types[node.name].row_shape[0]
    eps = node.layer.attributes()["eps"]
    op = to.make(node, ops.SCALE, to.image(node.inputs[0]))
    names = tuple(node.weights.values())
    roles = tuple(node.weights)
    w = Recipe.of(norm_factor, names, (C,), flop=C, roles=roles, eps=eps)
    b = Recipe.of(norm_shift, names, (C,), flop=C, roles=roles, eps=eps)
    to.weigh(op, w, b)


@recipe_op
def norm_factor(*weights: Array, roles: tuple[str, ...], eps: float) -> Array:
    return factor_and_shift(dict(zip(roles, weights, strict=True)), eps)[0]


@recipe_op
def norm_shift(*weights: Array, roles: tuple[str, ...], eps: float) -> Array:
    return factor_and_shift(dict(zip(roles, weights, strict=True)), eps)[1]


def _concat(to: Lowering, node: Node) -> None:
    assert isinstance(node.layer, Concat)
    if node.layer.axis % len(to.net.types[node.name].shape) != 1:
        raise UnsupportedError("a Concat of other than channels")
    whole = to.own(node.name, image_sizes(to.net.types[node.name].row_shape), exact=True)
    channel = 0
    for value in node.inputs:
        x = to.image(value)
        to.emit(ops.COPY, x, View(whole.store, x.sizes, channel=channel))
        channel += x.sizes[0]
    to.values[node.name] = Value(whole, None)


def _normalise(to: Lowering, node: Node) -> None:
    value = to.read(node.inputs[0])
    if len(to.net.types[node.name].shape) != 2 or value.view.sizes[1:] != (1, 1):
        raise UnsupportedError("a softmax over an image")
    to.make(node, ops.COPY, value.view)
    view = to.values[node.name].view
    to.emit(ops.NORMALISE, view, view, fields={ops.KH: NORMALISERS[node.layer.kind]})
    to.values[node.name] = Value(view, None)


def _embedding(to: Lowering, node: Node) -> None:
    """Ids to vectors, side by side: (S, E) is an image of one row whose channels are last already."""
    if node.inputs[0] != to.source or len(to.net.types[to.source].shape) != 2:
        raise UnsupportedError("an Embedding in the middle")
    if given_ids(to.net, to.source) is None:
        raise UnsupportedError("ids are computed, and nobody could check them before the launch")
    behind = to.readers(node.name)
    if len(behind) != 1 or behind[0].layer != Permute((0, 2, 1)):
        raise UnsupportedError("an Embedding whose channels stay last")
    S, E = to.net.types[node.name].row_shape
    y = to.own(node.name, (E, 1, S), exact=True)
    op = to.emit(ops.LOOK_UP, None, y, fields={ops.C: E, ops.H: 1, ops.W: S})
    shape = to.net.weights[node.weights["weight"]].shape
    to.weigh(op, Recipe.of(as_is, (node.weights["weight"],), shape), padded_bias(None, 0))
    to.values[node.name] = Value(y, None)


def _permute(to: Lowering, node: Node) -> None:
    """Behind an Embedding it says what is there already; at the end, channels stay last."""
    before = to.by_name.get(node.inputs[0])
    if before is not None and isinstance(before.layer, Embedding):
        to.values[node.name] = to.values[before.name]
        return
    rank = len(to.net.types[node.name].shape)
    last = to.nodes[-1]
    at_end = node is last or (isinstance(last.layer, ToPixels) and to.readers(node.name) == [last])
    if node.layer != Permute((0, *range(2, rank), 1)) or not at_end:
        raise UnsupportedError("a Permute in the middle")
    to.emit(ops.STORE_ROWS, to.image(node.inputs[0]), None)


def _to_pixels(to: Lowering, node: Node) -> None:
    if node is not to.nodes[-1] or not to.operations or to.operations[-1].code != ops.STORE_ROWS:
        raise UnsupportedError("ToPixels not behind a Permute that puts channels last, at the end")
    to.operations[-1].code = ops.STORE_PIXELS


_HANDLERS: tuple[tuple[tuple[type, ...], Callable[[Lowering, Node], None]], ...] = (
    ((Convolution,), convolution),
    ((Linear,), linear),
    ((Reshape,), _reshape),
    (CPU_ACTIVATIONS, _activation),
    ((Interleave,), _interleave),
    ((MaxPool1d, MaxPool2d, AvgPool1d, AvgPool2d), _pool),
    ((GlobalMax, GlobalMean), _global_pool),
    ((Add, Mul), _combine),
    ((BatchNorm1d, BatchNorm2d), _batch_norm),
    ((Concat,), _concat),
    ((Softmax, LogSoftmax), _normalise),
    ((Embedding,), _embedding),
    ((Permute,), _permute),
    ((ToPixels,), _to_pixels),
)
SUPPORTED = tuple(kind for kinds, _ in _HANDLERS for kind in kinds)
