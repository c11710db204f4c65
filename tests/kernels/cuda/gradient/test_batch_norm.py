"""Batch norms of a training step on an emulated GPU: statistics, y and gradients, of any shape, in both layouts."""

import numpy as np
import pytest

from checks import assert_error_within, ulps_of
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.gradient.channels import MAX_COLUMNS, MAX_SLICES, THREADS, Channels
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BatchMean,
    BatchNorm1d,
    BatchNorm2d,
    BatchNormGrad,
    BatchVariance,
    Conv2d,
    GlobalMean,
    Linear,
    Mask,
    ReLU,
    WeightGrad,
)
from onchip.network.recipe import value_weight
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.plan.layout import has_channels
from onchip.plan.planner import make_plan

# Planes and columns, odd and in vectors; one tile of channels and several; a channel of one element.
SHAPES = [(3, 7, 5), (5, 4, 6), (4, 9), (10,), (36,), (67,), (1,), (40, 3, 1)]
ROLES = ("mean", "var", "weight", "bias")
# Of x, the weight and the bias.
DTYPES = [
    *((dtype,) * 3 for dtype in FLOATS), ("bfloat16", "bfloat16", "float32"), ("float64", "float32", "float16"),
    ("float32", "bfloat16", "float64"),
]  # fmt: skip


def some(*shape, seed=0, dtype="float32"):
    drawn = np.random.default_rng((seed, *shape)).standard_normal(shape, dtype=np.float32)
    return drawn.astype(numpy_dtype(dtype))


def norm_of(row):
    return (BatchNorm1d if len(row) < 3 else BatchNorm2d)(1e-3)


def in_training(row, more=(), dtypes=DTYPES[0]):
    """The norm by the statistics of the batch, and layers after it."""
    at = {role: f"{role}.row" for role in ("mean", "var")}
    nodes = [
        Node("mean", BatchMean(), ("x",)),
        Node("var", BatchVariance(), ("x",), {"mean": "mean.row"}),
        Node("unbiased", BatchVariance(is_unbiased=True), ("x",), {"mean": "mean.row"}),
        Node("y", norm_of(row), ("x",), at | {"weight": "weight", "bias": "bias"}),
    ]
    for i, layer in enumerate(more):
        nodes.append(Node(f"z{i}", layer, (nodes[-1].name,)))
    weights = {f"{role}.row": value_weight(role, row[:1], dtypes[0]) for role in ("mean", "var")}
    weights |= {role: some(*row[:1], seed=i, dtype=dtypes[i]) for i, role in ((1, "weight"), (2, "bias"))}
    outputs = ("mean", "var", "unbiased", nodes[-1].name)
    x = TensorType(("B", *row), dtypes[0])
    return Network({"x": x}, tuple(nodes), outputs, weights, state={"weight": "", "bias": ""})


def given(row, roles=ROLES, dtypes=DTYPES[0]):
    """Weights of a norm with its statistics."""
    of_role = dict(zip(("weight", "bias", "d_weight", "d_bias"), dtypes[1:] * 2, strict=True))
    drawn = ((role, np.abs(some(*row[:1], seed=i)) + 0.1) for i, role in enumerate(roles))
    return {role: array.astype(numpy_dtype(of_role.get(role, dtypes[0]))) for role, array in drawn}


def backward(row, roles=("weight", "bias"), has_dx=True, is_masked=False, dtypes=DTYPES[0]):
    """The gradients of a norm as a training step computes them: of these weights, and of x."""
    x, weights = TensorType(("B", *row), dtypes[0]), {role: role for role in ROLES}
    inputs = {"upper": x, "relu": x, "x": x} if is_masked else {"x": x, "dy": x}
    nodes = [Node("dy", Mask(), ("upper", "relu"))] if is_masked else []
    nodes += [Node(f"d{role}", WeightGrad(norm_of(row), role), ("x", "dy"), weights) for role in roles]
    read = {role: role for role in ("mean", "var", "weight", "d_weight", "d_bias")}
    nodes += [Node("dx", BatchNormGrad(1e-3), ("x", "dy"), read)] if has_dx else []
    outputs = (*(f"d{role}" for role in roles), *(["dx"] if has_dx else []))
    arrays = given(row, (*ROLES, "d_weight", "d_bias"), dtypes)
    of_role = dict(zip(("weight", "bias"), dtypes[1:], strict=True))
    arrays |= {f"d_{role}": value_weight(f"d{role}", row[:1], of_role[role]) for role in roles}
    return Network(inputs, tuple(nodes), outputs, arrays, state={"mean": ""})


def assert_right(gpu, net, kernel, *xs):
    claims = claims_of(net, kernel)
    assert len(claims) == 1 + has_channels(net.types["x"])
    narrowest = max((kind.dtype for kind in net.types.values()), key=ulps_of)
    truth, baseline = (reference.forward(net, xs if len(xs) > 1 else xs[0], dtype) for dtype in ("float64", narrowest))
    for claim in claims:
        assert set(claim.nodes) >= set(net.outputs)
        got = run_claim(gpu, net, claim, *xs)
        several = (each if isinstance(each, tuple) else (each,) for each in (got, truth, baseline))
        for each in zip(*several, strict=True):
            assert_error_within(*each, ulps=ulps_of(narrowest))


