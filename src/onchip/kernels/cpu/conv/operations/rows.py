"""Where conv_fused begins and ends beside Load: embedded sentences, rows of the batch, rows of bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from onchip.kernels.chain import given_ids
from onchip.kernels.cpu.compiler.jit import ALL, bytes_at, floats_at, ints_at
from onchip.kernels.cpu.conv.lowering import Lowering, Value
from onchip.kernels.cpu.conv.operation import Operation, call_at, fields_of, own_rows, runs
from onchip.kernels.cpu.conv.operations.load import copy_lines
from onchip.kernels.cpu.conv.values import UnsupportedError, View
from onchip.network.graph import Node
from onchip.network.layers import Embedding, Permute, ToPixels
from onchip.network.recipe import Recipe, as_is

_ZERO, _ONE = np.float32(0), np.float32(1)


@dataclass(frozen=True, eq=False, kw_only=True)
class LookUp(Operation):
    """Rows of a table by ids: an embedded sentence has its channels last already."""

    y: View  # (E, 1, S)
    w: Recipe

    def weight_bytes(self) -> int:
        return 0  # an image looks some rows up


@dataclass(frozen=True, eq=False, kw_only=True)
class StoreRows(Operation):
    """Images to rows of the batch: (C, H, W), or (H, W, C) with channels last."""

    x: View
    last: bool = False
    is_layout: bool = True  # channels last is how y may lie, not a Permute that the network asks for


@dataclass(frozen=True, eq=False, kw_only=True)
class StorePixels(Operation):
    """Images to rows (H, W, C) of bytes: uint8((x + 1) / 2 * 255); what is not in 0 .. 255 is cut, a NaN is 0."""

    x: View


def lower_embedding(to: Lowering, node: Node) -> None:
    """Ids to vectors, side by side: (S, E) is an image of one row whose channels are last already."""
    if node.inputs[0] != to.source or len(to.net.types[to.source].shape) != 2:
        raise UnsupportedError("an Embedding in the middle")
    if given_ids(to.net, to.source) is None:
        raise UnsupportedError("ids are computed, and nobody could check them before the launch")
    behind = to.readers(node.name)
    if len(behind) != 1 or behind[0].layer != Permute((0, 2, 1)):
        raise UnsupportedError("an Embedding whose channels stay last")
    S, E = to.net.types[node.name].row_shape
    y, table = to.own(node.name, (E, 1, S), exact=True), node.weights["weight"]
    to.emit(LookUp(y=y, w=Recipe.of(as_is, (table,), to.net.weights[table].shape)))
    to.values[node.name] = Value(y, None)


def lower_permute(to: Lowering, node: Node) -> None:
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
    to.emit(StoreRows(x=to.image(node.inputs[0]), last=True, is_layout=False))


def lower_to_pixels(to: Lowering, node: Node) -> None:
    permuted = to.operations[-1] if to.operations else None
    if node is not to.nodes[-1] or not isinstance(permuted, StoreRows):
        raise UnsupportedError("ToPixels not behind a Permute that puts channels last, at the end")
    to.operations[-1] = StorePixels(x=permuted.x)


def lower_end(to: Lowering) -> None:
    """What the last layer made goes out, if it did not yet."""
    if not isinstance(to.operations[-1], StoreRows | StorePixels):
        to.emit(StoreRows(x=to.read(to.nodes[-1].name).view))


def laid_out(op: Operation, last: bool) -> Operation:
    """A Load or a store whose rows of the batch lie with channels last, or not."""
    return dataclasses.replace(op, last=last)  # type: ignore[call-arg]


_look_up, _store, _pixels = fields_of(LookUp), fields_of(StoreRows), fields_of(StorePixels)


@runs(LookUp)
def look_up(row: int, call: int) -> None:
    op, at = _look_up(row, call), call_at(call)
    if at.part > 0:
        return
    a, y = floats_at(at.here, ALL), op.y
    for i in range(at.images):
        sentence = ints_at(at.x + (at.first + i) * y.W * 8, y.W)
        for p in range(y.W):
            begin = y.at + i * y.image + p * y.pixel
            target = a[begin : begin + y.C]
            source = floats_at(op.w + sentence[p] * y.C * 4, y.C)
            for c in range(y.C):
                target[c] = source[c]


@runs(StoreRows)
def store_rows(row: int, call: int) -> None:
    op, at = _store(row, call), call_at(call)
    a, x = floats_at(at.here, ALL), op.x
    count = x.H * x.W
    top, bottom = own_rows(x.H, at.part, at.parts)
    has_no_gap = x.row == x.W * x.pixel
    lines = max(1, bottom - top) if has_no_gap else 1  # rows that lie one behind the other are one
    for i in range(at.images):
        for iy in range(top, bottom, lines):
            begin = x.at + i * x.image + iy * x.row
            if op.last or count == 1:
                to = at.y + ((at.first + i) * count + iy * x.W) * x.C * 4
                copy_lines(to, x.C, at.here + begin * 4, x.pixel, lines * x.W, x.C)
            else:
                source = a[begin:]
                for c in range(x.C):
                    line = floats_at(at.y + (((at.first + i) * x.C + c) * count + iy * x.W) * 4, lines * x.W)
                    for ix in range(len(line)):
                        line[ix] = source[ix * x.pixel + c]


@runs(StorePixels)
def store_pixels(row: int, call: int) -> None:
    op, at = _pixels(row, call), call_at(call)
    a, x = floats_at(at.here, ALL), op.x
    size = x.W * x.C
    top, bottom = own_rows(x.H, at.part, at.parts)
    for i in range(at.images):
        for iy in range(top, bottom):
            source = a[x.at + i * x.image + iy * x.row :]
            target = bytes_at(at.y + ((at.first + i) * x.H + iy) * size, size)
            for ix in range(x.W):
                for c in range(x.C):
                    level = (source[ix * x.pixel + c] + _ONE) / np.float32(2) * np.float32(255)
                    level = level if level > _ZERO else _ZERO
                    target[ix * x.C + c] = np.uint8(level if level < np.float32(255) else np.float32(255))
