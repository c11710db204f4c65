"""resize: LinearResize, a line of y at a time.

Idea      A line of y interpolates between two or four lines of x. These are blended first, vectorised, into a line in
          cache; then each element of y blends two of its elements. In NHWC an element is a vector of channels, and no
          single element is gathered. Values between convolutions are NHWC already.
Order     Axis by axis: a (1 - share) + b share.
Floor     Memory: x in, y out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CPU, CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.selection import axis_taps, may_be_nhwc, resize_parts
from onchip.network.graph import Network, Node
from onchip.network.layers import LinearResize
from onchip.network.recipe import Array
from onchip.network.types import TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job
from onchip.plan.layout import CHANNELS_LAST, ROWS

_TASK_ELEMENTS = 1 << 12  # minimum of y per task


@compiled(inline=True)
def _blend(out: Array, a: Array, b: Array, share: np.float32) -> None:
    rest = np.float32(1) - share
    for n in range(len(out)):
        out[n] = a[n] * rest + b[n] * share


# Fields of a layer. Per axis, three axes: the addresses of the offsets (n, 2) of both elements and of the shares of the
# second, then the number of outputs and of shares; without shares the axis is not resized.
_OFFSETS, _SHARES, _COUNTS, _SHARED = 0, 3, 6, 9
_SCRATCH, _ROW_LINES, _X_ROW, _X_WIDTH, _RUN, _WORDS = range(12, 18)


@compiled()
def _lines(worker: int, task: int, x: int, y: int, lines: int, per_task: int, layer: Array) -> None:
    """Lines of y, of n3 * run elements each; those of x have x_width. Scratch: two lines of x per worker."""
    n1, n2, n3 = layer[_COUNTS], layer[_COUNTS + 1], layer[_COUNTS + 2]
    offsets1, offsets2, offsets3 = (
        ints_at(layer[_OFFSETS], 2 * n1),
        ints_at(layer[_OFFSETS + 1], 2 * n2),
        ints_at(layer[_OFFSETS + 2], 2 * n3),
    )
    shares1, shares2, shares3 = (
        floats_at(layer[_SHARES], layer[_SHARED]),
        floats_at(layer[_SHARES + 1], layer[_SHARED + 1]),
        floats_at(layer[_SHARES + 2], layer[_SHARED + 2]),
    )
    x_width, run, one = layer[_X_WIDTH], layer[_RUN], np.float32(1)
    scratch = layer[_SCRATCH] + worker * 2 * x_width * 4
    blended, other = floats_at(scratch, x_width), floats_at(scratch + x_width * 4, x_width)
    for line in range(task * per_task, min(lines, (task + 1) * per_task)):
        i1, i2 = line // n2 % n1, line % n2
        begin = line // (n1 * n2) * layer[_X_ROW]
        for k in range(2 if len(shares2) else 1):
            line_k = blended if k == 0 else other
            offset = begin + offsets2[2 * i2 + k]
            low = floats_at(x + (offset + offsets1[2 * i1]) * 4, x_width)
            if len(shares1):
                _blend(line_k, low, floats_at(x + (offset + offsets1[2 * i1 + 1]) * 4, x_width), shares1[i1])
            else:
                for n in range(x_width):
                    line_k[n] = low[n]
        if len(shares2):
            _blend(blended, blended, other, shares2[i2])
        out = floats_at(y + line * n3 * run * 4, n3 * run)
        if not len(shares3):
            for n in range(len(out)):
                out[n] = blended[n]
        elif run == 1:
            for n in range(n3):
                out[n] = blended[offsets3[2 * n]] * (one - shares3[n]) + blended[offsets3[2 * n + 1]] * shares3[n]
        else:
            for n in range(n3):
                a, b = scratch + offsets3[2 * n] * 4, scratch + offsets3[2 * n + 1] * 4
                _blend(out[n * run : (n + 1) * run], floats_at(a, run), floats_at(b, run), shares3[n])


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    layer, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    lines, width = B * layer[_ROW_LINES], layer[_COUNTS + 2] * layer[_RUN]
    per_task = max(1, _TASK_ELEMENTS // max(1, width))
    threads = max(1, min(threads, lines * width // _TASK_ELEMENTS))
    run_tasks(_lines, (x, y, lines, per_task, layer), (lines + per_task - 1) // per_task, threads)


@dataclass(frozen=True)
class Facts:
    layer: LinearResize
    row_shape: tuple[int, ...]
    layout: str


class ResizeKernel(CpuKernel):
    name = "resize"
    layers = (LinearResize,)
    order = "axis by axis"

    def label(self, net: Network, node: Node) -> str:
        return f"{self.name}<linear>"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        node = net.nodes[start]
        layer, x, y = node.layer, net.types[node.inputs[0]], net.types[node.name]
        assert isinstance(layer, LinearResize)
        for layout in (ROWS, CHANNELS_LAST) if may_be_nhwc(net, node) else (ROWS,):
            parts = resize_parts(layer, x, layout)
            if parts is None:
                continue
            gathered = CPU.gather_bytes if parts.run == 1 and parts.is_resized[-1] else 1
            cost = CoreCost(net.row_flop(node), x.row_bytes + y.row_bytes, row_cache_bytes=(1 + gathered) * y.row_bytes)
            yield self.claim(net, node, Facts(layer, x.row_shape, layout), layout, cost=cost)

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        facts = claim.facts
        assert isinstance(facts, Facts)
        parts = resize_parts(facts.layer, TensorType(("B", *facts.row_shape)), facts.layout)
        assert parts is not None
        axes = axis_taps(facts.layer, facts.row_shape, facts.layout)
        offsets = [
            np.ascontiguousarray(np.stack((taps.low, taps.high), axis=1) * step, np.int64) for taps, step in axes
        ]
        shares = [
            (taps.share if is_resized else taps.share[:0]).astype(np.float32)
            for (taps, _), is_resized in zip(axes, parts.is_resized, strict=True)
        ]
        n1, n2, _ = parts.sizes
        # x_width spans every element of x that a line of y reads: the stride of the axis before it.
        x_width = parts.x_row if n1 * n2 == 1 and not axes[1][1] else axes[1][1]
        counts, row_lines = (*map(len, offsets), *map(len, shares)), parts.outer * n1 * n2

        def build_facts(threads: int) -> tuple[int, object]:
            scratch = np.empty((threads, 2, x_width), np.float32)
            fields = words(*offsets, *shares, *counts, scratch, row_lines, parts.x_row, x_width, parts.run)
            return address(fields), (fields, scratch, offsets, shares)

        return CompiledLaunch(address_of(_run), build_facts)
