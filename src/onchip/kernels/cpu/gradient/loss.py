"""loss: the loss of each row, the gradient of the network's output, and the loss of the batch, in one pass over rows;
also whether the output of each row is correct.

Idea      A row's softmax serves its loss and its gradient, while it is in cache.
Order     A row in order, in float64, squares in four interleaved sums; the batch in parts of the rows, by its size.
Limits    float32; classes as int32 or int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.errors import InputError
from onchip.kernels.cpu.compiler.jit import (
    address,
    address_of,
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
from onchip.kernels.cpu.microkernels.exponential import expm1_exp
from onchip.kernels.cpu.threading.launches import CompiledLaunch, operand_at, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchSum, Correct, CrossEntropy, InputGrad, Layer, Mul, SquaredError
from onchip.network.layers.embedding import ID_DTYPES
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_PARTS = 64  # of the batch, at most: each has a sum of losses
_THREAD_ELEMENTS = 1 << 13  # per thread: below this, a thread is not woken
_ZERO, _ONE = np.float32(0), np.float32(1)
_CROSS_ENTROPY, _SQUARES, _CORRECT = range(3)

# Layout of the array that `_run` reads. X to TOTAL are operands, -1 for none: inputs, then the results that are wanted.
# SMOOTHING is float32 bits, FACTOR float64 bits.
(
    _KIND, _N, _CLASS_BYTES, _SMOOTHING, _FACTOR, _X, _TARGET, _SHARE, _LOSSES, _TOTAL, _DX, _SUMS, _FIELDS,
) = range(13)  # fmt: skip


@compiled()
def _cross_entropy(z: Array, target: int, smoothing: np.float32, share: np.float32, dx_at: int) -> float:
    """The loss of one row; its gradient times `share` goes to the address dx_at, if that is not 0."""
    N, highest, total = len(z), z[0], 0.0
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
def _squares(y: Array, target: Array, factor: float, share: np.float32, dx_at: int) -> float:
    """The same for `factor` times the sum of squared differences."""
    N = len(y)
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    for n in range(0, N - 3, 4):
        a += np.float64(y[n] - target[n]) ** 2
        b += np.float64(y[n + 1] - target[n + 1]) ** 2
        c += np.float64(y[n + 2] - target[n + 2]) ** 2
        d += np.float64(y[n + 3] - target[n + 3]) ** 2
    total = (a + b) + (c + d)
    for n in range(N - N % 4, N):
        total += np.float64(y[n] - target[n]) ** 2
    if dx_at != 0:
        dx, scale = floats_at(dx_at, N), np.float32(2 * factor) * share
        for n in range(N):
            dx[n] = (y[n] - target[n]) * scale
    return total * factor


@compiled()
def _correct(y: Array, target: int) -> float:
    """1 if element `target` is the first largest one: each before it is smaller, none after it is larger."""
    if target < 0 or target >= len(y):
        return 0.0
    is_largest, most = True, y[target]
    for n in range(target):
        is_largest &= y[n] < most
    for n in range(target, len(y)):
        is_largest &= y[n] <= most  # False for NaN
    return 1.0 if is_largest else 0.0


@compiled()
def _rows(worker: int, part: int, facts: Array, operands: int, B: int, part_rows: int) -> None:
    N, size, total = facts[_N], facts[_CLASS_BYTES], 0.0
    x, target, dx = (
        operand_at(facts, _X, operands),
        operand_at(facts, _TARGET, operands),
        operand_at(facts, _DX, operands),
    )
    share, losses = operand_at(facts, _SHARE, operands), operand_at(facts, _LOSSES, operands)
    smoothing, factor = np.int32(facts[_SMOOTHING]).view(np.float32), np.int64(facts[_FACTOR]).view(np.float64)
    for r in range(part * part_rows, min(B, (part + 1) * part_rows)):
        z, dx_at, of_row = floats_at(x + r * N * 4, N), dx + r * N * 4 if dx != 0 else 0, _ONE
        if share != 0:
            of_row = floats_at(share, B)[r]
        if facts[_KIND] != _SQUARES:
            index = int_at(target + r * 8) if size == 8 else int32_at(target + r * 4)
            if facts[_KIND] == _CORRECT:
                loss = _correct(z, index)
            else:
                loss = _cross_entropy(z, index, smoothing, of_row, dx_at)
        else:
            loss = _squares(z, floats_at(target + r * N * 4, N), factor, of_row, dx_at)
        if losses != 0:
            floats_at(losses, B)[r] = np.float32(loss)
        total += loss * np.float64(of_row)
    doubles_at(facts[_SUMS], _PARTS)[part] = total


@linked(*(types.int64,) * 4)
def _run(facts_at: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    facts = ints_at(facts_at, _FIELDS)
    part_rows = max(1, (B + _PARTS - 1) // _PARTS)
    parts = (B + part_rows - 1) // part_rows
    threads = max(1, min(threads, B * facts[_N] // _THREAD_ELEMENTS))
    run_tasks(_rows, (facts, operands, B, part_rows), parts, threads)
    total, sums = operand_at(facts, _TOTAL, operands), doubles_at(facts[_SUMS], _PARTS)
    if total != 0:
        loss = 0.0
        for part in range(parts):
            loss += sums[part]
        floats_at(total, 1)[0] = np.float32(loss)


@dataclass(frozen=True)
class Facts:
    layer: CrossEntropy | SquaredError | Correct
    N: int  # elements per row
    class_bytes: int
    operands: tuple[int, ...]  # of output, target, share, losses, total and gradient; -1 for none


class LossKernel(CpuKernel):
    name = "loss"
    layers = (CrossEntropy, SquaredError, Correct, InputGrad)
    order = "rows in order, the batch in parts by its size"

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return not isinstance(layer, InputGrad) or isinstance(layer.of, CrossEntropy | SquaredError)

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
        assert isinstance(loss, CrossEntropy | SquaredError | Correct)
        inputs = list(dict.fromkeys(v for node in nodes for v in node.inputs if v not in inside))
        outputs = [last] if len(nodes) == 1 else [nodes[2], last]
        gradient = last.name if isinstance(last.layer, InputGrad) else ""
        operands = {name: i for i, name in enumerate((*inputs, *(node.name for node in outputs)))}
        losses, total = ("" if gradient else last.name), (nodes[2].name if len(nodes) > 1 else "")
        roles = *first.inputs[:2], last.inputs[-1] if gradient else "", losses, total, gradient
        N = math.prod(net.types[first.inputs[0]].row_shape)
        facts = Facts(
            loss, N, DTYPE_BYTES[net.types[first.inputs[1]].dtype], tuple(operands.get(name, -1) for name in roles)
        )
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
        layer, kind, smoothing, factor = meta.layer, _SQUARES, np.float32(0), 0.5
        if isinstance(layer, CrossEntropy):
            kind, smoothing = _CROSS_ENTROPY, np.float32(layer.smoothing)
        elif isinstance(layer, Correct):
            kind = _CORRECT
        elif layer.is_mean:
            factor = 1 / max(1, meta.N)
        numbers = int(smoothing.view(np.int32)), int(np.float64(factor).view(np.int64))

        def facts(threads: int) -> tuple[int, object]:
            sums = np.empty(_PARTS)
            fields = words(kind, meta.N, meta.class_bytes, *numbers, *meta.operands, sums)
            return address(fields), (fields, sums)

        def check(inputs: Sequence[Array]) -> None:
            classes = inputs[meta.operands[1]]
            if classes.size and not 0 <= classes.min() <= classes.max() < meta.N:
                got = f"{classes.min()} to {classes.max()}"
                raise InputError("a class is out of range", got=got, expected=f"0 to {meta.N - 1}")

        return CompiledLaunch(address_of(_run), facts, check if kind == _CROSS_ENTROPY else None)


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
