"""loss: the loss of each row, the gradient of the network's output, and the loss of the batch, in one pass over rows;
also whether the output of each row is correct.

Idea      A row's softmax serves its loss and its gradient, while it is in cache.
Order     A row in order, in float64, elements in four interleaved sums; the batch in parts of the rows, by its size.
Limits    float32; classes as int32 or int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.kernels.cpu.compiler.jit import (
    LinkedFunction,
    address,
    address_of,
    code_call,
    compiled,
    doubles_at,
    floats_at,
    int32_at,
    int_at,
    ints_at,
    linked,
)
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.microkernels.exponential import clip, expm1_exp, sigmoid, softplus
from onchip.kernels.cpu.threading.launches import CompiledLaunch, operand_at, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    AbsoluteError,
    BatchSum,
    BinaryCrossEntropy,
    Correct,
    CrossEntropy,
    HuberLoss,
    InputGrad,
    Layer,
    Mul,
    SquaredError,
)
from onchip.network.layers.embedding import ID_DTYPES
from onchip.network.recipe import Array
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_PARTS = 64  # of the batch, at most: each has a sum of losses
_THREAD_ELEMENTS = 1 << 13  # per thread: below this, a thread is not woken
_ZERO, _ONE = np.float32(0), np.float32(1)

# Layout of the array that `_run` reads. ROWS is the address of code: see _rows_of. X to DX are operands, -1 for none:
# inputs, and the results that are wanted. SMOOTHING is float32 bits, FACTOR float64 bits.
(
    _ROWS, _N, _TARGET_BYTES, _SMOOTHING, _FACTOR, _X, _TARGET, _SHARE, _LOSSES, _TOTAL, _DX, _SUMS, _FIELDS,
) = range(13)  # fmt: skip

# -- rows --------------------------------------------------------------------------------------------------------

# Of the facts, the output y, the address of its target, and its share of the batch: the loss of a row. The gradient
# times `share` goes to the address dx_at, if that is not 0.


@compiled()
def _cross_entropy(facts: Array, z: Array, target_at: int, share: np.float32, dx_at: int) -> float:
    N, highest, total, target = len(z), z[0], 0.0, _class_at(facts, target_at)
    smoothing = np.int32(facts[_SMOOTHING]).view(np.float32)
    for n in range(1, N):
        highest = max(highest, z[n])
    if dx_at != 0:
        dx = floats_at(dx_at, N)
        for n in range(N):
            _, e = expm1_exp(z[n] - highest)
            dx[n] = e
        for n in range(N):
            total += np.float64(dx[n])
        scale, even = _ONE / np.float32(total), smoothing / np.float32(N)
        for n in range(N):
            dx[n] = (dx[n] * scale - even) * share
        dx[target] -= (_ONE - smoothing) * share
    else:
        for n in range(N):
            _, e = expm1_exp(z[n] - highest)
            total += np.float64(e)
    loss: float = np.log(total)
    if smoothing > _ZERO:
        others = 0.0
        for n in range(N):
            others += np.float64(z[n] - highest)
        loss -= np.float64(smoothing) / N * others
    return loss - np.float64(_ONE - smoothing) * np.float64(z[target] - highest)


@compiled()
def _correct(facts: Array, y: Array, target_at: int, share: np.float32, dx_at: int) -> float:
    """1 if element `target` is the first largest one: each before it is smaller, none after it is larger."""
    target = _class_at(facts, target_at)
    if target < 0 or target >= len(y):
        return 0.0
    is_largest, most = True, y[target]
    for n in range(target):
        is_largest &= y[n] < most
    for n in range(target, len(y)):
        is_largest &= y[n] <= most  # False for NaN
    return 1.0 if is_largest else 0.0


@compiled(inline=True)
def _class_at(facts: Array, target_at: int) -> int:
    target: int = int_at(target_at) if facts[_TARGET_BYTES] == 8 else int32_at(target_at)
    return target


def _sum_of(element: Any) -> Any:
    """`factor` times the sum over the elements. element(y, target) returns a loss, and its derivative by y."""

    def of_row(facts: Array, y: Array, target_at: int, share: np.float32, dx_at: int) -> float:
        N, factor = len(y), np.int64(facts[_FACTOR]).view(np.float64)
        target = floats_at(target_at, N)
        a, b, c, d = 0.0, 0.0, 0.0, 0.0
        for n in range(0, N - 3, 4):
            a += element(y[n], target[n])[0]
            b += element(y[n + 1], target[n + 1])[0]
            c += element(y[n + 2], target[n + 2])[0]
            d += element(y[n + 3], target[n + 3])[0]
        total = (a + b) + (c + d)
        for n in range(N - N % 4, N):
            total += element(y[n], target[n])[0]
        if dx_at != 0:
            dx, scale = floats_at(dx_at, N), np.float32(factor) * share
            for n in range(N):
                dx[n] = element(y[n], target[n])[1] * scale
        return total * factor

    of_row.__name__ = of_row.__qualname__ = f"_sum_of{element.__name__}"  # by which the code that calls it is cached
    return compiled()(of_row)


@compiled(inline=True)
def _square(y: np.float32, target: np.float32) -> tuple[float, np.float32]:
    d = y - target
    return np.float64(d) ** 2, d + d


@compiled(inline=True)
def _binary_cross_entropy(y: np.float32, target: np.float32) -> tuple[float, np.float32]:
    """For y of any size: max(y, 0) - y target + log(1 + exp(-|y|))."""
    above = np.float64(max(y, _ZERO)) - np.float64(y) * np.float64(target)
    return above + np.float64(softplus(-abs(y))), sigmoid(y) - target


@compiled(inline=True)
def _absolute(y: np.float32, target: np.float32) -> tuple[float, np.float32]:
    d = y - target
    return np.float64(abs(d)), _ONE if d > _ZERO else -_ONE if d < _ZERO else d  # d: 0 or NaN


@compiled(inline=True)
def _huber(y: np.float32, target: np.float32) -> tuple[float, np.float32]:
    d = y - target
    inside = clip(d, -_ONE, _ONE)
    return np.float64(inside) * (np.float64(d) - np.float64(inside) * 0.5), inside


def _rows_of(of_row: Any) -> LinkedFunction:
    """The code of a loss for the rows from `first` to before `end`; their sum is written to the address sum_at."""

    def rows(facts_at: int, operands: int, first: int, end: int, sum_at: int) -> None:
        facts, total = ints_at(facts_at, _FIELDS), 0.0
        N, target_bytes = facts[_N], facts[_TARGET_BYTES]
        y, target, dx = (
            operand_at(facts, _X, operands),
            operand_at(facts, _TARGET, operands),
            operand_at(facts, _DX, operands),
        )
        shares, losses = operand_at(facts, _SHARE, operands), operand_at(facts, _LOSSES, operands)
        for r in range(first, end):
            share = _ONE
            if shares != 0:
                share = floats_at(shares, end)[r]
            dx_at = dx + r * N * 4 if dx != 0 else 0
            loss = of_row(facts, floats_at(y + r * N * 4, N), target + r * target_bytes, share, dx_at)
            if losses != 0:
                floats_at(losses, end)[r] = np.float32(loss)
            total += loss * np.float64(share)
        doubles_at(sum_at, 1)[0] = total

    rows.__name__ = f"rows_of{of_row.__name__}"  # its symbol
    return LinkedFunction(rows, (types.int64,) * 5)


# Compiled when a network has such a loss: all of them would take twice as long as the first.
_ROWS_OF: dict[type[Layer], LinkedFunction] = {
    CrossEntropy: _rows_of(_cross_entropy),
    Correct: _rows_of(_correct),
    SquaredError: _rows_of(_sum_of(_square)),
    BinaryCrossEntropy: _rows_of(_sum_of(_binary_cross_entropy)),
    AbsoluteError: _rows_of(_sum_of(_absolute)),
    HuberLoss: _rows_of(_sum_of(_huber)),
}
_call = code_call(5)


@compiled()
def _part(worker: int, part: int, facts_at: int, operands: int, B: int, part_rows: int) -> None:
    facts, end = ints_at(facts_at, _FIELDS), min(B, (part + 1) * part_rows)
    _call(facts[_ROWS], facts_at, operands, part * part_rows, end, facts[_SUMS] + 8 * part)


@linked(*(types.int64,) * 4)
def _run(facts_at: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    facts = ints_at(facts_at, _FIELDS)
    part_rows = max(1, (B + _PARTS - 1) // _PARTS)
    parts = (B + part_rows - 1) // part_rows
    threads = max(1, min(threads, B * facts[_N] // _THREAD_ELEMENTS))
    run_tasks(_part, (facts_at, operands, B, part_rows), parts, threads)
    total, sums = operand_at(facts, _TOTAL, operands), doubles_at(facts[_SUMS], _PARTS)
    if total != 0:
        loss = 0.0
        for part in range(parts):
            loss += sums[part]
        floats_at(total, 1)[0] = np.float32(loss)


@dataclass(frozen=True)
class Facts:
    layer: Layer
    N: int  # elements per row
    target_bytes: int  # per row
    operands: tuple[int, ...]  # of output, target, share, losses, total and gradient; -1 for none


class LossKernel(CpuKernel):
    name = "loss"
    layers = (*_ROWS_OF, InputGrad)
    order = "rows in order, the batch in parts by its size"

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return not isinstance(layer, InputGrad) or type(layer.of) in _ROWS_OF

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer, target = node.layer, net.types[node.inputs[1]]
        dtypes = ID_DTYPES if _of(layer) in (CrossEntropy, Correct) else ("float32",)
        if target.dtype not in dtypes or (isinstance(layer, InputGrad) and layer.index):
            yield Refusal(self.name, node.name, f"gradients of outputs, targets of {' or '.join(dtypes)}")
            return
        for nodes in filter(None, ((node,), _step_of(net, start))):
            yield self._claim(net, nodes)

    def _claim(self, net: Network, nodes: tuple[Node, ...]) -> Claim:
        first, last, inside = nodes[0], nodes[-1], {node.name for node in nodes}
        loss = first.layer.of if isinstance(first.layer, InputGrad) else first.layer
        inputs = list(dict.fromkeys(v for node in nodes for v in node.inputs if v not in inside))
        outputs = [last] if len(nodes) == 1 else [nodes[2], last]
        gradient = last.name if isinstance(last.layer, InputGrad) else ""
        operands = {name: i for i, name in enumerate((*inputs, *(node.name for node in outputs)))}
        losses, total = ("" if gradient else last.name), (nodes[2].name if len(nodes) > 1 else "")
        roles = *first.inputs[:2], last.inputs[-1] if gradient else "", losses, total, gradient
        N = math.prod(net.types[first.inputs[0]].row_shape)
        target_bytes = net.types[first.inputs[1]].row_bytes
        facts = Facts(loss, N, target_bytes, tuple(operands.get(name, -1) for name in roles))
        cost = CoreCost(
            sum(map(net.row_flop, nodes)), sum(net.types[name].row_bytes for name in operands), row_cache_bytes=8 * N
        )
        return Claim(
            self.name, f"{self.name}<{','.join(node.layer.kind for node in nodes)}>",
            tuple(node.name for node in nodes), cost, "one pass over rows", order=self.order, facts=facts,
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)
        layer, rows = meta.layer, address_of(_ROWS_OF[type(meta.layer)])
        smoothing = np.float32(layer.smoothing if isinstance(layer, CrossEntropy) else 0)
        is_half = isinstance(layer, SquaredError) and not layer.is_mean
        factor = 0.5 if is_half else 1 / max(1, meta.N)
        numbers = int(smoothing.view(np.int32)), int(np.float64(factor).view(np.int64))

        def facts(threads: int) -> tuple[int, object]:
            sums = np.empty(_PARTS)
            fields = words(rows, meta.N, meta.target_bytes, *numbers, *meta.operands, sums)
            return address(fields), (fields, sums)

        def check(inputs: Sequence[Array]) -> None:
            classes = inputs[meta.operands[1]]
            if classes.size and not 0 <= classes.min() <= classes.max() < meta.N:
                got = f"{classes.min()} to {classes.max()}"
                expected, hint = f"0 to {meta.N - 1}", "a network with one output per class, or classes counted from 0"
                raise InputError("a class is out of range", got=got, expected=expected, hint=hint)

        return CompiledLaunch(
            address_of(_run), facts, check if isinstance(layer, CrossEntropy) else None, meta.operands[1]
        )


def _of(layer: Layer) -> type[Layer]:
    return type(layer.of if isinstance(layer, InputGrad) else layer)


def _step_of(net: Network, start: int) -> tuple[Node, ...] | None:
    """A loss with its sum over the batch, weighted by each row's share, and the gradient of the output."""
    nodes = net.nodes[start : start + 4]
    if [type(node.layer) for node in nodes[1:]] != [Mul, BatchSum, InputGrad]:
        return None
    losses, shared, total, gradient = nodes
    share, read = shared.inputs[-1], losses.inputs
    reads = (losses.name, share), (shared.name,), (*read, losses.name, share)
    is_step = tuple(node.inputs for node in nodes[1:]) == reads and gradient.layer == InputGrad(losses.layer, 0)
    is_read = {reader.name for node in (losses, shared) for reader in net.readers(node.name)}
    is_closed = is_read <= {node.name for node in nodes} and net.kept.isdisjoint({losses.name, shared.name})
    has_results = all(node.name in net.kept or net.readers(node.name) for node in (total, gradient))
    return nodes if is_step and is_closed and has_results else None
