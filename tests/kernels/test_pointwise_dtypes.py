"""Pointwise layers in every dtype: casts, float64, ints that wrap, 16 bits; on the host and on a GPU."""

import numpy as np
import pytest

import onchip
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels import reference
from onchip.network.build import sequential
from onchip.network.graph import Network
from onchip.network.io import IO_DTYPES
from onchip.network.layers import (
    GELU,
    Add,
    Cast,
    Clip,
    Div,
    LeakyReLU,
    Mask,
    Max,
    Mod,
    Mul,
    ReLU,
    Reshape,
    Sigmoid,
    SiLU,
    Tanh,
    ToInts,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.runtime.check import DTYPE_ULP, scaled_error
from pointwise_networks import NETWORKS, as_tuple, assert_right, claims, emulated, inputs_of, network, planned, tree


@pytest.fixture
def gpu(monkeypatch):
    return emulated_gpu(monkeypatch)


INTS = ("int64", "int32", "int16", "int8", "uint8")
FLOATS = ("float64", *IO_DTYPES)
CASTS = [(given, to) for given in (*FLOATS, *INTS, "bool") for to in FLOATS if given != to]


def cast_case(given, to, B):
    """Values of all magnitudes, at and next to midpoints; the network, and NumPy's result."""
    rng = np.random.default_rng(3)
    dtype = numpy_dtype(given)
    if "float" in given:
        x = 30 * rng.standard_normal((B, 3)) * 10.0 ** rng.integers(-9, 9, (B, 3))
        x[B // 2] = 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-9 + 2.0**-40
        x[-1] = np.inf, -np.inf, 1e-7
    else:
        low, high = (0, 1) if given == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        x = rng.integers(low, high, (B, 3), "int64", endpoint=True) >> rng.integers(0, 62, (B, 3))
        x[-1] = low, high, 1
    with np.errstate(all="ignore"):
        x = x.astype(dtype)
        return sequential(TensorType(("B", 3), given), [("c", Cast(to))], {}), x, x.astype(numpy_dtype(to))


@needs_gxx
@pytest.mark.parametrize(("given", "to"), CASTS)
def test_rounded_as_numpy_rounds_on_the_host(gpu, given, to):
    net, x, expected = cast_case(given, to, 1001)
    assert emulated(gpu, net)(x).tobytes() == expected.tobytes()


def in_dtype(net, dtype):
    """The network with float32 replaced, in rows and weights."""
    inputs = {name: TensorType(t.shape, dtype) for name, t in net.inputs.items()}
    return Network(inputs, net.nodes, net.outputs, {n: w.astype(dtype) for n, w in net.weights.items()})


DOUBLE = {
    name: in_dtype(net, "float64")
    for name, net in NETWORKS.items()
    if {*net.inputs} and all(t.dtype == "float32" for t in net.inputs.values())
} | {
    "there and back": sequential(
        TensorType(("B", 7), "float64"),
        [
            ("a", Tanh()),
            ("b", Cast("float32")),
            ("c", GELU()),
            ("d", Cast("float64")),
            ("e", LeakyReLU(0.1)),
            ("f", Cast("float16")),
            ("g", Cast("float64")),
            ("h", SiLU()),
        ],
        {},
    ),
    "a bound that no float32 is": sequential(TensorType(("B", 9), "float64"), [("y", Clip(-1e300, 0.1))], {}),
}


def assert_right_in_float64(net, engine, x):
    """Within a few ulp of float64, or of the narrowest intermediate type."""
    ulp = max(DTYPE_ULP.get(t.dtype, 2.0**-52) for t in net.types.values())
    for name, got, exact in zip(net.outputs, as_tuple(engine(*x)), as_tuple(reference.forward(net, x)), strict=True):
        assert got.dtype == numpy_dtype(net.types[name].dtype)
        assert got.shape == exact.shape
        if got.dtype == np.uint8:
            np.testing.assert_array_equal(got, exact)
        assert scaled_error(got, exact) <= 8 * ulp, name


@needs_gxx
@pytest.mark.parametrize("name", DOUBLE)
def test_right_in_float64_on_the_host(gpu, name):
    net = DOUBLE[name]
    engine = emulated(gpu, net)
    for B in (1, 130):
        assert_right_in_float64(net, engine, inputs_of(net, B, B))


@needs_gxx
@pytest.mark.parametrize("layer", [Sigmoid(), Tanh(), SiLU(), GELU(), GELU("tanh"), ReLU(), Clip(-1, 1)], ids=str)
def test_special_values_in_float64(gpu, layer):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e300, -1e300, 1e-320, 800, -800, 20, -20], np.float64)[:, None]
    net = sequential(TensorType(("B", 1), "float64"), [("y", layer)], {})
    with np.errstate(all="ignore"):
        expected = reference.forward(net, x)
    np.testing.assert_allclose(emulated(gpu, net)(x), expected, rtol=1e-13, atol=1e-14)


