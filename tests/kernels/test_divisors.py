"""Ints divided by 0: an error with the position, on the CPU and in CUDA kernels, as for invalid ids."""

import numpy as np
import pytest

import onchip
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.errors import InputError
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Div, Mod, Mul, Reshape
from onchip.network.types import TensorType
from pointwise_networks import claims, emulated

INTS = ("int64", "int32", "int16", "int8", "uint8")
LAYERS = (Div(), Mod(), Mod(True))


def by_a_value(layer, dtype="int64"):
    """Division by a broadcast value that is computed in the same group."""
    nodes = (
        Node("moved", Add(), ("z",), {"constant": "two"}), Node("y", layer, ("x", "moved")),
        Node("twice", Mul(), ("y",), {"constant": "two"}),
    )  # fmt: skip
    inputs = {"x": TensorType(("B", 3, 5), dtype), "z": TensorType(("B", 1, 5), dtype)}
    return Network(inputs, nodes, ("twice",), {"two": np.array(2, dtype)})


def rows(dtype, B=70):
    rng = np.random.default_rng(0)
    return rng.integers(0, 100, (B, 3, 5)).astype(dtype), rng.integers(1, 9, (B, 1, 5)).astype(dtype)


def check(engine_of, layer, dtype):
    net = by_a_value(layer, dtype)
    engine, (x, z) = engine_of(net), rows(dtype)
    before = engine(x, z)
    np.testing.assert_array_equal(before, reference.forward(net, (x, z)))
    bad = z.copy()
    bad[[41, 67], :, 3] = np.array(-2).astype(dtype)  # with two added, 0
    with pytest.raises(InputError, match="row 41, position 0, 3: integer division by 0") as error:
        engine(x, bad)
    assert "try:" in str(error.value)
    np.testing.assert_array_equal(engine(x, z), before)  # the status is cleared
    assert engine(x[:0], z[:0]).shape == (0, 3, 5)


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_on_the_cpu(layer, dtype):
    check(lambda net: onchip.compile(net, "cpu"), layer, dtype)


@needs_gxx
@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_in_cuda_kernels(monkeypatch, layer, dtype):
    gpu = emulated_gpu(monkeypatch)
    check(lambda net: emulated(gpu, net), layer, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_on_a_gpu(layer, dtype):
    check(lambda net: onchip.compile(net, "cuda"), layer, dtype)


ONE = {
    "a constant numerator": (Node("y", Div(), ("x",), {"first": "k"}),),
    "a constant of 0": (Node("y", Mod(), ("x",), {"constant": "zeros"}),),
    "the accumulator": (Node("a", Add(), ("x",), {"constant": "k"}), Node("y", Div(), ("x", "a"))),
    "reshaped": (Node("a", Div(), ("x", "x")), Node("y", Reshape((4,)), ("a",))),
}
# The divisor is x, zeros, or x + 7.
BAD = {"a constant numerator": 0, "a constant of 0": 3, "the accumulator": -7, "reshaped": 0}


def one(case):
    weights = {"k": np.array(7), "zeros": np.array([5, 0])}
    used = {name for node in ONE[case] for name in node.weights.values()}
    return Network({"x": TensorType(("B", 2, 2), "int64")}, ONE[case], ("y",), {name: weights[name] for name in used})


def check_one(engine_of, case):
    engine, x = engine_of(one(case)), np.ones((3, 2, 2), "int64")
    if case != "a constant of 0":
        engine(x)
    x[1, 1, 1] = BAD[case]
    where = "row 0, position 0, 1" if case == "a constant of 0" else "row 1, position 1, 1"
    with pytest.raises(InputError, match=f"{where}: integer division by 0"):
        engine(x)


@pytest.mark.parametrize("case", ONE)
def test_whatever_divides_on_the_cpu(case):
    check_one(lambda net: onchip.compile(net, "cpu"), case)


@needs_gxx
@pytest.mark.parametrize("case", ONE)
def test_whatever_divides_in_cuda_kernels(monkeypatch, case):
    gpu = emulated_gpu(monkeypatch)
    check_one(lambda net: emulated(gpu, net), case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ONE)
def test_whatever_divides_on_a_gpu(case):
    check_one(lambda net: onchip.compile(net, "cuda"), case)


def test_constant_divisors_are_not_checked():
    """Constants without 0: the CPU's compiled loops claim it, and a GPU has no status to read."""
    net = Network(
        {"x": TensorType(("B", 2), "int64")}, (Node("y", Div(), ("x",), {"constant": "k"}),), ("y",),
        {"k": np.array([3, -4])},
    )  # fmt: skip
    assert claims(net)[0].facts.run.divisors is None
    engine = onchip.compile(net, "cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["pointwise"]
    np.testing.assert_array_equal(engine(np.array([[7, 9]])), [[2, -2]])
