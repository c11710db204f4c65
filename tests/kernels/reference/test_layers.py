"""Layers without windows in NumPy (network/layers/): against their definitions, value by value, and torch if any."""

import math

import numpy as np
import pytest

from onchip.errors import InputError, ShapeError
from onchip.network.layers import (
    GELU,
    Add,
    BatchNorm1d,
    BatchNorm2d,
    Cast,
    Clip,
    Concat,
    CumSum,
    Dropout,
    Embedding,
    Identity,
    Interleave,
    LeakyReLU,
    LogSoftmax,
    Mul,
    Permute,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
    TokenConv,
    ToPixels,
)


def run(layer, *xs, **w):
    return layer.forward(xs, w)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


# -- activations -------------------------------------------------------------------------------------------

SCALAR = [
    (ReLU(), lambda v: max(v, 0)),
    (LeakyReLU(0.1), lambda v: v if v >= 0 else 0.1 * v),
    (Sigmoid(), lambda v: 1 / (1 + math.exp(-v))),
    (Tanh(), lambda v: (math.exp(2 * v) - 1) / (math.exp(2 * v) + 1)),
    (SiLU(), lambda v: v / (1 + math.exp(-v))),
    (GELU(), lambda v: v * math.erfc(-v / math.sqrt(2)) / 2),
    (GELU("tanh"), lambda v: v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))),
]


