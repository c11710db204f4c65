"""The backprop ladder on the CPU: full-batch training, from naive loops to the engine.

The first three rungs are those of the report (2017): the original program, its loops interchanged, and all cores
with OpenMP. As there, a level's weights and biases are one matrix (1 + D_in, D_out); row 0 holds the biases.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from onchip.kernels.cpu.compiler.jit import compiled
from onchip.kernels.cpu.threading.threads import run_tasks, start_helpers
from onchip.ladders.frame import Ladder, Rung
from onchip.measure.pace import blas_limiter
from onchip.measure.truth import TrainingTruth, flat_run
from onchip.network.graph import Network
from onchip.network.layers import Linear
from onchip.network.recipe import Array, materialise
from onchip.network.training import TrainingStep
from onchip.plan.kernel import Cost, Job
from onchip.runtime.placement import plan
from onchip.train.loop import fit
from onchip.train.options import TrainOptions
from onchip.train.step import step_of
from onchip.workloads import backprop
from onchip.workloads.backprop import Patterns

EPOCHS = 2  # per run: momentum has no effect in the first
CHECKED = 1_000  # patterns on which each rung is checked
LR, MOMENTUM = np.float32(backprop.TRAIN.lr), np.float32(backprop.TRAIN.momentum)
_ZERO, _ONE = np.float32(0), np.float32(1)
_PAD = 16  # floats per cache line, to avoid false sharing between workers


class State(NamedTuple):
    """Everything the loops read and write; each of the P workers has its own g, h, delta and error."""

    widths: Array  # D_in of the first level, then D_out of every level
    w: Array  # the matrices (1 + D_in, D_out) of all levels, contiguous
    v: Array  # velocities, like w
    g: Array  # gradients, (P, len(w))
    h: Array  # (P, levels, width): activations of the current pattern
    delta: Array  # like h: the gradient of each sigmoid's input
    error: Array  # (P, _PAD): only column 0 is used


def make_state(net: Network, workers: int) -> State:
    levels = [node.weights for node in net.nodes if isinstance(node.layer, Linear)]
    matrices = [np.vstack([materialise(k["bias"], net.weights), materialise(k["weight"], net.weights).T])
                for k in levels]  # fmt: skip
    widths = np.array([len(matrices[0]) - 1, *(m.shape[1] for m in matrices)])
    w = np.concatenate([m.ravel() for m in matrices])
    activations = (workers, len(levels), -(-max(widths[1:]) // _PAD) * _PAD)
    return State(
        widths, w, np.zeros_like(w), np.zeros((workers, len(w)), np.float32), np.zeros(activations, np.float32),
        np.zeros(activations, np.float32), np.zeros((workers, _PAD)),
    )  # fmt: skip


@compiled()
def level_matrix(flat: Array, widths: Array, level: int) -> Array:
    """A view of the matrix (1 + D_in, D_out) of a level."""
    offset = 0
    for i in range(level):
        offset += (1 + widths[i]) * widths[i + 1]
    rows, columns = 1 + widths[level], widths[level + 1]
    return flat[offset : offset + rows * columns].reshape(rows, columns)


def trained_network(net: Network, s: State) -> Network:
    weights = dict(net.weights)
    for level, node in enumerate(node for node in net.nodes if isinstance(node.layer, Linear)):
        m = level_matrix(s.w, s.widths, level)
        weights[node.weights["bias"]] = m[0].copy()
        weights[node.weights["weight"]] = np.ascontiguousarray(m[1:].T)
    return net.replace(weights=weights)


def _run(net: Network, workers: int, epoch: Callable[[State], float]) -> Array:
    """Train EPOCHS epochs from the network's weights."""
    state = make_state(net, workers)
    losses = [epoch(state) for _ in range(EPOCHS)]
    return flat_run(losses, trained_network(net, state))


# -- the report's loops --------------------------------------------------------------------------------------


@compiled()
def _sigmoid(z: Any) -> Any:
    return _ONE / (_ONE + math.exp(-z))


@compiled()
def _output_error(h: Array, target: Array, delta: Array) -> float:
    """Return half the squared error of a pattern; write delta of the last level."""
    error = 0.0
    for j in range(len(target)):
        difference = h[j] - target[j]
        error += 0.5 * difference * difference
        delta[j] = difference * h[j] * (_ONE - h[j])
    return error


