"""backprop: the classic back-propagation exercise, 784-56-28-10, sigmoids, full batch with momentum.

One update per epoch: half the sum of squared errors over all 60,000 patterns, eta (the learning rate) 2e-4, alpha (the
momentum) 2e-3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.train.options import TrainOptions
from onchip.workloads import digits
from onchip.workloads.dataset import Dataset

HIDDEN = (56, 28)
PIXELS, CLASSES = 784, digits.CLASSES
PATTERNS = 60_000
TRAIN = TrainOptions(loss="half_sse", lr=2e-4, momentum=2e-3, batch_size=PATTERNS, epochs=100, shuffle=False)


def network(
    pixels: int = PIXELS, hidden: Sequence[int] = HIDDEN, seed: int = 0, activation: str = "Sigmoid"
) -> Network:
    """The network with small uniform weights: saturated sigmoids hardly learn.

    `rng = numpy.random.default_rng(seed)`; then for each layer, first to last,
    `rng.random((D_out, D_in), dtype=float32) - float32(0.5)`; biases are zero.
    """
    widths = (pixels, *hidden, CLASSES)
    net = mlp(*widths, activation=activation, output="Sigmoid", name="backprop")
    rng, weights = np.random.default_rng(seed), dict(net.weights)
    for i, (D_in, D_out) in enumerate(pairwise(widths), start=1):
        weights[f"fc{i}.weight"] = rng.random((D_out, D_in), dtype=np.float32) - np.float32(0.5)
    return net.replace(weights=weights)


def load_data(name: str = "auto") -> Dataset:
    """`digits.load_data` with one-hot targets (n, 10) float32."""
    data = digits.load_data(name)
    return dataclasses.replace(data, y_train=one_hot(data.y_train), y_test=one_hot(data.y_test))


def one_hot(classes: Array) -> Array:
    return np.eye(CLASSES, dtype=np.float32)[classes]


@dataclasses.dataclass(frozen=True, eq=False)
class Patterns:
    """Inputs with their targets; sliced like an array."""

    x: Array  # (n, D_in) float32
    y: Array  # (n, 10) float32

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice) -> Patterns:
        return Patterns(self.x[rows], self.y[rows])


def patterns(n: int) -> tuple[Patterns, str]:
    """n MNIST patterns, repeated if MNIST has fewer, or random ones if it is not found; and the name of the data."""
    if digits.find_mnist() is None:
        rng = np.random.default_rng(0)
        x = rng.integers(0, 256, (n, PIXELS), dtype=np.uint8).astype(np.float32) / np.float32(255)  # scaled like MNIST
        return Patterns(x, one_hot(rng.integers(0, CLASSES, n))), "random data"
    data = load_data("mnist")
    rows = np.arange(n) % len(data.x_train)
    return Patterns(data.x_train[rows], data.y_train[rows]), "MNIST"
