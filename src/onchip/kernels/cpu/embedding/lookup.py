"""lookup: rows of a table by ids, each by itself or the sum or the mean of some: an Embedding, with what adds it up,
or one that was folded into the Linear behind it.

Idea      A row is copied, or added, as it comes from the table; what is added up stays in the first cache.
Order     Rows in order, in parts of 16, then these in order.
Floor     Memory: ids and their rows in, y out.
Ids       are looked at as they are read: the row of one that is in no table is not touched, and the first word of the
          facts says so. The launch, made by itself, looks at all ids before and names the first bad one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.chain import is_closed
from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int32_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import Embedding, GlobalMean, GlobalSum, TokenConv
from onchip.network.recipe import Array, Recipe, recipe_op
from onchip.network.tokens import check_token_ids
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal
from onchip.plan.layout import CHANNELS_LAST, has_channels

_PART = 16  # rows that are added up, then added to the total
_TASK_NUMBERS = 1 << 12  # that a thread takes at a time, at least
_THREAD_NUMBERS = 1 << 13  # for fewer a thread is not woken
_COPY, _SUM, _MEAN = range(3)
_ZERO = np.float32(0)

# What `_run` is told of a layer once; scratch: E floats of each worker.
_BAD, _TABLE, _V, _E, _S, _LINES, _HOW, _ID_BYTES, _SCRATCH, _WORDS = range(10)


@compiled(inline=True)
def _id_at(layer: Array, ids: int, n: int) -> int:
    """An id, read once; 0 for one that is in no table."""
    found = int_at(ids + n * 8) if layer[_ID_BYTES] == 8 else int32_at(ids + n * 4)
    if found < 0 or found >= layer[_V]:
        layer[_BAD] = 1
        return 0
    return found  # type: ignore[no-any-return]


@compiled()
def _lines(worker: int, piece: int, layer: Array, ids: int, y: int, lines: int, together: int) -> None:
    """Some lines of S ids each: E numbers come of a line, or of each id."""
    E, S, table = layer[_E], layer[_S], layer[_TABLE]
    for line in range(piece * together, min(lines, (piece + 1) * together)):
        if layer[_HOW] == _COPY:
            for s in range(line * S, (line + 1) * S):
                row, made = floats_at(table + _id_at(layer, ids, s) * E * 4, E), floats_at(y + s * E * 4, E)
                for n in range(E):
                    made[n] = row[n]
            continue
        total, part = floats_at(y + line * E * 4, E), floats_at(layer[_SCRATCH] + worker * E * 4, E)
        for n in range(E):
            total[n] = _ZERO
        for first in range(0, S, _PART):
            for s in range(first, min(S, first + _PART)):
                row = floats_at(table + _id_at(layer, ids, line * S + s) * E * 4, E)
                if s == first:
                    for n in range(E):
                        part[n] = row[n]
                else:
                    for n in range(E):
                        part[n] = part[n] + row[n]
            for n in range(E):
                total[n] = total[n] + part[n]
        if layer[_HOW] == _MEAN:
            count = np.float32(S)
            for n in range(E):
                total[n] = total[n] / count


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch that checks."""
    layer = ints_at(facts, _WORDS)
    lines, numbers = B * layer[_LINES], layer[_S] * layer[_E]
    together = max(1, _TASK_NUMBERS // numbers)
    threads = max(1, min(threads, lines * numbers // _THREAD_NUMBERS))
    given = (layer, int_at(operands), int_at(operands + 8), lines, together)
    run_tasks(_lines, given, (lines + together - 1) // together, threads)


@dataclass(frozen=True)
class Facts:
    how: int
    ids: int  # of a line
    lines: int  # of a row of the batch
    id_bytes: int
    name: str  # of the ids


class LookUpKernel:
    name = "lookup"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if job.is_training or not (isinstance(node.layer, Embedding) or _is_of_one_tap(net, node)):
            return
        names = [node.weights[role] for role in ("weight", "bias") if role in node.weights]
        ids, y = net.types[node.inputs[0]], net.types[node.name]
        odd = next((name for name in names if net.weight_type(name).dtype != "float32"), None)
        if odd is not None:
            yield Refusal(self.name, node.name, f"looks up float32, got {net.weight_type(odd)}")
            return
        V, *_, E = (int(d) for d in net.weights[node.weights["weight"]].shape)
        table = Recipe.of(with_bias, names, (V, E), flop=V * E if len(names) > 1 else 0)
        is_turned = isinstance(node.layer, TokenConv) and has_channels(y)
        writes = {node.name: CHANNELS_LAST} if is_turned else {}
        for nodes, how in _ways(net, start):
            S = int(ids.shape[-1]) if how != _COPY else 1
            facts = Facts(how, S, ids.row_size // max(1, S), DTYPE_BYTES[ids.dtype], node.inputs[0])
            looked_up = 4 * net.row_looked_up(node)
            cost = CoreCost(
                sum(map(net.row_flop, nodes)), ids.row_bytes + looked_up + net.types[nodes[-1].name].row_bytes,
                row_cache_bytes=looked_up,
            )  # fmt: skip
            yield Claim(
                self.name, f"{self.name}<{','.join(each.layer.kind for each in nodes)}>",
                tuple(each.name for each in nodes), cost, f"rows of {V:,} by ids", {"table": table},
                order=f"in order, parts of {_PART}" if how != _COPY else "", facts=facts, writes=writes,
            )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        told = claim.facts
        assert isinstance(told, Facts)
        table = np.ascontiguousarray(weights["table"])
        V, E = table.shape

        def facts(threads: int) -> tuple[int, object]:
            scratch = np.empty((threads, E), np.float32)
            layer = words(0, table, V, E, told.ids, told.lines, told.how, told.id_bytes, scratch)
            return address(layer), (layer, table, scratch)

        def check(inputs: Sequence[Array]) -> None:
            check_token_ids(inputs[0], V, name=told.name)

        return CompiledLaunch(address_of(_run), facts, check)


@recipe_op
def with_bias(table: Array, bias: Array | None = None) -> Array:
    """(V, E), or (V, 1, E) of a token convolution, with what is added to every row."""
    rows = np.ascontiguousarray(table.reshape(len(table), -1), np.float32)
    return rows if bias is None else rows + bias


def _is_of_one_tap(net: Network, node: Node) -> bool:
    """Whether it is a token convolution whose channels, if they come last, are a row of its table; others look on."""
    layer = node.layer
    if not isinstance(layer, TokenConv) or layer.stride != 1 or layer.pads != (0, 0):
        return False
    y = net.types[node.name]
    may_be_nhwc = not has_channels(y) or (bool(net.readers(node.name)) and node.name not in net.outputs)
    return net.weights[node.weights["weight"]].shape[1] == 1 and may_be_nhwc


def _ways(net: Network, start: int) -> Iterator[tuple[tuple[Node, ...], int]]:
    """The Embedding by itself, and with what adds up its rows along the last axis of the ids."""
    node = net.nodes[start]
    yield (node,), _COPY
    behind = net.nodes[start + 1] if start + 1 < len(net.nodes) else node
    shape = net.types[node.name].shape
    is_summed = isinstance(node.layer, Embedding) and isinstance(behind.layer, GlobalSum | GlobalMean)
    if behind.inputs != (node.name,) or not is_summed:
        return
    assert isinstance(behind.layer, GlobalSum | GlobalMean)
    is_last = [axis % len(shape) for axis in behind.layer.axes] == [len(shape) - 2]
    if is_last and len(shape) > 2 and net.types[node.name].row_size and is_closed(net, [node, behind]):
        yield (node, behind), _MEAN if isinstance(behind.layer, GlobalMean) else _SUM
