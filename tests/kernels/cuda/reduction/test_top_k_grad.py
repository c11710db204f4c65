"""dx of the k largest and smallest values on an emulated GPU: of equal values the first, of rows and columns."""

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import InputGrad, TopK
from onchip.network.types import TensorType, numpy_dtype

LAYERS = [
    ((40,), TopK(5)), ((3, 7), TopK(3, 1)), ((5, 33), TopK(2, -1, False)), ((1,), TopK(1, largest=False)),
    ((6, 4, 3), TopK(3, 2, False)), ((6, 4, 3), TopK(6, 1)), ((129,), TopK(129)),
]  # fmt: skip


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(("row", "layer"), LAYERS, ids=str)
def test_dy_is_at_the_values_it_is_of(monkeypatch, row, layer, dtype):
    gpu, x = emulated_gpu(monkeypatch), TensorType(("B", *row), dtype)
    inputs = {"x": x, "dy": one_layer(layer, x).output}
    net = Network(inputs, (Node("dx", InputGrad(layer), ("x", "dy")),), ("dx",), {})
    (claim,) = claims_of(net, "top_k_grad")
    for B in (1, 5, 33):
        rng = np.random.default_rng(B)
        rows = rng.integers(-3, 3, (B, *row)).astype(numpy_dtype(dtype))
        rows[rng.random(rows.shape) < 0.1] = np.nan
        rows[rng.random(rows.shape) < 0.1] = -np.inf
        dy = rng.standard_normal((B, *inputs["dy"].row_shape)).astype(numpy_dtype(dtype))
        truth = reference.forward(net, (rows, dy))
        np.testing.assert_array_equal(run_claim(gpu, net, claim, rows, dy).astype(np.float64), truth)