def of_ints(dtype):
    """Sums and products of rows, broadcast values and constants; an intermediate output, and one as floats."""
    rng = np.random.default_rng(8)
    limits = np.iinfo(dtype)
    weights = {"c": rng.integers(limits.min, limits.max, (5, 1), dtype, endpoint=True)}
    return network(
        {"x": TensorType(("B", 5, 7), dtype), "z": TensorType(("B", 1, 7), dtype)},
        [
            ("a", Add(), ("x", "z")),
            ("b", Mul(), ("a", "x", "a"), {"constant": "c"}),
            ("r", Reshape(), ("b",)),
            ("d", Add(), ("r", "r")),
            ("f", Cast("float64"), ("d",)),
            ("g", Cast("float32"), ("a",)),
        ],
        ("b", "d", "f", "g"),
        weights,
    )


def assert_ints_wrap(dtype, engine, B):
    rng, limits = np.random.default_rng(B), np.iinfo(dtype)
    x, z = (rng.integers(limits.min, limits.max, (B, *row), dtype, endpoint=True) for row in ((5, 7), (1, 7)))
    c = of_ints(dtype).weights["c"]
    with np.errstate(all="ignore"):
        a = x + z
        b = a * x * a * c
        d = (b + b).reshape(B, 35)
    for got, expected in zip(engine(x, z), (b, d, d.astype("float64"), a.astype("float32")), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@needs_gxx
@pytest.mark.parametrize("dtype", INTS)
def test_ints_wrap_on_the_host(gpu, dtype):
    engine = emulated(gpu, of_ints(dtype))
    for B in (1, 3, 130):
        assert_ints_wrap(dtype, engine, B)


def divided_ints(dtype):
    """Sums that wrap: remainders of both signs, quotients, max and mask."""
    return network(
        {"x": TensorType(("B", 5), dtype), "z": TensorType(("B", 5), dtype)},
        [
            ("a", Mul(), ("x", "x")),
            ("q", Div(), ("a", "z")),
            ("m", Mod(), ("a", "z")),
            ("t", Mod(True), ("a", "z")),
            ("k", Mask(), ("a", "m")),
            ("l", Max(), ("a", "z")),
            ("f", Div(), ("x",), {"first": "c"}),
            ("b", ToInts("bool"), ("m",)),
        ],
        ("q", "m", "t", "k", "l", "f", "b"),
        {"c": np.array(100, dtype)},
    )


def assert_ints_divide(dtype, engine, B):
    rng, limits = np.random.default_rng(B), np.iinfo(dtype)
    x, z = (rng.integers(limits.min, limits.max, (B, 5), dtype, endpoint=True) for _ in "xz")
    x[-1], z[-1] = limits.min, (2, -1, 1, 7, limits.max) if limits.min else (3, 1, 2, 7, limits.max)
    z[: B // 2] = z[: B // 2] % 5 if limits.min == 0 else z[: B // 2] % 5 - 2
    x[x == 0], z[z == 0] = 1, 1  # by 0 it is an error
    net = divided_ints(dtype)
    for name, got, expected in zip(net.outputs, engine(x, z), reference.forward(net, (x, z)), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected, name)


def test_quotients_of_ints_are_those_of_c():
    x, z = np.array([7, -7, 7, -7, 6, -6, -128], "int8"), np.array([2, 2, -2, -2, 3, 3, -1], "int8")
    with np.errstate(all="ignore"):
        found = [layer.forward((x, z), {}).tolist() for layer in (Div(), Mod(), Mod(True))]
    assert found == [[3, -3, -3, 3, 2, -2, -128], [1, 1, -1, -1, 0, 0, 0], [1, -1, 1, -1, 0, 0, 0]]


@needs_gxx
@pytest.mark.parametrize("dtype", INTS)
def test_ints_divide_on_the_host(gpu, dtype):
    engine = emulated(gpu, divided_ints(dtype))
    for B in (2, 3, 130):
        assert_ints_divide(dtype, engine, B)


@pytest.mark.parametrize("dtype", INTS)
def test_ints_divide_on_the_cpu(dtype):
    assert_ints_divide(dtype, onchip.compile(divided_ints(dtype), "cpu"), 130)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", INTS)
def test_ints_divide_on_a_gpu(dtype):
    assert_ints_divide(dtype, onchip.compile(divided_ints(dtype), "cuda"), 4097)


TO_INTS = [(given, to) for given in (*FLOATS, *INTS, "bool") for to in (*INTS, "bool") if given != to]


def whole_case(given, to, B):
    """Values near an int of either dtype."""
    rng = np.random.default_rng(5)
    x = rng.integers(0, 100, (B, 3)) if given in ("uint8", "bool") or to == "uint8" else rng.integers(-100, 100, (B, 3))
    x = x.astype(numpy_dtype(given))
    if "float" in given:
        x = (x.astype(np.float64) * rng.random((B, 3))).astype(numpy_dtype(given))
    return sequential(TensorType(("B", 3), given), [("c", ToInts(to))], {}), x, x.astype(numpy_dtype(to))


@needs_gxx
@pytest.mark.parametrize(("given", "to"), TO_INTS)
def test_whole_as_numpy_has_it_on_the_host(gpu, given, to):
    net, x, expected = whole_case(given, to, 1001)
    assert emulated(gpu, net)(x).tobytes() == expected.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(("given", "to"), TO_INTS)
def test_whole_as_numpy_has_it_on_a_gpu(given, to):
    net, x, expected = whole_case(given, to, 1001)
    assert onchip.compile(net, "cuda")(x).tobytes() == expected.tobytes()


@needs_gxx
def test_floats_become_ints_and_floats_again_in_one_run(gpu):
    """The integer part of a value, as an output and read again."""
    nodes = [
        ("t", Mul(), ("x", "x")),
        ("i", ToInts("int64"), ("t",)),
        ("f", Cast("float32"), ("i",)),
        ("y", Add(), ("f", "t")),
    ]
    net = network({"x": (7,)}, nodes, ("i", "y"))
    assert [group.claim.facts.run.acc_type for group in planned(net).groups] == ["float"]
    x = np.linspace(-2, 2, 7 * 9, dtype=np.float32).reshape(9, 7)
    i, y = emulated(gpu, net)(x)
    assert i.dtype == np.int64
    assert set(i.ravel().tolist()) == {0, 1, 2, 3, 4}
    np.testing.assert_allclose(y, reference.forward(net, x)[1], rtol=1e-6)


def test_a_chain_has_one_dtype():
    def dtypes_of(net):
        return [group.claim.facts.run.acc_type for group in planned(net).groups]

    assert dtypes_of(DOUBLE["there and back"]) == ["double", "float", "double"]
    assert dtypes_of(of_ints("int64")) == ["long long", "double", "float"]
    assert dtypes_of(of_ints("int16")) == ["long long", "float"]  # which represents all int16 values
    for given, to in (("float64", "float32"), ("float32", "float64")):
        layers = [("a", Cast(to)), ("b", Tanh())]
        net = sequential(TensorType(("B", 3), given), layers, {})
        assert dtypes_of(net) == ["float" if to == "float32" else "double"]
    net = sequential(TensorType(("B", 3)), [("a", Tanh()), ("c", Cast("float64"))], {})
    assert dtypes_of(net) == ["float"]


@needs_gxx
@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "bool", "float64", "float16", "uint8"])
@pytest.mark.parametrize("row", [(2, 3), (3, 5)])
def test_any_dtype_is_reshaped(gpu, dtype, row):
    """Where no rewrite drops it, as two outputs need it in two shapes."""
    nodes = [("r", Reshape(), ("x",)), ("i", Reshape(row[::-1]), ("r",))]
    net = network({"x": TensorType(("B", *row), dtype)}, nodes, ("r", "i"))
    x = np.random.default_rng(1).integers(0, 2, (77, *row)).astype(dtype)
    if dtype.startswith("int"):
        x = np.random.default_rng(1).integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (77, *row), dtype)
    flat, reshaped = emulated(gpu, net)(x)
    assert flat.tobytes() == reshaped.tobytes() == x.tobytes()
    assert reshaped.shape == (77, *row[::-1])


