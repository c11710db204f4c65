"""Dropouts of a training step on an emulated GPU: the bits of their reference, whatever seed, step and dropout."""

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.network.graph import Network, Node
from onchip.network.layers import DropoutMask, Mul
from onchip.network.types import TensorType, numpy_dtype


def dropout(row, layer, draw, outputs, dtype="float32"):
    nodes = Node("mask", layer, ("x",), {"draw": "draw"}), Node("y", Mul(), ("x", "mask"))
    nodes = nodes if "y" in outputs else nodes[:1]
    return Network({"x": TensorType(("B", *row), dtype)}, nodes, outputs, {"draw": np.array(draw)}, state={"draw": ""})


@needs_gxx
@pytest.mark.parametrize("outputs", [("mask",), ("y",), ("mask", "y")], ids="-".join)
@pytest.mark.parametrize("row", [(), (3,), (7, 5), (4, 3, 8)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_factors(monkeypatch, row, outputs, dtype):
    gpu = emulated_gpu(monkeypatch)
    draws = [((0, 0), 0), ((-5, 7), 3), ((1 << 40 | 9, (1 << 32) - 1), 200)]
    for (draw, number), p in zip(draws, (0.5, 0.1, 0.25), strict=True):
        net = dropout(row, DropoutMask(p, number), draw, outputs, dtype)
        (claim,) = claims_of(net, "dropout")
        assert claim.nodes == tuple(node.name for node in net.nodes)
        for B in (1, 5, 33, 257):
            x = np.random.default_rng(B).standard_normal((B, *row), np.float32).astype(numpy_dtype(dtype))
            got, truth = run_claim(gpu, net, claim, x), reference.forward(net, x, dtype)
            for each, expected in zip(*((v if len(outputs) > 1 else (v,)) for v in (got, truth)), strict=True):
                assert np.array_equal(each, expected)


def test_a_product_with_another_value_is_not_fused():
    net = dropout((3,), DropoutMask(0.5), (0, 0), ("mask", "y"))
    other = Node("y", Mul(), ("mask", "x"))  # a product of the same values, in another order
    (claim,) = claims_of(net.replace(nodes=(net.nodes[0], other)), "dropout")
    assert claim.nodes == ("mask",)
