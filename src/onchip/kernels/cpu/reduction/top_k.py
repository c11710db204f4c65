"""top_k: the k largest or smallest numbers along an axis, or their places, in order.

A number goes in among the first k of those before it: nearly all of a long row are compared once, with the last of
them. An array is (outer, N, inner), as in reduce.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import ALL, address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network
from onchip.network.layers import ArgTopK, TopK
from onchip.network.recipe import Array
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_THREAD_NUMBERS = 1 << 14  # for fewer a thread is not woken
_PIECE_NUMBERS = 1 << 11  # that a thread takes at a time, at least


@linked(*(types.int64,) * 7)
def find_first(source: int, numbers: int, places: int, N: int, inner: int, k: int, is_min: int) -> None:
    """x (N, inner), one column of it -> its first k numbers and their places; a NaN is larger than any number."""
    x, found, at = floats_at(source, ALL), floats_at(numbers, k), ints_at(places, k)
    count = 0
    for n in range(N):
        v = x[n * inner]
        m = count
        while m > 0:
            u = found[m - 1]
            is_before = (v < u or (u != u and v == v)) if is_min else (v > u or (v != v and u == u))
            if not is_before:  # of equals the first one stays in front
                break
            if m < k:
                found[m], at[m] = u, at[m - 1]
            m -= 1
        if m < k:
            found[m], at[m] = v, n
            count = min(count + 1, k)


# What `_run` is told of a layer once: the shape of a row of the batch, and room for k numbers and places a thread.
_OUTER, _N, _INNER, _K, _IS_MIN, _GIVES_PLACES, _NUMBERS, _PLACES, _WORDS = range(9)


@compiled()
def _columns(worker: int, piece: int, layer: Array, x: int, y: int, columns: int, together: int) -> None:
    N, inner, k = layer[_N], layer[_INNER], layer[_K]
    numbers, places = layer[_NUMBERS] + worker * k * 4, layer[_PLACES] + worker * k * 8
    for column in range(piece * together, min(columns, (piece + 1) * together)):
        row, i = column // inner, column % inner
        find_first(x + (row * N * inner + i) * 4, numbers, places, N, inner, k, layer[_IS_MIN])
        if layer[_GIVES_PLACES]:
            at, to = ints_at(places, k), ints_at(y + (row * k * inner + i) * 8, ALL)
            for m in range(k):
                to[m * inner] = at[m]
        else:
            found, made = floats_at(numbers, k), floats_at(y + (row * k * inner + i) * 4, ALL)
            for m in range(k):
                made[m * inner] = found[m]


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    layer, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    columns = B * layer[_OUTER] * layer[_INNER]
    together = max(1, _PIECE_NUMBERS // layer[_N])
    pieces = (columns + together - 1) // together
    threads = max(1, min(threads, columns * layer[_N] // _THREAD_NUMBERS))
    run_tasks(_columns, (layer, x, y, columns, together), pieces, threads)


@dataclass(frozen=True)
class Facts:
    shape: tuple[int, int, int]  # outer, N and inner of one row of the batch
    k: int
    is_min: bool
    gives_places: bool


class TopKKernel:
    name = "top_k"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer = node.layer
        if job.is_training or not isinstance(layer, TopK | ArgTopK):
            return
        x, y = net.types[node.inputs[0]], net.types[node.name]
        if x.dtype != "float32":
            yield Refusal(self.name, node.name, f"compares float32, got {x.dtype}")
            return
        axis = layer.axis % len(x.shape) - 1  # of a row
        shape = math.prod(x.row_shape[:axis]), x.row_shape[axis], math.prod(x.row_shape[axis + 1 :])
        yield Claim(
            self.name, f"{self.name}<{layer.kind}>", (node.name,),
            CoreCost(net.row_flop(node), x.row_bytes + y.row_bytes, row_cache_bytes=x.row_bytes),
            "one layer by itself",
            facts=Facts(shape, layer.k, not layer.largest, isinstance(layer, ArgTopK)),
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        told = claim.facts
        assert isinstance(told, Facts)

        def facts(threads: int) -> tuple[int, object]:
            numbers, places = np.empty((threads, told.k), np.float32), np.empty((threads, told.k), np.int64)
            layer = words(*told.shape, told.k, int(told.is_min), int(told.gives_places), numbers, places)
            return address(layer), (layer, numbers, places)

        return CompiledLaunch(address_of(_run), facts)
