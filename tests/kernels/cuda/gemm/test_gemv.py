"""gemv: a Linear over few rows: what it claims, that it is right on the host by emulation, and on a GPU."""

import dataclasses

import numpy as np
import pytest

from checks import assert_error_within, random_mlp, rows
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.arguments import NOTHING, Input, Output
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import Steps
from onchip.kernels.cuda.gemm.gemv import MAX_ROWS, GemvKernel, SkinnyGemm
from onchip.network.build import mlp, sequential
from onchip.network.io import with_io
from onchip.network.layers import GELU, Linear, ReLU
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import A100, H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.check import NAIVE_DTYPE
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.engine import compile

FEW_UNITS = dataclasses.replace(H200, units=1)  # so that N = 24 takes more than one wave of columns


@pytest.fixture(params=[pytest.param("emulated", marks=needs_gxx), pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    return Gpu.get(0) if request.param == "cuda" else emulated_gpu(monkeypatch)


def run(gpu, gemm, x, w, bias=None, device=H200):
    """y of a gemm, with nothing written past its end."""
    guard = 64
    y = np.full(gemm.M * gemm.N + guard, 7, numpy_dtype(gemm.dtypes[1]))
    given = [x.astype(numpy_dtype(gemm.dtypes[0])), w.astype(numpy_dtype(PRECISIONS[gemm.precision].dtype))]
    there = [gpu.upload(each) for each in (*given, y, *([] if bias is None else [bias]))]
    bias_there = NOTHING if bias is None else Input(2)
    steps = Steps((gemm.launch(device, Input(0), Input(1), bias_there, NOTHING, Output(0)),))
    inputs = [buffer.pointer for buffer in (*there[:2], *there[3:])]
    BoundSteps(gpu, steps).enqueue(inputs, [there[2].pointer], 0, gpu.stream)
    gpu.download(there[2], y)
    assert (y[-guard:] == 7).all()
    return y[:-guard].reshape(gemm.M, gemm.N)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(1, 1, 1), (1, 24, 40), (3, 5, 77), (7, 13, 264), (9, 24, 1040), (17, 9, 304), (65, 24, 72), (20, 10, 2500)],
)
def test_it_multiplies_what_it_should(gpu, precision, M, N, K):
    """Small integers, exact in every precision: any wrong index shows."""
    rng = np.random.default_rng(0)
    x, w, bias = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((M, K), (N, K), (N,)))
    for dtypes in (("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")):
        truth = (x @ w.T + bias).astype(numpy_dtype(dtypes[1]))
        gemm = SkinnyGemm(M, N, K, precision, dtypes)
        assert np.array_equal(run(gpu, gemm, x, w, bias), truth), dtypes
        assert np.array_equal(run(gpu, gemm, x, w, bias, FEW_UNITS), truth), dtypes


@pytest.mark.parametrize("K", [512, 777, 3001])
def test_long_sums_in_fp32(gpu, K):
    x, w = rows(5, K), rows(6, K, seed=2)
    assert_error_within(run(gpu, SkinnyGemm(5, 6, K, "fp32"), x, w), x.astype(float) @ w.T.astype(float), x @ w.T)


