"""The reference of the digits ladder."""

from __future__ import annotations

import dataclasses

import numpy as np

from onchip.ladders.training import TrainingRows, layer_arrays, network_of
from onchip.measure.truth import TrainingTruth, Verdict, flat_run, relative_error
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.train.options import TrainOptions
from onchip.workloads import digits

_NAIVE_RUNS = 8  # float32 runs with other reduction orders: where rounding decides the sign of a ReLU's input, it jumps
_HALF_ULPS = 4 * float(np.finfo(np.float16).eps)


def batch_sizes(n: int) -> list[int]:
    """Rows of each step; a short last batch is kept."""
    return [min(digits.BATCH_SIZE, n - first) for first in range(0, n, digits.BATCH_SIZE)]


def run_options() -> TrainOptions:
    """One epoch over rows that are in training order."""
    return dataclasses.replace(digits.TRAIN, epochs=1, shuffle=False)


class DigitsTruth(TrainingTruth):
    """Losses and weights in float64 after an epoch over rows in training order, and the allowed error per precision."""

    def __init__(self, net: Network, rows: TrainingRows) -> None:
        self._net, self._rows, self._allowed_half = net, rows, 0.0
        ends = np.cumsum(batch_sizes(len(rows)))
        batches = np.split(np.arange(len(rows)), ends[:-1])
        super().__init__(net, rows.x, rows.y.argmax(axis=1), batches, run_options(), _NAIVE_RUNS)

    def verify_in(self, precision: str, got: Array) -> Verdict:
        """fp16: at most twice the error of a naive run whose gemms round their operands to fp16, plus a few ulp."""
        if precision != "fp16":
            return self.verify(got)
        if not self._allowed_half:
            self._allowed_half = 2 * relative_error(half_run(self._net, self._rows), self.run) + _HALF_ULPS
        return Verdict(relative_error(got, self.run), self._allowed_half)


def half_run(net: Network, rows: TrainingRows) -> Array:
    """Losses and weights (flat_run) with fp16 operands and float32 sums in all gemms, everything else float32."""
    arrays, losses, first = layer_arrays(net), [], 0
    last = len(arrays) // 2 - 1
    for B in batch_sizes(len(rows)):
        h, y = [rows.x[first : first + B].astype(np.float32)], rows.y[first : first + B]
        first += B
        for i in range(last + 1):
            z = _half_gemm(h[-1], arrays[f"w{i}"]) + arrays[f"b{i}"]
            h.append(np.maximum(z, 0) if i < last else z)
        p = np.exp(h[-1] - h[-1].max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        losses.append(float(-np.log((p * y).sum(axis=1)).mean()))
        dz, rate = p - y, np.float32(digits.LR / B)
        for i in reversed(range(last + 1)):
            dh = _half_gemm(dz, arrays[f"w{i}"].T) * (h[i] > 0)
            arrays[f"w{i}"] = arrays[f"w{i}"] - rate * _half_gemm(h[i].T, dz)
            arrays[f"b{i}"] = arrays[f"b{i}"] - rate * dz.sum(axis=0)
            dz = dh
    return flat_run(losses, network_of(net, arrays))


def _half_gemm(a: Array, b: Array) -> Array:
    product: Array = a.astype(np.float16).astype(np.float32) @ b.astype(np.float16).astype(np.float32)
    return product
