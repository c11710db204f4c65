"""LinearResize on the CPU, along one, two and three axes."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within, rows
from emulated_engine import one_layer
from image_networks import SAME, weight
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import Concat, LinearResize
from onchip.network.types import TensorType
from onchip.plan.layout import CHANNELS_LAST

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
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    assert np.array_equal(engine(x[5:7]), got[5:7])
    assert np.array_equal(onchip.compile(net, "cpu", threads=1)(x), got)
    assert engine(x[:0]).shape == (0, *sizes)


@pytest.mark.parametrize(
    ("row", "sizes"), [((32, 9, 7), (32, 18, 14)), ((5, 8, 8), (5, 3, 20)), ((16, 6, 6), (16, 6, 9))], ids=str
)
def test_values_between_convolutions_stay_nhwc(row, sizes):
    """The resize is between two conv_fused groups, and part of neither."""
    C, inputs = row[0], {"x": TensorType(("B", 3, *row[1:])), "x1": TensorType(("B", 3, *sizes[1:]))}
    nodes = (
        Node("a", SAME, ("x",), {"weight": "a"}), Node("b", SAME, ("x1",), {"weight": "b"}),
        Node("r", LinearResize(sizes, tuple(n / m for n, m in zip(sizes, row, strict=True))), ("a",)),
        Node("c", Concat(1), ("r", "b")), Node("y", SAME, ("c",), {"weight": "y"}),
        Node("z", SAME, ("a",), {"weight": "z"}),
    )  # fmt: skip
    weights = {"a": weight(C, 3, 3, 3), "b": weight(6, 3, 3, 3), "y": weight(4, C + 6, 3, 3), "z": weight(2, C, 3, 3)}
    net = Network(inputs, nodes, ("y", "z"), weights, "two images")
    engine = onchip.compile(net, "cpu", batch_hint=64)
    (resize,) = [group for group in engine.plan.groups if group.claim.kernel == "resize"]
    assert resize.claim.writes == {"r": CHANNELS_LAST}
    x = tuple(rows(9, *given.row_shape) for given in inputs.values())
    truth, naive = reference.forward_all(net, x), reference.forward_all(net, x, "float32")
    for name, got, again in zip(net.outputs, engine(*x), engine(*(each[5:7] for each in x)), strict=True):
        assert_error_within(got, truth[name], baseline=naive[name])
        assert np.array_equal(again, got[5:7])


def test_large_resizes_do_not_fall_back_to_numpy():
    net = one_layer(LinearResize((32, 64, 64), (1.0, 2.0, 2.0)), TensorType(("B", 32, 32, 32)))
    assert [group.claim.kernel for group in onchip.compile(net, "cpu").plan.groups] == ["resize"]
