"""batch_sums: sums over the batch, and over pixels: gradients of biases; statistics and gradients of batch norms.

Idea      x is rows of C columns, or of C channels of P pixels each. A task sums some columns over some rows; the sums
          of all tasks of a column are added at the end.
Order     Rows in order, in float64, in partial sums of as many rows as the sizes of x say; pixels as of
          microkernels/sums.py.
Floor     Memory: x in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onchip.kernels.chain import is_closed
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
from onchip.kernels.cpu.microkernels.sums import PRODUCTS, SQUARES, SUM, sum_terms
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BatchMean,
    BatchNorm1d,
    BatchNorm2d,
    BatchSum,
    BatchVariance,
    GlobalSum,
    WeightGrad,
)
from onchip.network.recipe import Array, Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_COLUMNS = 256  # per task
_TASK_ELEMENTS = 1 << 14  # per task, at least
_THREAD_ELEMENTS = 1 << 15  # per thread: below this, a thread is not woken
_PARTIAL_SUMS = 1 << 16  # of all columns together, at most
_MOST_PARTS = 64  # partial sums per column
_TOTAL, _MEAN, _VARIANCE, _NORMED = range(4)  # what the sum becomes; _NORMED: divided by the standard deviation

# Layout of the array that `_run` reads. Operands are indices; MEAN and VAR addresses; eps bits.
(
    _TERMS, _RESULT, _C, _P, _VECTORS, _X, _OTHER, _Y, _AT_MEAN, _AT_VAR, _IS_UNBIASED, _EPS, _SUMS, _FIELDS,
) = range(14)  # fmt: skip


@compiled()
def _sum_columns(x: int, dy: int, shifts: int, rows: int, C: int, count: int, terms: int, totals: Array) -> None:
    """Sums over rows, C elements apart, of `count` columns."""
    for r in range(rows):
        x_row, dy_row, mean = (
            floats_at(x + r * C * 4, count),
            floats_at(dy + r * C * 4, count),
            floats_at(shifts, count),
        )
        if terms == SUM:
            for c in range(count):
                totals[c] += np.float64(x_row[c])
        elif terms == SQUARES:
            for c in range(count):
                totals[c] += np.float64(x_row[c] - mean[c]) * np.float64(x_row[c] - mean[c])
        else:
            for c in range(count):
                totals[c] += np.float64(x_row[c] - mean[c]) * np.float64(dy_row[c])


@compiled()
def _sum_runs(x: int, dy: int, shifts: int, rows: int, layer: Array, count: int, totals: Array) -> None:
    """Sums over rows of the pixels of `count` channels."""
    P, terms = layer[_P], layer[_TERMS]
    row_bytes = layer[_C] * P * 4
    for r in range(rows):
        for c in range(count):
            at, with_ = x + r * row_bytes + c * P * 4, dy + r * row_bytes + c * P * 4
            if terms == SUM:
                totals[c] += sum_terms(at, 0, P, np.float32(0), SUM)
            elif terms == SQUARES:
                totals[c] += sum_terms(at, 0, P, floats_at(shifts, count)[c], SQUARES)
            else:
                totals[c] += sum_terms(at, with_, P, floats_at(shifts, count)[c], PRODUCTS)


@compiled()
def _part(worker: int, task: int, layer: Array, x: int, dy: int, rows: int, part_rows: int, blocks: int) -> None:
    """Some columns over the rows of a part: to that part's sums."""
    C, part, first = layer[_C], task // blocks, task % blocks * _COLUMNS
    begin, count = part * part_rows, min(_COLUMNS, C - first)
    totals = doubles_at(layer[_SUMS] + (part * C + first) * 8, count)
    for c in range(count):
        totals[c] = 0.0
    shifts, some = layer[_AT_MEAN] + first * 4, min(part_rows, rows - begin)
    offset = (begin * C + first) * layer[_P] * 4
    if layer[_P] > 1:
        _sum_runs(x + offset, dy + offset, shifts, some, layer, count, totals)
    else:
        _sum_columns(x + offset, dy + offset, shifts, some, C, count, layer[_TERMS], totals)


@compiled()
def _finish(layer: Array, parts: int, rows: int, y_at: int) -> None:
    """Add the parts in order, and write the results."""
    C, n, result = layer[_C], rows * layer[_P], layer[_RESULT]
    sums, y, var = doubles_at(layer[_SUMS], parts * C), floats_at(y_at, C), floats_at(layer[_AT_VAR], C)
    eps = np.int32(layer[_EPS]).view(np.float32)
    for part in range(1, parts):
        for c in range(C):
            sums[c] += sums[part * C + c]
    divisor = 1.0
    if result == _MEAN:
        divisor = np.float64(max(1, n))
    elif result == _VARIANCE:
        divisor = np.float64(max(1, n - layer[_IS_UNBIASED]))
    for c in range(C):
        if result == _NORMED:
            divisor = np.sqrt(np.float64(var[c]) + np.float64(eps))
        y[c] = np.float32(sums[c] / divisor)


