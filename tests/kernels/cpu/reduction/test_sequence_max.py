"""The max over sequences of different lengths on the CPU: both layouts, all lengths, NaN and infinities."""

import numpy as np
import pytest

import onchip
from checks import rows
from image_networks import weight
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import Conv1d, SequenceMax
from onchip.network.types import TensorType

LENGTHS = np.array([-5, 0, 1, 2, 3, 4, 7, 8, 9, 30, 1 << 30])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(("window", "stride"), [(1, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize("C", [1, 5, 33])
def test_every_length(C, window, stride, dtype):
    inputs = {"x": TensorType(("B", C, 8)), "n": TensorType(("B",), dtype)}
    net = Network(inputs, (Node("y", SequenceMax(window, stride), ("x", "n")),), ("y",), {})
    engine, x, n = onchip.compile(net, "cpu"), rows(11, C, 8), LENGTHS.astype(dtype)
    assert [group.claim.kernel for group in engine.plan.groups] == ["sequence_max"]
    x[6, 0, 1], x[6, 0, -1], x[7, 0, 2], x[9, 0, 0] = np.nan, np.nan, np.inf, -np.inf
    expected = reference.forward(net, (x, n), "float32")
    np.testing.assert_array_equal(engine(x, n), expected)
    np.testing.assert_array_equal(engine(x[6:8], n[6:8]), expected[6:8])


def test_nhwc_after_a_convolution():
    inputs = {"x": TensorType(("B", 4, 20)), "n": TensorType(("B",), "int64")}
    nodes = (Node("c", Conv1d(), ("x",), {"weight": "w"}), Node("y", SequenceMax(3), ("c", "n")))
    net = Network(inputs, nodes, ("y",), {"w": weight(24, 4, 3)})
    engine, x, n = onchip.compile(net, "cpu"), rows(50, 4, 20), np.arange(50) % 23
    assert [group.claim.kernel for group in engine.plan.groups] == ["conv_fused", "sequence_max"]
    assert engine.plan.groups[1].claim.reads
    np.testing.assert_allclose(engine(x, n), reference.forward(net, (x, n)), rtol=0, atol=1e-5)
