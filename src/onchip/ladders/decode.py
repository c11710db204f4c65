"""The decode ladder on the CPU: from pure Python to a fused kernel that keeps a tile of rows in cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onchip.kernels.cpu.compiler.jit import compiled
from onchip.kernels.cpu.threading.threads import run_tasks, start_helpers
from onchip.ladders.frame import Ladder, Rung
from onchip.ladders.ranks import RANK_RUNGS
from onchip.measure.pace import blas_limiter
from onchip.measure.truth import Truth
from onchip.network.graph import Network
from onchip.network.layers import Linear
from onchip.network.recipe import Array, materialise
from onchip.plan.kernel import Cost, Job
from onchip.runtime.engine import compile
from onchip.runtime.placement import plan
from onchip.workloads import decode

_ZERO = np.float32(0)


def weight_matrices(net: Network) -> list[Array]:
    """The weights (D_out, D_in) of the Linear layers, in order; decode has no biases."""
    return [materialise(node.weights["weight"], net.weights) for node in net.nodes if isinstance(node.layer, Linear)]


def layers_cost(net: Network, extra_passes: int = 0) -> Cost:
    """Layer by layer: every layer reads its input and writes its output; more passes over the hidden activations."""
    shapes = [w.shape for w in weight_matrices(net)]
    values = sum(D_out + D_in for D_out, D_in in shapes) + extra_passes * sum(D_out for D_out, _ in shapes[:-1])
    weights = sum(D_out * D_in for D_out, D_in in shapes)
    return Cost(2 * weights, 4 * values, fixed_bytes=4 * weights)


class PurePython(Rung[Array]):
    name = "python"
    idea = "the definition: four nested Python loops over lists of floats"
    max_rows = 16

    def prepare(self, net: Network, x: Array, threads: int) -> Callable[[], Array]:
        rows: list[list[float]] = x.tolist()
        layers: list[list[list[float]]] = [w.tolist() for w in weight_matrices(net)]
        return lambda: np.array([_python_row(row, layers) for row in rows], np.float32)


def _python_row(row: list[float], layers: list[list[list[float]]]) -> list[float]:
    for i, weights in enumerate(layers):
        out = []
        for neuron in weights:
            total = 0.0
            for k in range(len(row)):
                total += row[k] * neuron[k]
            out.append(max(total, 0.0) if i < len(layers) - 1 else total)
        row = out
    return row


class NumPy(Rung[Array]):
    name = "numpy"
    idea = "one library gemm per layer; the activations of every layer go through memory"
    why = "vector instructions, cache blocking and all cores, without the interpreter"

    def prepare(self, net: Network, x: Array, threads: int) -> Callable[[], Array]:
        weights = [w.T for w in weight_matrices(net)]
        buffers = [np.empty((len(x), w.shape[1]), np.float32) for w in weights]
        limited = blas_limiter(threads)

        def run() -> Array:
            rows = x
            with limited():
                for w, out in zip(weights, buffers, strict=True):
                    rows = np.matmul(rows, w, out=out)
                    if w is not weights[-1]:
                        np.maximum(rows, _ZERO, out=rows)
            return rows

        return run

    def cost(self, net: Network, B: int) -> Cost:
        return layers_cost(net, extra_passes=2)  # of ReLU


@compiled()
def _layer_share(worker: int, share: int, x: Array, w: Array, y: Array, is_last: bool, P: int) -> None:
    for r in range(len(x) * share // P, len(x) * (share + 1) // P):
        for n in range(w.shape[0]):
            total = _ZERO
            for k in range(w.shape[1]):
                total += x[r, k] * w[n, k]
            y[r, n] = _ZERO if total < _ZERO and not is_last else total  # NaN propagates


@compiled()
def _layer(x: Array, w: Array, y: Array, is_last: bool, P: int) -> None:
    run_tasks(_layer_share, (x, w, y, is_last, P), P, P)


def _layer_by_layer(x: Array, weights: Sequence[Array], threads: int) -> Callable[[], Array]:
    buffers = [np.empty((len(x), len(w)), np.float32) for w in weights]

    def run() -> Array:
        start_helpers(threads)
        rows = x
        for i, (w, out) in enumerate(zip(weights, buffers, strict=True)):
            _layer(rows, w, out, i == len(weights) - 1, threads)
            rows = out
        return rows

    return run


class NumbaSerial(Rung[Array]):
    name = "numba-serial"
    idea = "the same loops, compiled; one core, one element at a time"
    why = "slower than a library: each addition waits for the previous one, so nothing is vectorised"

    def prepare(self, net: Network, x: Array, threads: int) -> Callable[[], Array]:
        return _layer_by_layer(x, weight_matrices(net), 1)

    def cost(self, net: Network, B: int) -> Cost:
        return layers_cost(net)


class NumbaParallel(Rung[Array]):
    name = "numba-parallel"
    idea = "rows are independent: each core computes a share of them"
    why = "every core works; its inner loop is as slow as before"

    def prepare(self, net: Network, x: Array, threads: int) -> Callable[[], Array]:
        return _layer_by_layer(x, weight_matrices(net), threads)

    def cost(self, net: Network, B: int) -> Cost:
        return layers_cost(net)


class Onchip(Rung[Array]):
    name = "onchip"
    idea = "all layers in one pass: a tile of rows stays in cache, sums in vector registers"
    why = "independent sums fill the vector units, and hidden activations do not leave the cache"
    is_engine = True

    def prepare(self, net: Network, x: Array, threads: int) -> Callable[[], Array]:
        engine = compile(net, "cpu", threads=threads, batch_hint=len(x))
        out = np.empty((len(x), *engine.output.row_shape), np.float32)
        return lambda: engine(x, out=out)

    def cost(self, net: Network, B: int) -> Cost:
        """Hidden activations stay in cache."""
        return layers_cost(net, extra_passes=-2)


def floor_ms(net: Network, B: int, precision: str) -> float:
    return plan(net, "cpu", Job(precision, B)).floor_us / 1e3


LADDER = Ladder(
    name="decode",
    title="a tiny decoder (72-64-64-4, ReLU) applied to every row, on the CPU",
    rungs=(PurePython, NumPy, NumbaSerial, NumbaParallel, Onchip),
    network=decode.network,
    inputs=decode.inputs,
    floor_ms=floor_ms,
    rows=decode.ROWS[0],
    truth=Truth,
    over_ranks=RANK_RUNGS,
)
