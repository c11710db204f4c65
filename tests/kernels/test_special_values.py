"""Every pointwise layer and reduction on NaN, infinities, signed zeros, subnormal and huge values: as in NumPy, in
every dtype, on the CPU and in the CUDA kernels."""

import numpy as np
import pytest

import onchip
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels.cuda import KERNELS
from onchip.kernels.pointwise import BINARY, UNARY
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    ELU,
    GELU,
    Abs,
    Add,
    ArgMax,
    ArgMin,
    Cast,
    Ceil,
    Clip,
    Div,
    Equal,
    Floor,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
    Greater,
    GreaterOrEqual,
    HardSigmoid,
    LeakyReLU,
    Mask,
    Max,
    Min,
    Mod,
    Mul,
    Pow,
    PReLU,
    Reciprocal,
    ReLU,
    Round,
    Sign,
    Sqrt,
    Sub,
    ToInts,
    ToPixels,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.engine import Engine
from pointwise_networks import emulated

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTS = ("int64", "int32", "int16", "int8", "uint8")
SPECIAL = (
    0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -3.0, 0.7, -0.7, 7.3, -7.3, 1e-3, -1e-3, 700.0,
    -700.0, 60000.0, -60000.0, 1e10, -1e10, 1e20, -1e20, 3e38, -3e38, 1e-20, -1e-30, 6e-8, -6e-8, 1e-40, -1e-45,
)  # fmt: skip
# Exact, including the signs of zeros, except which zero is larger, which NumPy leaves undefined.
EXACT = {
    Abs: np.abs, Sign: np.sign, Sqrt: np.sqrt, Reciprocal: lambda x: 1 / x, Floor: np.floor, Ceil: np.ceil,
    Round: np.rint, Add: np.add, Sub: np.subtract, Mul: np.multiply, Div: np.divide,
    Greater: np.greater, GreaterOrEqual: np.greater_equal, Equal: np.equal, Max: np.maximum, Min: np.minimum,
}  # fmt: skip
PARAMETERS = {LeakyReLU: (0.25,), Clip: (-0.5, 2.0), ELU: (0.5,), HardSigmoid: (0.25, 0.5)}
LAYERS = [
    row.layer(row.variant) if row.layer is GELU else row.layer(*PARAMETERS.get(row.layer, ()))
    for row in UNARY
    if row.layer not in (Cast, ToInts, ToPixels)
]
PAIRS = [Mod(row.variant == "truncated") if row.layer is Mod else row.layer() for row in BINARY]


def values(dtype):
    with np.errstate(all="ignore"):
        return np.unique(np.array(SPECIAL).astype(numpy_dtype(dtype)).view(f"u{numpy_dtype(dtype).itemsize}")).view(
            numpy_dtype(dtype)
        )


def truth(layer, *xs):
    """The float64 result, and whether it must be exact."""
    wide = [x.astype(np.float64) for x in xs]
    if isinstance(layer, Mod):
        return (np.fmod if layer.truncated else np.mod)(*wide), True
    if isinstance(layer, Mask):
        return np.where(wide[1] != 0, wide[0], 0), True
    if isinstance(layer, Pow):
        return np.power(*wide), False
    if type(layer) in EXACT:
        return EXACT[type(layer)](*wide), True
    is_exact = isinstance(layer, ReLU | Clip | LeakyReLU | PReLU)
    return layer.forward(tuple(wide), {}), is_exact