NARROW = [
    (layer, dtype)
    for layer in (ReLU(), LeakyReLU(0.1), Sigmoid(), Tanh(), SiLU(), GELU(), GELU("tanh"))
    for dtype in ("float16", "bfloat16")
]


def assert_rounded_once(layer, dtype, compiled):
    """Every 16-bit value: the rounded float64 result, up to a relative error of 2^-15 before rounding."""
    x = np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(dtype)).reshape(-1, 32)
    net = sequential(TensorType(("B", 32), dtype), [("y", layer)], {})
    made = compiled(net)(x)
    with np.errstate(all="ignore"):
        got, wide = made.astype(np.float64), x.astype(np.float64)
        truth = reference.forward(net, x, "float64")
        most = float(np.finfo(np.float16).max) if dtype == "float16" else 3.38e38
        finite = np.abs(truth) <= most
        assert np.array_equal(got[~finite], truth.astype(made.dtype).astype(np.float64)[~finite], equal_nan=True)
        digits, least = (11, -24) if dtype == "float16" else (8, -126)
        half = 2.0 ** np.maximum(np.floor(np.log2(np.abs(truth) + 1e-300)) - digits, least - 1)
        # Far below 0 the reference itself loses digits: of 1 + tanh(x) those below 2^-52 are gone.
        allowed = half * 1.01 + 2.0**-15 * np.abs(truth) + 2.0**-52 * np.abs(wide) + 2.0**-120
        far = finite & (np.abs(got - truth) > allowed)
    assert not far.any(), (wide[far][:5], got[far][:5], truth[far][:5])


