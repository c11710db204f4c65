"""The Frechet distance between two sets of pictures, by the features of a small CNN that is trained here.

Like the FID of the literature, it is the distance between two normal distributions that are fitted to features:
|mean difference|^2 + trace(A + B - 2 sqrt(A B)), of covariances A and B. The features are others: not those of
Inception, but of a CNN that learns from the training pictures which of four ways each is turned. So a distance compares
generators of the same pictures, and says nothing next to an FID.

`nearest_difference` tells whether a generator repeats pictures that it was trained on.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from onchip.network.build import sequential
from onchip.network.graph import Network
from onchip.network.layers import Conv2d, GlobalMean, Layer, LeakyReLU, Linear, Permute
from onchip.network.recipe import Array
from onchip.network.types import BATCH, TensorType
from onchip.runtime.engine import compile
from onchip.train.loop import fit
from onchip.workloads.gan import PictureSize, picture_values

FEATURES = 32
_CHANNELS, _STRIDE = (8, 16, 32), 2
_TURNS = 4
_MOST_TRAINED = 2_000  # pictures, each in all turns
_EPOCHS = 4
_MOST_COMPARED = 10_000
_MOST_SEARCHED, _SEARCHED_AT_ONCE = 200, 1_000


class FeatureNetwork:
    """A CNN that tells the turns of these pictures; `features` is what its last layer reads."""

    def __init__(self, images: Array, size: PictureSize, device: str, threads: int | None) -> None:
        """images  (n, side, side, colours) uint8"""
        images = _some(images, _MOST_TRAINED)
        turned = np.concatenate([np.rot90(images, turn, axes=(1, 2)) for turn in range(_TURNS)])
        turns = np.repeat(np.arange(_TURNS), len(images))
        result = fit(
            _classifier(size), picture_values(turned), turns, optimiser="adam", lr=2e-3, batch_size=32, epochs=_EPOCHS,
            device=device, threads=threads,
        )  # fmt: skip
        net = result.network
        cut = Network(net.inputs, net.nodes[:-1], (net.nodes[-2].name,), net.weights, "features")
        self.accuracy = result.history[-1].accuracy
        self._engine = compile(cut, device, threads=threads)

    def features(self, images: Array) -> Array:
        """(n, FEATURES) of bytes (n, side, side, colours), at most _MOST_COMPARED of them."""
        return np.asarray(self._engine(picture_values(_some(images, _MOST_COMPARED))), np.float64)

    def distance(self, images: Array, others: Array) -> float:
        return frechet_distance(self.features(images), self.features(others))


def frechet_distance(a: Array, b: Array) -> float:
    """Of normal distributions fitted to features (n, D) and (m, D), in float64."""
    means = a.mean(axis=0) - b.mean(axis=0)
    A, B = (np.atleast_2d(np.cov(x, rowvar=False)) for x in (a, b))
    root = _root(A)
    cross = np.linalg.eigvalsh(root @ B @ root)  # the eigenvalues of A B
    return max(0.0, float(means @ means + np.trace(A) + np.trace(B) - 2 * np.sqrt(np.maximum(cross, 0)).sum()))


def nearest_difference(images: Array, others: Array) -> float:
    """The median, over at most _MOST_SEARCHED images, of the difference to the most similar of `others`, also mirrored:
    the root of the mean squared difference of bytes. 0: each image is one of them.
    """
    found = np.full(min(len(images), _MOST_SEARCHED), np.inf)
    rows = _flat(_some(images, _MOST_SEARCHED))
    for begin in range(0, len(others), _SEARCHED_AT_ONCE):
        part = others[begin : begin + _SEARCHED_AT_ONCE]
        for each in (part, part[:, :, ::-1]):
            flat = _flat(each)
            squares = (rows**2).sum(axis=1)[:, np.newaxis] + (flat**2).sum(axis=1) - 2 * rows @ flat.T
            found = np.minimum(found, squares.min(axis=1))
    return float(np.median(np.sqrt(np.maximum(found, 0) / rows.shape[1])))


def _flat(images: Array) -> Array:
    return images.reshape(len(images), -1).astype(np.float64)


def _root(A: Array) -> Array:
    values, vectors = np.linalg.eigh(A)
    root: Array = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    return root


def _some(images: Array, most: int) -> Array:
    """At most so many, evenly spread."""
    return images if len(images) <= most else images[np.linspace(0, len(images) - 1, most).astype(int)]


def _classifier(size: PictureSize) -> Network:
    rng, weights = np.random.default_rng(0), dict[str, Array]()
    layers: list[tuple[str, Layer]] = [("nchw", Permute((0, 3, 1, 2)))]
    for i, (C_in, C_out) in enumerate(pairwise((size.colours, *_CHANNELS)), start=1):
        spread = math.sqrt(2 / (9 * C_in))
        weights[f"conv{i}.weight"] = rng.standard_normal((C_out, C_in, 3, 3), np.float32) * np.float32(spread)
        weights[f"conv{i}.bias"] = np.zeros(C_out, np.float32)
        layers += [(f"conv{i}", Conv2d((_STRIDE,) * 2, (1,) * 4)), (f"relu{i}", LeakyReLU(0.1))]
    weights["turn.weight"] = rng.standard_normal((_TURNS, FEATURES), np.float32) * np.float32(1 / math.sqrt(FEATURES))
    weights["turn.bias"] = np.zeros(_TURNS, np.float32)
    layers += [("features", GlobalMean((2, 3))), ("turn", Linear())]
    return sequential(TensorType((BATCH, *size.shape)), layers, weights, name="features")