@needs_gxx
@pytest.mark.parametrize("row", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_statistics_and_norm(monkeypatch, row, dtypes):
    gpu = emulated_gpu(monkeypatch)
    for B in (1, 5, 33, 257):
        x = (some(B, *row) + 3).astype(numpy_dtype(dtypes[0]))
        assert_right(gpu, in_training(row, dtypes=dtypes), "batch_norm", x)


@needs_gxx
@pytest.mark.parametrize("row", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_gradients(monkeypatch, row, dtypes):
    gpu, net = emulated_gpu(monkeypatch), backward(row, dtypes=dtypes)
    for B in (1, 5, 33, 257):
        x, dy = some(B, *row, dtype=dtypes[0]), (some(B, *row, seed=1) + 1).astype(numpy_dtype(dtypes[0]))
        assert_right(gpu, net, "batch_norm_grad", x, dy)


@needs_gxx
def test_what_is_claimed_together(monkeypatch):
    gpu, row = emulated_gpu(monkeypatch), (4, 3, 3)
    x, dy = some(33, *row), some(33, *row, seed=1)
    with_relu = in_training(row, [ReLU()])
    assert_right(gpu, with_relu, "batch_norm", x)
    assert len(claims_of(with_relu, "batch_norm")[0].nodes) == 5
    both = in_training(row, [ReLU()])
    both = both.replace(outputs=(*both.outputs, "y"))  # then y is written, and the ReLU is another group's
    assert [len(claim.nodes) for claim in claims_of(both, "batch_norm")] == [4, 4]
    for net in (backward(row, ("bias",), has_dx=False), backward(row, ("bias", "weight")), backward(row, ())):
        assert_right(gpu, net, "batch_norm_grad", x, dy)
    apart = backward(row, ("weight",))  # d_bias is another one
    assert {claim.nodes for claim in claims_of(apart, "batch_norm_grad")} == {("dweight",)}


@needs_gxx
@pytest.mark.parametrize("row", [(3, 7, 5), (4, 9), (36,)], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_the_gradient_of_a_relu(monkeypatch, row, dtypes):
    gpu, net = emulated_gpu(monkeypatch), backward(row, is_masked=True, dtypes=dtypes)
    x, dy, y = (some(33, *row, seed=i, dtype=dtypes[0]) for i in range(3))
    y = np.maximum(y, 0)
    assert_right(gpu, net, "batch_norm_grad", dy, y, x)
    assert_right(gpu, backward(row, (), is_masked=True, dtypes=dtypes), "batch_norm_grad", dy, y, x)
    kept = net.replace(outputs=(*net.outputs, "dy"))
    assert claims_of(kept, "batch_norm_grad") == []
    assert claims_of(kept, "batch_norm_grad", start=1)[0].nodes == ("dweight", "dbias", "dx")


@needs_gxx
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_norms_by_weights(monkeypatch, dtypes):
    """A norm that is not trained, or only its weight: by its running statistics."""
    gpu, row = emulated_gpu(monkeypatch), (6, 4, 2)
    for roles in (ROLES, ROLES[:2]):
        norm = Node("y", norm_of(row), ("x",), {role: role for role in roles})
        x, weights = TensorType(("B", *row), dtypes[0]), given(row, dtypes=dtypes)
        net = Network({"x": x}, (norm,), ("y",), weights, state={"var": ""})
        assert_right(gpu, net, "batch_norm", some(5, *row, dtype=dtypes[0]))
        assert claims_of(net, "pointwise") == []
        constant = Network(net.inputs, net.nodes, net.outputs, net.weights)
        assert claims_of(constant, "batch_norm") == []
        assert len(claims_of(constant, "pointwise")) == 1


@needs_gxx
def test_values_far_from_zero(monkeypatch):
    """Their mean is 10^4 times their deviation: the mean of squares alone has lost the variance in float32."""
    gpu, row = emulated_gpu(monkeypatch), (3, 8)
    for x in (some(257, *row) + 1e4, np.full((33, *row), 1e4, np.float32)):
        assert_right(gpu, in_training(row), "batch_norm", x)
    x = some(257, *row)
    x[5, 1, 3] = np.nan
    net = in_training(row)
    mean, var, _, y = run_claim(gpu, net, claims_of(net, "batch_norm")[0], x)
    assert np.array_equal(np.isnan(mean[0]), [False, True, False])
    assert np.array_equal(np.isnan(var[0]), [False, True, False])
    assert np.array_equal(np.isnan(y).all(axis=(0, 2)), [False, True, False])


def test_blocks_cover_each_element_once():
    for C, plane, is_nhwc in ((1, 1, False), (3, 7, True), (16, 1024, False), (100, 1, False), (132, 9, True)):
        channels = Channels(C, plane, is_nhwc)
        columns = channels.lanes * channels.vector if channels.are_columns else 1
        assert columns <= MAX_COLUMNS
        assert (channels.tiles - 1) * columns < C <= channels.tiles * columns
        assert channels.lanes <= THREADS
        for B in (1, 2, 31, 4097, 1 << 20):
            each, count = channels.slice_at(B), channels.slices_at(B)
            assert (count - 1) * each < B * plane <= count * each
            assert count <= MAX_SLICES
    assert Channels(16, 1024, False).slices_at(128) * 16 == 512


def test_a_training_step_runs_a_norm_in_two_groups():
    layers = [("c", Conv2d()), ("n", BatchNorm2d()), ("r", ReLU()), ("p", GlobalMean((2, 3))), ("y", Linear())]
    weights = {"c.weight": some(8, 3, 3, 3), "y.weight": some(10, 8)} | {
        f"n.{role}": each for role, each in given((8,)).items()
    }
    net = sequential(TensorType(("B", 3, 8, 8)), layers, weights)
    plan = make_plan(training_step(net, TrainingStep("mse")), H200, KERNELS, Job(batch=64), whole=False)
    groups = [group.claim for group in plan.groups if group.claim.kernel.startswith("batch_norm")]
    assert [claim.label for claim in groups] == [
        "batch_norm<BatchMean,BatchVariance,BatchNorm2d,ReLU>", "batch_norm_grad<Mask,d_weight,d_bias,dx>"
    ]  # fmt: skip
