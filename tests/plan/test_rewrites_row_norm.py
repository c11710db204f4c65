"""fold_scales: constants after a row norm become its weights, where they fit."""

import numpy as np
import pytest

from networks import assert_same_meaning
from onchip.network.build import sequential
from onchip.network.layers import Add, GroupNorm, LayerNorm, Mul, ReLU, Reshape, RMSNorm
from onchip.network.types import TensorType
from onchip.plan.rewrites import fold_scales

REST = (("relu", ReLU()),)
# layers, the constants' shapes, and the remaining layers
CASES = {
    "layer norm": (((5, 7)), [LayerNorm(), Mul(), Add()], [(7,), (1, 7)], ["LayerNorm"]),
    "of two axes": ((2, 3, 4), [LayerNorm(2), Mul()], [(3, 1)], ["LayerNorm"]),
    "a number": ((5, 7), [RMSNorm(), Mul()], [()], ["RMSNorm"]),
    "no bias": ((5, 7), [RMSNorm(), Mul(), Add()], [(7,), (7,)], ["RMSNorm", "Add"]),
    "each row its own": ((5, 7), [LayerNorm(), Mul()], [(5, 7)], ["LayerNorm", "Mul"]),
    "the sum first": ((5, 7), [LayerNorm(), Add(), Mul()], [(7,), (7,)], ["LayerNorm", "Mul"]),
    "groups": ((6, 2, 2), [GroupNorm(2), Mul(), Add()], [(6, 1, 1), (6, 1, 1)], ["GroupNorm"]),
    "as exported": (
        (6, 2, 2), [Reshape((2, -1)), GroupNorm(2), Reshape((6, 2, 2)), Mul(), Add()], [(6, 1, 1), (6, 1, 1)],
        ["Reshape", "Reshape", "GroupNorm"],
    ),
    "pixels": ((6, 2, 2), [GroupNorm(2), Mul()], [(6, 2, 2)], ["GroupNorm", "Mul"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_constants_become_weights(case):
    row, layers, shapes, left = CASES[case]
    rng, weights, given = np.random.default_rng(0), {}, iter(shapes)
    for i, layer in enumerate(layers):
        if isinstance(layer, Add | Mul):
            weights[f"l{i}.constant"] = rng.standard_normal(next(given))
    named = [(f"l{i}", layer) for i, layer in enumerate(layers)]
    net = sequential(TensorType(("B", *row), "float64"), [*named, *REST], weights)
    made, told = fold_scales(net)
    assert [node.layer.kind for node in made.nodes] == [*left, "ReLU"]
    assert len(told) == sum(isinstance(layer, Add | Mul) for layer in layers) - sum(k in ("Add", "Mul") for k in left)
    assert_same_meaning(net, made)


def test_somebody_else_reads_the_norm():
    net = sequential(TensorType(("B", 7), "float64"), [("n", LayerNorm()), ("m", Mul())], {"m.constant": np.ones(7)})
    shared = net.replace(outputs=("n", "m"))
    assert fold_scales(shared) == (shared, [])
