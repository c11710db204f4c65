"""The scan ladder on the CPU: the prefix sum of an array, from the naive loop to the engine.

A "row" of this ladder is one element. Accumulators are float32 except in the engine's rung.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onchip.kernels import reference
from onchip.kernels.cpu.compiler.jit import compiled
from onchip.kernels.cpu.scan.scan import scan_rows
from onchip.kernels.cpu.threading.threads import run_tasks, start_helpers
from onchip.ladders.frame import Ladder, Rung
from onchip.measure.truth import Verdict, allowed_error
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.scan_op import ScanOp
from onchip.plan.device import Device
from onchip.plan.kernel import Cost
from onchip.runtime.cpu.backend import this_cpu
from onchip.workloads import scan

_ZERO = np.float32(0)
_STEP_ULPS = 64 * float(np.finfo(np.float32).eps)


@compiled()
def _prefix_sum(x: Array, y: Array) -> None:
    total = _ZERO
    for i in range(len(x)):
        total += x[i]
        y[i] = total


class OneThread(Rung[Array]):
    name = "one-thread"
    idea = "the definition: one loop, one accumulator; each addition waits for the previous one"

    def prepare(self, net: Network, x: Array, threads: int) -> Callable[[], Array]:
        y = np.empty_like(x)

        def run() -> Array:
            _prefix_sum(x, y)
            return y

        return run

    def cost(self, net: Network, B: int) -> Cost:
        return scan_cost()


class NumPy(Rung[Array]):
    name = "numpy"
    idea = "np.cumsum: the same loop in a library"
    why = "slower: a loop for any stride and operation, which keeps its total in memory"

    def prepare(self, net: Network, x: Array, threads: int) -> Callable[[], Array]:
        y = np.empty_like(x)
        return lambda: np.cumsum(x, out=y)

    def cost(self, net: Network, B: int) -> Cost:
        return scan_cost()


@compiled()
def _sum_share(worker: int, share: int, x: Array, totals: Array) -> None:
    P, N, total = len(totals), len(x), _ZERO
    for i in range(N * share // P, N * (share + 1) // P):
        total += x[i]
    totals[share] = total


@compiled()
def _scan_share(worker: int, share: int, x: Array, y: Array, totals: Array) -> None:
    P, N, total = len(totals), len(x), _ZERO
    prefix = totals[share]
    for i in range(N * share // P, N * (share + 1) // P):
        total += x[i]
        y[i] = prefix + total


@compiled()
def _two_level(x: Array, y: Array, totals: Array) -> None:
    """totals (P,): the sum of each of P chunks, then the exclusive prefix of each."""
    P = len(totals)
    run_tasks(_sum_share, (x, totals), P, P)
    prefix = _ZERO
    for share in range(P):
        total = totals[share]
        totals[share] = prefix
        prefix += total
    run_tasks(_scan_share, (x, y, totals), P, P)


class TwoLevel(Rung[Array]):
    name = "two-level"
    idea = "each core sums a share of the array, gets its exclusive prefix, and scans the share"
    why = "every core works, but each reads its share twice: no gain on two cores"

    def prepare(self, net: Network, x: Array, threads: int) -> Callable[[], Array]:
        y, totals = np.empty_like(x), np.empty(threads, np.float32)

        def run() -> Array:
            start_helpers(threads)
            _two_level(x, y, totals)
            return y

        return run

    def cost(self, net: Network, B: int) -> Cost:
        """x is read twice, and added twice."""
        return scan_cost(passes=3, flop=2)


class Onchip(Rung[Array]):
    name = "onchip"
    idea = "the engine: each segment is summed and scanned while it is in cache, 16 elements at a time, in float64"
    why = "the second pass reads from cache, and the dependency chain is one addition per 16 elements"
    is_engine = True

    def prepare(self, net: Network, x: Array, threads: int) -> Callable[[], Array]:
        y, op = np.empty_like(x), ScanOp("sum")

        def run() -> Array:
            scan_rows(x[None], y[None], op, threads)
            return y

        return run

    def cost(self, net: Network, B: int) -> Cost:
        """A segment is summed, then scanned from cache."""
        return scan_cost(flop=2)


class ScanTruth:
    """The prefix sums in float64, and the allowed error of a float32 run.

    The error of a sum is relative to the largest sum so far, |a - b| / max(1, |sum| so far): a random walk returns to
    zero now and then, but its errors do not. The limit is twice the error of a naive run plus a few ulp.

    After millions of additions a naive run is off by tenths, so that check alone would miss a skipped value. Each
    difference y[i] - y[i - 1] is checked too: it must equal x[i] up to the rounding of two sums.
    """

    def __init__(self, net: Network, x: Array) -> None:
        row = scan.network(len(x))
        self.x, self.y = x, reference.forward(row, x[None])[0]
        self._scale = np.maximum.accumulate(np.maximum(np.abs(self.y), 1))
        naive: Array = reference.forward(row, x[None], "float32")[0]
        self.allowed = allowed_error(self._error(naive))

    def _error(self, got: Array) -> float:
        return float((np.abs(got - self.y) / self._scale).max())

    def verify(self, got: Array) -> Verdict:
        """got (N,) float32."""
        if got.shape != self.y.shape:
            return Verdict(float("inf"), self.allowed)
        with np.errstate(invalid="ignore"):
            steps = np.diff(got, prepend=np.float64(0))
            has_steps = bool((np.abs(steps - self.x) <= _STEP_ULPS * self._scale).all())  # False for NaN
            return Verdict(self._error(got) if has_steps else float("inf"), self.allowed)


def scan_cost(passes: int = 2, flop: int = 1) -> Cost:
    """This many float32 passes over memory; at least every value is read and written once. Launches are not counted."""
    return Cost(row_flop=flop, row_bytes=4 * passes, launches=0)


def device_floor_ms(device: Device, N: int) -> float:
    return scan_cost().floor_us(device, "fp32", N) / 1e3


LADDER = Ladder(
    name="scan",
    title="prefix sum of a row, on the CPU",
    rungs=(OneThread, NumPy, TwoLevel, Onchip),
    network=scan.network,
    inputs=scan.inputs,
    floor_ms=lambda net, N, precision: device_floor_ms(this_cpu(), N),
    rows=scan.ELEMENTS,
    truth=ScanTruth,
)
