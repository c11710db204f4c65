"""The gradients of pools on an emulated GPU: any window, in both layouts, and of equal values the first."""

import numpy as np
import pytest

from checks import assert_error_within, ulps_of
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from layer_cases import CASES
from onchip.kernels import reference
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.window import POOLS
from onchip.network.graph import Network, Node
from onchip.network.layers import AvgPool1d, AvgPool2d, Identity, InputGrad, MaxPool1d, MaxPool2d
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.layout import has_channels

POOLS_AND_ROWS = [(case.layer, case.rows[0]) for case in CASES if isinstance(case.layer, POOLS)]
POOLS_AND_ROWS += [  # vectors of channels; windows that overlap, that leave gaps, that are all of x
    (MaxPool2d((2, 2)), (4, 6, 5)), (MaxPool2d((3, 3), (2, 2), (1, 1, 1, 1)), (8, 7, 6)),
    (MaxPool1d((2,), (5,)), (3, 13)), (AvgPool2d((3, 3), (1, 1), (1, 1, 1, 1)), (4, 5, 5)),
    (AvgPool2d((4, 3)), (2, 4, 3)), (AvgPool1d((1,), (3,)), (1, 8)),
    (MaxPool2d((3, 2), (1, 3), (2, 0, 1, 1), (3, 2), True), (4, 11, 9)),
]  # fmt: skip


def gradient_of(pool, row, dtype):
    """dx of x, y and dy, between other layers, so that it may have any layout."""
    x = TensorType(("B", *row), dtype)
    y = one_layer(pool, x).output
    inputs = {"x": x, "y": y, "dy": y} if pool.needs_y else {"x": x, "dy": y}
    nodes = Node("dx", InputGrad(pool), tuple(inputs)), Node("z", Identity(), ("dx",))
    return Network(inputs, nodes, ("dx",), {})


def assert_right(gpu, pool, x):
    dtype = x.dtype.name
    net = gradient_of(pool, x.shape[1:], dtype)
    y = reference.forward(one_layer(pool, TensorType(("B", *x.shape[1:]), dtype)), x, dtype).astype(x.dtype)
    dy = np.random.default_rng(1).standard_normal(y.shape, dtype=np.float32).astype(x.dtype)
    xs = (x, y, dy) if pool.needs_y else (x, dy)
    claims = claims_of(net, "pool_grad")
    assert len(claims) == 1 + all(has_channels(each) for each in net.inputs.values())
    truth, baseline = (reference.forward(net, xs, dtype) for dtype in ("float64", dtype))
    for claim in claims:
        assert_error_within(run_claim(gpu, net, claim, *xs), truth, baseline, ulps=ulps_of(dtype))


@needs_gxx
@pytest.mark.parametrize(("pool", "row"), POOLS_AND_ROWS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_windows_of_any_shape(monkeypatch, pool, row, dtype):
    gpu = emulated_gpu(monkeypatch)
    for B in (1, 5, 33):
        assert_right(
            gpu, pool, np.random.default_rng(B).standard_normal((B, *row), dtype=np.float32).astype(numpy_dtype(dtype))
        )


@needs_gxx
@pytest.mark.parametrize("pool", [pool for pool, _ in POOLS_AND_ROWS if pool.needs_y], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_first_of_equal_values(monkeypatch, pool, dtype):
    gpu, row = emulated_gpu(monkeypatch), next(row for each, row in POOLS_AND_ROWS if each is pool)
    x = np.random.default_rng(0).integers(0, 2, (257, *row)).astype(numpy_dtype(dtype))
    x[3] = -np.inf  # as in the padding
    assert_right(gpu, pool, x)
