"""Top-k values and indices along an axis: equals, NaNs, rows and columns; CPU and CUDA."""

import numpy as np
import pytest

import onchip
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.network.build import sequential
from onchip.network.layers import ArgTopK, TopK
from onchip.network.types import TensorType, numpy_dtype

LAYERS = [
    ((40,), TopK(5)), ((3, 7), ArgTopK(3, 1)), ((5, 33), ArgTopK(2, -1, False)), ((1,), TopK(1, largest=False)),
    ((6, 4, 3), TopK(3, 2, False)), ((6, 4, 3), ArgTopK(6, 1)), ((129,), ArgTopK(16)),
]  # fmt: skip


def values(row, B, dtype="float32"):
    """Many equal values, and some NaNs."""
    rng = np.random.default_rng(B)
    x = rng.integers(-3, 3, (B, *row)).astype(numpy_dtype(dtype))
    x[rng.random(x.shape) < 0.1] = np.nan
    x[rng.random(x.shape) < 0.1] = -np.inf
    x[rng.random(x.shape) < 0.1] = -0.0
    return x


def expected_of(layer, x):
    return layer.forward((x,), {})


def test_the_reference_sorts():
    x = np.array([[2.0, np.nan, 5.0, 2.0, -np.inf, 5.0]])
    for layer, indices in ((ArgTopK(6), [1, 2, 5, 0, 3, 4]), (ArgTopK(6, largest=False), [4, 0, 3, 2, 5, 1])):
        assert expected_of(layer, x).tolist() == [indices]
        values = expected_of(TopK(6, largest=layer.largest), x)
        np.testing.assert_array_equal(values, x[:, indices])


@pytest.mark.parametrize(("row", "layer"), LAYERS, ids=str)
def test_on_the_cpu(row, layer):
    engine = onchip.compile(sequential(TensorType(("B", *row)), [("y", layer)], {}), "cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["top_k"]
    for B in (1, 7, 300):
        x = values(row, B)
        np.testing.assert_array_equal(engine(x), expected_of(layer, x))
        assert engine(x)[B // 2 :].tobytes() == engine(x[B // 2 :]).tobytes()


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(("row", "layer"), LAYERS, ids=str)
def test_on_an_emulated_gpu(monkeypatch, row, layer, dtype):
    gpu = emulated_gpu(monkeypatch)
    net = one_layer(layer, TensorType(("B", *row), dtype))
    (claim,) = claims_of(net, "top_k")
    for B in (1, 9):
        x = values(row, B, dtype)
        got = run_claim(gpu, net, claim, x)
        np.testing.assert_array_equal(got.astype(np.float64), expected_of(layer, x.astype(np.float64)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(("row", "layer"), LAYERS, ids=str)
def test_on_a_gpu(row, layer, dtype):
    engine = onchip.compile(sequential(TensorType(("B", *row), dtype), [("y", layer)], {}), "cuda")
    for B in (0, 1, 7, 4097):
        x = values(row, B, dtype)
        np.testing.assert_array_equal(engine(x).astype(np.float64), expected_of(layer, x.astype(np.float64)))
