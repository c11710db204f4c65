"""top_k: the k largest or smallest elements along an axis, or their indices, in order.

Insertion into the sorted best k so far: nearly all elements of a long row are compared once, with the worst of these.
An array is (outer, N, inner), as in reduce.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import ALL, address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import ArgTopK, TopK
from onchip.network.recipe import Array
from onchip.network.types import TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim

_THREAD_ELEMENTS = 1 << 14  # minimum per woken thread
_TASK_ELEMENTS = 1 << 11  # minimum per task


@linked(*(types.int64,) * 7)
def find_first(source: int, values: int, indices: int, N: int, inner: int, k: int, is_min: int) -> None:
    """The first k values of a column of x (N, inner), and their indices; NaN is larger than any other value."""
    x, found, at = floats_at(source, ALL), floats_at(values, k), ints_at(indices, k)
    count = 0
    for n in range(N):
        v = x[n * inner]
        m = count
        while m > 0:
            u = found[m - 1]
            is_before = (v < u or (u != u and v == v)) if is_min else (v > u or (v != v and u == u))
            if not is_before:  # of equals, the first stays first
                break
            if m < k:
                found[m], at[m] = u, at[m - 1]
            m -= 1
        if m < k:
            found[m], at[m] = v, n
            count = min(count + 1, k)


# Fields of a layer: the shape of a batch row, and scratch for k values and indices per thread.
_OUTER, _N, _INNER, _K, _IS_MIN, _WRITES_INDICES, _VALUES, _INDICES, _WORDS = range(9)


@compiled()
def _columns(worker: int, task: int, layer: Array, x: int, y: int, columns: int, per_task: int) -> None:
    N, inner, k = layer[_N], layer[_INNER], layer[_K]
    values, indices = layer[_VALUES] + worker * k * 4, layer[_INDICES] + worker * k * 8
    for column in range(task * per_task, min(columns, (task + 1) * per_task)):
        row, i = column // inner, column % inner
        find_first(x + (row * N * inner + i) * 4, values, indices, N, inner, k, layer[_IS_MIN])
        if layer[_WRITES_INDICES]:
            at, to = ints_at(indices, k), ints_at(y + (row * k * inner + i) * 8, ALL)
            for m in range(k):
                to[m * inner] = at[m]
        else:
            found, target = floats_at(values, k), floats_at(y + (row * k * inner + i) * 4, ALL)
            for m in range(k):
                target[m * inner] = found[m]


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    layer, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    columns = B * layer[_OUTER] * layer[_INNER]
    per_task = max(1, _TASK_ELEMENTS // layer[_N])
    tasks = (columns + per_task - 1) // per_task
    threads = max(1, min(threads, columns * layer[_N] // _THREAD_ELEMENTS))
    run_tasks(_columns, (layer, x, y, columns, per_task), tasks, threads)


@dataclass(frozen=True)
class Facts:
    shape: tuple[int, int, int]  # outer, N and inner of a batch row
    k: int
    is_min: bool
    writes_indices: bool


class TopKKernel(CpuKernel):
    name = "top_k"
    layers = (TopK, ArgTopK)

    def cost(self, net: Network, node: Node) -> CoreCost:
        x, y = net.types[node.inputs[0]], net.types[node.name]
        return CoreCost(net.row_flop(node), x.row_bytes + y.row_bytes, row_cache_bytes=x.row_bytes)

    def lower(self, node: Node, types: Mapping[str, TensorType], device: Device) -> Facts:
        layer, x = node.layer, types[node.inputs[0]]
        assert isinstance(layer, TopK | ArgTopK)
        axis = layer.axis % len(x.shape) - 1  # of a row
        shape = math.prod(x.row_shape[:axis]), x.row_shape[axis], math.prod(x.row_shape[axis + 1 :])
        return Facts(shape, layer.k, not layer.largest, isinstance(layer, ArgTopK))

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        facts = claim.facts
        assert isinstance(facts, Facts)

        def build_facts(threads: int) -> tuple[int, object]:
            values, indices = np.empty((threads, facts.k), np.float32), np.empty((threads, facts.k), np.int64)
            layer = words(*facts.shape, facts.k, int(facts.is_min), int(facts.writes_indices), values, indices)
            return address(layer), (layer, values, indices)

        return CompiledLaunch(address_of(_run), build_facts)
