"""dx of max and min along axes and over sequences, emulated: of equal values the first, of any shape and layout."""

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.network.graph import Network, Node
from onchip.network.layers import GlobalMax, GlobalMin, Identity, InputGrad, SequenceMax
from onchip.network.types import TensorType, numpy_dtype

# Rows of few threads, of a warp and of a block; columns; all pixels; axes that are not adjacent.
SHAPES = [((3, 17), (-1,)), ((4, 8), (2,)), ((1100,), (1,)), ((8197,), (1,)), ((5, 7, 3), (2,)), ((3, 4, 5), (2, 3)),
          ((3, 4, 5), (1, 3)), ((2, 3, 4, 5), (2, 4))]  # fmt: skip


def gradient_of(layer, *inputs):
    """dx between other layers, so that it may have any layout."""
    dy = one_layer(layer, *inputs).output
    given = dict(zip(("x", "lengths"), inputs, strict=False)) | {"dy": dy}
    nodes = Node("dx", InputGrad(layer), tuple(given)), Node("z", Identity(), ("dx",))
    return Network(given, nodes, ("dx",), {})


def values(B, row, dtype):
    """Many equal ones, and a NaN here and there."""
    rng = np.random.default_rng((B, *row))
    x = rng.integers(-3, 4, (B, *row)).astype(numpy_dtype(dtype))
    x[rng.random(x.shape) < 0.01] = np.nan
    return x


def assert_right(gpu, net, claims, *xs):
    truth = reference.forward(net, xs, xs[0].dtype.name)
    for claim in claims:
        assert np.array_equal(run_claim(gpu, net, claim, *xs), truth)


@needs_gxx
@pytest.mark.parametrize("kind", [GlobalMax, GlobalMin])
@pytest.mark.parametrize(("row", "axes"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_first_extreme(monkeypatch, kind, row, axes, dtype):
    gpu, layer = emulated_gpu(monkeypatch), kind(axes)
    net = gradient_of(layer, TensorType(("B", *row), dtype))
    claims = claims_of(net, "extreme_grad")
    is_of_pixels = [axis % (1 + len(row)) for axis in axes] == [*range(2, 1 + len(row))]
    assert len(claims) == 1 + is_of_pixels
    for B in (1, 5, 33, 257) if np.prod(row) < 1000 else (1, 3):
        dy = np.random.default_rng(B).standard_normal((B, *net.types["dy"].row_shape), np.float32)
        assert_right(gpu, net, claims, values(B, row, dtype), dy.astype(numpy_dtype(dtype)))


@needs_gxx
@pytest.mark.parametrize(("dtype", "ids"), [*((dtype, "int32") for dtype in FLOATS), ("float32", "int64")])
@pytest.mark.parametrize(("row", "window", "stride"), [((3, 17), 1, 1), ((4, 40), 3, 2), ((1, 5), 2, 1)], ids=str)
def test_inside_a_sequence(monkeypatch, row, window, stride, dtype, ids):
    gpu, layer = emulated_gpu(monkeypatch), SequenceMax(window, stride)
    net = gradient_of(layer, TensorType(("B", *row), dtype), TensorType(("B",), ids))
    claims = claims_of(net, "extreme_grad")
    assert len(claims) == 1 + (row[0] > 1)
    for B in (1, 5, 33, 257):
        rng = np.random.default_rng(B)
        lengths = rng.integers(-1, row[1] * stride + 5, B).astype(numpy_dtype(ids))
        dy = rng.standard_normal((B, row[0]), np.float32).astype(numpy_dtype(dtype))
        x = rng.integers(-3, 4, (B, *row)).astype(numpy_dtype(dtype))
        assert_right(gpu, net, claims, x, lengths, dy)
