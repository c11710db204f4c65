"""resize: LinearResize, a line of y at a time.

Idea      A line of y lies between four lines of x, or two: their mean is made first, number by number in vectors, and
          lies in cache; then each number of y is the mean of two of it.
Order     Axis by axis: a (1 - share) + b share, two products and a sum.
Floor     Memory: x in, y out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.jit import compiled
from onchip.kernels.cpu.price import CorePrice
from onchip.kernels.cpu.threads import run_pieces
from onchip.kernels.selection import axis_taps, resize_parts
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.layout import ROWS
from onchip.spec.layers import LinearResize
from onchip.spec.network import Network
from onchip.spec.recipe import Array
from onchip.spec.types import TensorType

_TASK_NUMBERS = 1 << 12  # of y that a thread takes at a time, at least


@compiled(inline=True)
def _mean(made: Array, a: Array, b: Array, share: np.float32) -> None:
    rest = np.float32(1) - share
    for n in range(len(made)):
        made[n] = a[n] * rest + b[n] * share


@compiled()
def _lines(
    worker: int, piece: int, x: Array, y: Array, places1: Array, places2: Array, places3: Array, shares1: Array,
    shares2: Array, shares3: Array, scratch: Array, lines: int, together: int, x_row: int, x_width: int, run: int,
) -> None:  # fmt: skip
    """y has `lines` lines of len(places3) * run numbers, x of x_width.

    places  (n, 2): where the two numbers lie along an axis
    shares  of the second; empty: the axis is as it was
    scratch  (threads, 2, x_width)
    """
    n1, n2, n3 = len(places1), len(places2), len(places3)
    one = np.float32(1)
    held = scratch[worker]
    for line in range(piece * together, min(lines, (piece + 1) * together)):
        i1, i2 = line // n2 % n1, line % n2
        begin = line // (n1 * n2) * x_row
        for k in range(2 if len(shares2) else 1):
            low = begin + places2[i2, k] + places1[i1, 0]
            if len(shares1):
                high = begin + places2[i2, k] + places1[i1, 1]
                _mean(held[k], x[low : low + x_width], x[high : high + x_width], shares1[i1])
            else:
                held[k] = x[low : low + x_width]
        between = held[0]
        if len(shares2):
            _mean(between, between, held[1], shares2[i2])
        made = y[line * n3 * run : (line + 1) * n3 * run]
        if not len(shares3):
            made[:] = between
        elif run == 1:
            for n in range(n3):
                made[n] = between[places3[n, 0]] * (one - shares3[n]) + between[places3[n, 1]] * shares3[n]
        else:
            for n in range(n3):
                low, high = places3[n, 0], places3[n, 1]
                _mean(made[n * run : (n + 1) * run], between[low : low + run], between[high : high + run], shares3[n])


@compiled()
def _resize(
    x: Array, y: Array, places1: Array, places2: Array, places3: Array, shares1: Array, shares2: Array, shares3: Array,
    scratch: Array, lines: int, together: int, x_row: int, x_width: int, run: int, threads: int,
) -> None:  # fmt: skip
    given = (
        x, y, places1, places2, places3, shares1, shares2, shares3, scratch, lines, together, x_row, x_width, run,
    )  # fmt: skip
    run_pieces(_lines, given, (lines + together - 1) // together, threads)


@dataclass(frozen=True)
class Facts:
    layer: LinearResize
    row_shape: tuple[int, ...]


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
        price = CorePrice(net.row_flop(node), x.row_bytes + y.row_bytes, row_cache_bytes=y.row_bytes)
        yield Claim(
            self.name, f"{self.name}<linear>", (node.name,), price, "one layer by itself", order="axis by axis",
            facts=Facts(node.layer, x.row_shape),
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Callable[[Sequence[Array], Sequence[Array], int], None]:
        facts = claim.facts
        assert isinstance(facts, Facts)
        parts = resize_parts(facts.layer, TensorType(("B", *facts.row_shape)), ROWS)
        assert parts is not None
        axes = axis_taps(facts.layer, facts.row_shape, ROWS)
        places1, places2, places3 = (np.stack((taps.low, taps.high), axis=1) * step for taps, step in axes)
        shares1, shares2, shares3 = (
            (taps.share if is_resized else taps.share[:0]).astype(np.float32)
            for (taps, _), is_resized in zip(axes, parts.is_resized, strict=True)
        )
        n1, n2, n3 = parts.sizes
        # A line of x holds all that its line of y is made of; a step of the axis before it is as long.
        x_width = parts.x_row if n1 * n2 == 1 and not axes[1][1] else axes[1][1]
        together, row_lines = max(1, _TASK_NUMBERS // (n3 * parts.run)), parts.outer * n1 * n2

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            x, y = inputs[0].reshape(-1), outputs[0].reshape(-1)
            lines = len(inputs[0]) * row_lines
            held = np.empty((threads, 2, x_width), np.float32)
            _resize(
                x, y, places1, places2, places3, shares1, shares2, shares3, held, lines, together, parts.x_row, x_width,
                parts.run, threads,
            )  # fmt: skip

        return run
