"""Reductions on the CPU: any axes, any sizes, NaNs and infinities; the same bits in every batch."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from onchip.kernels import reference
from onchip.network.build import sequential
from onchip.network.layers import ArgMax, ArgMin, GlobalMax, GlobalMean, GlobalMin, GlobalNorm, GlobalSum
from onchip.network.types import TensorType

SHAPES = [((1,), (1,)), ((10,), (-1,)), ((3, 5), (1,)), ((3, 5), (2,)), ((4, 5, 6), (1, 3)), ((4, 5, 6), (2, 3)),
          ((2, 40000), (2,)), ((9, 1, 7), (1, 2))]  # fmt: skip


@pytest.mark.parametrize("kind", [GlobalMax, GlobalMin, GlobalSum, GlobalMean, GlobalNorm])
def test_reductions(kind):
    for row, axes in SHAPES:
        net = sequential(TensorType(("B", *row)), [("y", kind(axes, keep=len(row) > 2))], {})
        engine = onchip.compile(net, "cpu")
        assert [group.claim.kernel for group in engine.plan.groups] == ["reduce"]
        x = np.random.default_rng(0).standard_normal((7, *row)).astype(np.float32)
        got = engine(x)
        assert_error_within(got, reference.forward(net, x), reference.forward(net, x, "float32"))
        for rows in (slice(0), slice(1), slice(2, 7)):
            np.testing.assert_array_equal(engine(x[rows]), got[rows])
        np.testing.assert_array_equal(onchip.compile(net, "cpu", threads=1)(x), got)
        x.reshape(7, -1)[:3, -1] = np.nan, np.inf, -np.inf
        with np.errstate(all="ignore"):
            naive = reference.forward(net, x, "float32")
        finite = np.isfinite(naive)
        np.testing.assert_array_equal(engine(x)[~finite], naive[~finite])


def test_column_sums_have_the_same_bits_on_all_threads():
    net = sequential(TensorType(("B", 64, 33)), [("y", GlobalMean((1,)))], {})
    x = np.random.default_rng(0).standard_normal((400, 64, 33)).astype(np.float32)
    single, shared = onchip.compile(net, "cpu", threads=1)(x), onchip.compile(net, "cpu")
    for _ in range(20):
        np.testing.assert_array_equal(shared(x), single)


@pytest.mark.parametrize(
    "layer", [ArgMax(1), ArgMin(-1, keep=True), ArgMax(2, last=True), ArgMin(3, last=True)], ids=str
)
def test_indices(layer):
    """The first or the last of equals, also of NaNs."""
    x = np.random.default_rng(0).integers(0, 4, (9, 5, 6, 7)).astype(np.float32)
    x[2, :, 1, 1:3] = x[5, 3, :, 2] = np.nan
    net = sequential(TensorType(("B", 5, 6, 7)), [("y", layer)], {})
    engine = onchip.compile(net, "cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["reduce"]
    np.testing.assert_array_equal(engine(x), layer.forward((x,), {}))
    np.testing.assert_array_equal(engine(x[2:3]), engine(x)[2:3])
