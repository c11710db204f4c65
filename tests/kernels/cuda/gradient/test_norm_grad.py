"""dx of row norms on an emulated GPU: segments of any size, with and without weights."""

import numpy as np
import pytest

from checks import assert_error_within, ulps_of
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.network.layers import GroupNorm, InputGrad, LayerNorm, RMSNorm
from onchip.network.types import TensorType, numpy_dtype

# Few lanes, a warp, a block, a segment that a block loops over; aligned and not.
CASES = [
    (LayerNorm(), (3, 12), True), (LayerNorm(), (17,), True), (LayerNorm(), (1,), False), (RMSNorm(1), (5, 40), True),
    (RMSNorm(), (3,), False), (LayerNorm(1), (2, 511), False), (LayerNorm(), (1100,), True), (RMSNorm(), (8195,), True),
    (GroupNorm(2), (6, 3, 5), True), (GroupNorm(3), (3, 8), False), (GroupNorm(1), (4, 50, 42), True),
]  # fmt: skip


def gradient_of(layer, row, has_weight, dtype, weight_dtype):
    x = TensorType(("B", *row), dtype)
    roles = {"weight": 1, "bias": 2} if has_weight and "bias" in layer.optional else {"weight": 1} if has_weight else {}
    shape = layer.weight_shape(x)
    drawn = {role: np.random.default_rng(i).standard_normal(shape, np.float32) for role, i in roles.items()}
    weights = {role: array.astype(numpy_dtype(weight_dtype)) for role, array in drawn.items()}
    return one_layer(InputGrad(layer), x, x, weights=weights)


@needs_gxx
@pytest.mark.parametrize(("layer", "row", "has_weight"), CASES, ids=str)
@pytest.mark.parametrize(("dtype", "weight_dtype"), [*zip(FLOATS, FLOATS, strict=True), ("float64", "bfloat16")])
def test_dx(monkeypatch, layer, row, has_weight, dtype, weight_dtype):
    gpu, net = emulated_gpu(monkeypatch), gradient_of(layer, row, has_weight, dtype, weight_dtype)
    (claim,) = claims_of(net, "norm_grad")
    for B in (1, 5, 33, 257) if np.prod(row) < 1000 else (1, 3):
        rng = np.random.default_rng(B)
        drawn = rng.standard_normal((B, *row), np.float32) + 2, rng.standard_normal((B, *row), np.float32)
        x, dy = (array.astype(numpy_dtype(dtype)) for array in drawn)
        got = run_claim(gpu, net, claim, x, dy)
        truth, baseline = (reference.forward(net, (x, dy), of) for of in ("float64", dtype))
        assert_error_within(got, truth, baseline, ulps=ulps_of(dtype))
        assert np.array_equal(run_claim(gpu, net, claim, x[-1:], dy[-1:]), got[-1:])
