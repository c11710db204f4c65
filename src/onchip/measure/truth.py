"""Check engines against the float64 reference; the error of a naive float32 run is the baseline error."""

from __future__ import annotations

import concurrent.futures
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels import reference
from onchip.network.graph import Network
from onchip.network.recipe import Array, materialise
from onchip.network.types import numpy_dtype
from onchip.runtime.cpu.backend import core_count
from onchip.train.options import TrainOptions
from onchip.train.schedule import lrs_of

_CHUNK_ROWS = 16_384  # rows per chunk: the reference stores all activations
_FEW_ULP = 4 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Verdict:
    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed  # False for NaN


def relative_error(got: Array, truth: Array) -> float:
    """The largest |a - b| / max(1, |a|, |b|); inf if the shapes differ or only one side is NaN or infinite."""
    if got.shape != truth.shape:
        return float("inf")
    if not got.size:
        return 0.0
    a, b = got.astype(np.float64), truth.astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(a - b) / np.maximum(1, np.maximum(np.abs(a), np.abs(b)))
    error[(a == b) | (np.isnan(a) & np.isnan(b))] = 0  # matching NaNs and equal infinities count as no error
    return float(np.nan_to_num(error, nan=np.inf).max())


def allowed_error(naive: float) -> float:
    """Twice the error of a naive run in the same precision, plus a few ulp."""
    return 2 * naive + _FEW_ULP


Rows = Array | tuple[Array, ...]  # of the network's input, or one array per input, in order


def as_inputs(x: Rows) -> tuple[Array, ...]:
    return x if isinstance(x, tuple) else (x,)


class Truth:
    """The float64 output for x, and the allowed error of an engine with some dtype."""

    def __init__(self, net: Network, x: Rows, dtype: str = "float32") -> None:
        inputs = as_inputs(x)
        chunks = [tuple(rows[i : i + _CHUNK_ROWS] for rows in inputs) for i in range(0, len(inputs[0]), _CHUNK_ROWS)]
        self.y = np.concatenate([reference.forward(net, chunk) for chunk in chunks])
        naive = np.concatenate([naive_run(net, chunk, dtype) for chunk in chunks])
        self.allowed = allowed_error(relative_error(naive, self.y))

    def measured_by(self, naive: Array) -> Truth:
        """The same reference with the baseline error of this naive run, whose weights are rounded like the engine's."""
        return self.allowing(relative_error(naive, self.y))

    def allowing(self, naive: float) -> Truth:
        """The same reference with another baseline error, that of a naive run."""
        other = copy.copy(self)
        other.allowed = allowed_error(naive)
        return other

    def verify(self, got: Array) -> Verdict:
        """got: y of all rows."""
        return Verdict(relative_error(np.asarray(got), self.y), self.allowed)


def naive_error(net: Network, x: Rows, dtype: str = "float32") -> float:
    """The error of a naive run in this dtype."""
    return relative_error(naive_run(net, x, dtype), reference.forward(net, x))


def naive_run(net: Network, x: Rows, dtype: str) -> Array:
    """Run the network in this dtype, one layer at a time.

    NumPy computes 16-bit gemms on one core at about 0.2 Gflop/s, so the rows are split over all cores; the bits are the
    same.
    """
    inputs = as_inputs(x)
    B = len(inputs[0])
    slices = max(1, min(core_count(), B)) if numpy_dtype(dtype).itemsize == 2 else 1
    ends = [B * i // slices for i in range(slices + 1)]

    def run(start: int, end: int) -> Array:
        y: Array = reference.forward(net, tuple(rows[start:end] for rows in inputs), dtype)
        return y

    with concurrent.futures.ThreadPoolExecutor(slices) as pool:
        return np.concatenate(list(pool.map(run, ends, ends[1:])))


class TrainingTruth:
    """Losses and weights after steps of SGD or Adam in float64, and the allowed error of a float32 run."""

    def __init__(
        self, net: Network, x: Array, y: Array, batches: Sequence[Array], options: TrainOptions, naive_runs: int = 1
    ) -> None:
        """batches     the rows of each step
        naive_runs  float32 runs, each with the rows of a batch in another order: where rounding decides the sign of a
                    ReLU's input, the curve jumps. Of 7 runs over MNIST, 256 steps of 64 rows, one was off by 1.5e-4,
                    the others by at most 4e-7
        """
        self.run = reference_run(net, x, y, batches, options, "float64")
        self.losses = self.run[: len(batches)]
        error = losses_error = 0.0
        for seed in range(naive_runs):
            rng = np.random.default_rng(seed)
            orders = [rng.permutation(rows) for rows in batches] if seed else batches
            naive = reference_run(net, x, y, orders, options, "float32")
            error = max(error, relative_error(naive, self.run))
            losses_error = max(losses_error, relative_error(naive[: len(batches)], self.losses))
        self.allowed, self.losses_allowed = allowed_error(error), allowed_error(losses_error)

    def verify(self, got: Array) -> Verdict:
        """got: as returned by `flat_run`."""
        return Verdict(relative_error(got, self.run), self.allowed)

    def verify_losses(self, got: Array) -> Verdict:
        """Check only the loss curve. got: one loss per step, for these steps and maybe later ones."""
        return Verdict(relative_error(np.asarray(got)[: len(self.losses)], self.losses), self.losses_allowed)


def reference_run(
    net: Network, x: Array, y: Array, batches: Sequence[Array], options: TrainOptions, dtype: str
) -> Array:
    velocity, moments, losses = dict[str, Array](), dict[str, tuple[Array, Array]](), []
    steps = -(-len(batches) // options.epochs)
    lrs = np.concatenate([lrs_of(options, epoch, steps) for epoch in range(options.epochs)])
    for step, (rows, lr) in enumerate(zip(batches, map(float, lrs), strict=False), start=1):
        loss, gradients = reference.loss_and_gradients(net, x[rows], y[rows], options.loss, dtype)
        if options.optimiser == "adam":
            net = reference.adam_step(net, moments, gradients, lr, step)
        else:
            net = reference.sgd_step(net, velocity, gradients, lr, options.momentum)
        losses.append(loss)
    return flat_run(losses, net)


def flat_run(losses: Iterable[float], net: Network) -> Array:
    """A loss curve and the final weights, sorted by name, as one flat array."""
    weights = [np.ravel(materialise(name, net.weights)) for name in sorted(net.weights)]
    return np.concatenate([np.asarray(losses, np.float64), *weights])
