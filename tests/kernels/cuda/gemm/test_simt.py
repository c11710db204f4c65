"""A Linear of any shape on a GPU: what gemm and gemm_mma claim (anywhere), and that they are right (on a GPU)."""

import dataclasses

import numpy as np
import pytest

import onchip
from checks import random_mlp, rows
from onchip.errors import InputError
from onchip.kernels import cuda, reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.weights import split_weight, tf32_weight
from onchip.kernels.cuda.gemm.mma import GemmMmaKernel, MmaGemm
from onchip.kernels.cuda.gemm.simt import FMA_TILES, GemmSimtKernel, SimtGemm
from onchip.kernels.cuda.mlp.tensor_core import fits_in_block
from onchip.kernels.cuda.mma.mma_tile import TILES
from onchip.network.build import sequential
from onchip.network.io import with_io
from onchip.network.layers import GELU, Clip, LeakyReLU, Linear, Reshape, Softmax
from onchip.network.recipe import materialise
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import A100, H200, RTX_4060_LAPTOP
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.planner import make_plan
from onchip.runtime.check import DTYPE_ULP, FACTOR, NAIVE_DTYPE, ULP, ULPS, scaled_error

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


def linear(D_in, D_out, *after, bias=True):
    weights = {"fc.weight": rows(D_out, D_in, seed=3) / np.float32(D_in**0.5)}
    weights |= {"fc.bias": rows(1, D_out, seed=4)[0]} if bias else {}
    layers = [("fc", Linear()), *((f"after{i}", layer) for i, layer in enumerate(after))]
    return sequential(TensorType(("B", D_in)), layers, weights)


def claims_of(net, precision="fp32", start=0, device=H200, kernel=None):
    return list((kernel or GemmSimtKernel(fits_in_block)).claims(net, start, device, Job(precision)))


# -- planning --------------------------------------------------------------------------------------------------


def test_it_takes_what_the_others_have_no_room_for():
    (claim,) = claims_of(linear(10_000, 300, LeakyReLU(0.1), Softmax()))
    assert isinstance(claim, Claim)
    assert claim.label == "gemm_simt<10000,300,LeakyReLU>"
    assert claim.nodes == ("fc", "after0")  # a Softmax needs whole rows, a tile has part of one
    assert (claim.cost.row_flop, claim.cost.row_bytes) == (2 * 300 * 10_000 + 900, 4 * 10_300)
    assert claim.weight_bytes == 4 * (300 * 10_000 + 300)
    assert claims_of(linear(72, 64)) == []
    others = [kernel for kernel in KERNELS if kernel.name != "gemm_sm90"]  # which claims it on this GPU
    for precision in PRECISIONS:
        plan = make_plan(linear(10_001, 300), H200, others, Job(precision))
        (kernel,) = (group.claim.kernel for group in plan.groups)
        assert kernel == "gemm_mma" or (kernel == "gemm_simt" and precision == "fp32")
    (claim,) = claims_of(linear(10_001, 300), "fp16", kernel=GemmMmaKernel(fits_in_block))
    assert claim.weight_bytes == 2 * 300 * 10_008 + 4 * 300  # rows of whole units
    assert claims_of(linear(10_001, 300), "fp16") == []


def test_it_takes_the_casts_at_the_ends():
    net = with_io(linear(4096, 2048), "float16")
    (claim,) = claims_of(net, "fp16", kernel=GemmMmaKernel(fits_in_block))
    assert claim.nodes == tuple(node.name for node in net.nodes)
    assert claim.cost.row_bytes == 2 * (4096 + 2048)


def test_what_it_refuses():
    net = linear(10_000, 300)
    (refusal,) = claims_of(net, device=dataclasses.replace(H200, arch="sm_70"))
    assert isinstance(refusal, Refusal)
    assert "on sm_70" in refusal.why


def test_an_estimate_knows_that_the_kernel_is_slower_than_the_chip():
    half, whole = Cost(10**9, 4, rate=0.5), Cost(10**9, 4)
    assert half.floor_us(H200, "fp32", 1000) == whole.floor_us(H200, "fp32", 1000)
    work = whole.estimate_us(H200, "fp32", 1000) - H200.graph_launch_us
    assert half.estimate_us(H200, "fp32", 1000) == pytest.approx(2 * work + H200.graph_launch_us)
    (many,), (few,) = claims_of(linear(10_000, 512)), claims_of(linear(10_000, 3))
    assert few.cost.rate < many.cost.rate < costs_of(H200).gemm_simt.tile_shares[128, 128]  # idle columns and SMs


def test_layers_that_leave_room_for_one_warp_are_products():
    """mlp_fused would keep a row of 4,096 and one of 2,048 on the chip for each of 8 rows: three schedulers idle."""
    plan = make_plan(random_mlp(4096, 2048, 1024, 2), H200, KERNELS, Job(batch=1 << 14))
    assert plan.groups[0].claim.label == "gemm_sm90<4096,2048,ReLU>"
    plan = make_plan(random_mlp(4096, 2048, 1024, 2), A100, KERNELS, Job(batch=1 << 14))
    assert plan.groups[0].claim.label == "gemm_mma<4096,2048,ReLU>"
    plan = make_plan(random_mlp(4096, 2048, 1024, 2), RTX_4060_LAPTOP, KERNELS, Job(batch=1 << 14))
    assert plan.groups[0].claim.label == "gemm_simt<4096,2048,ReLU>", "three gemms of tf32 take longer there"