@pytest.mark.parametrize(("layer", "function"), SCALAR, ids=lambda value: str(value) if not callable(value) else "")
def test_activations(layer, function):
    x = np.concatenate((numbers(1, 30) * 4, [[-30.0, -9.0, 0.0, 9.0, 30.0]]), axis=1)
    np.testing.assert_allclose(run(layer, x), [[function(float(v)) for v in x[0]]], rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("layer", [layer for layer, _ in SCALAR], ids=str)
def test_activations_are_torchs(layer):
    torch = pytest.importorskip("torch")
    options = {"LeakyReLU": {"negative_slope": 0.1}, "GELU": {"approximate": getattr(layer, "approximate", "")}}
    module = getattr(torch.nn, layer.kind)(**options.get(layer.kind, {}))
    x = np.append(numbers(50) * 4, [np.nan, np.inf, -700, 700])
    with np.errstate(all="ignore"):
        got = run(layer, x)
    np.testing.assert_allclose(got, module(torch.tensor(x)).numpy(), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("bounds", [(0.0, 6.0), (-1.5, None), (None, 0.5), (2.0, -1.0)], ids=str)
def test_clip_is_torchs(bounds):
    torch = pytest.importorskip("torch")
    x = np.append(numbers(50) * 4, [np.nan, np.inf, -np.inf, 0.0, 6.0])
    np.testing.assert_array_equal(run(Clip(*bounds), x), torch.clamp(torch.tensor(x), *bounds).numpy())


def test_clip_refuses_a_bound_that_is_no_number():
    with pytest.raises(ShapeError, match="bad bounds"):
        Clip(0.0, float("nan"))


def test_softmaxes():
    x = np.array([[-800.0, -1.0, 0.0, 2.0, 800.0]])
    assert run(Softmax(), x).sum() == pytest.approx(1)
    np.testing.assert_allclose(np.exp(run(LogSoftmax(), x)), run(Softmax(), x))
    x = numbers(2, 3, 4)
    for axis in (1, 2, -2):
        e = np.exp(x)
        np.testing.assert_allclose(run(Softmax(axis), x), e / e.sum(axis, keepdims=True), rtol=1e-13)


def test_sigmoid_does_not_overflow_and_keeps_nan():
    np.testing.assert_array_equal(run(Sigmoid(), np.array([-800.0, 800.0, np.nan])), [0, 1, np.nan])


# -- weights of a channel, tables --------------------------------------------------------------------------


@pytest.mark.parametrize("roles", [(), ("weight",), ("bias",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize(
    ("kind", "row"), [(BatchNorm1d, (3,)), (BatchNorm1d, (3, 5)), (BatchNorm2d, (3, 2, 5))], ids=str
)
def test_batch_norm(kind, row, roles):
    x = numbers(2, *row)
    w = {"mean": numbers(3, seed=1), "var": numbers(3, seed=2) ** 2} | {role: numbers(3, seed=4) for role in roles}
    y = run(kind(1e-3), x, **w)
    for b, c, *at in np.ndindex(x.shape):
        expected = (x[(b, c, *at)] - w["mean"][c]) / math.sqrt(w["var"][c] + 1e-3)
        expected = expected * (w["weight"][c] if "weight" in w else 1) + (w["bias"][c] if "bias" in w else 0)
        assert y[(b, c, *at)] == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("shape", [(0,), (4,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_embedding(shape, dtype):
    table, ids = numbers(7, 3), np.random.default_rng(0).integers(0, 7, shape).astype(dtype)
    y = run(Embedding(), ids, weight=table)
    assert y.shape == (*shape, 3)
    for at in np.ndindex(shape):
        np.testing.assert_array_equal(y[at], table[ids[at]])


@pytest.mark.parametrize(("stride", "pads"), [(1, (0, 0)), (2, (0, 0)), (1, (2, 1)), (3, (1, 4))])
@pytest.mark.parametrize("K", [1, 3, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_token_conv(stride, pads, K, bias):
    """y[:, p] = bias + sum over k of weight[x[p * stride - before + k], k]."""
    w = {"weight": numbers(5, K, 2)} | ({"bias": numbers(2, seed=1)} if bias else {})
    ids = np.random.default_rng(1).integers(0, 5, (3, 7))
    y = run(TokenConv(stride, pads), ids, **w)
    assert y.shape == (3, 2, (7 + sum(pads) - K) // stride + 1)
    for b, o, p in np.ndindex(y.shape):
        places = [p * stride - pads[0] + k for k in range(K)]
        terms = [w["weight"][ids[b, at], k, o] for k, at in enumerate(places) if 0 <= at < 7]
        assert y[b, o, p] == pytest.approx(sum(terms) + (w["bias"][o] if bias else 0), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(("layer", "weight"), [(Embedding(), (4, 2)), (TokenConv(), (4, 1, 2))], ids=str)
@pytest.mark.parametrize("bad", [-1, 4])
def test_ids_that_are_in_no_table(layer, weight, bad):
    with pytest.raises(InputError, match=f"row 1, position 2: id {bad}, expected 0 to 3"):
        run(layer, np.array([[0, 1, 2], [3, 0, bad]]), weight=np.zeros(weight))


# -- several values ----------------------------------------------------------------------------------------


def test_add_and_mul_stretch_ones():
    a, b, c, constant = numbers(2, 3, 4), numbers(2, 3, 1, seed=1), numbers(2, 1, 4, seed=2), numbers(4, seed=3)
    total, product = run(Add(), a, b, c, constant=constant), run(Mul(), a, b, c, constant=constant)
    for n, i, j in np.ndindex(2, 3, 4):
        terms = [a[n, i, j], b[n, i, 0], c[n, 0, j], constant[j]]
        assert total[n, i, j] == pytest.approx(sum(terms), rel=1e-13)
        assert product[n, i, j] == pytest.approx(math.prod(terms), rel=1e-13)


def test_concat():
    a, b = numbers(2, 3, 4), numbers(2, 1, 4, seed=1)
    y = run(Concat(1), a, b, a)
    assert y.shape == (2, 7, 4)
    np.testing.assert_array_equal(y[:, :3], a)
    np.testing.assert_array_equal(y[:, 3:4], b)
    np.testing.assert_array_equal(y[:, 4:], a)


@pytest.mark.parametrize(("stride", "sizes"), [((2,), (7,)), ((3,), (2,)), ((2, 3), (5, 7)), ((1, 2), (3, 4))])
def test_interleave_puts_phases_back(stride, sizes):
    y = numbers(2, 3, *sizes)
    layer = Interleave(stride)
    phases = [y[(..., *(slice(p, None, s) for p, s in zip(phase, stride, strict=True)))] for phase in layer.phases()]
    np.testing.assert_array_equal(run(layer, *phases), y)


def test_moves():
    x = numbers(2, 3, 4, 5)
    y = run(Permute((0, 3, 1, 2)), x)
    assert y.shape == (2, 5, 3, 4)
    for b, i, j, k in np.ndindex(x.shape):
        assert y[b, k, i, j] == x[b, i, j, k]
    for layer in (Identity(), Dropout(0.9)):
        np.testing.assert_array_equal(run(layer, x), x)


# -- running sums, bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [1, 2, -1])
@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 1, 1), (1, 0, 3)])
def test_cum_sum(axis, exclusive, reverse, shape):
    x = np.random.default_rng(0).integers(-100, 100, shape).astype(np.float64)  # whole numbers: sums are exact
    y = run(CumSum(axis, exclusive, reverse), x)
    assert y.shape == x.shape
    moved, got = np.moveaxis(x, axis, -1), np.moveaxis(y, axis, -1)
    for *at, i in np.ndindex(moved.shape):
        row = moved[tuple(at)]
        first = i + 1 if exclusive else i
        terms = row[first:] if reverse else row[: i if exclusive else i + 1]
        assert got[(*at, i)] == sum(terms)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
def test_integer_sums_wrap(dtype):
    top = np.iinfo(dtype).max
    y = run(CumSum(), np.array([[top, 1, 2]], dtype))
    assert y.dtype == dtype
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y, [[top, np.iinfo(dtype).min, np.iinfo(dtype).min + 2]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pixels(dtype):
    x = np.array([-np.inf, -3, -1.001, -1, -0.9999, 0, 0.5, 0.9999, 1, 1.5, np.inf, np.nan], dtype)
    with np.errstate(all="ignore"):
        y = run(ToPixels(), x)
    assert y.dtype == np.uint8
    np.testing.assert_array_equal(y, [0, 0, 0, 0, 0, 127, 191, 254, 255, 255, 255, 0])


NARROW = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # the largest error of a rounding, of the number


@pytest.mark.parametrize("to", ["float64", "float32", "float16", "bfloat16"])
def test_a_cast_is_the_identity_in_float64_and_rounds_in_the_naive_run(to):
    x = np.random.default_rng(0).standard_normal((5, 7)) * 10
    assert np.array_equal(run(Cast(to), x), x)
    x = x.astype(np.float32)
    y = run(Cast(to), x)
    assert y.dtype == np.float32
    error = np.abs(y / x - 1).max()
    if to not in NARROW:
        assert error == 0
    else:
        assert NARROW[to] / 4 < error <= NARROW[to]


@pytest.mark.parametrize("given", ["int64", "int32", "int8", "uint8", "bool"])
def test_a_cast_of_ints_is_exact_and_has_no_gradient(given):
    x = np.array([[0, 1, 100]]).astype(given)
    y = run(Cast("float16"), x)
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, x)
    assert Cast("float16").backward((x,), {}, y, np.ones_like(y)) == ((None,), {})


@pytest.mark.parametrize("bad", ["int32", "float8_e4m3fn", "half", "", None])
def test_what_nothing_is_cast_to(bad):
    with pytest.raises(ShapeError, match="bad dtype to cast to"):
        Cast(bad)
