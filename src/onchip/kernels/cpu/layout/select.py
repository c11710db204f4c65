"""select: Slice, Gather, Pad, Tile and NearestResize: elements selected axis by axis.

Idea      A line of y, its last axis, is a list of segments: contiguous elements of a line of x, or fill. The list is
          computed once, and every line is copied segment by segment, or word by word if segments are short. A line of
          one segment, as in a Slice, is copied without the list.
Floor     Memory: reads the selected elements of x, writes y.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import (
    ALL,
    address,
    address_of,
    bytes_at,
    compiled,
    floats_at,
    int_at,
    ints_at,
    linked,
)
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.selection import may_be_nhwc, tables_for
from onchip.network.graph import Network, Node
from onchip.network.layers import Selection
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES, numpy_dtype
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job
from onchip.plan.layout import CHANNELS_LAST, ROWS

_TASK_WORDS = 1 << 13  # of y per task, at least
_SHORT = 16  # mean words per segment; below this, copy word by word

# Fields of a layer: addresses, then sizes and flags. A word is four bytes, or one for narrower dtypes.
_FIRST, _SECOND, _SEGMENTS, _SOURCES, _FILL = range(5)
_N1, _N2, _N_SEGMENTS, _N_SOURCES, _N_FILL, _ROW_LINES, _X_ROW, _WIDTH = range(5, 13)
_IS_BYTES, _IS_COPY, _WORDS = 13, 14, 15


@compiled()
def _line(out: Array, x: Array, fill: Array, layer: Array) -> None:
    """Fill a line of y from a line of x."""
    segments, sources = ints_at(layer[_SEGMENTS], 3 * layer[_N_SEGMENTS]), ints_at(layer[_SOURCES], layer[_N_SOURCES])
    for n in range(len(sources)):
        out[n] = x[sources[n]] if sources[n] >= 0 else fill[n % len(fill)]
    for s in range(layer[_N_SEGMENTS]):
        begin, source, count = segments[3 * s], segments[3 * s + 1], segments[3 * s + 2]
        target = out[begin : begin + count]
        if source < 0:
            for n in range(count):
                target[n] = fill[n % len(fill)]
        else:
            segment = x[source : source + count]
            for n in range(count):
                target[n] = segment[n]


@linked(*(types.int64,) * 5)
def copy_segments(x: int, y: int, begin: int, end: int, facts: int) -> None:
    """Copy lines `begin` to `end` - 1 of y, each one segment of a line of x."""
    layer = ints_at(facts, _WORDS)
    n1, n2, width, x_row = layer[_N1], layer[_N2], layer[_WIDTH], layer[_X_ROW]
    first, second, source = ints_at(layer[_FIRST], n1), ints_at(layer[_SECOND], n2), ints_at(layer[_SEGMENTS], 3)[1]
    row, i, j = begin // (n1 * n2), begin // n2 % n1, begin % n2
    for line in range(begin, end):
        at = x + (row * x_row + first[i] + second[j] + source) * 4
        target, line_x = floats_at(y + line * width * 4, width), floats_at(at, width)
        for n in range(width):
            target[n] = line_x[n]
        j += 1
        if j == n2:
            i, j = i + 1, 0
        if i == n1:
            row, i = row + 1, 0


@compiled()
def _lines(worker: int, task: int, x: int, y: int, lines: int, per_task: int, facts: int) -> None:
    """Fill lines of y, of `width` words each.

    first, second  source offset of a line, per index of two axes; -1: fill
    segments       (?, 3): offset in a line of y, offset in a line of x or -1 for fill, and length
    sources        source offset per word of a line, or -1; empty: copy segments
    fill           the words of an element
    """
    layer = ints_at(facts, _WORDS)
    n1, n2, width = layer[_N1], layer[_N2], layer[_WIDTH]
    first, second, fills = ints_at(layer[_FIRST], n1), ints_at(layer[_SECOND], n2), layer[_N_FILL]
    if layer[_IS_COPY]:
        copy_segments(x, y, task * per_task, min(lines, (task + 1) * per_task), facts)
        return
    for line in range(task * per_task, min(lines, (task + 1) * per_task)):
        a, b = first[line // n2 % n1], second[line % n2]
        begin, is_fill = line // (n1 * n2) * layer[_X_ROW] + a + b, a < 0 or b < 0
        if layer[_IS_BYTES]:
            out, fill = bytes_at(y + line * width, width), bytes_at(layer[_FILL], fills)
            if is_fill:
                for n in range(width):
                    out[n] = fill[n % fills]
            else:
                _line(out, bytes_at(x + begin, ALL), fill, layer)
        else:
            out_words, fill_words = floats_at(y + line * width * 4, width), floats_at(layer[_FILL], fills)
            if is_fill:
                for n in range(width):
                    out_words[n] = fill_words[n % fills]
            else:
                _line(out_words, floats_at(x + begin * 4, ALL), fill_words, layer)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    layer, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    lines, width = B * layer[_ROW_LINES], layer[_WIDTH]
    if width == 0:
        return
    per_task = max(1, _TASK_WORDS // width)
    threads = max(1, min(threads, lines * width // _TASK_WORDS))
    run_tasks(_lines, (x, y, lines, per_task, facts), (lines + per_task - 1) // per_task, threads)


def segments_of(offsets: Array, run: int) -> Array:
    """The segments of a line of y: runs of `run` elements from these source offsets, merged where contiguous."""
    continues = (offsets[1:] == offsets[:-1] + run) & (offsets[:-1] >= 0) | (offsets[1:] < 0) & (offsets[:-1] < 0)
    begins = np.flatnonzero(np.concatenate((np.ones(len(offsets[:1]), bool), ~continues)))
    counts = np.diff(np.append(begins, len(offsets)))
    return np.stack((begins * run, offsets[begins], counts * run), axis=1)


@dataclass(frozen=True)
class Facts:
    layer: Selection
    row_shape: tuple[int, ...]
    dtype: str
    layout: str


class SelectKernel(CpuKernel):
    name = "select"
    layers = (Selection,)
    dtypes = DTYPE_BYTES  # a copy

    def cost(self, net: Network, node: Node) -> CoreCost:
        x, y = net.types[node.inputs[0]], net.types[node.name]
        return CoreCost(0, min(x.row_bytes, y.row_bytes) + y.row_bytes, row_cache_bytes=y.row_bytes)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        node = net.nodes[start]
        layer, x = node.layer, net.types[node.inputs[0]]
        assert isinstance(layer, Selection)
        for layout in (ROWS, CHANNELS_LAST) if may_be_nhwc(net, node) else (ROWS,):
            yield self.claim(net, node, Facts(layer, x.row_shape, x.dtype, layout), layout)

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        facts = claim.facts
        assert isinstance(facts, Facts)
        tables = tables_for(facts.layer, facts.row_shape, facts.layout)
        nbytes = DTYPE_BYTES[facts.dtype]
        word_bytes = 4 if nbytes % 4 == 0 else 1
        per_item = nbytes // word_bytes  # words per element
        first, second, third = (_in_words(offsets, per_item) for offsets in tables.offsets)
        run = tables.run * per_item
        segments, width = segments_of(third, run), len(third) * run
        sources = np.empty(0, np.int64)
        is_copy = word_bytes == 4 and len(segments) == 1 and all((offsets >= 0).all() for offsets in tables.offsets)
        if width < _SHORT * len(segments) and not is_copy:
            offsets_in_runs = third[:, None] + np.arange(run)
            segments, sources = segments[:0], np.where(third[:, None] < 0, -1, offsets_in_runs).reshape(-1)
        fill = np.array([facts.layer.fill]).astype(numpy_dtype(facts.dtype))
        arrays = tuple(map(np.ascontiguousarray, (first, second, segments, sources, fill)))
        counts = len(first), len(second), len(segments), len(sources), per_item
        row_lines = tables.outer * len(first) * len(second)
        fields = words(*arrays, *counts, row_lines, tables.x_row * per_item, width, int(word_bytes == 1), int(is_copy))
        return CompiledLaunch(address_of(_run), lambda threads: (address(fields), (fields, arrays)))


def _in_words(offsets: Array, per_item: int) -> Array:
    """Element offsets as word offsets; -1 is unchanged."""
    return np.where(offsets < 0, -1, offsets * per_item)
