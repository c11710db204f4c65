"""short_scan: the CumSum of short rows, one thread per row, in one call into compiled code.

Order     From the first element to the last, or in reverse, one addition each.
Floor     Memory: x in, y out.
Limits    float32, rows of up to 1,024 elements; `scan` runs all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import CumSum
from onchip.network.recipe import Array
from onchip.network.types import TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim

MAX_NUMBERS = 1 << 10  # elements of a row
_TASK_ELEMENTS = 1 << 12  # minimum per task
_ROWS = 4  # interleaved, if a row is one column: `_scan_rows`
_LINES, _LENGTH, _COLUMNS, _EXCLUSIVE, _REVERSE, _WORDS = range(6)  # fields of a layer
_ZERO = np.float32(0)


@compiled()
def _scan_rows(x: int, y: int, rows: int, layer: Array) -> None:
    """Scan up to _ROWS rows interleaved, sums in registers: a single row is bound by the latency of additions."""
    N = layer[_LENGTH]
    source, out = floats_at(x, rows * N), floats_at(y, rows * N)
    # Missing rows repeat the last one.
    b, c, d = N * min(1, rows - 1), N * min(2, rows - 1), N * min(3, rows - 1)
    at, step = (N - 1, -1) if layer[_REVERSE] else (0, 1)
    s, t, u, v = source[at], source[b + at], source[c + at], source[d + at]
    if layer[_EXCLUSIVE]:
        out[at] = out[b + at] = out[c + at] = out[d + at] = _ZERO
    else:
        out[at], out[b + at], out[c + at], out[d + at] = s, t, u, v
    for _ in range(1, N):
        at += step
        p, q, r, w = source[at], source[b + at], source[c + at], source[d + at]
        if layer[_EXCLUSIVE]:
            out[at], out[b + at], out[c + at], out[d + at] = s, t, u, v
            s, t, u, v = s + p, t + q, u + r, v + w
        else:
            s, t, u, v = s + p, t + q, u + r, v + w
            out[at], out[b + at], out[c + at], out[d + at] = s, t, u, v


@compiled()
def _scan(worker: int, task: int, x: int, y: int, lines: int, per_task: int, layer: Array) -> None:
    """Scan lines of (length, columns), column by column."""
    N, C, is_reverse = layer[_LENGTH], layer[_COLUMNS], layer[_REVERSE]
    step = -C if is_reverse else C
    if C == 1:
        last = min(lines, (task + 1) * per_task)
        for line in range(task * per_task, last, _ROWS):
            _scan_rows(x + line * N * 4, y + line * N * 4, min(_ROWS, last - line), layer)
        return
    for line in range(task * per_task, min(lines, (task + 1) * per_task)):
        at = (line * N + (N - 1 if is_reverse else 0)) * C
        head, first = floats_at(y + at * 4, C), floats_at(x + at * 4, C)
        for c in range(C):
            head[c] = _ZERO if layer[_EXCLUSIVE] else first[c]
        for _ in range(1, N):
            previous, out = floats_at(y + at * 4, C), floats_at(y + (at + step) * 4, C)
            source = floats_at(x + (at if layer[_EXCLUSIVE] else at + step) * 4, C)
            for c in range(C):
                out[c] = previous[c] + source[c]
            at += step


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    layer, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    lines, elements = B * layer[_LINES], layer[_LENGTH] * layer[_COLUMNS]
    per_task = max(1, _TASK_ELEMENTS // elements)
    threads = max(1, min(threads, lines * elements // _TASK_ELEMENTS))
    run_tasks(_scan, (x, y, lines, per_task, layer), (lines + per_task - 1) // per_task, threads)


class ShortScanKernel(CpuKernel):
    name = "short_scan"
    layers = (CumSum,)
    order = "in order"

    def applies(self, net: Network, start: int) -> bool:
        return 0 < net.types[net.nodes[start].name].row_size <= MAX_NUMBERS

    def label(self, net: Network, node: Node) -> str:
        return f"{self.name}<sum>"

    def cost(self, net: Network, node: Node) -> CoreCost:
        return CoreCost(net.row_flop(node), 2 * net.types[node.name].row_bytes)

    def lower(self, node: Node, types: Mapping[str, TensorType], device: Device) -> tuple[int, ...]:
        layer, x = node.layer, types[node.name]
        assert isinstance(layer, CumSum)
        axis = layer.axis % len(x.shape)
        shape = math.prod(x.row_shape[: axis - 1]), x.row_shape[axis - 1], math.prod(x.row_shape[axis:])
        return (*shape, int(layer.exclusive), int(layer.reverse))

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        assert isinstance(claim.facts, tuple)
        fields = words(*claim.facts)
        return CompiledLaunch(address_of(_run), lambda threads: (address(fields), fields))