@compiled(inline=True)
def _parts(rows: int, C: int, P: int) -> int:
    """Parts of the rows: as many as there is work for."""
    most = max(1, min(_MOST_PARTS, _PARTIAL_SUMS // C))
    part_rows = max(1, _TASK_ELEMENTS // (min(C, _COLUMNS) * P))
    return max(1, min(most, (rows + part_rows - 1) // part_rows))


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    layer = ints_at(facts, _FIELDS)
    C, P, rows = layer[_C], layer[_P], B * layer[_VECTORS]
    x, dy, y = (
        int_at(operands + layer[_X] * 8),
        int_at(operands + layer[_OTHER] * 8),
        int_at(operands + layer[_Y] * 8),
    )
    parts = _parts(rows, C, P)
    part_rows = (rows + parts - 1) // parts
    blocks = (C + _COLUMNS - 1) // _COLUMNS
    threads = max(1, min(threads, rows * C * P // _THREAD_ELEMENTS))
    run_tasks(_part, (layer, x, dy, rows, part_rows, blocks), parts * blocks, threads)
    _finish(layer, parts, rows, y)


@dataclass(frozen=True)
class Facts:
    terms: int
    result: int
    shape: tuple[int, int, int]  # C, P, vectors per batch row
    operands: tuple[int, int, int]  # indices of x, dy and y
    is_unbiased: bool = False
    eps: float = 0.0


class BatchSumsKernel(CpuKernel):
    name = "batch_sums"
    layers = (BatchSum, GlobalSum, BatchMean, BatchVariance, WeightGrad)
    order = "rows in order, in partial sums by the sizes of x"

    def applies(self, net: Network, start: int) -> bool:
        return _found(net, start) is not None

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        found = _found(net, start)
        assert found is not None
        nodes, facts = found
        weights = {role: name for role, name in nodes[0].weights.items() if role in ("mean", "var")}
        kinds = [net.types[nodes[-1].name], *map(net.weight_type, weights.values())]
        if any(kind.dtype != "float32" for kind in kinds):
            yield Refusal(self.name, nodes[0].name, "computes on float32")
            return
        recipes = {role: Recipe.of(as_is, (name,), (facts.shape[0],)) for role, name in weights.items()}
        read = sum(net.types[value].row_bytes for value in {nodes[0].inputs[0], nodes[0].inputs[-1]})
        cost = CoreCost(sum(map(net.row_flop, nodes)), read, 4 * facts.shape[0], row_cache_bytes=read)
        yield Claim(
            self.name, f"{self.name}<{','.join(node.layer.kind for node in nodes)}>",
            tuple(node.name for node in nodes), cost, "sums of columns over parts of the rows", recipes,
            order=self.order, facts=facts,
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)
        arrays = {role: np.ascontiguousarray(weight) for role, weight in weights.items()}
        C, eps = meta.shape[0], int(np.float32(meta.eps).view(np.int32))

        def facts(threads: int) -> tuple[int, object]:
            sums = np.empty(max(C, _PARTIAL_SUMS))
            layer = words(
                meta.terms, meta.result, *meta.shape, *meta.operands, arrays.get("mean", 0), arrays.get("var", 0),
                meta.is_unbiased, eps, sums,
            )  # fmt: skip
            return address(layer), (layer, sums, arrays)

        return CompiledLaunch(address_of(_run), facts)


def _found(net: Network, start: int) -> tuple[tuple[Node, ...], Facts] | None:
    """The nodes from net.nodes[start] on that are one sum over the batch, and how it is computed."""
    node = net.nodes[start]
    layer, x = node.layer, net.types[node.inputs[0]].row_shape
    C, P, count = int(x[0]) if x else 1, math.prod(x[1:]), len(set(node.inputs))
    channels = (C, P, 1)
    if 0 in x:
        return None
    if isinstance(layer, BatchSum):
        return (node,), Facts(SUM, _TOTAL, (math.prod(x), 1, 1), (0, 0, 1))
    if isinstance(layer, GlobalSum):
        last = net.nodes[start + 1] if start + 1 < len(net.nodes) else node
        axes = sorted(axis % (len(x) + 1) for axis in layer.axes)
        is_summed = isinstance(last.layer, BatchSum) and last.inputs == (node.name,) and is_closed(net, [node, last])
        if is_summed and axes == list(range(2, len(x) + 1)):
            return (node, last), Facts(SUM, _TOTAL, channels, (0, 0, 1))
        if is_summed and axes == list(range(1, len(axes) + 1)):
            columns = math.prod(x[len(axes) :])
            return (node, last), Facts(SUM, _TOTAL, (columns, 1, math.prod(x) // columns), (0, 0, 1))
    if isinstance(layer, BatchMean):
        return (node,), Facts(SUM, _MEAN, channels, (0, 0, 1))
    if isinstance(layer, BatchVariance):
        return (node,), Facts(SQUARES, _VARIANCE, channels, (0, 0, 1), layer.is_unbiased)
    if isinstance(layer, WeightGrad) and isinstance(layer.of, BatchNorm1d | BatchNorm2d):
        dy = list(dict.fromkeys(node.inputs)).index(node.inputs[-1])
        if layer.role == "bias":
            return (node,), Facts(SUM, _TOTAL, channels, (dy, 0, count))
        return (node,), Facts(PRODUCTS, _NORMED, channels, (0, dy, count), eps=layer.of.eps)
    return None
