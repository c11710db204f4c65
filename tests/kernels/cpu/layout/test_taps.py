"""Weighted taps along one axis on the CPU, as in a cubic or smoothed Resize, in one pass."""

import dataclasses

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from onchip.kernels import reference
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.layout.taps import TapsKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import Gather, GlobalSum, Mask, Mul, Reshape
from onchip.network.types import TensorType
from onchip.plan.kernel import Job
from onchip.runtime.cpu.backend import this_cpu


def weighted_taps(row, axis, taps, outputs, is_masked=False, also=()):
    """y[i] = sum of weights[k, i] x[positions[k, i]] along an axis, the batch being 0."""
    rng = np.random.default_rng(1)
    positions = rng.integers(0, row[axis - 1], (taps, outputs))
    weights = {"w": rng.standard_normal((taps, outputs, *(1,) * (len(row) - axis))).astype(np.float32)}
    nodes = [
        Node("chosen", Gather(axis, tuple(positions.reshape(-1).tolist())), ("x",)),
        Node("split", Reshape((*row[: axis - 1], taps, outputs, *row[axis:])), ("chosen",)),
    ]
    if is_masked:
        weights["w"][rng.random(weights["w"].shape) < 0.4] = 0
        weights["w"][0] = 1  # every output has a tap
        weights["counts"] = (weights["w"] != 0).astype(np.float32)
        nodes.append(Node("masked", Mask(), ("split",), {"mask": "counts"}))
    nodes.append(Node("scaled", Mul(), (nodes[-1].name,), {"constant": "w"}))
    nodes.append(Node("y", GlobalSum((axis,)), ("scaled",)))
    return Network({"x": TensorType(("B", *row))}, tuple(nodes), ("y", *also), weights)


CASES = [
    ((40,), 1, 3, 7), ((3, 8, 32), 3, 4, 20), ((3, 8, LANES), 2, 16, 5), ((2, 9, 2 * LANES + 3), 2, 4, 11),
    ((5, 6, 3), 2, 2, 4), ((2, 3, 4, 5), 1, 1, 3), ((200, 31), 2, 5, 31),
]  # fmt: skip


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(("row", "axis", "taps", "outputs"), CASES, ids=str)
def test_taps_are_summed(row, axis, taps, outputs, is_masked):
    net = weighted_taps(row, axis, taps, outputs, is_masked)
    x = np.random.default_rng(0).standard_normal((33, *row), dtype=np.float32)
    (claim,) = TapsKernel().claims(net, 0, this_cpu(), Job())
    got = np.empty((33, *net.output.row_shape), np.float32)
    launch = TapsKernel().bind(claim, {role: net.weights[recipe.sources[0]] for role, recipe in claim.recipes.items()})
    launch((x,), (got,), 2)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    for rows in (slice(5, 7), slice(0, 1), slice(0, 0)):
        again = np.empty_like(got[rows])
        launch((np.ascontiguousarray(x[rows]),), (again,), 1)
        assert np.array_equal(again, got[rows])


@pytest.mark.parametrize(("row", "axis"), [((3, 8, 32), 3), ((3, 32, 20), 2)])
def test_nan_and_inf_reach_only_the_sums_that_read_them(row, axis):
    net = weighted_taps(row, axis, 6, 10, is_masked=True)
    x = np.random.default_rng(0).standard_normal((4, *row), dtype=np.float32)
    x[1, 1, 3, 4], x[2, 2, 5, 6] = np.nan, np.inf
    engine = onchip.compile(net, "cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["taps"]
    truth = reference.forward(net, x)
    assert 0 < np.isnan(truth).sum() < truth[1, 1].size
    np.testing.assert_allclose(engine(x), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", ["chosen", "split", "scaled"])
def test_values_with_other_readers_are_not_fused(value):
    net = weighted_taps((3, 8, 32), 3, 4, 20, also=(value,))
    assert not list(TapsKernel().claims(net, 0, this_cpu(), Job()))


def test_other_axes_than_the_split_one_are_not_claimed():
    net = weighted_taps((4, 4, 4), 2, 4, 4)
    nodes = tuple(dataclasses.replace(node, layer=GlobalSum((3,))) if node.name == "y" else node for node in net.nodes)
    assert not list(TapsKernel().claims(net.replace(nodes=nodes), 0, this_cpu(), Job()))
