"""Gradients of batch norms on the CPU: channels of few and of many pixels, with and without those of their weights."""

import numpy as np
import pytest

from onchip.kernels.cpu.gradient.batch_norm_grad import BatchNormGradKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchNorm1d, BatchNorm2d, BatchNormGrad, Mask, WeightGrad
from onchip.network.recipe import value_weight
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.kernel import Job, Refusal
from onchip.runtime.cpu.backend import this_cpu
from step_cases import bind, check_step

# Columns and planes; one task of channels and several, the last one smaller.
SHAPES = [(1,), (10,), (300,), (5, 7), (40, 3, 5), (3, 8, 8), (4, 63), (2, 40, 41)]
ROLES = ("mean", "var", "weight", "bias")
BATCHES = [0, 1, 7, 64]


def gradients(row, roles=("weight", "bias"), outputs=()):
    """The gradients of a norm as a training step computes them: of these weights, and of x."""
    x, weights = TensorType(("B", *row)), {role: role for role in ROLES}
    norm = (BatchNorm1d if len(row) < 3 else BatchNorm2d)(1e-3)
    nodes = [Node(f"d{role}", WeightGrad(norm, role), ("x", "dy"), weights) for role in roles]
    read = {role: role for role in ("mean", "var", "weight", "d_weight", "d_bias")}
    nodes.append(Node("dx", BatchNormGrad(1e-3), ("x", "dy"), read))
    rng = np.random.default_rng(row)
    arrays = {role: rng.random(row[:1], np.float32) + np.float32(0.1) for role in (*ROLES, "d_weight", "d_bias")}
    arrays |= {f"d_{role}": value_weight(f"d{role}", row[:1]) for role in roles}
    outputs = outputs or (*(f"d{role}" for role in roles), "dx")
    return Network({"x": x, "dy": x}, tuple(nodes), outputs, arrays, state=dict.fromkeys(ROLES, ""))


def rows(B, row):
    rng = np.random.default_rng(B)
    return tuple(rng.standard_normal((B, *row), np.float32) + np.float32(shift) for shift in (0, 0.5))


@pytest.mark.parametrize("B", BATCHES)
@pytest.mark.parametrize("row", SHAPES, ids=str)
def test_gradients(row, B):
    net = gradients(row)
    assert len(bind(net, "batch_norm_grad", 64).plan.groups) == 1
    check_step(net, "batch_norm_grad", rows(B, row))


@pytest.mark.parametrize("row", [(10,), (3, 8, 8)], ids=str)
def test_dx_by_given_gradients_of_weights(row):
    check_step(gradients(row, ()), "batch_norm_grad", rows(7, row))
    net = gradients(row, ("weight",))
    assert [len(group.claim.nodes) for group in bind(net, "batch_norm_grad", 64).plan.groups] == [1, 1]
    check_step(net, "batch_norm_grad", rows(7, row))


def test_only_dx_is_written():
    check_step(gradients((5, 7), outputs=("dx",)), "batch_norm_grad", rows(7, (5, 7)))


def test_the_gradient_of_a_narrow_bias_is_refused():
    net = gradients((5, 7))
    narrow = {**net.weights, "bias": np.ones(5, numpy_dtype("bfloat16"))}
    narrow["d_bias"] = value_weight("dbias", (5,), "bfloat16")
    claims = list(BatchNormGradKernel().claims(net.replace(weights=narrow), 0, this_cpu(), Job()))
    assert [type(claim) for claim in claims] == [Refusal]


def test_a_mask_is_a_launch_of_its_own():
    x, net = TensorType(("B", 5, 7)), gradients((5, 7))
    inputs = {"upper": x, "relu": x, "x": x}
    net = Network(
        inputs, (Node("dy", Mask(), ("upper", "relu")), *net.nodes), net.outputs, net.weights, state=net.state
    )
    assert [len(group.claim.nodes) for group in bind(net, "batch_norm_grad", 64).plan.groups] == [1, 3]
    check_step(net, "batch_norm_grad", (*rows(7, (5, 7)), rows(8, (5, 7))[0][:7]))


def test_nan_stays_in_its_channel():
    row, (x, dy) = (5, 3, 5), rows(7, (5, 3, 5))
    clean = check_step(gradients(row), "batch_norm_grad", (x, dy))["dx"]
    x[3, 2, 1, 1] = np.nan
    got = check_step(gradients(row), "batch_norm_grad", (x, dy))["dx"]
    assert np.isnan(got[:, 2]).all()
    assert np.array_equal(np.delete(got, 2, 1), np.delete(clean, 2, 1))
