"""Moves on the CPU: every element at its position, for every element size and layout."""

import numpy as np
import pytest

import onchip
from onchip.kernels import reference
from onchip.kernels.cpu.layout.move import MoveKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import Concat, Identity, Interleave, Permute
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.layout import CHANNELS_LAST, ROWS

MOVES = [
    (Permute((0, 2, 1)), [(5, 7)]),
    (Permute((0, 3, 1, 2)), [(4, 3, 5)]),
    (Permute((0, 2, 1, 3)), [(6, 4, 8)]),
    (Permute((0, 4, 2, 3, 1)), [(2, 3, 1, 4)]),
    (Concat(1), [(3, 4), (1, 4), (2, 4)]),
    (Concat(-1), [(3, 4, 1), (3, 4, 1), (3, 4, 1)]),
    (Concat(2), [(3, 4, 5), (3, 0, 5), (3, 2, 5)]),
    (Interleave((2, 3)), [(2, 3, 2), (2, 3, 1), (2, 3, 1), (2, 2, 2), (2, 2, 1), (2, 2, 1)]),
]


@pytest.mark.parametrize("dtype", ["float32", "int64", "float16", "uint8"])
def test_every_element_is_at_its_position(dtype):
    for layer, shapes in MOVES:
        names = [f"x{i}" for i in range(len(shapes))]
        ends = [Node(f"i{name}", Identity(), (name,)) for name in names]
        nodes = (*ends, Node("y", layer, tuple(end.name for end in ends)), Node("z", Identity(), ("y",)))
        given = {name: TensorType(("B", *row), dtype) for name, row in zip(names, shapes, strict=True)}
        net = Network(given, nodes, ("z",), {})
        for claim in MoveKernel().claims(net, len(ends), H200, Job()):
            launch, is_last = MoveKernel().bind(claim, {}), bool(claim.writes)
            for B in (1, 5):
                rng = np.random.default_rng(B)
                xs = [rng.integers(0, 100, (B, *row)).astype(numpy_dtype(dtype)) for row in shapes]
                truth = reference.forward(net, tuple(xs))
                stored = [np.ascontiguousarray(np.moveaxis(x, 1, -1) if is_last else x) for x in xs]
                y = np.full((np.moveaxis(truth, 1, -1) if is_last else truth).shape, 77, xs[0].dtype)
                launch(stored, [y], 2)
                assert np.array_equal(np.moveaxis(y, -1, 1) if is_last else y, truth), (layer, is_last)


def test_values_change_their_layout():
    net = Network({"x": TensorType(("B", 5, 3, 70))}, (Node("y", Identity(), ("x",)),), ("y",), {})
    x = np.random.default_rng(0).standard_normal((3, 5, 3, 70)).astype(np.float32)
    last, back = np.empty((3, 3, 70, 5), np.float32), np.empty_like(x)
    for given, wanted, source, target in ((ROWS, CHANNELS_LAST, x, last), (CHANNELS_LAST, ROWS, last, back)):
        MoveKernel().bind(MoveKernel().conversion(net, "x", given, wanted, H200, Job()), {})([source], [target], 2)
    assert np.array_equal(last, np.moveaxis(x, 1, -1))
    assert np.array_equal(back, x)


def test_a_value_that_is_joined_with_itself():
    net = Network({"x": TensorType(("B", 3))}, (Node("y", Concat(1), ("x", "x")),), ("y",), {})
    engine, x = onchip.compile(net, "cpu"), np.arange(12, dtype=np.float32).reshape(4, 3)
    assert [group.claim.kernel for group in engine.plan.groups] == ["move"]
    assert np.array_equal(engine(x), np.tile(x, (1, 2)))
    assert engine(x[:0]).shape == (0, 6)
