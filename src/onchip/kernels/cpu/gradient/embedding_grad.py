"""embedding_grad: the gradient of an Embedding's table, the rows of dy added by id.

Idea      The table is cleared. Then a task adds some columns of each row of dy to the row of its id: no two tasks write
          the same element, however often an id occurs.
Order     Ids in order.
Ids       out of range add nothing: the lookup of the same step reports them.
Floor     Memory: ids and dy in, the table out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int32_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network
from onchip.network.layers import Embedding, WeightGrad
from onchip.network.layers.embedding import ID_DTYPES
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_CLEARED = 1 << 14  # elements per task
_LINE = 16  # columns of a cache line
_TASKS = 16  # at most
_THREAD_ELEMENTS = 1 << 14  # per thread: below this, a thread is not woken
_ZERO = np.float32(0)

# Layout of the array that `_run` reads.
_IDS, _ID_BYTES, _V, _E, _FIELDS = range(5)


@compiled()
def _clear(worker: int, task: int, dw: int, elements: int) -> None:
    count = min(_CLEARED, elements - task * _CLEARED)
    part = floats_at(dw + task * _CLEARED * 4, count)
    for i in range(count):
        part[i] = _ZERO


@compiled()
def _columns(worker: int, task: int, layer: Array, operands: int, count: int, columns: int) -> None:
    V, E, ids, dy, dw = layer[_V], layer[_E], int_at(operands), int_at(operands + 8), int_at(operands + 16)
    first, size = task * columns, layer[_ID_BYTES]
    width = min(columns, E - first)
    for n in range(count):
        index = int_at(ids + n * 8) if size == 8 else int32_at(ids + n * 4)
        if index < 0 or index >= V:
            continue
        total, row = floats_at(dw + (index * E + first) * 4, width), floats_at(dy + (n * E + first) * 4, width)
        for i in range(width):
            total[i] += row[i]


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    layer = ints_at(facts, _FIELDS)
    count, E, elements = B * layer[_IDS], layer[_E], layer[_V] * layer[_E]
    tasks = (elements + _CLEARED - 1) // _CLEARED
    run_tasks(_clear, (int_at(operands + 16), elements), tasks, max(1, min(threads, tasks // 2)))
    lines = (E + _LINE - 1) // _LINE
    columns = (lines + _TASKS - 1) // _TASKS * _LINE
    threads = max(1, min(threads, count * E // _THREAD_ELEMENTS))
    run_tasks(_columns, (layer, operands, count, columns), (E + columns - 1) // columns, threads)


@dataclass(frozen=True)
class Facts:
    ids: int  # per batch row
    id_bytes: int
    V: int
    E: int


class EmbeddingGradKernel(CpuKernel):
    name = "embedding_grad"
    layers = (WeightGrad,)
    dtypes = (*ID_DTYPES, "float32")
    order = "ids in order"

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, WeightGrad) and isinstance(layer.of, Embedding)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        (ids, dy), dw = net.input_types(node), net.types[node.name]
        if (dw.dtype, dy.dtype) != ("float32", "float32"):
            yield Refusal(self.name, node.name, f"computes on float32, not {dw.dtype}")
            return
        V, E = dw.row_shape
        cost = CoreCost(ids.row_size * E, ids.row_bytes + dy.row_bytes, dw.row_bytes, row_cache_bytes=2 * dy.row_bytes)
        facts = Facts(ids.row_size, DTYPE_BYTES[ids.dtype], V, E)
        yield self.claim(net, node, facts, label=f"{self.name}<{V},{E}>", cost=cost)

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)
        layer = words(meta.ids, meta.id_bytes, meta.V, meta.E)
        return CompiledLaunch(address_of(_run), lambda threads: (address(layer), layer))
