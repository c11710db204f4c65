"""First and last operations of conv_fused besides Load: embedding lookup, float32 output, uint8 output."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from onchip.kernels.chain import ids_input
from onchip.kernels.cpu.compiler.jit import ALL, bytes_at, floats_at, ints_at
from onchip.kernels.cpu.conv.lowering import Lowering, Value
from onchip.kernels.cpu.conv.operation import Operation, call_at, fields_of, row_span, runs
from onchip.kernels.cpu.conv.operations.load import copy_lines
from onchip.kernels.cpu.conv.values import UnsupportedError, View
from onchip.network.graph import Node
from onchip.network.layers import Embedding, Permute, ToPixels
from onchip.network.recipe import Recipe, as_is

_ZERO, _ONE = np.float32(0), np.float32(1)


@dataclass(frozen=True, eq=False, kw_only=True)
class LookUp(Operation):
    """Table rows by ids: the output (S, E) is already NHWC, with one row of pixels."""

    y: View  # (E, 1, S)
    w: Recipe

    def weight_bytes(self) -> int:
        return 0  # an image reads only a few rows


@dataclass(frozen=True, eq=False, kw_only=True)
class StoreRows(Operation):
    """Copies images to rows of the batch: (C, H, W), or (H, W, C) if is_nhwc."""

    x: View
    is_nhwc: bool = False
    may_change: bool = True  # is_nhwc is a choice of layout, not a Permute of the network


@dataclass(frozen=True, eq=False, kw_only=True)
class StorePixels(Operation):
    """Images to uint8 rows (H, W, C): (x + 1) / 2 * 255, clamped to 0 .. 255; NaN becomes 0."""

    x: View


def lower_embedding(to: Lowering, node: Node) -> None:
    """Ids to vectors: (S, E) is an NHWC image of one row."""
    if node.inputs[0] != to.source or len(to.net.types[to.source].shape) != 2:
        raise UnsupportedError("an Embedding that is not the first layer")
    if ids_input(to.net, to.source) is None:
        raise UnsupportedError("ids are computed, so they cannot be checked before the launch")
    readers = to.readers(node.name)
    if len(readers) != 1 or readers[0].layer != Permute((0, 2, 1)):
        raise UnsupportedError("an Embedding without a Permute to channels first")
    S, E = to.net.types[node.name].row_shape
    y, table = to.allocate(node.name, (E, 1, S), exact=True), node.weights["weight"]
    to.emit(LookUp(y=y, w=Recipe.of(as_is, (table,), to.net.weights[table].shape)))
    to.values[node.name] = Value(y, None)


def lower_permute(to: Lowering, node: Node) -> None:
    """After an Embedding a no-op; at the end, the output is stored as NHWC."""
    producer = to.by_name.get(node.inputs[0])
    if producer is not None and isinstance(producer.layer, Embedding):
        to.values[node.name] = to.values[producer.name]
        return
    rank = len(to.net.types[node.name].shape)
    last = to.nodes[-1]
    at_end = node is last or (isinstance(last.layer, ToPixels) and to.readers(node.name) == [last])
    if node.layer != Permute((0, *range(2, rank), 1)) or not at_end:
        raise UnsupportedError("a Permute that is not at the end")
    to.emit(StoreRows(x=to.image(node.inputs[0]), is_nhwc=True, may_change=False))


def lower_to_pixels(to: Lowering, node: Node) -> None:
    permuted = to.operations[-1] if to.operations else None
    if node is not to.nodes[-1] or not isinstance(permuted, StoreRows):
        raise UnsupportedError("ToPixels that does not follow a final Permute to channels last")
    to.operations[-1] = StorePixels(x=permuted.x)


def lower_output(to: Lowering) -> None:
    """Store the last layer's output, unless a store was already emitted."""
    if not isinstance(to.operations[-1], StoreRows | StorePixels):
        to.emit(StoreRows(x=to.read(to.nodes[-1].name).view))


def with_layout(op: Operation, is_nhwc: bool) -> Operation:
    """The Load or StoreRows for batch rows in NHWC, or NCHW."""
    return dataclasses.replace(op, is_nhwc=is_nhwc)  # type: ignore[call-arg]


_look_up, _store, _pixels = fields_of(LookUp), fields_of(StoreRows), fields_of(StorePixels)


@runs(LookUp)
def look_up(row: int, call: int) -> None:
    op, args = _look_up(row, call), call_at(call)
    if args.part > 0:
        return
    a, y = floats_at(args.base, ALL), op.y
    for i in range(args.images):
        ids = ints_at(args.x + (args.first + i) * y.W * 8, y.W)
        for p in range(y.W):
            begin = y.offset + i * y.image + p * y.pixel
            target = a[begin : begin + y.C]
            source = floats_at(op.w + ids[p] * y.C * 4, y.C)
            for c in range(y.C):
                target[c] = source[c]


@runs(StoreRows)
def store_rows(row: int, call: int) -> None:
    op, args = _store(row, call), call_at(call)
    a, x = floats_at(args.base, ALL), op.x
    count = x.H * x.W
    top, bottom = row_span(x.H, args.part, args.parts)
    has_no_gap = x.row == x.W * x.pixel
    lines = max(1, bottom - top) if has_no_gap else 1  # contiguous rows are copied as one
    for i in range(args.images):
        for iy in range(top, bottom, lines):
            begin = x.offset + i * x.image + iy * x.row
            if op.is_nhwc or count == 1:
                dst = args.y + ((args.first + i) * count + iy * x.W) * x.C * 4
                copy_lines(dst, x.C, args.base + begin * 4, x.pixel, lines * x.W, x.C)
            else:
                source = a[begin:]
                for c in range(x.C):
                    line = floats_at(args.y + (((args.first + i) * x.C + c) * count + iy * x.W) * 4, lines * x.W)
                    for ix in range(len(line)):
                        line[ix] = source[ix * x.pixel + c]


@runs(StorePixels)
def store_pixels(row: int, call: int) -> None:
    op, args = _pixels(row, call), call_at(call)
    a, x = floats_at(args.base, ALL), op.x
    size = x.W * x.C
    top, bottom = row_span(x.H, args.part, args.parts)
    for i in range(args.images):
        for iy in range(top, bottom):
            source = a[x.offset + i * x.image + iy * x.row :]
            target = bytes_at(args.y + ((args.first + i) * x.H + iy) * size, size)
            for ix in range(x.W):
                for c in range(x.C):
                    level = (source[ix * x.pixel + c] + _ONE) / np.float32(2) * np.float32(255)
                    level = level if level > _ZERO else _ZERO
                    target[ix * x.C + c] = np.uint8(level if level < np.float32(255) else np.float32(255))
