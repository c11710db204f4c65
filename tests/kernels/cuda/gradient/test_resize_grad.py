"""dx of linear resizes on an emulated GPU: axes that grow, shrink and stay, by any scale."""

import numpy as np
import pytest

from checks import assert_error_within, ulps_of
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.network.graph import Network, Node
from onchip.network.layers import InputGrad, LinearResize
from onchip.network.types import TensorType, numpy_dtype

# The shape of x and of y, scales, coordinates.
CASES = [
    ((3, 5, 7), (3, 10, 14), (1.0, 2.0, 2.0), "half_pixel"),
    ((2, 8, 9), (2, 4, 3), (1.0, 0.5, 1 / 3), "half_pixel"),
    ((2, 3, 4, 5), (2, 7, 4, 12), (1.0, 7 / 3, 1.0, 2.4), "align_corners"),
    ((4, 6, 3), (4, 13, 3), (1.0, 13 / 6, 1.0), "asymmetric"),
    ((6,), (17,), (17 / 6,), "half_pixel"),
    ((3, 4), (3, 4), (1.0, 1.0), "half_pixel"),
    ((2, 5), (3, 1), (1.5, 0.2), "half_pixel"),
]


@needs_gxx
@pytest.mark.parametrize(("row", "sizes", "scales", "coordinates"), CASES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dx(monkeypatch, row, sizes, scales, coordinates, dtype):
    gpu, layer = emulated_gpu(monkeypatch), LinearResize(sizes, scales, coordinates)
    given = {"x": TensorType(("B", *row), dtype), "dy": TensorType(("B", *sizes), dtype)}
    net = Network(given, (Node("dx", InputGrad(layer), ("x", "dy")),), ("dx",), {})
    (claim,) = claims_of(net, "resize_grad")
    for B in (1, 5, 33):
        rng = np.random.default_rng(B)
        xs = [rng.standard_normal((B, *shape), np.float32).astype(numpy_dtype(dtype)) for shape in (row, sizes)]
        truth, baseline = (reference.forward(net, tuple(xs), of) for of in ("float64", dtype))
        assert_error_within(run_claim(gpu, net, claim, *xs), truth, baseline, ulps=ulps_of(dtype))


def test_a_resize_of_one_value_and_its_own_gradient(monkeypatch):
    """x and dy may be one value, where the sizes stay."""
    x = TensorType(("B", 3, 4))
    net = Network({"x": x}, (Node("dx", InputGrad(LinearResize((3, 4), (1.0, 1.0))), ("x", "x")),), ("dx",), {})
    (claim,) = claims_of(net, "resize_grad")
    assert claim.facts.dy == 0
