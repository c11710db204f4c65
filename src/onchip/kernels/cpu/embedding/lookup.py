"""lookup: embedding lookup, optionally reduced to sums or means over the last axis of the ids; also an Embedding folded
into the next Linear.

Idea      Each row is copied, or accumulated in L1, as it comes from the table.
Order     Rows in order, in partial sums of 16 rows.
Floor     Memory: ids and their rows in, y out.
Ids       are checked when they are read: a bad id reads row 0 and sets the first field of the facts. Launched on its
          own, the kernel checks all ids first, and the error names the first bad one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.chain import is_closed
from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int32_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import Embedding, GlobalMean, GlobalSum, TokenConv
from onchip.network.layers.embedding import ID_DTYPES
from onchip.network.recipe import Array, Recipe, recipe_op
from onchip.network.tokens import check_token_ids
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.layout import CHANNELS_LAST, has_channels

_CHUNK = 16  # rows per partial sum
_TASK_ELEMENTS = 1 << 12  # per task, at least
_THREAD_ELEMENTS = 1 << 13  # per thread: below this, a thread is not woken
_COPY, _SUM, _MEAN = range(3)
_ZERO = np.float32(0)

# Layout of the array that `_run` reads; scratch: E floats per worker.
_HAS_BAD_ID, _TABLE, _V, _E, _S, _LINES, _HOW, _ID_BYTES, _SCRATCH, _FIELDS = range(10)


@compiled(inline=True)
def _id_at(layer: Array, ids: int, n: int) -> int:
    """Id n, read once; 0 if it is out of range."""
    index = int_at(ids + n * 8) if layer[_ID_BYTES] == 8 else int32_at(ids + n * 4)
    if index < 0 or index >= layer[_V]:
        layer[_HAS_BAD_ID] = 1
        return 0
    return index  # type: ignore[no-any-return]


@compiled()
def _lines(worker: int, task: int, layer: Array, ids: int, y: int, lines: int, task_lines: int) -> None:
    """Some lines of S ids each; the result has E elements per line, or per id if rows are copied."""
    E, S, table = layer[_E], layer[_S], layer[_TABLE]
    for line in range(task * task_lines, min(lines, (task + 1) * task_lines)):
        if layer[_HOW] == _COPY:
            for s in range(line * S, (line + 1) * S):
                row, dst = floats_at(table + _id_at(layer, ids, s) * E * 4, E), floats_at(y + s * E * 4, E)
                for n in range(E):
                    dst[n] = row[n]
            continue
        total, partial = floats_at(y + line * E * 4, E), floats_at(layer[_SCRATCH] + worker * E * 4, E)
        for n in range(E):
            total[n] = _ZERO
        for first in range(0, S, _CHUNK):
            for s in range(first, min(S, first + _CHUNK)):
                row = floats_at(table + _id_at(layer, ids, line * S + s) * E * 4, E)
                if s == first:
                    for n in range(E):
                        partial[n] = row[n]
                else:
                    for n in range(E):
                        partial[n] = partial[n] + row[n]
            for n in range(E):
                total[n] = total[n] + partial[n]
        if layer[_HOW] == _MEAN:
            count = np.float32(S)
            for n in range(E):
                total[n] = total[n] / count


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch with an id check."""
    layer = ints_at(facts, _FIELDS)
    lines, elements = B * layer[_LINES], layer[_S] * layer[_E]
    task_lines = max(1, _TASK_ELEMENTS // elements)
    threads = max(1, min(threads, lines * elements // _THREAD_ELEMENTS))
    arguments = (layer, int_at(operands), int_at(operands + 8), lines, task_lines)
    run_tasks(_lines, arguments, (lines + task_lines - 1) // task_lines, threads)


@dataclass(frozen=True)
class Facts:
    how: int
    ids: int  # per line
    lines: int  # per batch row
    id_bytes: int
    name: str  # the value with the ids


class LookUpKernel(CpuKernel):
    name = "lookup"
    layers = (Embedding, TokenConv)
    dtypes = ID_DTYPES

    def applies(self, net: Network, start: int) -> bool:
        node = net.nodes[start]
        return isinstance(node.layer, Embedding) or _has_one_tap(net, node)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        names = [node.weights[role] for role in ("weight", "bias") if role in node.weights]
        ids, y = net.types[node.inputs[0]], net.types[node.name]
        other = next((name for name in names if net.weight_type(name).dtype != "float32"), None)
        if other is not None:
            yield Refusal(self.name, node.name, f"float32 tables only, got {net.weight_type(other)}")
            return
        V, *_, E = (int(d) for d in net.weights[node.weights["weight"]].shape)
        table = Recipe.of(with_bias, names, (V, E), flop=V * E if len(names) > 1 else 0)
        is_nhwc = isinstance(node.layer, TokenConv) and has_channels(y)
        writes = {node.name: CHANNELS_LAST} if is_nhwc else {}
        for nodes, how in _candidates(net, start):
            S = int(ids.shape[-1]) if how != _COPY else 1
            facts = Facts(how, S, ids.row_size // max(1, S), DTYPE_BYTES[ids.dtype], node.inputs[0])
            looked_up = 4 * net.row_lookup_elements(node)
            cost = CoreCost(
                sum(map(net.row_flop, nodes)), ids.row_bytes + looked_up + net.types[nodes[-1].name].row_bytes,
                row_cache_bytes=looked_up,
            )  # fmt: skip
            yield Claim(
                self.name, f"{self.name}<{','.join(each.layer.kind for each in nodes)}>",
                tuple(each.name for each in nodes), cost, f"rows of a {V:,}-row table by id", {"table": table},
                order=f"in order, in partial sums of {_CHUNK} rows" if how != _COPY else "", facts=facts, writes=writes,
            )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)
        table = np.ascontiguousarray(weights["table"])
        V, E = table.shape

        def facts(threads: int) -> tuple[int, object]:
            scratch = np.empty((threads, E), np.float32)
            layer = words(0, table, V, E, meta.ids, meta.lines, meta.how, meta.id_bytes, scratch)
            return address(layer), (layer, table, scratch)

        def check(inputs: Sequence[Array]) -> None:
            check_token_ids(inputs[0], V, name=meta.name)

        return CompiledLaunch(address_of(_run), facts, check)


@recipe_op
def with_bias(table: Array, bias: Array | None = None) -> Array:
    """(V, E), or (V, 1, E) of a token convolution, with the bias added to every row."""
    rows = np.ascontiguousarray(table.reshape(len(table), -1), np.float32)
    return rows if bias is None else rows + bias


def _has_one_tap(net: Network, node: Node) -> bool:
    """Whether the node is a token convolution with one tap, whose output rows, in NHWC, are rows of its table."""
    layer = node.layer
    if not isinstance(layer, TokenConv) or layer.stride != 1 or layer.pads != (0, 0):
        return False
    y = net.types[node.name]
    may_be_nhwc = not has_channels(y) or (bool(net.readers(node.name)) and node.name not in net.outputs)
    return net.weights[node.weights["weight"]].shape[1] == 1 and may_be_nhwc


def _candidates(net: Network, start: int) -> Iterator[tuple[tuple[Node, ...], int]]:
    """The lookup alone; an Embedding also with a sum or mean over the last axis of the ids."""
    node = net.nodes[start]
    yield (node,), _COPY
    following = net.nodes[start + 1] if start + 1 < len(net.nodes) else node
    shape = net.types[node.name].shape
    is_summed = isinstance(node.layer, Embedding) and isinstance(following.layer, GlobalSum | GlobalMean)
    if following.inputs != (node.name,) or not is_summed:
        return
    assert isinstance(following.layer, GlobalSum | GlobalMean)
    is_last = [axis % len(shape) for axis in following.layer.axes] == [len(shape) - 2]
    if is_last and len(shape) > 2 and net.types[node.name].row_size and is_closed(net, [node, following]):
        yield (node, following), _MEAN if isinstance(following.layer, GlobalMean) else _SUM
