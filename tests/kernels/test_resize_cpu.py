"""LinearResize on the CPU, along one, two and three axes."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from emulated_engine import one_layer
from onchip.kernels import reference
from onchip.spec.layers import LinearResize
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
