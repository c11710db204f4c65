"""Chains of elementwise layers on the CPU: every operation on ordinary and special values, rows of every size."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from onchip.kernels import reference
from onchip.kernels.cpu.elementwise.block import BLOCK
from onchip.kernels.cpu.elementwise.pointwise import MAX_NODES
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    ELU,
    Abs,
    Add,
    BatchNorm1d,
    Cast,
    Clip,
    Conv1d,
    Cos,
    Div,
    Erf,
    Exp,
    GlobalMax,
    Identity,
    Log,
    Mask,
    Max,
    Min,
    Mul,
    Pow,
    PReLU,
    Reciprocal,
    ReLU,
    Reshape,
    Sin,
    Slice,
    Softmax,
    Sqrt,
    Sub,
    Tanh,
)
from onchip.network.types import TensorType

ODD = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-30, -1e-30, 1, -1, 88.6, 88.8, -86, 2, 0.5, 1e-42], np.float32
)


def kernels(engine):
    return [group.claim.kernel for group in engine.plan.groups]


def run(net, *xs):
    engine = onchip.compile(net, "cpu")
    assert kernels(engine) == ["pointwise"]
    return engine(*xs)


@pytest.mark.parametrize("layer", [Abs(), Sqrt(), Reciprocal(), Exp(), Log(), Sin(), Cos(), Erf()], ids=str)
def test_functions(layer):
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [ODD, rng.standard_normal(3000), np.exp(rng.uniform(-90, 88, 3000)), rng.uniform(-900, 900, 3000)]
    ).astype(np.float32)[:, None]
    nodes = (Node("f", layer, ("x",)), Node("y", Mul(), ("f",), {"constant": "one"}))
    net = Network({"x": TensorType(("B", 1))}, nodes, ("y",), {"one": np.ones(1, np.float32)})
    got, truth = run(net, x).astype(np.float64), reference.forward(net, x.astype(np.float64))
    truth[np.abs(truth) > np.finfo(np.float32).max] *= np.inf
    tiny = np.abs(truth) < 2e-38  # exp flushes these to 0
    same = (got == truth) | (np.isnan(got) & np.isnan(truth)) | tiny
    with np.errstate(all="ignore"):
        wrong = ~(same | (np.abs(got - truth) <= 3 * 2.0**-23 * np.abs(truth)))
    assert not wrong.any(), (x[wrong][:5], got[wrong][:5], truth[wrong][:5])


@pytest.mark.parametrize("layer", [Add(), Mul(), Max(), Min(), Sub(), Div(), PReLU()], ids=str)
def test_combinations(layer):
    type_ = TensorType(("B", 1))
    x, z = np.repeat(ODD, len(ODD))[:, None], np.tile(ODD, len(ODD))[:, None]
    net = Network({"x": type_, "z": type_}, (Node("y", layer, ("x", "z")),), ("y",), {})
    with np.errstate(all="ignore"):
        expected = layer.forward((x, z), {})
    np.testing.assert_array_equal(run(net, x, z), expected)


def test_powers():
    """Ordinary values within an ulp; special values as in the reference."""
    rng, type_ = np.random.default_rng(0), TensorType(("B", 1))
    net = Network({"x": type_, "z": type_}, (Node("y", Pow(), ("x", "z")),), ("y",), {})
    x = np.exp(rng.uniform(-80, 80, 4000)).astype(np.float32)
    z = (rng.uniform(-88, 88, 4000) / np.maximum(1, np.abs(np.log(x)))).astype(np.float32)
    x, z = (np.concatenate(both)[:, None] for both in ((x, np.repeat(ODD, len(ODD))), (z, np.tile(ODD, len(ODD)))))
    with np.errstate(all="ignore"):
        truth = np.power(x.astype(np.float64), z.astype(np.float64))
        got, rounded = run(net, x, z).astype(np.float64), truth.astype(np.float32)
        same = (got == rounded) | (np.isnan(got) & np.isnan(truth))
        wrong = ~(same | (np.abs(got - truth) <= 2.0**-23 * np.abs(truth)) | (np.abs(got - truth) < 2e-45))
    assert not wrong.any(), (x[wrong][:5], z[wrong][:5], got[wrong][:5], truth[wrong][:5])


def network(row):
    """A chain with a broadcast value, weights as left and right operands, a value read twice, two outputs, a Reshape, a
    BatchNorm, and a slice of another input."""
    rng = np.random.default_rng(0)
    weights = {"c": rng.standard_normal(row[-1:]), "m": rng.random(row) > 0.5, "p": rng.standard_normal(row)}
    weights |= {"mean": rng.standard_normal(row[0]), "var": 1 + rng.random(row[0])}
    wide = (row[0], row[1] + 3)
    nodes = (
        Node("a", Sub(), ("x",), {"first": "c"}),
        Node("b", Mul(), ("a", "z")),
        Node("t", Tanh(), ("b",)),
        Node("s", Add(), ("t", "a", "z"), {"constant": "c"}),
        Node("k", Mask(), ("s",), {"mask": "m"}),
        Node("r", Reshape((-1,)), ("k",)),
        Node("e", ELU(0.3), ("r",)),
        Node("w", Reshape(row), ("e",)),
        Node("part", Slice((0, 2), row, (1, 1)), ("v",)),
        Node("n", BatchNorm1d(), ("w",), {"mean": "mean", "var": "var", "weight": "var"}),
        Node("y", Max(), ("n", "part")),
    )
    inputs = {"x": TensorType(("B", *row)), "z": TensorType(("B", *row[:-1], 1)), "v": TensorType(("B", *wide))}
    return Network(inputs, nodes, ("y", "t"), {role: w.astype(np.float32) for role, w in weights.items()})


@pytest.mark.parametrize("row", [(1, 1), (3, 5), (1, BLOCK), (2, BLOCK - 1), (5, 700)], ids=str)
def test_rows_of_every_size(row):
    net, rng = network(row), np.random.default_rng(1)
    B = max(7, 3 * BLOCK // (row[0] * row[1]))
    xs = [rng.standard_normal((B, *given.row_shape)).astype(np.float32) for given in net.inputs.values()]
    engine = onchip.compile(net, "cpu")
    assert kernels(engine) == ["pointwise"]
    whole = engine(*xs)
    for got, truth, naive in zip(
        whole, reference.forward(net, tuple(xs)), reference.forward(net, tuple(xs), "float32"), strict=True
    ):
        assert_error_within(got, truth, naive)
    for first, count in ((0, 0), (0, 1), (2, 5), (B - 1, 1)):
        part = engine(*(x[first : first + count] for x in xs))
        for got, expected in zip(part, whole, strict=True):
            np.testing.assert_array_equal(got, expected[first : first + count])
    for got, expected in zip(onchip.compile(net, "cpu", threads=1)(*xs), whole, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("x", "z"),
    [
        ((25, 1, 96), (1, 6, 96)), ((3, 1), (1, 5)), ((7, 1, 40), (1, 9, 1)), ((2, 1200), (1, 1200)),
        ((3, 700, 1), (3, 1, 5)), ((3, 4, 1, 1), (1, 4, 5, 7)), ((1, 2, 300), (5, 1, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_values_are_broadcast(x, z):
    """In contiguous runs, runs of one element, and element by element; rows in a block, and blocks in a row."""
    given = {"x": TensorType(("B", *x)), "z": TensorType(("B", *z))}
    net = Network(given, (Node("a", Add(), ("x", "z")), Node("y", Mul(), ("a", "z"))), ("y",), {})
    engine, rng = onchip.compile(net, "cpu"), np.random.default_rng(0)
    assert [group.claim.kernel for group in engine.plan.groups] == ["pointwise"]
    x, z = (rng.standard_normal((11, *shape), dtype=np.float32) for shape in (x, z))
    assert np.array_equal(engine(x, z), (x + z) * z)


def test_a_slice_of_an_intermediate_starts_another_chain():
    nodes = (
        Node("a", Add(), ("x", "x")), Node("b", Slice((0,), (3,), (1,)), ("a",)), Node("d", Tanh(), ("b",)),
        Node("c", Slice((3,), (3,), (1,)), ("a",)), Node("y", Mul(), ("d", "c")),
    )  # fmt: skip
    net = Network({"x": TensorType(("B", 6))}, nodes, ("y",), {})
    engine, x = onchip.compile(net, "cpu"), np.random.default_rng(0).standard_normal((9, 6)).astype(np.float32)
    assert [set(group.claim.nodes) for group in engine.plan.groups] == [{"a"}, {"b", "c", "d", "y"}]
    assert_error_within(engine(x), reference.forward(net, x), reference.forward(net, x, "float32"))


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_ids_as_floats(dtype):
    """With a constant added first, and unchanged: in one pass."""
    nodes = (
        Node("a", Add(), ("x",), {"constant": "c"}),
        Node("y", Cast("float32"), ("a",)),
        Node("z", Cast("float32"), ("x",)),
    )
    net = Network({"x": TensorType(("B", 3), dtype)}, nodes, ("y", "z"), {"c": np.array(-7, dtype)})
    engine, x = onchip.compile(net, "cpu"), np.arange(9000, dtype=dtype).reshape(3000, 3) - 500
    assert kernels(engine) == ["pointwise"]
    for B in (0, 1, 3000):
        for got, expected in zip(engine(x[:B]), (x[:B] - 7, x[:B]), strict=True):
            np.testing.assert_array_equal(got, expected.astype(np.float32))


def test_a_chain_may_end_where_conv_fused_starts():
    """p is read twice by the sum that is fused into a convolution: one value, which the multiplication must output."""
    type_ = TensorType(("B", 4, 9))
    nodes = (
        Node("s", Sin(), ("z",)), Node("p", Mul(), ("x", "s")), Node("two", Add(), ("p", "p")),
        Node("y", Conv1d(), ("two",), {"weight": "w"}),
    )  # fmt: skip
    w = np.random.default_rng(0).standard_normal((8, 4, 3)).astype(np.float32)
    net = Network({"x": type_, "z": type_}, nodes, ("y",), {"w": w})
    engine = onchip.compile(net, "cpu")
    assert [group.claim.nodes for group in engine.plan.groups] == [("s", "p"), ("two", "y")]
    x, z = np.random.default_rng(1).standard_normal((2, 7, 4, 9)).astype(np.float32)
    assert_error_within(engine(x, z), reference.forward(net, (x, z)), reference.forward(net, (x, z), "float32"))


def test_many_rows_use_several_threads():
    x = np.random.default_rng(0).standard_normal((300, 2000)).astype(np.float32)
    nodes = (Node("a", Add(), ("x", "x")), Node("y", ReLU(), ("a",)))
    net = Network({"x": TensorType(("B", 2000))}, nodes, ("y",), {})
    np.testing.assert_array_equal(run(net, x), np.maximum(x + x, 0))


def test_where_a_chain_ends():
    """At an unsupported layer or another row size; a final Reshape is left as a view."""
    nodes = (
        Node("a", Add(), ("x", "x")), Node("i", Identity(), ("a",)), Node("c", Clip(-1.0, 1.0), ("i",)),
        Node("r", Reshape((2, 3)), ("c",)), Node("s", Softmax(), ("r",)), Node("m", GlobalMax((2,), keep=True), ("s",)),
        Node("y", Mul(), ("s", "m")), Node("z", Abs(), ("m",)),
    )  # fmt: skip
    net = Network({"x": TensorType(("B", 6))}, nodes, ("y", "z"), {})
    runs = [g.claim.nodes for g in onchip.compile(net, "cpu").plan.groups if g.claim.kernel == "pointwise"]
    assert runs[0][0] == "a"
    assert runs[0][-1] == "c"
    assert all("s" not in nodes for nodes in runs)
    chain = tuple(Node(f"n{i}", Abs(), (f"n{i - 1}" if i else "x",)) for i in range(2 * MAX_NODES + 1))
    long = Network({"x": TensorType(("B", 6))}, chain, (chain[-1].name,), {})
    assert kernels(onchip.compile(long, "cpu")) == ["pointwise"] * 3
