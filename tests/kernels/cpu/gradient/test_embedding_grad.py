"""Gradients of tables on the CPU: rows of any width, ids that occur never, once and often."""

import numpy as np
import pytest

from onchip.network.layers import Embedding, WeightGrad
from onchip.network.types import TensorType
from step_cases import bind, check_step, one_gradient, run


def gradient(V, E, S, dtype):
    inputs = {"ids": TensorType(("B", S), dtype), "dy": TensorType(("B", S, E))}
    return one_gradient(WeightGrad(Embedding()), inputs, {"weight": np.zeros((V, E), np.float32)})


def rows(B, S, V, E, dtype, often=0.3):
    """Ids below V - 1; the first one `often`."""
    rng = np.random.default_rng(B)
    ids = rng.integers(0, max(1, V - 1), (B, S))
    return np.where(rng.random(ids.shape) < often, 0, ids).astype(dtype), rng.standard_normal((B, S, E), np.float32)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("B", [0, 1, 7, 64])
@pytest.mark.parametrize(("V", "E"), [(1, 1), (9, 5), (41, 16), (300, 33), (5, 300)])
def test_rows_by_id(V, E, B, dtype):
    got = check_step(gradient(V, E, 12, dtype), "embedding_grad", rows(B, 12, V, E, dtype))["out"]
    assert V == 1 or not got[0, -1].any()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ids_out_of_range_are_left_out(dtype):
    net, (ids, dy) = gradient(9, 5, 12, dtype), rows(7, 12, 9, 5, dtype)
    bad = np.arange(ids.size).reshape(ids.shape) % 5 == 2
    kept = run(bind(net, "embedding_grad", 7), (ids, np.where(bad[..., None], 0, dy).astype(np.float32)))["out"]
    wrong = np.where(bad, np.where(ids % 2, -1, 9), ids).astype(dtype)
    assert np.array_equal(run(bind(net, "embedding_grad", 7), (wrong, dy))["out"], kept)