@pytest.mark.parametrize(("precision", "K"), [("fp32", 200), ("fp32", 77), ("fp16", 200), ("bf16", 77)])
def test_a_row_has_the_same_bits_in_every_batch(gpu, precision, K):
    x, w = rows(70, K), rows(24, K, seed=2)
    whole = run(gpu, SkinnyGemm(70, 24, K, precision), x, w)
    for first, count in ((0, 1), (69, 1), (5, 3), (17, 16), (30, 40)):
        some = x[first : first + count]
        assert np.array_equal(run(gpu, SkinnyGemm(count, 24, K, precision), some, w), whole[first : first + count])
        other = run(gpu, SkinnyGemm(count, 24, K, precision), some, w, device=FEW_UNITS)
        assert np.array_equal(other, whole[first : first + count])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_activations_and_what_is_no_number(gpu, precision):
    N, K = 12, 24
    x, w, bias = rows(10, K), rows(N, K, seed=2) / np.float32(4), rows(1, N, seed=3)[0]
    x[3], x[4, 0] = np.nan, np.inf
    for layer in (ReLU(), GELU()):
        net = sequential(TensorType(("B", K)), [("fc", Linear()), ("a", layer)], {"fc.weight": w, "fc.bias": bias})
        got = run(gpu, SkinnyGemm(10, N, K, precision, activation=layer), x, w, bias)
        good = [0, 1, 2, 5, 6, 7, 8, 9]
        naive = reference.forward(net, x, NAIVE_DTYPE[precision])
        assert_error_within(got[good].astype(float), reference.forward(net, x)[good], naive[good].astype(float))
        assert np.isnan(got[3]).all()
        assert not np.isfinite(got[4]).all()


# -- planning --------------------------------------------------------------------------------------------------


def linear(D_in, D_out):
    weights = {"fc.weight": rows(D_out, D_in) / np.float32(D_in**0.5), "fc.bias": rows(1, D_out, seed=2)[0]}
    return sequential(TensorType(("B", D_in)), [("fc", Linear()), ("relu", ReLU())], weights)


@pytest.mark.parametrize("device", [H200, A100])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_few_rows_are_planned_for_it(device, precision):
    net = with_io(linear(1024, 1024), "float16" if precision == "fp16" else "float32")
    (group,) = make_plan(net, device, KERNELS, Job(precision, 1)).groups
    assert group.claim.label == "gemv<1024,1024,ReLU>"
    assert group.claim.nodes == tuple(node.name for node in net.nodes)  # the Casts at the ends, too
    (group,) = make_plan(net, device, KERNELS, Job(precision, 4096)).groups
    assert group.claim.kernel != "gemv"


def test_it_is_asked_for_few_rows_only():
    net = linear(512, 512)
    assert len(list(GemvKernel().claims(net, 0, H200, Job("fp16", MAX_ROWS)))) == 1
    assert not list(GemvKernel().claims(net, 0, H200, Job("fp16", MAX_ROWS + 1)))


def test_no_rows_are_no_launch():
    (claim,) = GemvKernel().claims(linear(64, 64), 0, H200, Job("fp16", 1))
    assert claim.facts.at(0).launches == ()
    assert claim.facts.at(1).launches[0].config.overlaps
    (claim,) = GemvKernel().claims(linear(64, 64), 0, A100, Job("fp16", 1))
    assert not claim.facts.at(1).launches[0].config.overlaps


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("widths", [(784, 512, 256, 10), (256, 1024, 256), (400, 120, 84, 10)])
def test_one_row_is_not_left_to_one_warp(precision, widths):
    """mlp_fused would walk through all weights by one warp: 100 us on an H200."""
    plan = make_plan(mlp(*widths), H200, KERNELS, Job(precision, 1))
    assert "mlp_fused" not in {group.claim.kernel for group in plan.groups}
    assert plan.estimate_us < 15


# -- engines ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("widths", [(784, 512, 256, 10), (1000, 333, 1024), (4096, 1024, 7)])
def test_a_plan_for_one_row_keeps_its_promises_with_any_number(precision, widths):
    net = random_mlp(*widths)
    engine, x = compile(net, "cuda", precision, batch_hint=1), rows(4097, widths[0])
    assert "gemv" in {group.claim.kernel for group in engine.plan.groups}
    whole = engine(x)
    narrow = "float16" if precision == "tf32" else NAIVE_DTYPE[precision]  # as many digits
    naive = reference.forward(net, x[:300], narrow)
    assert_error_within(whole[:300], reference.forward(net, x[:300]), naive)
    for first, count in ((0, 0), (0, 1), (4096, 1), (100, 7), (1000, 64), (2000, 129)):
        assert np.array_equal(engine(x[first : first + count]), whole[first : first + count])
