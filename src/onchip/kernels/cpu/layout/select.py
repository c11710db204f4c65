"""select: Slice, Gather, Pad, Tile and NearestResize: numbers of rows, chosen axis by axis.

Idea      A line of y, all that lies along its last axis, is some stretches of a line of x, or of what stands for none.
          They are found once; then every line is as many copies. Where stretches are short, number by number. Where a
          line is one stretch, as in Slices, lines are copied without a look at the table.
Floor     Memory: what is chosen of x in, y out.
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
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.selection import may_be_nhwc, tables_for
from onchip.network.graph import Network
from onchip.network.layers import Selection
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES, numpy_dtype
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS

_TASK_NUMBERS = 1 << 13  # of y that a thread takes at a time, at least
_SHORT = 16  # numbers of a stretch, on average


# What `_run` is told of a layer once: addresses, then numbers. A word is four bytes, or one.
_FIRST, _SECOND, _STRETCHES, _EACH, _FILL, _N1, _N2, _PARTS, _SINGLES, _FILLS, _ROW_LINES, _X_ROW, _WIDTH = range(13)
_IS_BYTES, _IS_COPY, _WORDS = 13, 14, 15


@compiled()
def _line(made: Array, given: Array, fill: Array, layer: Array) -> None:
    """A line of y of the numbers behind a place of x."""
    stretches, each = ints_at(layer[_STRETCHES], 3 * layer[_PARTS]), ints_at(layer[_EACH], layer[_SINGLES])
    for n in range(len(each)):
        made[n] = given[each[n]] if each[n] >= 0 else fill[n % len(fill)]
    for s in range(layer[_PARTS]):
        at, source, count = stretches[3 * s], stretches[3 * s + 1], stretches[3 * s + 2]
        to = made[at : at + count]
        if source < 0:
            for n in range(count):
                to[n] = fill[n % len(fill)]
        else:
            stretch = given[source : source + count]
            for n in range(count):
                to[n] = stretch[n]


@linked(*(types.int64,) * 5)
def copy_stretches(x: int, y: int, begin: int, end: int, facts: int) -> None:
    """Lines of y, begin to end - 1, where each is one stretch of a line of x."""
    layer = ints_at(facts, _WORDS)
    n1, n2, width, x_row = layer[_N1], layer[_N2], layer[_WIDTH], layer[_X_ROW]
    first, second, source = ints_at(layer[_FIRST], n1), ints_at(layer[_SECOND], n2), ints_at(layer[_STRETCHES], 3)[1]
    row, i, j = begin // (n1 * n2), begin // n2 % n1, begin % n2
    for line in range(begin, end):
        at = x + (row * x_row + first[i] + second[j] + source) * 4
        made, given = floats_at(y + line * width * 4, width), floats_at(at, width)
        for n in range(width):
            made[n] = given[n]
        j += 1
        if j == n2:
            i, j = i + 1, 0
        if i == n1:
            row, i = row + 1, 0


@compiled()
def _lines(worker: int, piece: int, x: int, y: int, lines: int, together: int, facts: int) -> None:
    """Some lines of y, of `width` words each.

    first, second  where lines of y come from, along two axes; -1: nowhere
    stretches      (?, 3): where each begins in a line of y and in one of x, or -1, and how long it is
    each           where each word of a line comes from, or -1; none: copy the stretches
    fill           the words of a number
    """
    layer = ints_at(facts, _WORDS)
    n1, n2, width = layer[_N1], layer[_N2], layer[_WIDTH]
    first, second, fills = ints_at(layer[_FIRST], n1), ints_at(layer[_SECOND], n2), layer[_FILLS]
    if layer[_IS_COPY]:
        copy_stretches(x, y, piece * together, min(lines, (piece + 1) * together), facts)
        return
    for line in range(piece * together, min(lines, (piece + 1) * together)):
        a, b = first[line // n2 % n1], second[line % n2]
        begin, is_none = line // (n1 * n2) * layer[_X_ROW] + a + b, a < 0 or b < 0
        if layer[_IS_BYTES]:
            made, fill = bytes_at(y + line * width, width), bytes_at(layer[_FILL], fills)
            if is_none:
                for n in range(width):
                    made[n] = fill[n % fills]
            else:
                _line(made, bytes_at(x + begin, ALL), fill, layer)
        else:
            words_made, words_fill = floats_at(y + line * width * 4, width), floats_at(layer[_FILL], fills)
            if is_none:
                for n in range(width):
                    words_made[n] = words_fill[n % fills]
            else:
                _line(words_made, floats_at(x + begin * 4, ALL), words_fill, layer)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    layer, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    lines, width = B * layer[_ROW_LINES], layer[_WIDTH]
    if width == 0:
        return
    together = max(1, _TASK_NUMBERS // width)
    threads = max(1, min(threads, lines * width // _TASK_NUMBERS))
    run_tasks(_lines, (x, y, lines, together, facts), (lines + together - 1) // together, threads)


def stretches_of(places: Array, run: int) -> Array:
    """The stretches of a line whose runs of so many numbers come from these places."""
    follow = (places[1:] == places[:-1] + run) & (places[:-1] >= 0) | (places[1:] < 0) & (places[:-1] < 0)
    begins = np.flatnonzero(np.concatenate((np.ones(len(places[:1]), bool), ~follow)))
    counts = np.diff(np.append(begins, len(places)))
    return np.stack((begins * run, places[begins], counts * run), axis=1)


@dataclass(frozen=True)
class Facts:
    layer: Selection
    row_shape: tuple[int, ...]
    dtype: str
    layout: str


class Select:
    name = "select"
    device_kind = "cpu"
    precisions = ("fp32",)  # numbers are only moved

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer = node.layer
        if job.is_training or not isinstance(layer, Selection):
            return
        x, y = net.types[node.inputs[0]], net.types[node.name]
        for layout in (ROWS, CHANNELS_LAST) if may_be_nhwc(net, node) else (ROWS,):
            is_last = layout == CHANNELS_LAST
            yield Claim(
                self.name, f"{self.name}<{layer.kind}>", (node.name,),
                CoreCost(0, min(x.row_bytes, y.row_bytes) + y.row_bytes, row_cache_bytes=y.row_bytes),
                "one layer by itself", facts=Facts(layer, x.row_shape, x.dtype, layout),
                reads={node.inputs[0]: Use(layout)} if is_last else {}, writes={node.name: layout} if is_last else {},
            )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        facts = claim.facts
        assert isinstance(facts, Facts)
        made = tables_for(facts.layer, facts.row_shape, facts.layout)
        nbytes = DTYPE_BYTES[facts.dtype]
        word = 4 if nbytes % 4 == 0 else 1
        each_word = nbytes // word  # words of a number
        first, second, third = (_in_words(places, each_word) for places in made.places)
        run = made.run * each_word
        stretches, width = stretches_of(third, run), len(third) * run
        each = np.empty(0, np.int64)
        is_copy = word == 4 and len(stretches) == 1 and all((places >= 0).all() for places in made.places)
        if width < _SHORT * len(stretches) and not is_copy:
            numbers = third[:, None] + np.arange(run)
            stretches, each = stretches[:0], np.where(third[:, None] < 0, -1, numbers).reshape(-1)
        fill = np.array([facts.layer.fill]).astype(numpy_dtype(facts.dtype))
        kept = tuple(map(np.ascontiguousarray, (first, second, stretches, each, fill)))
        counts = len(first), len(second), len(stretches), len(each), each_word
        row_lines = made.outer * len(first) * len(second)
        told = words(*kept, *counts, row_lines, made.x_row * each_word, width, int(word == 1), int(is_copy))
        return CompiledLaunch(address_of(_run), lambda threads: (address(told), (told, kept)))


def _in_words(places: Array, each: int) -> Array:
    """Places of numbers as places of their words; -1 stays what it is."""
    return np.where(places < 0, -1, places * each)
