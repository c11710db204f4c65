"""The gemms of gemm/simt.cu and gemm/mma.cu, run on the host: every tile, odd shapes, the same bits."""

import dataclasses

import numpy as np
import pytest

from checks import assert_error_within, rows
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels import reference
from onchip.kernels.cuda.common.arguments import NOTHING, Input, Output
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import Steps
from onchip.kernels.cuda.common.weights import split_weight, tf32_weight
from onchip.kernels.cuda.gemm import simt
from onchip.kernels.cuda.gemm.mma import MmaGemm
from onchip.kernels.cuda.gemm.simt import FMA_TILES, PART, SimtGemm
from onchip.kernels.cuda.mma.mma_tile import TILES, tiles_of
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.build import sequential
from onchip.network.layers import ELU, GELU, Clip, LeakyReLU, Linear
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.runtime.cuda.bound_steps import BoundSteps

pytestmark = needs_gxx
FEW_UNITS = dataclasses.replace(H200, units=4)


@pytest.fixture
def gpu(monkeypatch):
    return emulated_gpu(monkeypatch)


def use(monkeypatch, tile):
    """Compute every gemm with one kind of tile."""
    monkeypatch.setattr(simt, "FMA_TILES", (tile,))
    monkeypatch.setattr(simt, "MAX_NARROW", 1 << 20)


def run(gpu, gemm, x, w, bias=None, tile=None):
    """y of a gemm, with nothing written past its end."""
    dtype = numpy_dtype(gemm.dtypes[1])
    guard, y = 64, np.full(gemm.M * gemm.N + 64, 7, dtype)
    there = [gpu.upload(array) for array in (x, w, y) if array is not None]
    arrays = Input(0), Input(1), NOTHING if bias is None else Input(2), Output(0)
    steps = Steps((gemm.launch(FEW_UNITS, *arrays) if tile is None else gemm.launch_tile(tile, *arrays),))
    inputs = [there[0].pointer, there[1].pointer, 0]
    if bias is not None:
        there.append(gpu.upload(bias))
        inputs[2] = there[-1].pointer
    BoundSteps(gpu, steps).enqueue(inputs, [there[2].pointer], 0, gpu.stream)
    gpu.download(there[2], y)
    assert (y[-guard:] == 7).all()
    return y[:-guard].reshape(gemm.M, gemm.N)


@pytest.mark.parametrize("tile", FMA_TILES, ids=lambda tile: f"{tile.BM}x{tile.BN}")
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 1), (7, 13, 5), (129, 64, 33), (33, 129, 16), (130, 260, 40)])
def test_odd_shapes_in_fp32(gpu, monkeypatch, tile, M, N, K):
    use(monkeypatch, tile)
    x, w, bias = rows(M, K), rows(N, K, seed=2), rows(1, N, seed=3)[0]
    got = run(gpu, SimtGemm(M, N, K, "fp32"), x, w, bias)
    truth = x.astype(float) @ w.T.astype(float) + bias
    assert_error_within(got, truth, baseline=x @ w.T + bias)


@pytest.mark.parametrize("K", [PART, PART + 1, 3 * PART, 3001])
def test_long_sums_in_fp32(gpu, monkeypatch, K):
    x, w = rows(9, K), rows(20, K, seed=2)
    truth, naive = x.astype(float) @ w.T.astype(float), x @ w.T
    tiles = {}
    for tile in FMA_TILES:
        use(monkeypatch, tile)
        tiles[tile] = run(gpu, SimtGemm(9, 20, K, "fp32"), x, w)
        monkeypatch.undo()
        gpu = emulated_gpu(monkeypatch)
    first, *others = tiles.values()
    assert_error_within(first, truth, baseline=naive)
    assert all(np.array_equal(first, other) for other in others)


def test_a_row_has_the_same_bits_in_every_batch(gpu):
    N, K = 70, 100
    x, w = rows(300, K), rows(N, K, seed=2)
    whole = run(gpu, SimtGemm(300, N, K, "fp32"), x, w)
    chosen = {SimtGemm(300, N, K, "fp32").tile(FEW_UNITS)}
    for first, count in ((0, 1), (17, 16), (250, 50)):
        gemm = SimtGemm(count, N, K, "fp32")
        chosen.add(gemm.tile(FEW_UNITS))
        assert np.array_equal(run(gpu, gemm, x[first : first + count], w), whole[first : first + count])
    assert len(chosen) > 1