@compiled()
def _patterns_by_columns(x: Array, y: Array, first: int, last: int, s: State, worker: int) -> None:
    """Forward and backward pass of patterns first..last, one neuron at a time: each sum reads down a column."""
    h, delta, L = s.h[worker], s.delta[worker], len(s.widths) - 1
    error = 0.0
    for p in range(first, last):
        for level in range(L):
            w, level_in = level_matrix(s.w, s.widths, level), x[p] if level == 0 else h[level - 1]
            for j in range(w.shape[1]):
                total = w[0, j]
                for i in range(1, w.shape[0]):
                    total += level_in[i - 1] * w[i, j]
                h[level, j] = _sigmoid(total)
        error += _output_error(h[L - 1], y[p], delta[L - 1])
        for level in range(L - 1, 0, -1):
            w = level_matrix(s.w, s.widths, level)
            for i in range(1, w.shape[0]):
                total = _ZERO
                for j in range(w.shape[1]):
                    total += w[i, j] * delta[level, j]
                out = h[level - 1, i - 1]
                delta[level - 1, i - 1] = total * out * (_ONE - out)
        for level in range(L):
            g, level_in = level_matrix(s.g[worker], s.widths, level), x[p] if level == 0 else h[level - 1]
            for j in range(g.shape[1]):
                g[0, j] += delta[level, j]
                for i in range(1, g.shape[0]):
                    g[i, j] += level_in[i - 1] * delta[level, j]
    s.error[worker, 0] = error


@compiled()
def _patterns_by_rows(x: Array, y: Array, first: int, last: int, s: State, worker: int) -> None:
    """The same with the loops over i and j interchanged: the inner loop reads a row, so it vectorises."""
    h, delta, L = s.h[worker], s.delta[worker], len(s.widths) - 1
    error = 0.0
    for p in range(first, last):
        for level in range(L):
            w, level_in = level_matrix(s.w, s.widths, level), x[p] if level == 0 else h[level - 1]
            sums = h[level, : w.shape[1]]
            for j in range(len(sums)):
                sums[j] = w[0, j]
            for i in range(1, w.shape[0]):
                value, row = level_in[i - 1], w[i]
                for j in range(len(sums)):
                    sums[j] += value * row[j]
            for j in range(len(sums)):
                sums[j] = _sigmoid(sums[j])
        error += _output_error(h[L - 1], y[p], delta[L - 1])
        for level in range(L - 1, 0, -1):
            w = level_matrix(s.w, s.widths, level)
            for i in range(1, w.shape[0]):
                total, row = _ZERO, w[i]
                for j in range(len(row)):
                    total += row[j] * delta[level, j]
                out = h[level - 1, i - 1]
                delta[level - 1, i - 1] = total * out * (_ONE - out)
        for level in range(L):
            g, level_in = level_matrix(s.g[worker], s.widths, level), x[p] if level == 0 else h[level - 1]
            deltas = delta[level, : g.shape[1]]
            for j in range(len(deltas)):
                g[0, j] += deltas[j]
            for i in range(1, g.shape[0]):
                value, row = level_in[i - 1], g[i]
                for j in range(len(deltas)):
                    row[j] += value * deltas[j]
    s.error[worker, 0] = error


@compiled()
def _update(s: State, k: int) -> None:
    """Sum the workers' gradients of weight k, update the weight, and zero the gradients."""
    total = _ZERO
    for worker in range(len(s.g)):
        total += s.g[worker, k]
        s.g[worker, k] = _ZERO
    s.v[k] = MOMENTUM * s.v[k] + total
    s.w[k] -= LR * s.v[k]


@compiled()
def _epoch_by_columns(x: Array, y: Array, s: State) -> float:
    _patterns_by_columns(x, y, 0, len(x), s, 0)
    for k in range(len(s.w)):
        _update(s, k)
    return s.error[0, 0]  # type: ignore[no-any-return]


@compiled()
def _epoch_by_rows(x: Array, y: Array, s: State) -> float:
    _patterns_by_rows(x, y, 0, len(x), s, 0)
    for k in range(len(s.w)):
        _update(s, k)
    return s.error[0, 0]  # type: ignore[no-any-return]


