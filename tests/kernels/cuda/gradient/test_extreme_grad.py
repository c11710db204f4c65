"""Gradients of maxima, of the k largest values and of maxima of sequences on an emulated GPU; equal values and NaNs."""

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.network.layers import GlobalMax, GlobalMin, InputGrad, SequenceMax, TopK
from onchip.network.types import TensorType, numpy_dtype

pytestmark = needs_gxx


def check(gpu, layer, row, B, dtype="float32", ids="int64", change=lambda x: x):
    x_type, lengths = TensorType(("B", *row), dtype), [TensorType(("B",), ids)] * isinstance(layer, SequenceMax)
    y_type = layer.infer((x_type, *lengths), {})
    net = one_layer(InputGrad(layer), x_type, *lengths, y_type, y_type)
    rng = np.random.default_rng(B)
    x = change(rng.integers(-3, 4, (B, *row)).astype(numpy_dtype(dtype)))  # few values: many are equal
    more = [rng.integers(-2, row[-1] + 3, B).astype(ids)] * len(lengths)
    y = layer.forward((x, *more), {})
    xs = (x, *more, y, rng.standard_normal(y.shape).astype(x.dtype))
    (claim,) = claims_of(net, "extreme_grad")
    np.testing.assert_array_equal(run_claim(gpu, net, claim, *xs), net.nodes[0].layer.forward(xs, {}))


@pytest.mark.parametrize("B", [1, 5, 33, 257])
@pytest.mark.parametrize(
    ("layer", "row"),
    [
        (GlobalMax((-1,)), (3, 7)), (GlobalMin((1,)), (5, 3)), (GlobalMax((1, 2), True), (3, 5, 2)),
        (GlobalMin((-1, -2)), (2, 3, 4)), (TopK(3), (2, 9)), (TopK(2, 1, False), (5, 3)), (TopK(1, -2), (1, 4)),
        (SequenceMax(), (3, 7)), (SequenceMax(3, 2), (2, 6)),
    ],
)  # fmt: skip
def test_values(monkeypatch, layer, row, B):
    check(emulated_gpu(monkeypatch), layer, row, B, ids="int32" if B == 5 else "int64")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(monkeypatch, dtype):
    for layer in (GlobalMax((-1,)), TopK(2)):
        check(emulated_gpu(monkeypatch), layer, (3, 5), 7, dtype)


def test_nans(monkeypatch):
    def with_nans(x):
        x[:, 1::3] = np.nan
        return x

    for layer in (GlobalMax((-1,)), TopK(4)):
        check(emulated_gpu(monkeypatch), layer, (9,), 5, change=with_nans)


def test_axes_that_are_not_adjacent_are_refused():
    x = TensorType(("B", 3, 4, 5))
    y = GlobalMax((1, 3)).infer((x,), {})
    assert claims_of(one_layer(InputGrad(GlobalMax((1, 3))), x, y, y), "extreme_grad") == []