def test_tiles_are_chosen_by_the_sizes():
    def tile(M, N):
        return SimtGemm(M, N, 512, "fp32").tile(H200)

    def mma_tile(M, N, precision):
        return MmaGemm(M, N, 512, precision).tile(H200)

    assert tile(8192, 8192) is FMA_TILES[0]
    assert (tile(4, 4096).BM, tile(10**6, 10).BN) == (16, 16)
    assert tile(512, 512) is FMA_TILES[1]
    assert mma_tile(8192, 8192, "fp16") is TILES[0]
    assert mma_tile(8192, 8192, "fp32") is TILES[1]
    assert mma_tile(65536, 24, "tf32").BN == 32
    assert mma_tile(7, 4096, "bf16") is TILES[-1]


def test_no_rows_are_no_launch():
    (claim,) = claims_of(linear(10_000, 300))
    assert claim.facts.at(0).launches == ()
    (launch,) = claim.facts.at(129).launches
    assert launch.config.block == (256, 1, 1)


def test_sizes_and_activations_cost_no_compilation():
    programs = set()
    for D_in, D_out, slope in ((10_000, 300, 0.1), (20_000, 301, 0.2)):
        (claim,) = claims_of(linear(D_in, D_out, LeakyReLU(slope)))
        programs.add(claim.facts.at(1 << 16).launches[0].program)
    assert len(programs) == 1


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", "float32"), ("tf32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]
)
def test_weights_are_kept_as_the_cores_want_them(precision, dtype):
    net = linear(8192, 2048)
    (claim,) = claims_of(net, precision, kernel=GemmMmaKernel(fits_in_block))
    made = materialise(claim.recipes["weight"], net.weights)
    given = net.weights["fc.weight"]
    want = {"fp32": split_weight, "tf32": tf32_weight}.get(precision, lambda each: each.astype(numpy_dtype(dtype)))(
        given
    )
    assert made.tobytes() == want.tobytes()
    assert materialise(claim.recipes["bias"], net.weights).dtype == np.float32


def test_a_weight_that_is_too_large_is_an_error():
    net = linear(8192, 2048)
    (claim,) = claims_of(net, "fp16", kernel=GemmMmaKernel(fits_in_block))
    with pytest.raises(InputError, match="too large for float16"):
        materialise(claim.recipes["weight"], {"fc.weight": np.float32(1e8) * net.weights["fc.weight"]})


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.fixture
def without_wgmma(monkeypatch):
    """gemm_sm90 claims most gemms on Hopper: leave them to the others."""
    monkeypatch.setattr(cuda, "KERNELS", tuple(k for k in cuda.KERNELS if k.name != "gemm_sm90"))


def verify(net, x, precision):
    """Compile, run, and hold against the float64 reference with the naive run as a yardstick."""
    engine = onchip.compile(net, "cuda", precision)
    assert {"gemm_simt", "gemm_mma"} & {group.claim.kernel for group in engine.plan.groups}
    got = engine(x)
    truth = reference.forward(net, x)
    naive = scaled_error(reference.forward(net, x, NAIVE_DTYPE[precision]), truth)
    allowed = FACTOR * naive + ULPS * max(ULP[precision], DTYPE_ULP.get(net.output.dtype, 0.0))
    error = scaled_error(got, truth)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}, naive {naive:.3g}"
    return engine, got


@pytest.mark.usefixtures("without_wgmma")
@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("D_in", "D_out", "B"), [(10_001, 300, 129), (9001, 33, 1000), (8191, 2048, 77), (12_345, 131, 1), (8191, 10, 4097)]
)
def test_right_in_every_precision(precision, D_in, D_out, B):
    net, x = linear(D_in, D_out, GELU()), rows(B, D_in)
    engine, whole = verify(net, x, precision)
    for first, count in ((0, 1), (B // 2, 7), (B // 3, B // 3)):
        assert np.array_equal(engine(x[first : first + count]), whole[first : first + count])


@pytest.mark.usefixtures("without_wgmma")
@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("io", ["float16", "bfloat16"])
def test_rows_in_half_precision(precision, io):
    net = with_io(linear(8201, 260, Clip(-1, 1.5), bias=False), io)
    _, got = verify(net, rows(200, 8201).astype(numpy_dtype(io)), precision)
    assert got.dtype == numpy_dtype(io)


@pytest.mark.usefixtures("without_wgmma")
@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_mlp_too_wide_for_the_chip(precision):
    net = random_mlp(2047, 4097, 1023, 10, output="Softmax")
    verify(net, rows(500, 2047), precision)


@pytest.mark.usefixtures("without_wgmma")
@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_beside_the_batch_axis(precision):
    weights = {"a.weight": rows(30, 9001, seed=3) / np.float32(95)}
    net = sequential(TensorType(("B", 27_003)), [("split", Reshape((3, 9001))), ("a", Linear())], weights)
    verify(net, rows(33, 27_003), precision)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_nan_stays_in_its_row(precision):
    net, x = linear(9001, 40), rows(150, 9001)
    x[3, 2], x[111, 0] = np.nan, np.inf
    got = onchip.compile(net, "cuda", precision)(x)
    assert np.isnan(got[3]).all()
    assert not np.isfinite(got[111]).any()
    assert np.isfinite(np.delete(got, [3, 111], axis=0)).all()
