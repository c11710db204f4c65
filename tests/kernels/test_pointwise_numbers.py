"""Chains of pointwise layers on the CPU over ints and other floats: bit-identical to NumPy."""

import numpy as np
import pytest

import onchip
from image_networks import weight
from onchip.kernels import reference
from onchip.kernels.cpu.elementwise.block import BLOCK
from onchip.kernels.cpu.elementwise.casts import COMPUTED_INTS, TO_INT_CASTS
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Add,
    Cast,
    Conv2d,
    Div,
    Equal,
    GlobalSum,
    Greater,
    GreaterOrEqual,
    Mask,
    Max,
    Min,
    Mod,
    Mul,
    ReLU,
    Reshape,
    Sub,
    ToInts,
)
from onchip.network.types import TensorType, numpy_dtype

INTS = ("int64", "int32", "int16", "int8", "uint8")
FLOATS = ("float64", "float16", "bfloat16")


def run(net, *xs):
    engine = onchip.compile(net, "cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["pointwise"], str(engine.plan)
    return engine(*xs)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def all_sizes(dtype, *shape):
    """Small and large ints, including the minimum and the maximum."""
    rng, kind = np.random.default_rng(0), np.iinfo(dtype)
    x = rng.integers(kind.min, kind.max, shape, "int64", endpoint=True) >> rng.integers(0, 60, shape)
    x.flat[0], x.flat[-1] = kind.min, kind.max
    return x.astype(dtype)


@pytest.mark.parametrize("size", [3, BLOCK + 5])  # rows in a block, more than a block of a row
@pytest.mark.parametrize("layer", [Add(), Mul(), Max(), Min(), Sub()], ids=str)
@pytest.mark.parametrize("dtype", COMPUTED_INTS)
def test_ints_wrap_as_in_numpy(dtype, layer, size):
    """Two values, one broadcast; then a constant, whose wrapped sum is compared."""
    operation = {Add: np.add, Mul: np.multiply, Max: np.maximum, Min: np.minimum, Sub: np.subtract}[type(layer)]
    given = {"x": TensorType(("B", 3, size), dtype), "z": TensorType(("B", 3, 1), dtype)}
    nodes = (
        Node("a", layer, ("x", "z")), Node("b", Add(), ("a",), {"constant": "k"}), Node("y", Max(), ("b", "x")),
    )  # fmt: skip
    k = all_sizes(dtype, size)[::-1].copy()
    net = Network(given, nodes, ("y", "a"), {"k": k})
    x, z = all_sizes(dtype, 5, 3, size), all_sizes(dtype, 5, 3, 1)
    y, a = run(net, x, z)
    with np.errstate(over="ignore"):
        expected = operation(x, z)
        np.testing.assert_array_equal(a, expected)
        np.testing.assert_array_equal(y, np.maximum(expected + k, x))
    assert y.dtype == a.dtype == numpy_dtype(dtype)


@pytest.mark.parametrize("dtype", COMPUTED_INTS)
def test_a_constant_first_operand(dtype):
    given, k = TensorType(("B", 6), dtype), all_sizes(dtype, 6)
    net = Network({"x": given}, (Node("y", Sub(), ("x",), {"first": "k"}),), ("y",), {"k": k})
    x = all_sizes(dtype, 40, 6)
    np.testing.assert_array_equal(run(net, x), k - x)


@pytest.mark.parametrize("size", [3, BLOCK + 5])
@pytest.mark.parametrize("layer", [Div(), Mod(), Mod(True)], ids=str)
@pytest.mark.parametrize("dtype", COMPUTED_INTS)
def test_ints_divide_by_constants(dtype, layer, size):
    """By both signs, and the minimum int by -1."""
    k = all_sizes(dtype, size)[::-1].copy()
    k[0] = -1
    k[k == 0] = -3
    net = Network(
        {"x": TensorType(("B", size), dtype)}, (Node("y", layer, ("x",), {"constant": "k"}),), ("y",), {"k": k}
    )
    x = all_sizes(dtype, 40, size)
    x[:, 0] = np.iinfo(dtype).min
    np.testing.assert_array_equal(run(net, x), reference.forward(net, x))


@pytest.mark.parametrize("size", [3, BLOCK + 5])
@pytest.mark.parametrize("layer", [Mask(), Greater(), GreaterOrEqual(), Equal()], ids=str)
@pytest.mark.parametrize("dtype", COMPUTED_INTS)
def test_ints_are_masked_and_compared(dtype, layer, size):
    given = TensorType(("B", size), dtype)
    net = Network({"x": given, "z": given}, (Node("y", layer, ("x", "z")),), ("y",), {})
    x, z = all_sizes(dtype, 40, size), all_sizes(dtype, 40, size)[::-1].copy()
    z[5:20], z[30] = np.arange(15)[:, None] % 7 - 3, x[30]
    np.testing.assert_array_equal(run(net, x, z), reference.forward(net, (x, z)))


def test_digits_by_constants():
    """Ids in one pass: several quotients and remainders."""
    nodes = (
        Node("hundreds", Div(), ("ids",), {"constant": "hundred"}), Node("a", Div(), ("ids",), {"constant": "ten"}),
        Node("tens", Mod(), ("a",), {"constant": "ten"}), Node("rest", Mod(), ("ids",), {"constant": "hundred"}),
    )  # fmt: skip
    weights = {"hundred": np.array(100), "ten": np.array(10)}
    net = Network({"ids": TensorType(("B", 4), "int64")}, nodes, ("hundreds", "tens", "rest"), weights)
    ids = np.random.default_rng(0).integers(1, 1000, (90, 4))
    for got, expected in zip(run(net, ids), (ids // 100, ids // 10 % 10, ids % 100), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("given", "to"), sorted(TO_INT_CASTS))
def test_whole_numbers(given, to):
    rng = np.random.default_rng(2)
    x = rng.integers(0 if to in ("uint8", "bool") or given == "bool" else -128, 128, (700, 9)).astype(given)
    if given.startswith("float"):
        x *= rng.random((700, 9)).astype(given)
        x[0] = (0.0, -0.0, 0.9, -0.9 if to != "uint8" else 0.5, 1.0, 99.99, 2.5, 1e-30, 126.5)
    elif given == "int64" and to == "int32":
        x = all_sizes(given, 700, 9)
    net = Network({"x": TensorType(("B", 9), given)}, (Node("y", ToInts(to), ("x",)),), ("y",), {})
    y, expected = run(net, x), x.astype(to)
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("inner", [1, 5])
@pytest.mark.parametrize("dtype", COMPUTED_INTS)
def test_sums_of_ints(dtype, inner):
    """In float64, as the ONNX reader emits a ReduceSum of ints."""
    nodes = (
        Node("wide", Cast("float64"), ("x",)), Node("sum", GlobalSum((2,)), ("wide",)),
        Node("y", ToInts("int64"), ("sum",)),
    )  # fmt: skip
    net = Network({"x": TensorType(("B", 3, 7, inner), dtype)}, nodes, ("y",), {})
    engine = onchip.compile(net, "cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["pointwise", "reduce", "pointwise"]
    x = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, (50, 3, 7, inner)).astype(dtype)
    x = x << 15 if dtype == "int64" else x
    np.testing.assert_array_equal(engine(x), x.sum(2, "int64"))


@pytest.mark.parametrize("given", [*INTS, "bool", *FLOATS])
def test_ints_as_float32(given):
    """Rounded once, to the nearest."""
    if given in INTS:
        x = all_sizes(given, 700, 9)
        x[3] = np.array([1 << 24, (1 << 24) + 1, (1 << 24) + 3, (1 << 53) + 1, -1, 0, 1, 2, 3]).astype(given)
    elif given == "bool":
        x = np.random.default_rng(0).random((700, 9)) > 0.5
    else:
        x = odd_floats(given)
    net = Network({"x": TensorType(("B", 9), given)}, (Node("y", Cast("float32"), ("x",)),), ("y",), {})
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(bits(run(net, x)), bits(x.astype(np.float32)))


def odd_floats(dtype):
    """All magnitudes, at and next to midpoints, and NaNs."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((700, 9)) * 2.0 ** rng.integers(-160, 140, (700, 9))
    x[1] = 0.0, -0.0, np.inf, -np.inf, np.nan, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8
    x[2] = 65504, 65519, 65520, -65521, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-14 - 2.0**-26, 3.4e38
    x[3] = 2.0**-133, 2.0**-134, 3 * 2.0**-134, 2.0**-149, 2.0**-15 + 2.0**-26, 1e-7, -1e-7, 3.39e38, -3.4e38
    x[4:200] = rng.standard_normal((196, 9)) * 2.0 ** rng.integers(-26, 17, (196, 9))
    with np.errstate(over="ignore"):
        return x.astype(numpy_dtype(dtype))


@pytest.mark.parametrize("to", FLOATS)
def test_float32_as_other_floats(to):
    x = odd_floats("float32")
    net = Network({"x": TensorType(("B", 9))}, (Node("y", Cast(to), ("x",)),), ("y",), {})
    with np.errstate(over="ignore"):
        expected = x.astype(numpy_dtype(to))
    np.testing.assert_array_equal(bits(run(net, x)), bits(expected))


def test_every_float16():
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(-1, 8)
    there = Network({"x": TensorType(("B", 8), "float16")}, (Node("y", Cast("float32"), ("x",)),), ("y",), {})
    back = Network({"x": TensorType(("B", 8))}, (Node("y", Cast("float16"), ("x",)),), ("y",), {})
    wide = run(there, x)
    np.testing.assert_array_equal(wide, x.astype(np.float32))
    np.testing.assert_array_equal(run(back, wide), x)


@pytest.mark.parametrize("size", [3, BLOCK + 3])
def test_ints_become_floats_in_one_pass(size):
    """A mask of ids that are not padding, and shifted ids, both outputs, in one pass."""
    given = {"ids": TensorType(("B", size), "int32"), "is_new": TensorType(("B", 1), "bool")}
    nodes = (
        Node("moved", Add(), ("ids",), {"constant": "offset"}), Node("seen", Reshape((1, size)), ("moved",)),
        Node("floats", Cast("float32"), ("seen",)), Node("mask", Greater(), ("floats",), {"constant": "limit"}),
        Node("y", ReLU(), ("mask",)),
    )  # fmt: skip
    weights = {"offset": np.array(100, np.int32), "limit": np.array(103.5, np.float32)}
    net = Network({"ids": given["ids"]}, nodes, ("y", "seen"), weights)
    ids = np.random.default_rng(0).integers(-9, 9, (13, size)).astype(np.int32)
    y, seen = run(net, ids)
    np.testing.assert_array_equal(seen, (ids + 100)[:, None])
    np.testing.assert_array_equal(y, (ids + 100 > 103.5).astype(np.float32)[:, None])


def test_images_of_bytes():
    """The Cast is a separate pass if conv_fused claims the next layers."""
    nodes = (
        Node("floats", Cast("float32"), ("x",)), Node("scaled", Mul(), ("floats",), {"constant": "share"}),
        Node("y", Conv2d(), ("scaled",), {"weight": "w"}),
    )  # fmt: skip
    weights = {"share": np.array(1 / 255, np.float32), "w": weight(8, 3, 3, 3)}
    net = Network({"x": TensorType(("B", 3, 9, 8), "uint8")}, nodes, ("y",), weights)
    engine = onchip.compile(net, "cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["pointwise", "conv_fused"]
    x = np.random.default_rng(0).integers(0, 256, (5, 3, 9, 8)).astype(np.uint8)
    floats = onchip.compile(Network({"floats": TensorType(("B", 3, 9, 8))}, nodes[1:], ("y",), weights), "cpu")
    np.testing.assert_array_equal(engine(x), floats(x.astype(np.float32)))
