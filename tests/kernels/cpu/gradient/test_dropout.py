"""Dropouts of a training step on the CPU: the bits of their reference, whatever seed, step and dropout."""

import numpy as np
import pytest

from onchip.network.graph import Network, Node
from onchip.network.layers import DropoutMask, Mul
from onchip.network.types import TensorType
from step_cases import bind, check_step, expected

DRAWS = [((0, 0), 0, 0.5), ((-5, 7), 3, 0.1), ((1 << 40 | 9, (1 << 32) - 1), 200, 0.25), ((3, 1), 1, 0.0)]


def dropout(row, layer, draw, outputs):
    nodes = Node("mask", layer, ("x",), {"draw": "draw"}), Node("y", Mul(), ("x", "mask"))
    nodes = nodes if "y" in outputs else nodes[:1]
    return Network({"x": TensorType(("B", *row))}, nodes, outputs, {"draw": np.array(draw)}, state={"draw": ""})


@pytest.mark.parametrize("outputs", [("mask",), ("y",), ("mask", "y")], ids="-".join)
@pytest.mark.parametrize("row", [(), (3,), (7, 5), (4, 3, 8)], ids=str)
def test_factors(row, outputs):
    for draw, number, p in DRAWS:
        net = dropout(row, DropoutMask(p, number), draw, outputs)
        for B in (0, 1, 7, 300):
            x = np.random.default_rng(B).standard_normal((B, *row), np.float32)
            got, truth = check_step(net, "dropout", (x,)), expected(net, (x,), "float32")
            assert all(np.array_equal(got[name], truth[name]) for name in outputs)


def test_which_products_are_fused():
    net = dropout((300,), DropoutMask(0.5), (0, 0), ("mask", "y"))
    assert len(bind(net, "dropout", 64).plan.groups) == 1
    other = Node("y", Mul(), ("mask", "x"))  # a product of the same values, in another order
    assert len(bind(net.replace(nodes=(net.nodes[0], other)), "pointwise", 64).plan.groups) == 2


def test_a_state_that_changes_is_another_mask():
    net = dropout((40,), DropoutMask(0.5), (0, 0), ("mask",))
    bound, x = bind(net, "dropout", 64), {"x": np.ones((7, 40), np.float32)}
    first = bound.run(x, 7)["mask"]
    bound.state["draw"][...] = (0, 1)
    assert not np.array_equal(bound.run(x, 7)["mask"], first)
