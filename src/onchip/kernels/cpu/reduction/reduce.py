"""reduce: max, min, sum, mean, norm, argmax and argmin along axes.

An array is (outer, N, inner). Sums over N are float64: four interleaved ones for inner = 1, else one in order, for any
batch. Axes that are not adjacent are transposed to the end first. float64 inputs, which sums of ints use, are added in
order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import (
    ALL,
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
from onchip.kernels.cpu.threading.launches import CompiledLaunch, Launch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network
from onchip.network.layers import ArgMax, ArgMin, GlobalMax, GlobalMean, GlobalMin, GlobalNorm, GlobalSum, Layer
from onchip.network.recipe import Array
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_KINDS: tuple[type[Layer], ...] = (GlobalMax, GlobalMin, GlobalSum, GlobalMean, GlobalNorm, ArgMax, ArgMin)  # by code
MAX, _MIN, _SUM, _MEAN, _NORM, _ARG_MAX, _ARG_MIN = range(7)
_LAST = 8  # added to the code of an argmax or argmin: the last of equals
_DOUBLES = 16  # code: a sum of float64
_SUMS = (_SUM, _MEAN, _NORM, _DOUBLES)
_THREAD_ELEMENTS = 1 << 15  # minimum per woken thread
_TASK_ELEMENTS = 1 << 12  # minimum per task


@linked(*(types.int64,) * 4)
def reduce_row(source: int, to: int, N: int, code: int) -> None:
    """x (N,) -> one element."""
    x, y = floats_at(source, N), floats_at(to, 1)
    if code <= _MIN:
        found = x[0]
        for n in range(1, N):
            v = x[n] if code == MAX else -x[n]
            best = found if code == MAX else -found
            found = x[n] if v > best or v != v else found  # NaN wins
        y[0] = found
        return
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    is_norm = code == _NORM
    whole = N // 4
    for n in range(whole):
        p, q, r, s = np.float64(x[4 * n]), np.float64(x[4 * n + 1]), np.float64(x[4 * n + 2]), np.float64(x[4 * n + 3])
        a += p * p if is_norm else p
        b += q * q if is_norm else q
        c += r * r if is_norm else r
        d += s * s if is_norm else s
    total = (a + b) + (c + d)
    for n in range(4 * whole, N):
        p = np.float64(x[n])
        total += p * p if is_norm else p
    y[0] = np.float32(total / N if code == _MEAN else np.sqrt(total) if is_norm else total)


@linked(*(types.int64,) * 6)
def reduce_columns(source: int, to: int, totals_at: int, N: int, inner: int, code: int) -> None:
    """x (N, inner) -> y (inner,); totals (inner,) of float64 are overwritten."""
    y, totals = floats_at(to, inner), ints_at(totals_at, inner).view(np.float64)
    for i in range(inner):
        totals[i] = 0.0
    for n in range(N):
        x = floats_at(source + n * inner * 4, inner)
        if n == 0 and code <= _MIN:
            for i in range(inner):
                y[i] = x[i]
        elif code == MAX:
            for i in range(inner):
                y[i] = x[i] if x[i] > y[i] or x[i] != x[i] else y[i]
        elif code == _MIN:
            for i in range(inner):
                y[i] = x[i] if x[i] < y[i] or x[i] != x[i] else y[i]
        elif code == _NORM:
            for i in range(inner):
                totals[i] += np.float64(x[i]) * np.float64(x[i])
        else:
            for i in range(inner):
                totals[i] += np.float64(x[i])
    if code == _MEAN:
        for i in range(inner):
            y[i] = np.float32(totals[i] / N)
    elif code == _NORM:
        for i in range(inner):
            y[i] = np.float32(np.sqrt(totals[i]))
    elif code == _SUM:
        for i in range(inner):
            y[i] = np.float32(totals[i])


@linked(*(types.int64,) * 5)
def find_indices(source: int, to: int, N: int, inner: int, code: int) -> None:
    """x (N, inner) -> y (inner,) int64: the index of the max or min; NaN wins."""
    y = ints_at(to, inner)
    kind, is_last = code & (_LAST - 1), code >= _LAST
    for i in range(inner):
        x = floats_at(source + i * 4, ALL)
        best, index = x[0], 0
        for n in range(1, N):
            v = x[n * inner]
            is_more = v > best if kind == _ARG_MAX else v < best
            is_nan, is_equal = v != v and best == best, v == best or (v != v and best != best)
            if is_more or is_nan or (is_last and is_equal):
                best, index = v, n
        y[i] = index


@linked(*(types.int64,) * 4)
def sum_doubles(source: int, to: int, N: int, inner: int) -> None:
    """x (N, inner) -> y (inner,), both float64."""
    y = doubles_at(to, inner)
    for i in range(inner):
        y[i] = 0.0
    for n in range(N):
        x = doubles_at(source + n * inner * 8, inner)
        for i in range(inner):
            y[i] += x[i]


@compiled()
def _rows(
    worker: int, task: int, x: int, y: int, totals: int, outer: int, N: int, inner: int, code: int, per_task: int
) -> None:
    for row in range(task * per_task, min(outer, (task + 1) * per_task)):
        if code == _DOUBLES:
            sum_doubles(x + row * N * inner * 8, y + row * inner * 8, N, inner)
        elif code >= _ARG_MAX:
            find_indices(x + row * N * inner * 4, y + row * inner * 8, N, inner, code)
        elif inner == 1:
            reduce_row(x + row * N * 4, y + row * 4, N, code)
        else:
            reduce_columns(x + row * N * inner * 4, y + row * inner * 4, totals + worker * inner * 8, N, inner, code)


# Fields of a layer: the shape of a batch row, and `inner` float64 values per thread.
_OUTER, _N, _INNER, _CODE, _TOTALS, _WORDS = range(6)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """x (B * outer, N, inner) -> y (B * outer, inner); the code of a CompiledLaunch."""
    layer, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    outer, N, inner = B * layer[_OUTER], layer[_N], layer[_INNER]
    per_task = max(1, _TASK_ELEMENTS // (N * inner))
    tasks = (outer + per_task - 1) // per_task
    threads = max(1, min(threads, outer * N * inner // _THREAD_ELEMENTS))
    run_tasks(_rows, (x, y, layer[_TOTALS], outer, N, inner, layer[_CODE], per_task), tasks, threads)


@dataclass(frozen=True)
class Facts:
    code: int
    order: tuple[int, ...]  # of all axes, the reduced ones last; () if nothing is transposed
    shape: tuple[int, int, int]  # outer, N and inner of a batch row


class ReduceKernel(CpuKernel):
    name = "reduce"
    layers = _KINDS
    dtypes = ("float32", "float64")

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer, x, y = node.layer, net.types[node.inputs[0]], net.types[node.name]
        adds_doubles = x.dtype == "float64"
        if adds_doubles and not isinstance(layer, GlobalSum):
            yield Refusal(self.name, node.name, f"only sums of float64, not {layer.kind}")
            return
        code, attributes = _DOUBLES if adds_doubles else _KINDS.index(type(layer)), layer.attributes()
        axes = sorted(axis % len(x.shape) for axis in attributes.get("axes", (attributes.get("axis"),)))
        facts = _facts(code + _LAST if attributes.get("last") else code, x.row_shape, axes)
        cached = x.row_bytes // 2 + (x.row_bytes if facts.order else 0)
        cost = CoreCost(net.row_flop(node), x.row_bytes + y.row_bytes, row_cache_bytes=cached)
        order = "four interleaved sums or one, depending on N only" if code in _SUMS else ""
        yield self.claim(net, node, facts, cost=cost, order=order)

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Launch:
        facts = claim.facts
        assert isinstance(facts, Facts)

        def build_facts(threads: int) -> tuple[int, object]:
            totals = np.empty((threads, facts.shape[2]))
            fields = words(*facts.shape, facts.code, totals)
            return address(fields), (fields, totals)

        launch = CompiledLaunch(address_of(_run), build_facts)
        if not facts.order:
            return launch

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            launch([np.ascontiguousarray(inputs[0].transpose(facts.order))], outputs, threads)

        return run


def _facts(code: int, row: tuple[int, ...], axes: list[int]) -> Facts:
    """axes  of the whole array, batch first"""
    shape = (1, *row)
    if axes == list(range(axes[0], axes[-1] + 1)):
        sizes = shape[: axes[0]], shape[axes[0] : axes[-1] + 1], shape[axes[-1] + 1 :]
        return Facts(code, (), (math.prod(sizes[0]), math.prod(sizes[1]), math.prod(sizes[2])))
    others = [axis for axis in range(len(shape)) if axis not in axes]
    N = math.prod(shape[axis] for axis in axes)
    return Facts(code, (*others, *axes), (math.prod(row) // max(1, N), N, 1))