def wrong(layer, run, dtype):
    """Results that differ from the truth rounded once: (inputs, got, expected)."""
    x = values(dtype)
    count = len(x) if isinstance(layer, tuple(PAIR_KINDS)) else 1
    xs = [np.repeat(x, count)] + ([np.tile(x, count)] if count > 1 else [])
    net = Network({f"x{i}": TensorType(("B", 1), dtype) for i in range(len(xs))},
                  (Node("y", layer, tuple(f"x{i}" for i in range(len(xs)))),), ("y",), {})  # fmt: skip
    with np.errstate(all="ignore"):
        exact, is_exact = truth(layer, *xs)
        results = run(net)(*(each[:, None] for each in xs))[:, 0]
        assert results.dtype == numpy_dtype(dtype)
        got, expected = results.astype(np.float64), exact.astype(numpy_dtype(dtype)).astype(np.float64)
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        if not is_exact:
            info = {"float32": 2.0**-23, "float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
            allowed = 8 * info * np.abs(expected) + LEAST[dtype] + 2.0**-52 * np.abs(xs[0].astype(np.float64))
            same |= np.isfinite(expected) & (np.abs(got - expected) <= allowed)
        if type(layer) in EXACT and not isinstance(layer, Max | Min):
            same &= (np.signbit(got) == np.signbit(expected)) | np.isnan(expected)
    return [(*(float(each[i]) for each in xs), got[i], expected[i]) for i in np.flatnonzero(~same)]


PAIR_KINDS = {type(layer) for layer in PAIRS}
# Exponentials below the least normal number may be 0.
LEAST = {"float32": 2.0**-126, "float64": 2.0**-1022, "float16": 2.0**-14, "bfloat16": 2.0**-126}


def found(run, dtype):
    return {str(layer): errors for layer in (*LAYERS, *PAIRS) if (errors := wrong(layer, run, dtype)[:4])}


@pytest.mark.parametrize("dtype", FLOATS)
def test_on_the_cpu(dtype):
    assert not found(lambda net: onchip.compile(net, "cpu"), dtype)


@needs_gxx
@pytest.mark.parametrize("dtype", FLOATS)
def test_in_cuda_kernels(monkeypatch, dtype):
    gpu = emulated_gpu(monkeypatch)
    assert not found(lambda net: emulated(gpu, net), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_on_a_gpu(dtype):
    assert not found(lambda net: onchip.compile(net, "cuda"), dtype)


@pytest.mark.parametrize("dtype", INTS)
def test_ints_on_the_cpu(dtype):
    assert not wrong_ints(lambda net: onchip.compile(net, "cpu"), dtype)


@needs_gxx
@pytest.mark.parametrize("dtype", INTS)
def test_ints_in_cuda_kernels(monkeypatch, dtype):
    gpu = emulated_gpu(monkeypatch)
    assert not wrong_ints(lambda net: emulated(gpu, net), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", INTS)
def test_ints_on_a_gpu(dtype):
    assert not wrong_ints(lambda net: onchip.compile(net, "cuda"), dtype)


def wrong_ints(run, dtype):
    """The least and the largest wrap; they are compared as ints, not by their difference."""
    info = np.iinfo(dtype)
    few = np.unique(np.array([info.min, info.min + 1, 0, 1, 3, info.max // 2 + 1, info.max - 1, info.max]))
    x, z = np.repeat(few, len(few)).astype(dtype), np.tile(few, len(few)).astype(dtype)
    bad = {}
    for kind in (Add, Sub, Mul, Max, Min, Greater, GreaterOrEqual, Equal):
        given = TensorType(("B", 1), dtype)
        net = Network({"x": given, "z": given}, (Node("y", kind(), ("x", "z")),), ("y",), {})
        with np.errstate(all="ignore"):
            expected = EXACT[kind](x, z).astype(dtype)
        indices = np.flatnonzero(run(net)(x[:, None], z[:, None])[:, 0] != expected)
        if len(indices):
            bad[kind.__name__] = [(int(x[i]), int(z[i])) for i in indices[:4]]
    return bad


INF, NAN = np.inf, np.nan
ROWS = [
    [1, 2, 3, 4], [INF, 1, 2, 3], [-INF, 1, 2, 3], [-INF] * 4, [INF] * 4, [INF, -INF, 0, 1], [NAN, 1, 2, 3],
    [3, 2, NAN, -INF], [NAN, INF, -INF, 0], [1e4, 1e4, -1e4, 1], [0, -0.0, 0, 0], [-5, -6, -7, -8],
]  # fmt: skip
REDUCTIONS = {
    GlobalMax: np.max, GlobalMin: np.min, GlobalSum: np.sum, GlobalMean: np.mean,
    GlobalNorm: lambda x, axis: np.sqrt((x * x).sum(axis)), ArgMax: np.argmax, ArgMin: np.argmin,
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions_on_the_cpu(dtype):
    check_reductions(lambda net: onchip.compile(net, "cpu"), dtype)


@needs_gxx
@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions_in_cuda_kernels(monkeypatch, dtype):
    gpu = emulated_gpu(monkeypatch)
    check_reductions(lambda net: Engine(make_plan(net, gpu.device, KERNELS, Job()), CudaBackend(), "cuda:0"), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions_on_a_gpu(dtype):
    check_reductions(lambda net: onchip.compile(net, "cuda"), dtype)


def check_reductions(run, dtype):
    """inner = 1 and inner > 1, which have different loops."""
    flat = np.array(ROWS).astype(numpy_dtype(dtype))
    for kind, function in REDUCTIONS.items():
        for x, axis in ((flat, 1), (np.repeat(flat[:, :, None], 3, 2), 1)):
            layer = kind(axis) if kind in (ArgMax, ArgMin) else kind((axis,))
            net = Network({"x": TensorType(("B", *x.shape[1:]), dtype)}, (Node("y", layer, ("x",)),), ("y",), {})
            with np.errstate(all="ignore"):
                expected = function(x.astype(np.float64), axis)
                got = run(net)(x).astype(np.float64)
            np.testing.assert_allclose(got, expected, rtol=2.0**-7, err_msg=f"{layer} {x.shape}")
