"""dx of softmax and log-softmax on an emulated GPU: rows and columns of any length."""

import numpy as np
import pytest

from checks import assert_error_within, ulps_of
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.network.layers import InputGrad, LogSoftmax, Softmax
from onchip.network.types import TensorType, numpy_dtype

SHAPES = [
    ((3, 11), -1),
    ((1,), 1),
    ((40,), 1),
    ((2, 1022), 2),
    ((1100,), 1),
    ((8195,), 1),
    ((3, 5, 7), 1),
    ((5, 4, 2), -2),
]


@needs_gxx
@pytest.mark.parametrize("kind", [Softmax, LogSoftmax])
@pytest.mark.parametrize(("row", "axis"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dx(monkeypatch, kind, row, axis, dtype):
    gpu, x, element = emulated_gpu(monkeypatch), TensorType(("B", *row), dtype), numpy_dtype(dtype)
    net = one_layer(InputGrad(kind(axis)), x, x)
    (claim,) = claims_of(net, "softmax_grad")
    for B in (1, 5, 33, 257) if np.prod(row) < 1000 else (1, 3):
        rng = np.random.default_rng(B)
        y = kind(axis).forward((rng.standard_normal((B, *row), np.float32),), {}).astype(element)
        dy = rng.standard_normal((B, *row), np.float32).astype(element)
        got = run_claim(gpu, net, claim, y, dy)
        truth, baseline = (reference.forward(net, (y, dy), of) for of in ("float64", dtype))
        assert_error_within(got, truth, baseline, ulps=ulps_of(dtype))
        assert np.array_equal(run_claim(gpu, net, claim, y[-1:], dy[-1:]), got[-1:])
