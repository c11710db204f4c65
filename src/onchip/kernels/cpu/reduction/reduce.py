"""reduce: maxima, minima, sums, means and norms along axes, and where maxima and minima stand, by themselves.

An array is (outer, N, inner), and sums along the middle axis are float64: of inner = 1 in four by turns, of more one
after the other, whatever the batch. Axes that do not stand next to each other are moved to the end first. Sums of
float64, which is what sums of ints are made as, come one after the other, too.
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
from onchip.kernels.cpu.threading.launches import CompiledLaunch, Launch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network
from onchip.network.layers import ArgMax, ArgMin, GlobalMax, GlobalMean, GlobalMin, GlobalNorm, GlobalSum, Layer
from onchip.network.recipe import Array
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

_KINDS: tuple[type[Layer], ...] = (GlobalMax, GlobalMin, GlobalSum, GlobalMean, GlobalNorm, ArgMax, ArgMin)  # by codes
MAX, _MIN, _SUM, _MEAN, _NORM, _ARG_MAX, _ARG_MIN = range(7)
_LAST = 8  # added to the code of a place: the last of equals
_DOUBLES = 16  # the code of a sum of float64
_SUMS = (_SUM, _MEAN, _NORM, _DOUBLES)
_THREAD_NUMBERS = 1 << 15  # for fewer a thread is not woken
_PIECE_NUMBERS = 1 << 12  # that a thread takes at a time, at least


@linked(*(types.int64,) * 4)
def reduce_row(source: int, to: int, N: int, code: int) -> None:
    """x (N,) -> one number."""
    x, y = floats_at(source, N), floats_at(to, 1)
    if code <= _MIN:
        found = x[0]
        for n in range(1, N):
            v = x[n] if code == MAX else -x[n]
            best = found if code == MAX else -found
            found = x[n] if v > best or v != v else found  # a NaN is found before all numbers
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
def find_places(source: int, to: int, N: int, inner: int, code: int) -> None:
    """x (N, inner) -> y (inner,) of int64: where the largest or the smallest stands; a NaN is found before numbers."""
    y = ints_at(to, inner)
    kind, is_last = code & (_LAST - 1), code >= _LAST
    for i in range(inner):
        x = floats_at(source + i * 4, ALL)
        best, place = x[0], 0
        for n in range(1, N):
            v = x[n * inner]
            is_more = v > best if kind == _ARG_MAX else v < best
            is_nan, is_equal = v != v and best == best, v == best or (v != v and best != best)
            if is_more or is_nan or (is_last and is_equal):
                best, place = v, n
        y[i] = place


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
    worker: int, piece: int, x: int, y: int, totals: int, outer: int, N: int, inner: int, code: int, together: int
) -> None:
    for row in range(piece * together, min(outer, (piece + 1) * together)):
        if code == _DOUBLES:
            sum_doubles(x + row * N * inner * 8, y + row * inner * 8, N, inner)
        elif code >= _ARG_MAX:
            find_places(x + row * N * inner * 4, y + row * inner * 8, N, inner, code)
        elif inner == 1:
            reduce_row(x + row * N * 4, y + row * 4, N, code)
        else:
            reduce_columns(x + row * N * inner * 4, y + row * inner * 4, totals + worker * inner * 8, N, inner, code)


# What `_run` is told of a layer once: the shape of a row of the batch, and `inner` numbers of float64 for each thread.
_OUTER, _N, _INNER, _CODE, _TOTALS, _WORDS = range(6)


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """x (B * outer, N, inner) -> y (B * outer, inner); the code of a CompiledLaunch."""
    layer, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    outer, N, inner = B * layer[_OUTER], layer[_N], layer[_INNER]
    together = max(1, _PIECE_NUMBERS // (N * inner))
    pieces = (outer + together - 1) // together
    threads = max(1, min(threads, outer * N * inner // _THREAD_NUMBERS))
    run_tasks(_rows, (x, y, layer[_TOTALS], outer, N, inner, layer[_CODE], together), pieces, threads)


@dataclass(frozen=True)
class Facts:
    code: int
    order: tuple[int, ...]  # of all axes, those that are walked over behind the others; () if nothing is moved
    shape: tuple[int, int, int]  # outer, N and inner of one row of the batch


class Reduce:
    name = "reduce"
    device_kind = "cpu"
    precisions = ("fp32",)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer = node.layer
        if job.is_training or not isinstance(layer, _KINDS):
            return
        x, y = net.types[node.inputs[0]], net.types[node.name]
        adds_doubles = x.dtype == "float64" and isinstance(layer, GlobalSum)
        if x.dtype != "float32" and not adds_doubles:
            yield Refusal(self.name, node.name, f"computes on float32, got {x.dtype}")
            return
        code, told = _DOUBLES if adds_doubles else _KINDS.index(type(layer)), layer.attributes()
        axes = sorted(axis % len(x.shape) for axis in told.get("axes", (told.get("axis"),)))
        facts = _facts(code + _LAST if told.get("last") else code, x.row_shape, axes)
        cached = x.row_bytes // 2 + (x.row_bytes if facts.order else 0)
        yield Claim(
            self.name, f"{self.name}<{layer.kind}>", (node.name,),
            CoreCost(net.row_flop(node), x.row_bytes + y.row_bytes, row_cache_bytes=cached), "one layer by itself",
            order="in four sums or one, by N alone" if code in _SUMS else "", facts=facts,
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> Launch:
        told = claim.facts
        assert isinstance(told, Facts)

        def facts(threads: int) -> tuple[int, object]:
            totals = np.empty((threads, told.shape[2]))
            numbers = words(*told.shape, told.code, totals)
            return address(numbers), (numbers, totals)

        launch = CompiledLaunch(address_of(_run), facts)
        if not told.order:
            return launch

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            launch([np.ascontiguousarray(inputs[0].transpose(told.order))], outputs, threads)

        return run


def _facts(code: int, row: tuple[int, ...], axes: list[int]) -> Facts:
    """axes  of the whole array, the batch in front"""
    shape = (1, *row)
    if axes == list(range(axes[0], axes[-1] + 1)):
        sizes = shape[: axes[0]], shape[axes[0] : axes[-1] + 1], shape[axes[-1] + 1 :]
        return Facts(code, (), (math.prod(sizes[0]), math.prod(sizes[1]), math.prod(sizes[2])))
    others = [axis for axis in range(len(shape)) if axis not in axes]
    N = math.prod(shape[axis] for axis in axes)
    return Facts(code, (*others, *axes), (math.prod(row) // max(1, N), N, 1))
