"""pool_grad: the gradients of max and average pooling in 1D and 2D.

Idea      A task computes some planes of dx, one window row at a time and one tap after the other: a tap adds to dx what
          is left of dy. Where x is the window's maximum y, that is all of it: the first maximum takes it. An average
          leaves dy as it is.
Order     Window rows in order, their taps in order.
Floor     Memory: dy in, dx out; for a max, x and y in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, compiled, floats_at, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.window import POOLS, Axis, axes_of
from onchip.network.graph import Network
from onchip.network.layers import InputGrad, MaxPool1d, MaxPool2d
from onchip.network.recipe import Array
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job

_TASK_ELEMENTS = 1 << 12  # of dx per task, at least
_THREAD_ELEMENTS = 1 << 14  # per thread: below this, a thread is not woken
_ZERO, _LOWEST = np.float32(0), np.float32(-np.inf)

# Layout of the array that `_run` reads; scratch: a window row per worker. Then the fields of the axes h and w: those of
# Axis, and the address of what an average divides by, per window.
_PLANES, _IS_MAX, _SCRATCH, _H, _W, _FIELDS = 0, 1, 2, 3, 11, 19
_SIZE, _COUNT, _TAPS, _STRIDE, _BEFORE, _DILATION, _END, _DIVISORS = range(8)


@compiled(inline=True)
def _add_tap(
    x: Array, y: Array, left: Array, dx: Array, begin: int, end: int, at: int, stride: int, is_max: int
) -> None:
    """Add what is left of windows `begin` to `end` - 1 to the elements from dx[at + begin * stride] on."""
    if is_max:
        for i in range(begin, end):
            rest, is_first = left[i], x[at + i * stride] == y[i]
            dx[at + i * stride] += rest if is_first else _ZERO
            left[i] = _ZERO if is_first else rest
    else:
        for i in range(begin, end):
            dx[at + i * stride] += left[i]


@compiled(inline=True)
def _add_pairs(x: Array, y: Array, left: Array, dx: Array, count: int, is_max: int) -> None:
    """The same for both taps of `count` windows of two adjacent elements each, which LLVM vectorises."""
    if is_max:
        for i in range(count):
            rest, first, second, largest = left[i], x[2 * i], x[2 * i + 1], y[i]
            to_first = rest if first == largest else _ZERO
            rest = _ZERO if first == largest else rest
            to_second = rest if second == largest else _ZERO
            rest = _ZERO if second == largest else rest
            dx[2 * i] += to_first
            dx[2 * i + 1] += to_second
            left[i] = rest
    else:
        for i in range(count):
            dx[2 * i] += left[i]
            dx[2 * i + 1] += left[i]


@compiled(inline=True)
def _skip_tap(y: Array, left: Array, begin: int, end: int) -> None:
    """Padding counts as -infinity: where that is the maximum, it is the first."""
    for i in range(begin, end):
        rest = left[i]
        left[i] = _ZERO if y[i] == _LOWEST else rest


@compiled()
def _window_row(layer: Array, row: int, x: int, y: int, dy: int, dx: int, left_at: int) -> None:
    """A row of windows of one plane."""
    h, w, is_max = layer[_H : _H + 8], layer[_W : _W + 8], layer[_IS_MAX]
    W, count, stride = w[_SIZE], w[_COUNT], w[_STRIDE]
    d, largest = floats_at(dy + row * count * 4, count), floats_at(y + row * count * 4, count)
    left = floats_at(left_at, count)
    if is_max:
        for i in range(count):
            left[i] = d[i]
    else:
        share, shares = floats_at(h[_DIVISORS], h[_COUNT])[row], floats_at(w[_DIVISORS], count)
        for i in range(count):
            left[i] = d[i] / (share * shares[i])
    for kh in range(h[_TAPS]):
        at_h = row * h[_STRIDE] - h[_BEFORE] + kh * h[_DILATION]
        if at_h < 0 or at_h >= h[_SIZE]:
            if is_max:
                _skip_tap(largest, left, 0, count)
            continue
        values, result = floats_at(x + at_h * W * 4, W), floats_at(dx + at_h * W * 4, W)
        pairs = 0
        if w[_TAPS] == stride == 2 and w[_DILATION] == 1 and w[_BEFORE] == 0:
            pairs = min(count, W // 2)
            _add_pairs(values, largest, left, result, pairs, is_max)
        for kw in range(w[_TAPS]):
            at = kw * w[_DILATION] - w[_BEFORE]
            begin = max(pairs, min(count, (-at + stride - 1) // stride) if at < 0 else 0)
            end = max(begin, min(count, (W - at + stride - 1) // stride)) if at < W else begin
            if is_max:
                _skip_tap(largest, left, pairs, begin)
                _skip_tap(largest, left, end, count)
            if stride == 1:
                _add_tap(values, largest, left, result, begin, end, at, 1, is_max)
            else:
                _add_tap(values, largest, left, result, begin, end, at, stride, is_max)


@compiled()
def _planes(worker: int, task: int, layer: Array, operands: int, planes: int, per_task: int) -> None:
    h, w = layer[_H : _H + 8], layer[_W : _W + 8]
    size, windows = h[_SIZE] * w[_SIZE], h[_COUNT] * w[_COUNT]
    x, y = int_at(operands), int_at(operands + 8 * layer[_IS_MAX])
    dy, dx = int_at(operands + 8 + 8 * layer[_IS_MAX]), int_at(operands + 16 + 8 * layer[_IS_MAX])
    for plane in range(task * per_task, min(planes, (task + 1) * per_task)):
        result = floats_at(dx + plane * size * 4, size)
        for i in range(size):
            result[i] = _ZERO
        for row in range(h[_COUNT]):
            _window_row(
                layer, row, x + plane * size * 4, y + plane * windows * 4, dy + plane * windows * 4,
                dx + plane * size * 4, layer[_SCRATCH] + worker * w[_COUNT] * 4,
            )  # fmt: skip


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    layer = ints_at(facts, _FIELDS)
    planes, size = B * layer[_PLANES], max(1, layer[_H + _SIZE] * layer[_W + _SIZE])
    per_task = max(1, _TASK_ELEMENTS // size)
    threads = max(1, min(threads, planes * size // _THREAD_ELEMENTS))
    run_tasks(_planes, (layer, operands, planes, per_task), (planes + per_task - 1) // per_task, threads)


@dataclass(frozen=True)
class Facts:
    planes: int  # per row
    h: Axis
    w: Axis
    is_max: bool
    count_pads: bool


class PoolGradKernel(CpuKernel):
    name = "pool_grad"
    layers = (InputGrad,)
    order = "window rows in order, their taps in order"

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, InputGrad) and isinstance(layer.of, POOLS)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        node = net.nodes[start]
        pool, x, dy = node.layer.attributes()["of"], net.types[node.inputs[0]], net.types[node.inputs[-1]]
        is_max = isinstance(pool, MaxPool1d | MaxPool2d)
        h, w = axes_of(pool, x.row_shape[1:], dy.row_shape[1:], pool.kernel)
        read = sum(net.types[value].row_bytes for value in (node.inputs if is_max else node.inputs[1:]))
        cost = CoreCost(net.row_flop(node), read + x.row_bytes, row_cache_bytes=h.taps * w.taps * dy.row_bytes)
        label = f"{pool.kind.lower()}_grad<{','.join(map(str, pool.kernel))}>"
        facts = Facts(x.row_shape[0], h, w, is_max, getattr(pool, "count_pads", False))
        yield self.claim(net, node, facts, label=label, cost=cost)

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, Facts)
        divisors = [_divisors(axis, meta.count_pads) for axis in (meta.h, meta.w)]

        def facts(threads: int) -> tuple[int, object]:
            scratch = np.empty((threads, meta.w.count), np.float32)
            axes = (*astuple(meta.h), divisors[0], *astuple(meta.w), divisors[1])
            layer = words(meta.planes, meta.is_max, scratch, *axes)
            return address(layer), (layer, scratch, divisors)

        return CompiledLaunch(address_of(_run), facts)


def _divisors(axis: Axis, count_pads: bool) -> Array:
    """How many of each window's taps an average counts."""
    taps = np.arange(axis.count)[:, None] * axis.stride - axis.before + np.arange(axis.taps) * axis.dilation
    inside = taps < axis.end if count_pads else (taps >= 0) & (taps < axis.size)
    return np.asarray(inside.sum(axis=1), np.float32)
