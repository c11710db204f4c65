"""select: Slice, Gather, Pad, Tile and NearestResize: numbers of rows, chosen axis by axis.

Idea      A line of y, all that lies along its last axis, is some stretches of a line of x, or of what stands for none.
          They are found once; then every line is as many copies. Where stretches are short, number by number.
Floor     Memory: what is chosen of x in, y out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.kernels.cpu.jit import compiled
from onchip.kernels.cpu.price import CorePrice
from onchip.kernels.cpu.threads import run_pieces
from onchip.kernels.selection import may_turn, tables_for
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS
from onchip.spec.layers import Selection
from onchip.spec.network import Network
from onchip.spec.recipe import Array
from onchip.spec.types import DTYPE_BYTES, numpy_dtype

_TASK_NUMBERS = 1 << 13  # of y that a thread takes at a time, at least
_SHORT = 16  # numbers of a stretch, on average
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # what numbers are does not matter


@compiled()
def _lines(
    worker: int, piece: int, x: Array, y: Array, first: Array, second: Array, stretches: Array, each: Array,
    fill: Array, lines: int, together: int, x_row: int, width: int,
) -> None:  # fmt: skip
    """x and y are flat words; y has `lines` lines of `width`.

    first, second  where lines of y come from, along two axes; -1: nowhere
    stretches      (?, 3): where each begins in a line of y and in one of x, or -1, and how long it is
    each           where each number of a line comes from, or -1; empty: copy the stretches
    fill           one word
    """
    n1, n2 = len(first), len(second)
    for line in range(piece * together, min(lines, (piece + 1) * together)):
        a, b = first[line // n2 % n1], second[line % n2]
        made = y[line * width : (line + 1) * width]
        if a < 0 or b < 0:
            made[:] = fill[0]
            continue
        begin = line // (n1 * n2) * x_row + a + b
        given = x[begin:]
        for n in range(len(each)):
            made[n] = given[each[n]] if each[n] >= 0 else fill[0]
        for s in range(len(stretches)):
            at, source, count = stretches[s, 0], stretches[s, 1], stretches[s, 2]
            to = made[at : at + count]
            if source < 0:
                to[:] = fill[0]
            else:
                stretch = given[source : source + count]
                for n in range(count):
                    to[n] = stretch[n]


@compiled()
def _choose(
    x: Array, y: Array, first: Array, second: Array, stretches: Array, each: Array, fill: Array, lines: int,
    together: int, x_row: int, width: int, threads: int,
) -> None:  # fmt: skip
    given = (x, y, first, second, stretches, each, fill, lines, together, x_row, width)
    run_pieces(_lines, given, (lines + together - 1) // together, threads)


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
        for layout in (ROWS, CHANNELS_LAST) if may_turn(net, node) else (ROWS,):
            is_last = layout == CHANNELS_LAST
            yield Claim(
                self.name, f"{self.name}<{layer.kind}>", (node.name,),
                CorePrice(0, min(x.row_bytes, y.row_bytes) + y.row_bytes, row_cache_bytes=y.row_bytes),
                "one layer by itself", facts=Facts(layer, x.row_shape, x.dtype, layout),
                reads={node.inputs[0]: Use(layout)} if is_last else {}, gives={node.name: layout} if is_last else {},
            )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Callable[[Sequence[Array], Sequence[Array], int], None]:
        facts = claim.facts
        assert isinstance(facts, Facts)
        made = tables_for(facts.layer, facts.row_shape, facts.layout)
        first, second, third = made.places
        stretches, width = stretches_of(third, made.run), len(third) * made.run
        each = np.empty(0, np.int64)
        if width < _SHORT * len(stretches):
            numbers = third[:, None] + np.arange(made.run)
            stretches, each = stretches[:0], np.where(third[:, None] < 0, -1, numbers).reshape(-1)
        words: Any = _WORDS[DTYPE_BYTES[facts.dtype]]
        fill = np.array([facts.layer.fill]).astype(numpy_dtype(facts.dtype)).view(words)
        together = max(1, _TASK_NUMBERS // max(1, width))
        row_lines = made.outer * len(first) * len(second)

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            x, y = (array.reshape(-1).view(words) for array in (inputs[0], outputs[0]))
            if not y.size:
                return
            lines = len(inputs[0]) * row_lines
            _choose(x, y, first, second, stretches, each, fill, lines, together, made.x_row, width, threads)

        return run
