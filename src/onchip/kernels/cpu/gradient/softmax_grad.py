"""softmax_grad: dx of softmax, y (dy - sum of dy y), and of log-softmax, dy - exp(y) (sum of dy).

Idea      y and dy are (outer, N, inner). A row's sum and its dx read it from memory once. The sums of columns are added
          side by side.
Order     As of microkernels/sums.py; columns in order, in float64.
Floor     Memory: y and dy in, dx out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import (
    address,
    address_of,
    compiled,
    doubles_at,
    floats_at,
    int_at,
    ints_at,
    linked,
)
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.microkernels.exponential import expm1_exp
from onchip.kernels.cpu.microkernels.sums import PRODUCTS, SUM, sum_terms
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network
from onchip.network.layers import InputGrad, LogSoftmax, Softmax
from onchip.network.recipe import Array
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_TASK_ELEMENTS = 1 << 12  # minimum per task
_THREAD_ELEMENTS = 1 << 13  # minimum per woken thread
_ZERO = np.float32(0)

# Layout of the array that `_run` reads: sizes, outer per batch row; scratch: a sum per column, per worker.
_OUTER, _N, _INNER, _IS_LOG, _SUMS, _FIELDS = range(6)


@compiled(inline=True)
def _dx(y: np.float32, dy: np.float32, total: np.float32, is_log: int) -> np.float32:
    if is_log:
        _, probability = expm1_exp(y)
        return dy - probability * total
    return y * (dy - total)


@compiled()
def _row(y: int, dy: int, dx: int, N: int, is_log: int) -> None:
    values, d, result = floats_at(y, N), floats_at(dy, N), floats_at(dx, N)
    if is_log:
        total = np.float32(sum_terms(dy, 0, N, _ZERO, SUM))
        for n in range(N):
            result[n] = _dx(values[n], d[n], total, 1)
    else:
        total = np.float32(sum_terms(y, dy, N, _ZERO, PRODUCTS))
        for n in range(N):
            result[n] = _dx(values[n], d[n], total, 0)


@compiled()
def _columns(y: int, dy: int, dx: int, layer: Array, sums_at: int) -> None:
    N, inner, is_log, row = layer[_N], layer[_INNER], layer[_IS_LOG], layer[_INNER] * 4
    sums = doubles_at(sums_at, inner)
    for i in range(inner):
        sums[i] = 0.0
    for n in range(N):
        values, d = floats_at(y + n * row, inner), floats_at(dy + n * row, inner)
        if is_log:
            for i in range(inner):
                sums[i] += np.float64(d[i])
        else:
            for i in range(inner):
                sums[i] += np.float64(d[i]) * np.float64(values[i])
    for n in range(N):
        values, d, result = (
            floats_at(y + n * row, inner),
            floats_at(dy + n * row, inner),
            floats_at(dx + n * row, inner),
        )
        for i in range(inner):
            result[i] = _dx(values[i], d[i], np.float32(sums[i]), is_log)


@compiled()
def _task(worker: int, task: int, layer: Array, operands: int, outer: int, per_task: int) -> None:
    N, inner = layer[_N], layer[_INNER]
    y, dy, dx = int_at(operands), int_at(operands + 8), int_at(operands + 16)
    for i in range(task * per_task, min(outer, (task + 1) * per_task)):
        at = i * N * inner * 4
        if inner == 1:
            _row(y + at, dy + at, dx + at, N, layer[_IS_LOG])
        else:
            _columns(y + at, dy + at, dx + at, layer, layer[_SUMS] + worker * inner * 8)


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
    is_log: bool


class SoftmaxGradKernel(CpuKernel):
    name = "softmax_grad"
    layers = (InputGrad,)
    order = "by the row's length"

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, InputGrad) and isinstance(layer.of, Softmax | LogSoftmax)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        of, y = node.layer.attributes()["of"], net.types[node.name]
        axis = of.axis % len(y.shape) - 1
        sizes = math.prod(y.row_shape[:axis]), y.row_shape[axis], math.prod(y.row_shape[axis + 1 :])
        if not math.prod(sizes):
            yield Refusal(self.name, node.name, "needs rows with elements")
            return
        yield self.claim(
            net, node, Facts(*sizes, isinstance(of, LogSoftmax)), label=f"{of.kind.lower()}_grad<{sizes[1]}>",
            cost=CoreCost(net.row_flop(node), 3 * y.row_bytes, row_cache_bytes=2 * y.row_bytes),
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)

        def facts(threads: int) -> tuple[int, object]:
            sums = np.empty((threads, meta.inner))
            layer = words(meta.outer, meta.N, meta.inner, meta.is_log, sums)
            return address(layer), (layer, sums)

        return CompiledLaunch(address_of(_run), facts)
