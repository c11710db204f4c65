"""LinearResize on the CPU, along one, two and three axes."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from emulated_engine import one_layer
from onchip.kernels import reference
from onchip.plan.layout import CHANNELS_LAST
from onchip.spec.build import sequential
from onchip.spec.layers import Conv2d, LinearResize
from onchip.spec.types import TensorType

CASES = [
    ((3, 6, 10), (3, 4, 5)), ((7,), (3,)), ((5, 3), (3, 3)), ((4, 4, 6), (2, 3, 4)), ((6, 4, 8), (3, 4, 4)),
    ((2, 3, 6, 5), (2, 3, 4, 5)), ((2, 9, 4, 5), (2, 4, 4, 5)),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "row"), CASES, ids=str)
def test_rows_are_resized(sizes, row):
    scales = tuple(size / n for n, size in zip(row, sizes, strict=True))
    net = one_layer(LinearResize(sizes, scales), TensorType(("B", *row)))
    engine = onchip.compile(net, "cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["resize"]
    x = np.random.default_rng(0).standard_normal((33, *row)).astype(np.float32)
    got = engine(x)
    assert_error_within(got, reference.forward(net, x), yardstick=reference.forward(net, x, "float32"))
    assert np.array_equal(engine(x[5:7]), got[5:7])
    assert np.array_equal(onchip.compile(net, "cpu", threads=1)(x), got)
    assert engine(x[:0]).shape == (0, *sizes)


def between_convolutions(row, sizes):
    """A resize whose values only convolutions see."""
    C, N = row[0], sizes[0]
    resize = LinearResize(sizes, tuple(n / m for n, m in zip(sizes, row, strict=True)))
    layers = [("a", Conv2d(pads=(1, 1, 1, 1))), ("r", resize), ("b", Conv2d(pads=(1, 1, 1, 1)))]
    rng = np.random.default_rng(1)
    weights = {
        "a.weight": rng.standard_normal((C, 3, 3, 3)).astype(np.float32),
        "b.weight": rng.standard_normal((4, N, 3, 3)).astype(np.float32),
    }
    return sequential(TensorType(("B", 3, *row[1:])), layers, weights)


@pytest.mark.parametrize(
    ("row", "sizes"), [((32, 9, 7), (32, 18, 14)), ((5, 8, 8), (5, 3, 20)), ((16, 6, 6), (16, 6, 9))], ids=str
)
def test_values_that_convolutions_see_stay_with_channels_last(row, sizes):
    net = between_convolutions(row, sizes)
    engine = onchip.compile(net, "cpu", batch_hint=64)
    (resize,) = [group for group in engine.plan.groups if group.claim.kernel == "resize"]
    assert resize.claim.gives == {"r": CHANNELS_LAST}
    assert "move" not in [group.claim.kernel for group in engine.plan.groups]
    x = np.random.default_rng(0).standard_normal((9, 3, *row[1:])).astype(np.float32)
    got = engine(x)
    assert_error_within(got, reference.forward(net, x), yardstick=reference.forward(net, x, "float32"))
    assert np.array_equal(engine(x[5:7]), got[5:7])


def test_many_numbers_are_not_left_to_numpy():
    net = one_layer(LinearResize((32, 64, 64), (1.0, 2.0, 2.0)), TensorType(("B", 32, 32, 32)))
    assert [group.claim.kernel for group in onchip.compile(net, "cpu").plan.groups] == ["resize"]
