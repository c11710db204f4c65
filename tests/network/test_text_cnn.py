"""The network for sentences: its layers, initial weights and limits."""

from __future__ import annotations

import numpy as np
import pytest

from onchip.errors import InputError
from onchip.kernels import reference
from onchip.network.layers import Dropout
from onchip.network.text_cnn import text_cnn

SIZES = {"vocabulary": 20, "length": 9, "classes": 3, "embedding": 4, "channels": 5}


def test_it_computes_what_kim_describes():
    net = text_cnn(**SIZES, kernels=(2, 4))
    ids = np.random.default_rng(0).integers(0, 20, (7, 9)).astype(np.int32)
    w = {name: np.asarray(weight, np.float64) for name, weight in net.weights.items()}
    words, best = w["embedding.weight"][ids], []
    for K in (2, 4):
        windows = np.stack([words[:, i : i + K] for i in range(9 - K + 1)], axis=1)
        sums = np.einsum("bpke,cek->bpc", windows, w[f"conv{K}.weight"]) + w[f"conv{K}.bias"]
        best.append(np.maximum(sums, 0).max(axis=1))
    expected = np.concatenate(best, axis=1) @ w["fc.weight"].T + w["fc.bias"]
    np.testing.assert_allclose(reference.forward(net, ids, "float64"), expected, rtol=1e-6)
    assert next(node.layer.p for node in net.nodes if isinstance(node.layer, Dropout)) == 0.5
    assert not any(isinstance(node.layer, Dropout) for node in text_cnn(**SIZES, dropout=0).nodes)


def test_initial_weights_are_the_documented_ones():
    net, rng = text_cnn(**SIZES, seed=3), np.random.default_rng(3)
    drawn = rng.random((20, 4), dtype=np.float32) * 2 - 1
    np.testing.assert_array_equal(net.weights["embedding.weight"], drawn * np.float32(0.25))
    drawn = rng.random((5, 4, 3), dtype=np.float32) * 2 - 1
    np.testing.assert_array_equal(net.weights["conv3.weight"], drawn * np.float32(12**-0.5))
    assert not net.weights["conv3.bias"].any()
    assert not np.array_equal(net.weights["embedding.weight"], text_cnn(**SIZES, seed=4).weights["embedding.weight"])


@pytest.mark.parametrize(
    "change",
    [{"length": 4}, {"classes": 0}, {"vocabulary": "9"}, {"embedding": True}, {"seed": -1}, {"dropout": 1},
     {"dropout": "half"}, {"kernels": ()}, {"kernels": (3, 3)}, {"kernels": 3}, {"kernels": (0, 1)},
     {"vocabulary": 1 << 26}, {"channels": 1 << 40}],
)  # fmt: skip
def test_sizes_that_are_none(change):
    with pytest.raises(InputError):
        text_cnn(**{**SIZES, **change})