@compiled()
def _pattern_share(worker: int, share: int, x: Array, y: Array, s: State) -> None:
    P = len(s.error)
    _patterns_by_rows(x, y, len(x) * share // P, len(x) * (share + 1) // P, s, share)


@compiled()
def _update_task(worker: int, k: int, s: State) -> None:
    _update(s, k)


@compiled()
def _epoch_all_cores(x: Array, y: Array, s: State) -> float:
    P = len(s.error)
    run_tasks(_pattern_share, (x, y, s), P, P)
    run_tasks(_update_task, (s,), len(s.w), P)
    return s.error[:, 0].sum()  # type: ignore[no-any-return]


def pattern_cost(net: Network) -> Cost:
    """An epoch over one pattern, whose activations stay in cache: a forward gemm and two backward."""
    shapes = [materialise(node.weights["weight"], net.weights).shape for node in net.nodes
              if isinstance(node.layer, Linear)]  # fmt: skip
    sizes = [D_out * D_in for D_out, D_in in shapes]
    flop = 2 * (3 * sum(sizes) - sizes[0])  # the gradient of x is not computed
    return Cost(flop, 4 * (shapes[0][1] + shapes[-1][0]), fixed_bytes=4 * sum(sizes))


class Serial(Rung[Patterns]):
    name = "serial"
    idea = "the original program: pattern by pattern, neuron by neuron, each sum down a column of the weights"
    report_ms = MappingProxyType({backprop.PATTERNS: 170_000.0})
    max_rows = 2_000

    def prepare(self, net: Network, x: Patterns, threads: int) -> Callable[[], Array]:
        return lambda: _run(net, 1, lambda state: _epoch_by_columns(x.x, x.y, state))

    def cost(self, net: Network, B: int) -> Cost:
        return pattern_cost(net)


class Reordered(Rung[Patterns]):
    name = "reordered"
    idea = "the two inner loops interchanged: contiguous reads, many sums in one vector register"
    why = "the inner loop reads contiguous weights, and its sums are independent, so it vectorises"
    max_rows = 10_000

    def prepare(self, net: Network, x: Patterns, threads: int) -> Callable[[], Array]:
        return lambda: _run(net, 1, lambda state: _epoch_by_rows(x.x, x.y, state))

    def cost(self, net: Network, B: int) -> Cost:
        return pattern_cost(net)


class OpenMP(Rung[Patterns]):
    name = "openmp"
    idea = "each core has a share of the patterns and its own gradients; one reduction at the end"
    why = "every core works, and no gradient is shared until the end of the epoch"
    report_ms = MappingProxyType({backprop.PATTERNS: 14_995.0})

    def prepare(self, net: Network, x: Patterns, threads: int) -> Callable[[], Array]:
        def run() -> Array:
            start_helpers(threads)
            return _run(net, threads, lambda state: _epoch_all_cores(x.x, x.y, state))

        return run

    def cost(self, net: Network, B: int) -> Cost:
        return pattern_cost(net)


# -- beyond the report -------------------------------------------------------------------------------------


class NumPy(Rung[Patterns]):
    name = "numpy"
    idea = "all patterns at once: one library gemm per layer and direction; every layer goes through memory"
    why = "each weight that is read serves a block of patterns, not one"

    def prepare(self, net: Network, x: Patterns, threads: int) -> Callable[[], Array]:
        limited = blas_limiter(threads)
        widths = make_state(net, 1).widths
        levels = range(len(widths) - 1)
        h = [x.x, *(np.empty((len(x), width), np.float32) for width in widths[1:])]
        delta = [np.empty_like(values) for values in h[1:]]

        def epoch(s: State) -> float:
            ws, vs = ([level_matrix(flat, widths, level) for level in levels] for flat in (s.w, s.v))
            for level, w in enumerate(ws):
                out = np.matmul(h[level], w[1:], out=h[level + 1])
                out += w[0]
                _sigmoid_in_place(out)
            np.subtract(h[-1], x.y, out=delta[-1])
            error = 0.5 * float(np.square(delta[-1]).sum())
            for level in reversed(levels):
                delta[level] *= h[level + 1] * (_ONE - h[level + 1])
                if level > 0:
                    np.matmul(delta[level], ws[level][1:].T, out=delta[level - 1])
                vs[level] *= MOMENTUM
                vs[level][0] += delta[level].sum(axis=0)
                vs[level][1:] += h[level].T @ delta[level]
                ws[level] -= LR * vs[level]
            return error

        def run() -> Array:
            with limited():
                return _run(net, 1, epoch)

        return run


def _sigmoid_in_place(z: Array) -> None:
    np.negative(z, out=z)
    np.exp(z, out=z)
    z += _ONE
    np.reciprocal(z, out=z)


class Onchip(Rung[Patterns]):
    name = "onchip"
    idea = "blocks of patterns that stay in cache, forward and backward; gradients summed in vector registers"
    why = "activations and gradients stay in cache and registers instead of going through memory"
    is_engine = True

    def prepare(self, net: Network, x: Patterns, threads: int) -> Callable[[], Array]:
        options = dataclasses.asdict(run_options(x))

        def run() -> Array:
            result = fit(net, x.x, x.y, device="cpu", threads=threads, **options)
            return flat_run(result.losses, result.network)

        return run

    def cost(self, net: Network, B: int) -> Cost:
        return pattern_cost(net)


def run_options(x: Patterns) -> TrainOptions:
    """Full-batch training, for any number of patterns."""
    return dataclasses.replace(backprop.TRAIN, batch_size=len(x), epochs=EPOCHS)


def truth(net: Network, x: Patterns) -> TrainingTruth:
    return TrainingTruth(net, x.x, x.y, [np.arange(len(x))] * EPOCHS, run_options(x))


def floor_ms(net: Network, B: int, precision: str) -> float:
    step = step_of(net, TrainingStep(backprop.TRAIN.loss, "momentum"))
    return plan(step, "cpu", Job(precision, B)).floor_us / 1e3


LADDER = Ladder(
    name="backprop",
    title="an epoch of full-batch training (784-56-28-10, sigmoids, momentum), on the CPU",
    rungs=(Serial, Reordered, OpenMP, NumPy, Onchip),
    network=backprop.network,
    inputs=lambda B: backprop.patterns(B)[0],
    floor_ms=floor_ms,
    rows=backprop.PATTERNS,
    truth=truth,
    checked=CHECKED,
    parts=EPOCHS,
)
