"""dx of softmax and log-softmax on an emulated GPU: rows and columns of any length."""

import numpy as np
import pytest

from checks import assert_error_within
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.kernels import reference
from onchip.network.layers import InputGrad, LogSoftmax, Softmax
from onchip.network.types import TensorType

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
def test_dx(monkeypatch, kind, row, axis):
    gpu, x = emulated_gpu(monkeypatch), TensorType(("B", *row))
    net = one_layer(InputGrad(kind(axis)), x, x)
    (claim,) = claims_of(net, "softmax_grad")
    for B in (1, 5, 33, 257) if np.prod(row) < 1000 else (1, 3):
        rng = np.random.default_rng(B)
        y = kind(axis).forward((rng.standard_normal((B, *row), np.float32),), {})
        dy = rng.standard_normal((B, *row), np.float32)
        got = run_claim(gpu, net, claim, y, dy)
        assert_error_within(got, reference.forward(net, (y, dy)), reference.forward(net, (y, dy), "float32"))
        assert np.array_equal(run_claim(gpu, net, claim, y[-1:], dy[-1:]), got[-1:])