def test_sums_in_double_precision_are_rounded_once(gpu):
    x, w = rows(65, 1100), rows(70, 1100, seed=2)
    got = run(gpu, SimtGemm(65, 70, 1100, "fp64"), x, w)
    assert np.array_equal(got, (x.astype(float) @ w.T.astype(float)).astype(np.float32))


@pytest.mark.parametrize(
    "layer",
    [*(kind() for kind in ACTIVATIONS), LeakyReLU(0.1), Clip(-0.5, 0.7), Clip(None, 1.0), GELU("tanh"), ELU(0.3)],
    ids=str,
)
def test_activations(gpu, layer):
    N, K = 12, 21
    x, w, bias = rows(10, K), rows(N, K, seed=2) / np.float32(4), rows(1, N, seed=3)[0]
    x[3] = np.nan
    x[4, 0] = np.inf
    net = sequential(TensorType(("B", K)), [("fc", Linear()), ("a", layer)], {"fc.weight": w, "fc.bias": bias})
    got = run(gpu, SimtGemm(10, N, K, "fp32", activation=layer), x, w, bias)
    good = [0, 1, 2, 5, 6, 7, 8, 9]
    naive = reference.forward(net, x, "float32")
    assert_error_within(got[good], reference.forward(net, x)[good], naive[good])
    assert np.array_equal(np.isnan(got), np.isnan(naive))
    assert np.array_equal(np.isinf(got), np.isinf(naive))


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16"), ("bfloat16", "float16"), ("float32", "float16")])
def test_rows_in_half_precision(gpu, dtypes):
    given, made = map(numpy_dtype, dtypes)
    x, w = rows(5, 24).astype(given), rows(11, 24, seed=2)
    got = run(gpu, SimtGemm(5, 11, 24, "fp32", dtypes), x, w)
    whole = run(gpu, SimtGemm(5, 11, 24, "fp32"), x.astype(np.float32), w)
    assert got.tobytes() == whole.astype(made).tobytes()


def multiplied(w, gemm):
    """As the tensor cores multiply it, rows zero-padded."""
    full = np.zeros((gemm.N, gemm.pitch), np.float32)
    full[:, : gemm.K] = w
    dtype = numpy_dtype(PRECISIONS[gemm.precision].dtype)
    return {"fp32": split_weight, "tf32": tf32_weight}.get(gemm.precision, lambda each: each.astype(dtype))(full)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.BM}x{tile.BN}")
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 1), (17, 13, 7), (70, 130, 72), (130, 40, 100)])
def test_tensor_cores_multiply_what_they_should(gpu, tile, precision, M, N, K):
    """Small integers, exact in every precision: any wrong index shows. Lower splits of fp32 are not zero."""
    if tile not in tiles_of(precision):
        pytest.skip("too many sums")
    rng = np.random.default_rng(0)
    x, w, bias = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((M, K), (N, K), (N,)))
    truth = x @ w.T + bias
    for dtype in ("float32", "float16", "bfloat16"):
        gemm = MmaGemm(M, N, K, precision, (dtype, "float32"))
        got = run(gpu, gemm, x.astype(numpy_dtype(dtype)), multiplied(w, gemm), bias, tile)
        assert np.abs(got - truth).max() <= (1e-6 if precision == "fp32" else 0) * np.abs(truth).max(), dtype


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_tile_makes_the_same_bits(gpu, precision):
    x, w = rows(70, 201), rows(75, 201, seed=2)
    gemm = MmaGemm(70, 75, 201, precision)
    first, *others = (run(gpu, gemm, x, multiplied(w, gemm), tile=tile) for tile in tiles_of(precision))
    assert all(np.array_equal(first, other) for other in others)
    some = MmaGemm(9, 75, 201, precision)
    assert np.array_equal(run(gpu, some, x[50:59], multiplied(w, some), tile=TILES[-1]), first[50:59])
    if precision == "fp32":
        assert_error_within(first, x.astype(float) @ w.T.astype(float), baseline=x @ w.T)
