"""Sums, products and constants of conv_fused, as one loop over all images: no element of one image reaches another."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from image_networks import graph, weight
from onchip.kernels import cpu, reference
from onchip.network.layers import GELU, Add, Concat, Conv2d, Linear, Mul, Sigmoid, Tanh
from onchip.runtime.engine import compile


def check(net, x, monkeypatch):
    monkeypatch.setattr(cpu, "KERNELS", tuple(k for k in cpu.KERNELS if k.name not in ("mlp_fused", "pointwise")))
    engine = compile(net, device="cpu", threads=1, without=("fold", "merge", "windows"))
    assert [group.claim.kernel for group in engine.plan.groups] == ["conv_fused"], str(engine.plan)
    operations = engine.plan.groups[0].claim.facts.program.operations
    assert any(getattr(op, "is_contiguous", False) for op in operations)
    for _ in range(3):  # the gaps between images are overwritten
        got = engine(x)
        assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    assert np.array_equal(np.concatenate([engine(x[i : i + 1]) for i in range(len(x))]), got)


@pytest.mark.parametrize("D", [1, 8, 16, 17, 33])  # below, at and past a vector
def test_vectors(D, monkeypatch):
    """A solver step: a network's output, scaled, is added to its input."""
    weights = {"a": weight(24, D), "b": weight(D, 24), "half": np.float32([0.5]), "k": weight(D)}
    weights["y"] = weight(5, 3 * D)
    net = graph(
        (D,), weights, ("y",), ("a", Linear(), ("x",), {"weight": "a"}), ("t", Tanh(), ("a",)),
        ("b", Linear(), ("t",), {"weight": "b"}), ("h", Mul(), ("b",), {"constant": "half"}),
        ("s", Add(), ("x", "h", "b")), ("m", Mul(), ("s", "h")), ("g", GELU(), ("m",)),
        ("k", Add(), ("g", "s"), {"constant": "k"}), ("c", Concat(1), ("k", "h", "x")),
        ("y", Linear(), ("c",), {"weight": "y"}),
    )  # fmt: skip
    check(net, rows(131, D), monkeypatch)


@pytest.mark.parametrize("sizes", [(1, 1, 17), (1, 2, 17), (3, 5, 7), (16, 4, 4)], ids=str)
def test_images(sizes, monkeypatch):
    C, H, W = sizes
    weights = {"k": weight(C, H, W), "channels": weight(C, 1, 1), "w": weight(5, C, 1, 1)}
    net = graph(
        sizes, weights, ("y",), ("k", Mul(), ("x",), {"constant": "k"}), ("s", Sigmoid(), ("k",)),
        ("c", Add(), ("s",), {"constant": "channels"}), ("m", Mul(), ("x", "c")), ("t", Tanh(), ("m",)),
        ("y", Conv2d(), ("t",), {"weight": "w"}),
    )  # fmt: skip
    check(net, rows(19, *sizes), monkeypatch)
