"""gemm_sm90: every tile and precision, odd shapes, edges. On the host, then on a GPU."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels import cuda, reference
from onchip.kernels.cuda.common.arguments import NOTHING, Input, Output, Weight
from onchip.kernels.cuda.common.precision import PRECISIONS, round_tf32
from onchip.kernels.cuda.common.program import Steps
from onchip.kernels.cuda.common.weights import split_weight, tf32_weight
from onchip.kernels.cuda.gemm.pad_rows import pad_rows, padded, padded_rows
from onchip.kernels.cuda.gemm.sm90 import GemmSm90Lowering, launch_gemm
from onchip.kernels.cuda.mma import wgmma_tile
from onchip.kernels.cuda.mma.wgmma_tile import CLUSTER_TILES, TILES, WgmmaGemm
from onchip.network.build import sequential
from onchip.network.layers import GELU, Linear, ReLU
from onchip.network.types import DTYPE_BYTES, TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.engine import compile

UNITS = 3  # fewer than tiles: blocks compute several


@pytest.fixture
def gpu(monkeypatch):
    return emulated_gpu(monkeypatch)


def multiplied(w, precision):
    """w as the kernel wants it."""
    if precision == "fp32":
        return split_weight(w)
    return tf32_weight(w) if precision == "tf32" else w.astype(numpy_dtype(PRECISIONS[precision].dtype))


def run(gpu, gemm, x, w, bias=None):
    """y of a gemm, with nothing written past its end."""
    guard = 64
    y = np.full(gemm.M * gemm.N + guard, 7, numpy_dtype(gemm.dtypes[1]))
    there = [gpu.upload(each) for each in (x.astype(numpy_dtype(gemm.dtypes[0])), multiplied(w, gemm.precision), y)]
    inputs = [there[0].pointer, there[1].pointer]
    given = NOTHING
    if bias is not None:
        there.append(gpu.upload(bias))
        inputs.append(there[-1].pointer)
        given = Input(2)
    steps = Steps((launch_gemm(gemm, UNITS, Input(0), Input(1), given, Output(0)),))
    BoundSteps(gpu, steps).enqueue(inputs, [there[2].pointer], 0, gpu.stream)
    gpu.download(there[2], y)
    assert (y[-guard:] == 7).all()
    return y[:-guard].reshape(gemm.M, gemm.N)


def rounded(array, precision, dtype="float32"):
    """What the tensor cores multiply of float64 values that are stored as `dtype`."""
    array = array.astype(numpy_dtype(dtype))
    if precision == "tf32":
        return tf32_weight(array).astype(float)
    return array.astype(numpy_dtype(PRECISIONS[precision].dtype)).astype(float)


CASES = [
    ("fp16", "float16", "float16"), ("bf16", "bfloat16", "float32"), ("fp32", "float32", "float32"),
    ("tf32", "float32", "float16"), ("fp16", "float32", "float32"), ("bf16", "float32", "bfloat16"),
]  # fmt: skip


@needs_gxx
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.height}x{tile.BN}")
@pytest.mark.parametrize(("precision", "given", "made"), [*CASES, ("bf16", "bfloat16", "bfloat16")])
def test_every_tile(gpu, monkeypatch, tile, precision, given, made):
    if tile.BN == 256 and given == "float32" and precision != "tf32":
        pytest.skip("rows that go through registers have narrower tiles")
    monkeypatch.setattr(wgmma_tile, "TILES", (tile,))
    M, N, K = tile.height + 9, 2 * tile.BN + 8, 88
    x, w, bias = rows(M, K), rows(N, K, seed=2), rows(1, N, seed=3)[0]
    gemm = WgmmaGemm(M, N, K, precision, (given, made), ReLU())
    if tile.is_transposed and not gemm.can_transpose:
        pytest.skip("16 bits of x and y are turned")
    assert not gemm.why_not()
    got = run(gpu, gemm, x, w, bias).astype(float)
    exact = np.maximum(rounded(x, precision, given) @ rounded(w, precision).T + bias, 0)
    eps = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[made]
    assert np.abs(got - exact).max() <= eps * np.abs(exact).max()


@needs_gxx
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 8), (7, 13, 16), (65, 33, 136), (130, 34, 264)])
@pytest.mark.parametrize(("precision", "given", "made"), CASES)
def test_odd_shapes(gpu, precision, given, made, M, N, K):
    x, w = rows(M, K), rows(N, K, seed=2)
    got = run(gpu, WgmmaGemm(M, N, K, precision, (given, made)), x, w).astype(float)
    exact = rounded(x, precision, given) @ rounded(w, precision).T
    eps = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[made]
    assert np.abs(got - exact).max() <= eps * np.abs(exact).max()


@needs_gxx
@pytest.mark.parametrize(("precision", "given", "made"), CASES)
def test_sums_in_parts(gpu, precision, given, made):
    """Many rows: a block computes the split-K chunks in sequence."""
    M, N, K = 300, 70, 520
    x, w = rows(M, K), rows(N, K, seed=2)
    gemm = WgmmaGemm(M, N, K, precision, (given, made), split_k=2)
    assert gemm.choose_tile(UNITS)[1] == "SEQUENTIAL"
    got = run(gpu, gemm, x, w).astype(float)
    exact = rounded(x, precision, given) @ rounded(w, precision).T
    eps = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[made]
    assert np.abs(got - exact).max() <= eps * np.abs(exact).max()


@needs_gxx
@pytest.mark.parametrize("tile", CLUSTER_TILES, ids=lambda tile: f"{tile.height}x{tile.BN}")
@pytest.mark.parametrize(("M", "N"), [(70, 140), (3, 65), (64, 34)])
@pytest.mark.parametrize("activation", [ReLU(), GELU()], ids=str)
def test_sums_of_a_cluster(gpu, monkeypatch, tile, M, N, activation):
    """A cluster of one block, which reduces its own sums: as many as run at a time here."""
    monkeypatch.setattr(WgmmaGemm, "choose_tile", lambda gemm, units: (tile, "CLUSTER"))
    x, w, bias = rows(M, 136), rows(N, 136, seed=2), rows(1, N, seed=3)[0]
    got = run(gpu, WgmmaGemm(M, N, 136, "fp16", ("float16", "float16"), activation), x, w, bias).astype(float)
    net = sequential(TensorType(("B", N)), [("f", activation)], {})
    exact = reference.forward(net, rounded(x, "fp16") @ rounded(w, "fp16").T + bias)
    assert np.abs(got - exact).max() <= 1e-3 * np.abs(exact).max()


def test_short_sums_have_large_tiles():
    """A tile has a prologue and an epilogue: with few slices of k, fewer tiles cost less."""
    for M, N, K, is_transposed in ((2_359_296, 32, 32, True), (4_194_304, 16, 144, True), (1024, 64, 288, False)):
        tile, _ = WgmmaGemm(M, N, K, "fp16", ("float16", "float16")).choose_tile(H200.units)
        assert (tile.is_transposed, tile.warpgroups) == ((True, 2) if is_transposed else (False, 1))
    assert WgmmaGemm(8192, 8192, 8192, "fp16", ("float16", "float16")).rate(H200.units) > 0.9


def test_when_sums_are_made_in_parts():
    few, many = WgmmaGemm(16, 1024, 4096, "fp16"), WgmmaGemm(65536, 1024, 4096, "fp16")
    assert few.best_split_k(132) == 4
    assert many.best_split_k(132) == WgmmaGemm(16, 1024, 64, "fp16").best_split_k(132) == 1
    assert WgmmaGemm(16, 8192, 4096, "fp16").best_split_k(132) == 1  # tiles enough
    together = WgmmaGemm(16, 1024, 4096, "fp16", split_k=4)
    launch = launch_gemm(together, 132, Input(0), Input(1), NOTHING, Output(0))
    assert (launch.config.grid[0], launch.config.cluster) == (128, 4)


@needs_gxx
def test_fp32_is_as_exact_as_float32(gpu):
    x, w = rows(70, 520), rows(40, 520, seed=2)
    got = run(gpu, WgmmaGemm(70, 40, 520, "fp32"), x, w)
    assert_error_within(got, x.astype(float) @ w.T.astype(float), baseline=x @ w.T)


@needs_gxx
def test_other_activations(gpu):
    x, w = rows(10, 32), rows(40, 32, seed=2)
    got = run(gpu, WgmmaGemm(10, 40, 32, "fp32", activation=GELU()), x, w)
    net = sequential(TensorType(("B", 32)), [("a", Linear()), ("g", GELU())], {"a.weight": w})
    exact = reference.forward(net, x)
    assert np.abs(got - exact).max() <= 2e-6 * np.abs(exact).max()


@needs_gxx
@pytest.mark.parametrize(
    ("precision", "given", "K"),
    [
        ("fp16", "float16", 100), ("bf16", "bfloat16", 77), ("fp16", "float32", 100), ("bf16", "float32", 67),
        ("fp32", "float32", 70), ("tf32", "float32", 3), ("fp16", "float16", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("M", [1, 70])
def test_rows_of_any_length(gpu, precision, given, K, M):
    """Rows that TMA cannot address are copied and zero-padded; so are those of w."""
    N = 40
    x, w, bias = rows(M, K).astype(numpy_dtype(given)), rows(N, K, seed=2), rows(1, N, seed=3)[0]
    K_padded, length = (padded(K, DTYPE_BYTES[dtype]) for dtype in (PRECISIONS[precision].dtype, given))
    row = WgmmaGemm(1, N, K_padded, precision, (given, "float32"), length=length)
    lowering = GemmSm90Lowering(row, K, UNITS, Weight("bias"))
    gemm = lowering.of_rows(M)
    assert not gemm.why_not()
    wide = multiplied(padded_rows(w, gemm.K), precision)
    steps = lowering.at(M)
    assert len(steps.launches) == (2 if x.strides[0] % 16 else 1)
    there = {"weight": gpu.upload(wide), "bias": gpu.upload(bias)}
    x_there, y_there = gpu.upload(x), gpu.upload(np.full((M, N), 7, np.float32))
    scratch = gpu.upload(np.full(steps.scratch_bytes + 16, 7, np.uint8))  # what zeros do not stand in for
    BoundSteps(gpu, steps, there).enqueue([x_there.pointer], [y_there.pointer], scratch.pointer, gpu.stream)
    got = gpu.download(y_there, np.empty((M, N), np.float32)).astype(float)
    exact = rounded(x, precision, given) @ rounded(w, precision).T + bias
    assert np.abs(got - exact).max() <= 2e-6 * np.abs(exact).max()
    if M > 1:  # a row's bits do not depend on its batch
        alone = gpu.upload(np.zeros((1, N), np.float32))
        one = gpu.upload(x[M - 1 :])
        BoundSteps(gpu, lowering.at(1), there).enqueue([one.pointer], [alone.pointer], scratch.pointer, gpu.stream)
        assert np.array_equal(gpu.download(alone, np.empty(N, np.float32)).astype(float), got[-1])


@needs_gxx
@pytest.mark.parametrize(("M", "row_bytes"), [(1, 1), (5, 3), (300, 200), (7, 1002), (2, 12), (33, 514)])
def test_padded_rows(gpu, M, row_bytes):
    x = np.random.default_rng(0).integers(0, 256, (M, row_bytes), dtype=np.uint8)
    wide = padded(row_bytes, 1)
    assert wide % 16 == 0
    there, made = gpu.upload(x), gpu.upload(np.full((M, wide), 7, np.uint8))
    steps = Steps((pad_rows(M, row_bytes, UNITS, Input(0), Output(0)),))
    BoundSteps(gpu, steps).enqueue([there.pointer], [made.pointer], 0, gpu.stream)
    assert np.array_equal(gpu.download(made, np.empty((M, wide), np.uint8)), padded_rows(x, wide))


@pytest.mark.parametrize(
    ("gemm", "word"),
    [
        (WgmmaGemm(8, 8, 12, "fp16", ("float16", "float16")), "rows of x in multiples of 16 B, got 12"),
        (WgmmaGemm(8, 8, 12, "bf16"), "rows of w in multiples of 16 B, got 12"),
        (WgmmaGemm(8, 8, 6, "fp32"), "got 6 elements"),
        (WgmmaGemm(8, 8, 64, "fp32", ("float16", "float32")), "not float16"),
        (WgmmaGemm(8, 8, 64, "bf16", ("float16", "float32")), "not float16"),
    ],
)
def test_what_it_does_not_take(gemm, word):
    assert word in gemm.why_not()


def test_every_part_of_a_sum_has_slices():
    for slices in range(1, 200):
        parts = WgmmaGemm(7, 256, slices * 64, "fp16").best_split_k(H200.units)
        assert (parts - 1) * -(-slices // parts) < slices


# -- on a GPU --------------------------------------------------------------------------------------------------


def engine_of(N, K, precision, io, layers=(), bias=True, batch_hint=1024):
    weights = {"a.weight": rows(N, K, seed=2) / np.float32(np.sqrt(K))}
    if bias:
        weights["a.bias"] = rows(1, N, seed=3)[0]
    net = sequential(TensorType(("B", K)), [("a", Linear()), *layers], weights)
    with pytest.MonkeyPatch.context() as patch:  # whatever is estimated to be faster
        patch.setattr(cuda, "KERNELS", tuple(k for k in cuda.KERNELS if k.name not in ("gemm_mma", "gemv")))
        engine = compile(net, "cuda", precision, io=io, batch_hint=batch_hint)
    assert "gemm_sm90" in {group.claim.kernel for group in engine.plan.groups}, str(engine.plan)
    return net, engine


def rows_of_tf32():
    """Numbers between those of tf32."""
    x = rows(300, 32) * np.float32(np.pi)
    assert not np.array_equal(round_tf32(x), x)
    return x


@needs_gxx
def test_rows_of_tf32_are_rounded(gpu):
    x, gemm = rows_of_tf32(), WgmmaGemm(300, 1, 32, "tf32")
    for k in range(0, 32, 7):
        one = np.zeros((1, 32), np.float32)
        one[0, k] = 1
        assert np.array_equal(run(gpu, gemm, x, one)[:, 0], round_tf32(x)[:, k])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "io", "eps"),
    [("fp16", "fp16", 1e-3), ("bf16", "bf16", 8e-3), ("fp32", "", 2e-6), ("tf32", "", 1e-3), ("fp16", "", 1e-3)],
)
@pytest.mark.parametrize(("N", "K"), [(1000, 1024), (2048, 520), (264, 4096), (4099, 776), (8192, 100), (777, 1001)])
def test_layers_on_a_gpu(precision, io, eps, N, K):
    net, engine = engine_of(N, K, precision, io, [("r", ReLU())])
    x = rows(1500, K).astype(numpy_dtype(engine.input.dtype))
    exact = reference.forward(net, x.astype(np.float32))
    got = engine(x)
    assert np.abs(got.astype(float) - exact).max() <= eps * np.abs(exact).max()
    for first, count in ((0, 1), (17, 7), (500, 64), (130, 1100)):  # other tiles, the same bits
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "io", "eps"), [("fp16", "fp16", 1e-3), ("fp32", "", 2e-6), ("bf16", "", 8e-3)])
@pytest.mark.parametrize(("N", "K"), [(1024, 4096), (1001, 2056), (300, 2048)])
def test_few_rows_on_a_gpu(monkeypatch, precision, io, eps, N, K):
    """Clusters share the sums; with more rows a block computes all split-K chunks, with the same bits."""
    monkeypatch.setattr(cuda, "KERNELS", tuple(k for k in cuda.KERNELS if k.name != "gemv"))
    net, engine = engine_of(N, K, precision, io, [("r", ReLU())], batch_hint=16)
    (facts,) = (g.claim.facts for g in engine.plan.groups if g.claim.kernel == "gemm_sm90")  # a Cast may be before it
    assert facts.gemm.split_k > 1
    x = rows(3000, K).astype(numpy_dtype(engine.input.dtype))
    exact = reference.forward(net, x.astype(np.float32))
    got = engine(x)
    assert np.abs(got.astype(float) - exact).max() <= eps * np.abs(exact).max()
    for first, count in ((0, 1), (17, 7), (500, 16), (100, 64), (1200, 100), (130, 1100)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])


@pytest.mark.gpu
def test_fp32_on_a_gpu_is_as_exact_as_float32():
    net, engine = engine_of(512, 4096, "fp32", "")
    x = rows(2000, 4096)
    w, bias = net.weights["a.weight"], net.weights["a.bias"]
    assert_error_within(engine(x), reference.forward(net, x), baseline=x @ w.T + bias)


@pytest.mark.gpu
def test_rows_of_tf32_are_rounded_on_a_gpu():
    """By the accelerator, on their way to the tensor cores."""
    x = np.tile(rows_of_tf32(), (1, 64))  # many weights: no other kernel claims it
    one = np.zeros((64, 32 * 64), np.float32)
    one[np.arange(64), 32 * np.arange(64) + np.arange(64) % 32] = 1
    net = sequential(TensorType(("B", 32 * 64)), [("y", Linear())], {"y.weight": one})
    engine = compile(net, "cuda", "tf32", batch_hint=1 << 20)
    assert [group.claim.kernel for group in engine.plan.groups] == ["gemm_sm90"]
    assert np.array_equal(engine(x), np.tile(round_tf32(x[:, :32]), (1, 2)))
