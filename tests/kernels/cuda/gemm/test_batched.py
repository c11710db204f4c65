"""MatMul of two values, and ArgMax and ArgMin, on a GPU: any shape, broadcast batch axes, weights."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.kernels import reference
from onchip.network.layers import ArgMax, ArgMin, MatMul
from onchip.network.types import TensorType, numpy_dtype

ULPS = {"float32": 4, "float64": 2**-23, "float16": 2**14, "bfloat16": 2**17}
# Rows of a and of b; None: of a weight.
PRODUCTS = [
    ((5, 3), (3, 7), None),
    ((2, 3, 33, 17), (2, 1, 17, 5), None),
    ((2, 1, 5, 70), (1, 3, 70, 40), None),
    ((40, 300), (300, 65), None),
    ((4, 9, 8), (8, 5), "constant"),
    ((3, 4), (2, 4, 5), "first"),
    ((1, 1), (1, 1), None),
    ((2, 36, 68), (2, 68, 40), None),
]
ARGUMENTS = [
    ((40,), ArgMax()), ((3, 7), ArgMin(1)), ((5, 33), ArgMax(-1, keep=True, last=True)), ((1,), ArgMin(last=True)),
    ((6, 4, 3), ArgMax(2, last=True)),
]  # fmt: skip


def assert_right(net, got, xs):
    truth, naive = (reference.forward(net, tuple(xs), dtype) for dtype in ("float64", net.output.dtype))
    assert_error_within(got, truth, naive, ulps=ULPS[net.output.dtype])


def matmul(a, b, weight, dtype, B):
    """A network and its inputs."""
    rng = np.random.default_rng(B)
    kind = numpy_dtype(dtype)
    rows = [row for row, role in ((a, "first"), (b, "constant")) if weight != role]
    weights = {} if weight is None else {weight: rng.standard_normal(a if weight == "first" else b).astype(kind)}
    net = one_layer(MatMul(), *(TensorType(("B", *row), dtype) for row in rows), weights=weights)
    return net, [rng.standard_normal((B, *row)).astype(kind) for row in rows]


@needs_gxx
@pytest.mark.sample(5)  # both kernels
@pytest.mark.parametrize(
    ("i", "dtype", "kernel"),
    [
        *((i, "float32", kernel) for i in range(8) for kernel in ("matmul", "matmul_mma")), (1, "bfloat16", "matmul"),
        (3, "float64", "matmul"), (3, "bfloat16", "matmul_mma"), (7, "float16", "matmul_mma"),
    ],
)  # fmt: skip
def test_products(monkeypatch, i, dtype, kernel):
    gpu = emulated_gpu(monkeypatch)
    net, xs = matmul(*PRODUCTS[i], dtype, 5)
    (claim,) = claims_of(net, kernel, {"float16": "fp16", "bfloat16": "bf16"}.get(dtype, "fp32"))
    got = run_claim(gpu, net, claim, *xs)
    assert_right(net, got, xs)
    for rows in (slice(1), slice(2, 5)):
        assert np.array_equal(run_claim(gpu, net, claim, *(x[rows] for x in xs)), got[rows])
    assert claim.facts.at(0).launches == ()


def rows_with_equals(row, dtype, B):
    """Numbers of which many are alike, and some are NaN."""
    x = np.random.default_rng(B).integers(-2, 3, (B, *row)).astype(numpy_dtype(dtype))
    x[::3].reshape(len(x[::3]), -1)[:, -1] = np.nan
    return x


@needs_gxx
@pytest.mark.parametrize(("i", "dtype"), [*((i, "float32") for i in range(5)), (1, "float64"), (2, "float16")])
def test_places(monkeypatch, i, dtype):
    gpu = emulated_gpu(monkeypatch)
    row, layer = ARGUMENTS[i]
    net, x = one_layer(layer, TensorType(("B", *row), dtype)), rows_with_equals(row, dtype, 9)
    (claim,) = claims_of(net, "arg_reduce")
    np.testing.assert_array_equal(run_claim(gpu, net, claim, x), reference.forward(net, x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ULPS)
def test_on_a_gpu(dtype):
    for case in PRODUCTS:
        net, xs = matmul(*case, dtype, 1001)
        engine = onchip.compile(net, "cuda", {"float16": "fp16", "bfloat16": "bf16"}.get(dtype, "fp32"))
        got = engine(*xs)
        assert_right(net, got, xs)
        for B in (0, 1, 7):
            assert np.array_equal(engine(*(x[:B] for x in xs)), got[:B])
    for row, layer in ARGUMENTS:
        net, x = one_layer(layer, TensorType(("B", *row), dtype)), rows_with_equals(row, dtype, 4097)
        np.testing.assert_array_equal(onchip.compile(net, "cuda")(x), reference.forward(net, x))