@needs_gxx
@pytest.mark.parametrize(("layer", "dtype"), NARROW, ids=str)
def test_every_16_bit_value_on_the_host(gpu, layer, dtype):
    assert_rounded_once(layer, dtype, lambda net: emulated(gpu, net))


@pytest.mark.gpu
@pytest.mark.parametrize(("layer", "dtype"), NARROW, ids=str)
def test_every_16_bit_value_on_a_gpu(layer, dtype):
    assert_rounded_once(layer, dtype, lambda net: onchip.compile(net, "cuda"))


def narrow_tree(dtype):
    """Broadcast values, an intermediate output and a batch norm, all in 16 bits."""
    nodes = (
        ("t", Tanh(), ("x",)), ("s", Sigmoid(), ("x",)), ("m", Mul(), ("t", "s")), ("a", Add(), ("m", "z")),
        ("y", GELU(), ("a",)), ("u", Add(), ("y", "t")),
    )  # fmt: skip
    inputs = {"x": TensorType(("B", 3, 5), dtype), "z": TensorType(("B", 3, 1), dtype)}
    return network(inputs, nodes, ("y", "u"))


def test_layers_of_16_bits_have_eight_neighbours():
    def vector(net):
        return claims(net)[0].facts.run.vector

    assert vector(narrow_tree("float16")) == vector(narrow_tree("bfloat16")) == 8
    assert vector(tree()) == 4
    assert vector(sequential(TensorType(("B", 3), "float16"), [("c", Cast("float32"))], {})) == 4


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_tree_in_16_bits_on_the_host(gpu, dtype):
    net = narrow_tree(dtype)
    engine = emulated(gpu, net)
    for B in (1, 7, 300):
        assert_right(net, engine, inputs_of(net, B, B))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_tree_in_16_bits_on_a_gpu(dtype):
    """Also with enough rows for blocks to prefetch."""
    net = narrow_tree(dtype)
    engine = onchip.compile(net, "cuda")
    x, z = inputs_of(net, 1000)
    assert_right(net, engine, (x, z))
    many = engine(np.tile(x, (300, 1, 1)), np.tile(z, (300, 1, 1)))
    for got, expected in zip(many, engine(x, z), strict=True):
        assert got.tobytes() == np.tile(expected, (300, 1, 1)).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(("given", "to"), CASTS)
@pytest.mark.parametrize("B", [3, 7, 1000, 100_001])
def test_rounded_as_numpy_rounds(given, to, B):
    net, x, expected = cast_case(given, to, B)
    assert onchip.compile(net, "cuda")(x).tobytes() == expected.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("name", DOUBLE)
def test_right_in_float64_on_a_gpu(name):
    net = DOUBLE[name]
    engine = onchip.compile(net, "cuda")
    for B in (0, 1, 7, 4097):
        assert_right_in_float64(net, engine, inputs_of(net, B, B))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", INTS)
def test_ints_wrap_on_a_gpu(dtype):
    engine = onchip.compile(of_ints(dtype), "cuda")
    for B in (0, 1, 7, 4097):
        assert_ints_wrap(dtype, engine, B)
