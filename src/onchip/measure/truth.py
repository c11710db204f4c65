"""Right or wrong: every engine against the float64 reference, with the naive float32 run as the yardstick."""

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

_PIECE_ROWS = 16_384  # the reference keeps every value of every layer: millions of rows go through in pieces
_FEW_ULP = 4 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Verdict:
    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed  # a NaN is wrong


def relative_error(got: Array, truth: Array) -> float:
    """The largest |a - b| / max(1, |a|, |b|); infinite for another shape, for a NaN or an infinity too many."""
    if got.shape != truth.shape:
        return float("inf")
    if not got.size:
        return 0.0
    a, b = got.astype(np.float64), truth.astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(a - b) / np.maximum(1, np.maximum(np.abs(a), np.abs(b)))
    error[(a == b) | (np.isnan(a) & np.isnan(b))] = 0  # equal infinities have no difference
    return float(np.nan_to_num(error, nan=np.inf).max())


def allowed_error(naive: float) -> float:
    """At most twice the error of a naive run in the same precision, and a few ulp."""
    return 2 * naive + _FEW_ULP


Rows = Array | tuple[Array, ...]  # of a network's input, or of its inputs in their order


def as_inputs(x: Rows) -> tuple[Array, ...]:
    return x if isinstance(x, tuple) else (x,)


class Truth:
    """What the network makes of x, in float64, and how far from it an engine of some dtype may be."""

    def __init__(self, net: Network, x: Rows, dtype: str = "float32") -> None:
        given = as_inputs(x)
        pieces = [tuple(rows[i : i + _PIECE_ROWS] for rows in given) for i in range(0, len(given[0]), _PIECE_ROWS)]
        self.y = np.concatenate([reference.forward(net, piece) for piece in pieces])
        naive = np.concatenate([naive_run(net, piece, dtype) for piece in pieces])
        self.allowed = allowed_error(relative_error(naive, self.y))

    def measured_by(self, naive: Array) -> Truth:
        """The same truth with another yardstick: what a naive run made of x, with weights as coarse as the engine's."""
        return self.allowing(relative_error(naive, self.y))

    def allowing(self, naive: float) -> Truth:
        """The same truth with another yardstick: the error of a naive run."""
        other = copy.copy(self)
        other.allowed = allowed_error(naive)
        return other

    def judge(self, got: Array) -> Verdict:
        """got: y of all rows."""
        return Verdict(relative_error(np.asarray(got), self.y), self.allowed)


def naive_error(net: Network, x: Rows, dtype: str = "float32") -> float:
    """How far a naive run in this dtype is off."""
    return relative_error(naive_run(net, x, dtype), reference.forward(net, x))


def naive_run(net: Network, x: Rows, dtype: str) -> Array:
    """What a run in this dtype makes of x, a layer at a time.

    NumPy multiplies 16 bits on one core, some 0.2 Gflop/s: every core takes a share of the rows, of the same bits.
    """
    given = as_inputs(x)
    B = len(given[0])
    shares = max(1, min(core_count(), B)) if numpy_dtype(dtype).itemsize == 2 else 1
    ends = [B * i // shares for i in range(shares + 1)]

    def run(start: int, end: int) -> Array:
        made: Array = reference.forward(net, tuple(rows[start:end] for rows in given), dtype)
        return made

    with concurrent.futures.ThreadPoolExecutor(shares) as pool:
        return np.concatenate(list(pool.map(run, ends, ends[1:])))


class TrainingTruth:
    """Where steps of SGD lead in float64, and how far from it a float32 run may end."""

    def __init__(
        self, net: Network, x: Array, y: Array, batches: Sequence[Array], options: TrainOptions, naive_runs: int = 1
    ) -> None:
        """batches     the rows of each step
        naive_runs  in float32, each with the rows of a batch in another order: where a unit's sign is rounding's to
                    say, a curve jumps. Of 7 runs over MNIST, 256 steps of 64 rows, one was off by 1.5e-4, the others
                    by 4e-7 at most
        """
        self.run = _reference_run(net, x, y, batches, options, "float64")
        self._losses = self.run[: len(batches)]
        error = losses_error = 0.0
        for seed in range(naive_runs):
            rng = np.random.default_rng(seed)
            orders = [rng.permutation(rows) for rows in batches] if seed else batches
            naive = _reference_run(net, x, y, orders, options, "float32")
            error = max(error, relative_error(naive, self.run))
            losses_error = max(losses_error, relative_error(naive[: len(batches)], self._losses))
        self.allowed, self.losses_allowed = allowed_error(error), allowed_error(losses_error)

    def judge(self, got: Array) -> Verdict:
        """got: as `flat_run` makes it."""
        return Verdict(relative_error(got, self.run), self.allowed)

    def judge_losses(self, got: Array) -> Verdict:
        """The loss curve alone. got: one number a step, of these steps and maybe of later ones."""
        return Verdict(relative_error(np.asarray(got)[: len(self._losses)], self._losses), self.losses_allowed)


def _reference_run(
    net: Network, x: Array, y: Array, batches: Sequence[Array], options: TrainOptions, dtype: str
) -> Array:
    velocity, losses = dict[str, Array](), []
    for rows in batches:
        loss, gradients = reference.loss_and_gradients(net, x[rows], y[rows], options.loss, dtype)
        net = reference.sgd_step(net, velocity, gradients, options.lr, options.momentum)
        losses.append(loss)
    return flat_run(losses, net)


def flat_run(losses: Iterable[float], net: Network) -> Array:
    """A loss curve and the weights it led to, by name, as one array."""
    weights = [np.ravel(materialise(name, net.weights)) for name in sorted(net.weights)]
    return np.concatenate([np.asarray(losses, np.float64), *weights])
