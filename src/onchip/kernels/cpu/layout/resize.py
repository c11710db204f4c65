"""resize: LinearResize, a line of y at a time.

Idea      A line of y lies between four lines of x, or two: their mean is made first, number by number in vectors, and
          lies in cache; then each number of y is the mean of two of it.
Order     Axis by axis: a (1 - share) + b share, two products and a sum.
          With channels last, neighbours are vectors: no number is looked up by itself. Values that only convolutions
          make and read lie so already.
Floor     Memory: x in, y out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.selection import axis_taps, may_be_nhwc, resize_parts
from onchip.network.graph import Network
from onchip.network.layers import LinearResize
from onchip.network.recipe import Array
from onchip.network.types import TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS

_TASK_NUMBERS = 1 << 12  # of y that a thread takes at a time, at least
_NUMBER_BYTES = 12  # of a copy in the time of a number that is looked up by itself


@compiled(inline=True)
def _mean(made: Array, a: Array, b: Array, share: np.float32) -> None:
    rest = np.float32(1) - share
    for n in range(len(made)):
        made[n] = a[n] * rest + b[n] * share


# What `_run` is told of a layer once. Of each of three axes: the address of its places (n, 2), where the two numbers
# lie, and of the shares of the second, and how many there are of either; no share: the axis is as it was.
_PLACES, _SHARES, _COUNTS, _SHARED = 0, 3, 6, 9
_SCRATCH, _ROW_LINES, _X_ROW, _X_WIDTH, _RUN, _WORDS = range(12, 18)


@compiled()
def _lines(worker: int, piece: int, x: int, y: int, lines: int, together: int, layer: Array) -> None:
    """Some lines of y, of n3 * run numbers each; those of x have x_width. Scratch: two lines of x for each worker."""
    n1, n2, n3 = layer[_COUNTS], layer[_COUNTS + 1], layer[_COUNTS + 2]
    places1, places2, places3 = (
        ints_at(layer[_PLACES], 2 * n1),
        ints_at(layer[_PLACES + 1], 2 * n2),
        ints_at(layer[_PLACES + 2], 2 * n3),
    )
    shares1, shares2, shares3 = (
        floats_at(layer[_SHARES], layer[_SHARED]),
        floats_at(layer[_SHARES + 1], layer[_SHARED + 1]),
        floats_at(layer[_SHARES + 2], layer[_SHARED + 2]),
    )
    x_width, run, one = layer[_X_WIDTH], layer[_RUN], np.float32(1)
    own = layer[_SCRATCH] + worker * 2 * x_width * 4
    between, other = floats_at(own, x_width), floats_at(own + x_width * 4, x_width)
    for line in range(piece * together, min(lines, (piece + 1) * together)):
        i1, i2 = line // n2 % n1, line % n2
        begin = line // (n1 * n2) * layer[_X_ROW]
        for k in range(2 if len(shares2) else 1):
            held = between if k == 0 else other
            at = begin + places2[2 * i2 + k]
            low = floats_at(x + (at + places1[2 * i1]) * 4, x_width)
            if len(shares1):
                _mean(held, low, floats_at(x + (at + places1[2 * i1 + 1]) * 4, x_width), shares1[i1])
            else:
                for n in range(x_width):
                    held[n] = low[n]
        if len(shares2):
            _mean(between, between, other, shares2[i2])
        made = floats_at(y + line * n3 * run * 4, n3 * run)
        if not len(shares3):
            for n in range(len(made)):
                made[n] = between[n]
        elif run == 1:
            for n in range(n3):
                made[n] = between[places3[2 * n]] * (one - shares3[n]) + between[places3[2 * n + 1]] * shares3[n]
        else:
            for n in range(n3):
                a, b = own + places3[2 * n] * 4, own + places3[2 * n + 1] * 4
                _mean(made[n * run : (n + 1) * run], floats_at(a, run), floats_at(b, run), shares3[n])


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    layer, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    lines, width = B * layer[_ROW_LINES], layer[_COUNTS + 2] * layer[_RUN]
    together = max(1, _TASK_NUMBERS // max(1, width))
    threads = max(1, min(threads, lines * width // _TASK_NUMBERS))
    run_tasks(_lines, (x, y, lines, together, layer), (lines + together - 1) // together, threads)


@dataclass(frozen=True)
class Facts:
    layer: LinearResize
    row_shape: tuple[int, ...]
    layout: str


class Resize:
    name = "resize"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if job.is_training or not isinstance(node.layer, LinearResize):
            return
        x, y = net.types[node.inputs[0]], net.types[node.name]
        if x.dtype != "float32":
            yield Refusal(self.name, node.name, f"computes on float32, got {x.dtype}")
            return
        for layout in (ROWS, CHANNELS_LAST) if may_be_nhwc(net, node) else (ROWS,):
            parts = resize_parts(node.layer, x, layout)
            if parts is None:
                continue
            by_itself = _NUMBER_BYTES if parts.run == 1 and parts.is_resized[-1] else 1
            cost = CoreCost(
                net.row_flop(node), x.row_bytes + y.row_bytes, row_cache_bytes=(1 + by_itself) * y.row_bytes
            )
            is_last = layout == CHANNELS_LAST
            yield Claim(
                self.name, f"{self.name}<linear>", (node.name,), cost, "one layer by itself", order="axis by axis",
                facts=Facts(node.layer, x.row_shape, layout),
                reads={node.inputs[0]: Use(layout)} if is_last else {},
                writes={node.name: layout} if is_last else {},
            )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        told = claim.facts
        assert isinstance(told, Facts)
        parts = resize_parts(told.layer, TensorType(("B", *told.row_shape)), told.layout)
        assert parts is not None
        axes = axis_taps(told.layer, told.row_shape, told.layout)
        places = [np.ascontiguousarray(np.stack((taps.low, taps.high), axis=1) * step, np.int64) for taps, step in axes]
        shares = [
            (taps.share if is_resized else taps.share[:0]).astype(np.float32)
            for (taps, _), is_resized in zip(axes, parts.is_resized, strict=True)
        ]
        n1, n2, _ = parts.sizes
        # A line of x holds all that its line of y is made of; a step of the axis before it is as long.
        x_width = parts.x_row if n1 * n2 == 1 and not axes[1][1] else axes[1][1]
        counts, row_lines = (*map(len, places), *map(len, shares)), parts.outer * n1 * n2

        def facts(threads: int) -> tuple[int, object]:
            scratch = np.empty((threads, 2, x_width), np.float32)
            numbers = words(*places, *shares, *counts, scratch, row_lines, parts.x_row, x_width, parts.run)
            return address(numbers), (numbers, scratch, places, shares)

        return CompiledLaunch(address_of(_run), facts)
