"""Embedding lookup on the CPU: rows copied and summed, and ids out of range."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within, rows
from onchip.errors import InputError
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Add,
    Concat,
    Embedding,
    GlobalMean,
    GlobalSum,
    Linear,
    Permute,
    ReLU,
    Reshape,
    Slice,
    TokenConv,
)  # fmt: skip
from onchip.network.types import TensorType, numpy_dtype
from onchip.runtime.cpu.backend import CpuBackend


def bag(layer, dtype="int64", S=37):
    nodes = (Node("e", Embedding(), ("ids",), {"weight": "t"}), Node("m", layer, ("e",)))
    nodes = (*nodes, Node("y", Linear(), ("m",), {"weight": "w"}))
    return Network({"ids": TensorType(("B", S), dtype)}, nodes, ("y",), {"t": rows(50, 13), "w": rows(3, 13, seed=1)})


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("layer", [GlobalMean((1,)), GlobalSum((-2,))], ids=str)
def test_sums_of_rows(layer, dtype):
    net = bag(layer, dtype)
    engine = onchip.compile(net, "cpu")
    assert engine.plan.groups[0].claim.label == f"lookup<Embedding,{layer.kind}>"
    x = np.random.default_rng(0).integers(0, 50, (300, 37)).astype(numpy_dtype(dtype))
    whole = engine(x)
    assert_error_within(whole, reference.forward(net, x), reference.forward(net, x, "float32"))
    for B in (1, 7):
        np.testing.assert_array_equal(engine(x[5 : 5 + B]), whole[5 : 5 + B])
    np.testing.assert_array_equal(onchip.compile(net, "cpu", threads=1)(x), whole)


@pytest.mark.parametrize("bias", [False, True])
def test_a_folded_linear_is_a_lookup(bias):
    """A token convolution with one tap before a Permute: the lookup writes NHWC, as the next layer reads it."""
    weights = {"t": rows(9, 1, 6)} | ({"b": rows(6, seed=1)} if bias else {})
    roles = {"weight": "t", "bias": "b"} if bias else {"weight": "t"}
    nodes = (Node("c", TokenConv(), ("ids",), roles), Node("p", Permute((0, 2, 1)), ("c",)), Node("y", ReLU(), ("p",)))
    net = Network({"ids": TensorType(("B", 5), "int32")}, nodes, ("y",), weights)
    engine, ids = onchip.compile(net, "cpu"), np.random.default_rng(0).integers(0, 9, (7, 5)).astype(np.int32)
    assert [group.claim.kernel for group in engine.plan.groups] == ["lookup", "view", "rowwise"]
    np.testing.assert_array_equal(engine(ids), reference.forward(net, ids, "float32"))


def columns():
    """Two columns of ids with one table each, of 5 and of 40 rows."""
    nodes = []
    for i, table in enumerate("st"):
        nodes += [
            Node(f"c{i}", Slice((i,), (1,), (1,)), ("ids",)), Node(f"r{i}", Reshape(()), (f"c{i}",)),
            Node(f"e{i}", Embedding(), (f"r{i}",), {"weight": table}),
        ]  # fmt: skip
    nodes += [Node("j", Concat(1), ("e0", "e1", "x")), Node("y", Add(), ("j", "j"))]
    given = {"ids": TensorType(("B", 2), "int64"), "x": TensorType(("B", 3))}
    return Network(given, tuple(nodes), ("y",), {"s": rows(5, 4), "t": rows(40, 2)})


def test_each_column_has_its_table():
    net, ids, x = columns(), np.array([[4, 39], [0, 7], [2, 0]]), rows(3, 3)
    engine = onchip.compile(net, "cpu")
    assert "plain" not in [group.claim.kernel for group in engine.plan.groups]
    assert CpuBackend(None).bind(engine.plan).quick_call() is not None
    np.testing.assert_array_equal(engine(ids, x), reference.forward(net, (ids, x), "float32"))


@pytest.mark.parametrize("bad", [5, -1, 1 << 40])
def test_the_error_names_the_first_bad_id(bad):
    engine, ids, x = onchip.compile(columns(), "cpu"), np.zeros((4_000, 2), np.int64), rows(4_000, 3)
    good = engine(ids, x)
    ids[3_000, 0] = bad
    for B in (3_001, 4_000):
        with pytest.raises(InputError, match=f"row 3000: id {bad}, expected 0 to 4"):
            engine(ids[:B], x[:B])
    np.testing.assert_array_equal(engine(ids[:3_000], x[:3_000]), good[:3_000])
    with pytest.raises(InputError, match="row 2, position 1: id 50, expected 0 to 49"):
        onchip.compile(bag(GlobalMean((1,)), S=2), "cpu")(np.array([[0, 1], [2, 3], [4, 50]]))
