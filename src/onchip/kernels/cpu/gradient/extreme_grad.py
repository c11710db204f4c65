"""extreme_grad: dx of a max or min along adjacent axes: dy, at the first of the largest or smallest elements.

Idea      x is (outer, N, inner). A task reads some rows, or some columns side by side, and keeps where the first
          extreme is. A NaN is one, as in NumPy.
Floor     Memory: x and dy in, dx out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.axes import middle_of
from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network
from onchip.network.layers import GlobalMax, GlobalMin, InputGrad
from onchip.network.recipe import Array
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_TASK_ELEMENTS = 1 << 12  # of x per task, at least
_THREAD_ELEMENTS = 1 << 14  # per thread: below this, a thread is not woken
_ZERO = np.float32(0)

# Layout of the array that `_run` reads: sizes, outer per batch row; scratch: the best of each column, per worker.
_OUTER, _N, _INNER, _IS_MIN, _BEST, _PLACES, _FIELDS = range(7)


@compiled(inline=True)
def _is_better(value: float, best: float, is_min: int) -> bool:
    """Whether a later value replaces the best so far: only the first NaN does."""
    return (value < best if is_min else value > best) or (value != value and best == best)


@compiled()
def _row(x: int, dy: int, dx: int, N: int, is_min: int) -> None:
    values, result, found = floats_at(x, N), floats_at(dx, N), 0
    best = values[0]
    for n in range(N):
        result[n] = _ZERO
        if _is_better(values[n], best, is_min):
            best, found = values[n], n
    result[found] = floats_at(dy, 1)[0]


@compiled()
def _columns(x: int, dy: int, dx: int, layer: Array, worker: int) -> None:
    N, inner, is_min = layer[_N], layer[_INNER], layer[_IS_MIN]
    best, places = (
        floats_at(layer[_BEST] + worker * inner * 4, inner),
        ints_at(layer[_PLACES] + worker * inner * 8, inner),
    )
    for n in range(N):
        values, result = floats_at(x + n * inner * 4, inner), floats_at(dx + n * inner * 4, inner)
        for i in range(inner):
            result[i] = _ZERO
            if n == 0 or _is_better(values[i], best[i], is_min):
                best[i], places[i] = values[i], n
    given, result = floats_at(dy, inner), floats_at(dx, N * inner)
    for i in range(inner):
        result[places[i] * inner + i] = given[i]


@compiled()
def _task(worker: int, task: int, layer: Array, operands: int, outer: int, per_task: int) -> None:
    N, inner = layer[_N], layer[_INNER]
    x, dy, dx = int_at(operands), int_at(operands + 8), int_at(operands + 16)
    for i in range(task * per_task, min(outer, (task + 1) * per_task)):
        at = i * N * inner * 4
        if inner == 1:
            _row(x + at, dy + i * 4, dx + at, N, layer[_IS_MIN])
        else:
            _columns(x + at, dy + i * inner * 4, dx + at, layer, worker)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    layer = ints_at(facts, _FIELDS)
    outer, size = B * layer[_OUTER], max(1, layer[_N] * layer[_INNER])
    per_task = max(1, _TASK_ELEMENTS // size)
    threads = max(1, min(threads, outer * size // _THREAD_ELEMENTS))
    run_tasks(_task, (layer, operands, outer, per_task), (outer + per_task - 1) // per_task, threads)


@dataclass(frozen=True)
class Facts:
    outer: int  # of a batch row
    N: int
    inner: int
    is_min: bool


class ExtremeGradKernel(CpuKernel):
    name = "extreme_grad"
    layers = (InputGrad,)

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, InputGrad) and isinstance(layer.of, GlobalMax | GlobalMin)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        of, x, dy = node.layer.attributes()["of"], net.types[node.inputs[0]], net.types[node.inputs[-1]]
        axes = tuple(sorted(axis % len(x.shape) for axis in of.axes))
        sizes = middle_of((1, *x.row_shape), axes)
        if sizes is None or not math.prod(sizes):
            yield Refusal(self.name, node.name, "needs adjacent axes, and elements")
            return
        yield self.claim(
            net, node, Facts(*sizes, isinstance(of, GlobalMin)),
            label=f"{of.kind.lower()}_grad<{','.join(map(str, axes))}>",
            cost=CoreCost(net.row_flop(node), 2 * x.row_bytes + dy.row_bytes, row_cache_bytes=2 * x.row_bytes),
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)

        def facts(threads: int) -> tuple[int, object]:
            best, places = np.empty((threads, meta.inner), np.float32), np.empty((threads, meta.inner), np.int64)
            layer = words(meta.outer, meta.N, meta.inner, meta.is_min, best, places)
            return address(layer), (layer, best, places)

        return CompiledLaunch(address_of(_run), facts)
