"""LayerNorm, RMSNorm and GroupNorm on a GPU, emulated and real: segments of any size, in every dtype."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.rows import MAX_PER_THREAD, THREADS
from onchip.kernels.cuda.reduction.norm import NormLowering
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, GroupNorm, LayerNorm, RMSNorm
from onchip.network.layers.norm import NormSegments
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.engine import Engine

DTYPES = ("float32", "float16", "bfloat16", "float64")
# Few lanes, a warp, a block, a segment that a block loops over; aligned and not; with all, some or no weights.
CASES = [
    (LayerNorm(), (3, 12), ("weight", "bias")), (LayerNorm(), (17,), ("bias",)), (LayerNorm(), (1,), ()),
    (RMSNorm(1), (5, 40), ("weight",)), (LayerNorm(), (2, 1022), ("weight",)),
    (LayerNorm(), (1100,), ("weight", "bias")), (RMSNorm(), (8195,), ("weight",)),
    (GroupNorm(2), (6, 3, 5), ("weight", "bias")), (GroupNorm(3), (3, 8), ("weight",)),
    (GroupNorm(1), (4, 50, 42), ("weight", "bias")),
]  # fmt: skip


def normed(layer, row, roles, dtype):
    rng, given = np.random.default_rng(0), TensorType(("B", *row), dtype)
    weights = {role: rng.standard_normal(layer.weight_shape(given)).astype(numpy_dtype(dtype)) for role in roles}
    return one_layer(layer, given, weights=weights)


def rows(B, row, dtype):
    return (np.random.default_rng(B).standard_normal((B, *row)) + 2).astype(numpy_dtype(dtype))


def assert_right(net, x, got):
    dtype = net.output.dtype
    assert_error_within(got.astype(np.float64), reference.forward(net, x), baseline=reference.forward(net, x, dtype))


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parts_of_any_size(monkeypatch, dtype):
    gpu = emulated_gpu(monkeypatch)
    for layer, row, roles in (CASES[i] for i in ((0, 1, 5, 6, 7) if dtype == "float32" else (0,))):
        net = normed(layer, row, roles, dtype)
        (claim,) = claims_of(net, "norm")
        B = 37 if np.prod(row) < 100 else 2  # a warp has several segments, and the last is partial
        x = rows(B, row, dtype)
        got = run_claim(gpu, net, claim, x)
        assert_right(net, x, got)
        assert np.array_equal(run_claim(gpu, net, claim, x[1:2]), got[1:2])
    kinds = {name.partition("<")[0] for name in gpu.driver.programs}
    assert kinds >= ({"norm_lanes", "norm_rows"} if dtype == "float32" else {"norm_lanes"})


def added(row, dtype="float32", constant=None, is_read=False):
    """An Add in front of a LayerNorm: of two values, or with a constant; with `is_read`, the sum is an output, too."""
    rng, given = np.random.default_rng(0), TensorType(("B", *row), dtype)
    weights = {} if constant is None else {"c": rng.standard_normal(constant).astype(numpy_dtype(dtype))}
    weights["w"] = rng.standard_normal(row[-1:]).astype(numpy_dtype(dtype))
    inputs = {"x": given} if constant else {"x": given, "z": given}
    nodes = (
        Node("s", Add(), tuple(inputs), {"constant": "c"} if constant else {}),
        Node("y", LayerNorm(), ("s",), {"weight": "w"}),
    )
    return Network(inputs, nodes, ("s", "y") if is_read else ("y",), weights)


@needs_gxx
@pytest.mark.parametrize(("row", "constant"), [((3, 12), None), ((2, 17), (2, 1)), ((1100,), (1100,))])
def test_what_is_added_in_front(monkeypatch, row, constant):
    gpu, net = emulated_gpu(monkeypatch), added(row, constant=constant)
    (claim,) = claims_of(net, "norm")
    xs = tuple(rows(5 + i, row, "float32")[:5] for i in range(len(net.inputs)))
    got = run_claim(gpu, net, claim, *xs)
    assert_right(net, xs, got)
    assert np.array_equal(run_claim(gpu, net, claim, *(x[3:4] for x in xs)), got[3:4])


@needs_gxx
def test_a_sum_that_others_read(monkeypatch):
    net = added((3, 12), is_read=True)
    plan = make_plan(net, H200, KERNELS, Job())
    assert [group.claim.label for group in plan.groups] == ["layernorm<12,Add>"]
    emulated_gpu(monkeypatch)
    xs = tuple(rows(5 + i, (3, 12), "float32")[:5] for i in range(2))
    for got, want in zip(Engine(plan, CudaBackend(), "cuda:0")(*xs), reference.forward(net, xs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    alike = Network(net.inputs, (Node("s", Add(), ("x", "x")), *net.nodes[1:]), ("y",), net.weights)
    assert claims_of(alike, "norm") == []  # a value is read once


def test_every_number_is_held_once():
    for size in (*range(1, 70), 127, 128, 1000, 1023, 1024, 1025, 4096, 8191, 8192):
        made = NormLowering("float32", NormSegments(1, size, 1), 0, (), True, 1e-5, 132)
        _, V, lanes, items = made.program.name_expression.rstrip(">").split(", ")
        assert int(V) * int(lanes) * int(items) >= size
        assert int(V) * int(items) <= MAX_PER_THREAD
        assert THREADS % int(lanes) == 0
    assert made.at(0).launches == ()


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_of_them_are_planned(dtype):
    for layer, row, roles in CASES:
        plan = make_plan(normed(layer, row, roles, dtype), H200, KERNELS, Job())
        assert [group.claim.kernel for group in plan.groups] == ["norm"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_any_size_on_a_gpu(dtype):
    for layer, row, roles in (*CASES, (GroupNorm(32), (64, 56, 56), ("weight", "bias"))):
        net = normed(layer, row, roles, dtype)
        engine = onchip.compile(net, "cuda")
        x = rows(257, row, dtype)
        got = engine(x)
        assert_right(net, x, got)
        for B in (1, 7, 0):
            assert np.array_equal(engine(x[:B]), got[:B])
