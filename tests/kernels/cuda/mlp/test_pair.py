"""mlp_pair: two layers in one launch, every width of y, odd shapes, edges. On the host, then on a GPU."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels import cuda, reference
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.mlp.pair import MlpPairLowering, Pair
from onchip.network.build import mlp, sequential
from onchip.network.io import with_io
from onchip.network.layers import GELU, Linear, ReLU, Sigmoid
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.engine import compile


@pytest.fixture
def gpu(monkeypatch):
    return emulated_gpu(monkeypatch)


def weights(K, H, N):
    """u, w, a, b: scaled so that activations stay near 1."""
    u, w = rows(H, K, seed=2) / np.float32(np.sqrt(K)), rows(N, H, seed=3) / np.float32(np.sqrt(H))
    return u, w, rows(1, H, seed=4)[0], rows(1, N, seed=5)[0]


def run(gpu, pair, M, x, given, has_bias=(True, True)):
    """y of M rows, with nothing written past its end."""
    u, w, a, b = given
    dtype, guard = numpy_dtype(PRECISIONS[pair.precision].dtype), 64
    there = {"u": gpu.upload(u.astype(dtype)), "w": gpu.upload(w.astype(dtype)), "a": gpu.upload(a), "b": gpu.upload(b)}
    y = np.full(M * pair.N + guard, 7, numpy_dtype(pair.y_dtype))
    x_there, y_there = gpu.upload(x.astype(dtype)), gpu.upload(y)
    steps = MlpPairLowering(pair, has_bias).at(M)
    BoundSteps(gpu, steps, there).enqueue([x_there.pointer], [y_there.pointer], 0, gpu.stream)
    gpu.download(y_there, y)
    assert (y[-guard:] == 7).all()
    return y[:-guard].reshape(M, pair.N)


@needs_gxx
@pytest.mark.parametrize(
    ("M", "K", "H", "N"),
    [
        (70, 88, 136, 40),
        (130, 256, 256, 256),
        (1, 8, 200, 1),
        (7, 264, 328, 100),
        (130, 64, 40, 65),
        (9, 384, 136, 200),
    ],
)
@pytest.mark.parametrize(("precision", "made"), [("fp16", "float16"), ("bf16", "float32")])
def test_shapes(gpu, precision, made, M, K, H, N):
    pair = Pair(1, K, H, N, precision, made, (ReLU(), None))
    assert not pair.why_not()
    x, given = rows(M, K), weights(K, H, N)
    got = run(gpu, pair, M, x, given).astype(float)
    dtype = numpy_dtype(PRECISIONS[precision].dtype)
    u, w = (each.astype(dtype).astype(float) for each in given[:2])
    hidden = np.maximum(x.astype(dtype).astype(float) @ u.T + given[2], 0).astype(dtype).astype(float)
    exact = hidden @ w.T + given[3]
    eps = {"fp16": 1e-3, "bf16": 4e-3}[precision]  # a hidden value may round to the adjacent one
    assert np.abs(got - exact).max() <= eps * np.abs(exact).max()
    if M > 66:  # a row's bits do not depend on its batch
        assert np.array_equal(run(gpu, pair, 3, x[63:66], given), got[63:66].astype(numpy_dtype(made)))


@needs_gxx
def test_activations_and_no_biases(gpu):
    x, given = rows(20, 40), weights(40, 200, 24)
    pair = Pair(1, 40, 200, 24, "fp16", "float32", (GELU(), Sigmoid()))
    layers = [("a", Linear()), ("f", GELU()), ("b", Linear()), ("g", Sigmoid())]
    net = sequential(TensorType(("B", 40)), layers, {"a.weight": given[0], "b.weight": given[1]})
    got = run(gpu, pair, 20, x, given, (False, False))
    assert np.abs(got - reference.forward(net, x)).max() <= 2e-3


@pytest.mark.parametrize(
    ("pair", "word"),
    [
        (Pair(1, 256, 1024, 257, "fp16", "float16"), "at most 256"),
        (Pair(1, 100, 1024, 256, "fp16", "float16"), "rows of x in multiples of 16 B, got 100"),
        (Pair(1, 256, 1001, 256, "bf16", "float16"), "got 1001"),
        (Pair(1, 2048, 1024, 256, "fp16", "float16"), "does not fit"),
        (Pair(1, 256, 1024, 256, "tf32", "float32"), "not float32"),
    ],
)
def test_what_it_does_not_take(pair, word):
    assert word in pair.why_not()


def test_many_rows_are_worth_it():
    """As measured: with 4,096 rows two launches take half as long, with 16,384 one is faster."""
    net = mlp(256, 1024, 256, activation="GELU")
    for B, kernels in ((4096, ["gemm_sm90"] * 2), (16_384, ["mlp_pair"])):
        plan = make_plan(with_io(net, "float16"), H200, cuda.KERNELS, Job("fp16", B))
        assert [group.claim.kernel for group in plan.groups] == kernels


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "io"), [("fp16", "fp16"), ("bf16", "bf16")])
@pytest.mark.parametrize(("K", "H", "N"), [(256, 1024, 256), (384, 512, 200), (72, 1000, 65)])
def test_layers_on_a_gpu(monkeypatch, precision, io, K, H, N):
    others = ("gemm_simt", "gemv", "gemm_mma", "gemm_sm90", "mlp_tensor_core")
    monkeypatch.setattr(cuda, "KERNELS", tuple(k for k in cuda.KERNELS if k.name not in others))
    u, w, a, b = weights(K, H, N)
    given = {"a.weight": u, "b.weight": w, "a.bias": a, "b.bias": b}
    net = sequential(TensorType(("B", K)), [("a", Linear()), ("f", GELU()), ("b", Linear())], given)
    engine = compile(net, "cuda", precision, io=io, batch_hint=4096)
    assert [group.claim.kernel for group in engine.plan.groups] == ["mlp_pair"], str(engine.plan)
    x = rows(4097, K).astype(numpy_dtype(engine.input.dtype))
    got = engine(x)
    naive = reference.forward(net, x.astype(np.float32), "float16") if precision == "fp16" else None
    exact = reference.forward(net, x.astype(np.float32))
    if naive is not None:
        assert_error_within(got.astype(float), exact, baseline=naive.astype(float))
    assert np.abs(got.astype(float) - exact).max() <= {"fp16": 2e-3, "bf16": 1.6e-2}[precision] * np.abs(exact).max()
    for first, count in ((0, 1), (17, 7), (500, 64), (130, 1100)):  # the same bits
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])
