"""Arithmetic on ids and counts, and bool outputs, as ONNX Runtime computes them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

import onchip
from onchip.kernels import reference
from onchip.network.layers import Embedding
from onnx_models import check_meaning, model, numbers, op, read, refused, rows_of, run_onnx

I64, I32, BOOL, F32 = TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.FLOAT


def of(nodes, weights=None, element=I64, made=I64, row=("N", 7)):
    """A model of ints, or of `element`, with the outputs `made`."""
    proto = model(nodes, weights, row, element=element)
    proto.graph.output[0].type.tensor_type.elem_type = made
    return proto


ARITHMETIC = {
    "hashed": [op("Mod", "x three")],
    "hashed below zero": [op("Sub", "x three", "d"), op("Mod", "d five")],
    "truncated": [op("Sub", "x three", "d"), op("Mod", "d five", fmod=1)],
    "divided": [op("Sub", "x three", "d"), op("Div", "d two")],
    "by another": [op("Add", "x one", "d"), op("Mul", "x five", "e"), op("Div", "e d", "q"), op("Mod", "e d", "r"),
                   op("Add", "q r")],
    "a constant in front": [op("Add", "x one", "d"), op("Div", "many d", "q"), op("Mod", "many d", "r"),
                            op("Add", "q r")],
    "largest": [op("Neg", "x", "n"), op("Sub", "x three", "d"), op("Max", "n d", "m"), op("Min", "m two")],
    "size": [op("Sub", "x three", "d"), op("Abs", "d")],
    "clipped": [op("Clip", "x one three")],
    "clipped below": [op("Clip", "x two")],
    "chosen": [op("Less", "x two", "m"), op("Where", "m x five")],
    "chosen from two": [op("Equal", "x two", "m"), op("Mul", "x x", "s"), op("Where", "m s x")],
    "chosen numbers": [op("Greater", "x two", "m"), op("Where", "m five many")],
    "chosen by a constant": [op("Where", "some x many")],
    "counted": [op("Equal", "x two", "m"), op("Cast", "m", "c", to=I64), op("ReduceSum", "c axis", keepdims=0)],
    "positions": [op("Equal", "x one", "m"), op("Not", "m", "n"), op("Cast", "n", "c", to=I64),
                  op("CumSum", "c one", "s"), op("Mul", "s c", "p"), op("Add", "p one")],
    "sum": [op("ReduceSum", "x axis", keepdims=1)],
    "most": [op("ReduceMax", "x", axes=[1], keepdims=0)],
    "place": [op("ArgMax", "x", axis=1)],
    "one hot": [op("OneHot", "x five bits")],
    "there and back": [op("Cast", "x", "f", to=F32), op("Mul", "f third", "g"), op("Cast", "g", to=I64)],
}  # fmt: skip
WEIGHTS = {
    **{name: np.array(n) for name, n in (("one", 1), ("two", 2), ("three", 3), ("five", 5))},
    "axis": np.array([1]), "bits": np.array([0, 1]), "many": np.arange(7) - 2, "some": np.arange(7) % 2 == 0,
    "third": np.array(0.34, "f4"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARITHMETIC)
def test_ints(tmp_path, case):
    proto = of(ARITHMETIC[case], WEIGHTS)
    net = check_meaning(tmp_path, proto, rows=40)
    assert net.output.dtype == "int64"
    x = rows_of(net, 40, seed=3)
    np.testing.assert_array_equal(onchip.compile(net, "cpu")(*x), run_onnx(proto, *x)[0])


TRUTHS = {
    "a threshold": ([op("Greater", "x t")], F32),
    "all but": ([op("LessOrEqual", "x t", "m"), op("Not", "m", "n"), op("Less", "x zero", "k"), op("Or", "n k")], F32),
    "ids": ([op("Equal", "x two")], I64),
    "any": ([op("Equal", "x two", "m"), op("Cast", "m", "c", to=I64), op("ReduceSum", "c axis", "s", keepdims=0),
             op("Cast", "s", to=BOOL)], I64),
    "numbers": ([op("Cast", "x", to=BOOL)], I64),
    "side by side": ([op("Equal", "x two", "m"), op("Greater", "x two", "n"), op("Concat", "m n", axis=1)], I64),
    "not a number": ([op("Log", "x", "l"), op("IsNaN", "l")], F32),
    "infinite": ([op("Mul", "x huge", "l"), op("IsInf", "l")], F32),
    "infinite on one side": ([op("Mul", "x huge", "l"), op("IsInf", "l", detect_positive=0)], F32),
}  # fmt: skip


@pytest.mark.parametrize("case", TRUTHS)
def test_bool_outputs(tmp_path, case):
    nodes, element = TRUTHS[case]
    weights = {"t": np.array(0.3, "f4"), "zero": np.array(0, "f4"), "huge": np.array(3e38, "f4")}
    proto = of(nodes, WEIGHTS | weights, element, BOOL)
    net = check_meaning(tmp_path, proto, rows=40)
    x = rows_of(net, 40, seed=3)
    got = onchip.compile(net, "cpu")(*x)
    assert got.dtype == bool
    np.testing.assert_array_equal(got, run_onnx(proto, *x)[0])


def test_a_mask_of_lengths_is_an_output(tmp_path):
    for kind in ("Less", "GreaterOrEqual"):
        nodes = [op("Unsqueeze", "x axis", "n"), op(kind, "places n")]
        check_meaning(tmp_path, of(nodes, WEIGHTS | {"places": np.arange(4)[None]}, I64, BOOL, ("N",)), rows=40)


def test_a_count_is_divided_by(tmp_path):
    """The count stays a float."""
    nodes = [
        op("Equal", "x one", "m"), op("Not", "m", "n"), op("Cast", "n", "c", to=I64),
        op("ReduceSum", "c axis", "s", keepdims=1), op("Cast", "s", "f", to=F32), op("Cast", "n", "g", to=F32),
        op("Div", "g f"),
    ]  # fmt: skip
    net = check_meaning(tmp_path, of(nodes, WEIGHTS, made=F32), rows=40)
    assert not any(node.layer.kind == "ToInts" for node in net.nodes)


def test_columns_of_floats_are_ids(tmp_path):
    """A table of floats whose first column is a category."""
    nodes = [
        op("Abs", "x", "a"),
        op("Gather", "a zero", "c", axis=1),
        op("Cast", "c", "i", to=I64),
        op("Gather", "t i"),
    ]
    check_meaning(tmp_path, of(nodes, {"zero": np.array(0), "t": numbers(6, 3)}, F32, F32), rows=40)


def test_ids_in_32_bits_are_looked_up_as_they_are(tmp_path):
    nodes = [op("Cast", "x", "i", to=I64), op("Gather", "t i")]
    net = check_meaning(tmp_path, of(nodes, {"t": numbers(5, 3)}, I32, F32))
    assert [type(node.layer) for node in net.nodes] == [Embedding]


def test_missing_values_are_filled(tmp_path):
    nodes = [op("Log", "x", "l"), op("IsNaN", "l", "m"), op("Where", "m t l", "w"), op("Add", "w t")]
    for t in (np.array(0.3, "f4"), np.array(0, "f4"), numbers(1, 7)):
        check_meaning(tmp_path, of(nodes, {"t": t}, F32, F32), rows=40)


@pytest.mark.parametrize("fmod", [0, 1])
def test_the_rest_of_floats(tmp_path, fmod):
    """ONNX Runtime supports only fmod; without it, NumPy's mod is the reference."""
    for operands, t in (("x t", np.array(0.7, "f4")), ("x t", -abs(numbers(1, 7))), ("t x", numbers(1, 7))):
        proto = of([op("Mod", operands, fmod=fmod)], {"t": t}, F32, F32)
        net, x = read(tmp_path, proto), numbers(40, 7, seed=5)
        a, b = (x, t) if operands == "x t" else (t, x)
        np.testing.assert_allclose(reference.forward(net, x), (np.fmod if fmod else np.mod)(a, b), atol=1e-5)


ROUNDED = {"Floor": np.floor, "Ceil": np.ceil, "Round": np.rint}


@pytest.mark.parametrize("kind", ROUNDED)
def test_whole_floats(tmp_path, kind):
    net = check_meaning(tmp_path, of([op(kind, "x")], None, F32, F32), rows=40)
    x = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 1e9, -0.2]], "f4")
    np.testing.assert_array_equal(onchip.compile(net, "cpu")(x), ROUNDED[kind](x))
    folded = [op(kind, "c", "d"), op("Add", "x d")]
    check_meaning(tmp_path, of(folded, {"c": numbers(1, 7)}, F32, F32))


@pytest.mark.parametrize("kind", ["Tan", "Sinh", "Cosh", "Atan", "Asin", "Acos"])
def test_functions_of_others(tmp_path, kind):
    check_meaning(tmp_path, of([op("Tanh", "x", "t"), op(kind, "t")], None, F32, F32), rows=40, tolerance=1e-5)


@pytest.mark.parametrize("upper", [0, 1])
def test_a_triangle_of_a_value(tmp_path, upper):
    weights = {"k": np.array(-1)}
    check_meaning(tmp_path, of([op("Trilu", "x k", upper=upper)], weights, F32, F32, ("N", 2, 4, 5)))
    refused(tmp_path, of([op("Trilu", "x k")], weights, F32, F32), "needs matrices")


def test_reduce_prod(tmp_path):
    for axes, keep in (([1], 1), ([1, 2], 0), ([2], 0)):
        check_meaning(tmp_path, of([op("ReduceProd", "x", axes=axes, keepdims=keep)], None, F32, F32, ("N", 3, 4)))
    refused(tmp_path, of([op("ReduceProd", "x", axes=[1])], None, F32, F32, ("N", 100)), "too many factors")
    for shape in (("N",), ("N", 4)):
        refused(tmp_path, of([op("ReduceProd", "x", axes=[0])], None, F32, F32, shape), "rows of the batch")


# -- TopK ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("axis", [1, -1])
def test_top_k(tmp_path, axis, largest):
    nodes = [op("TopK", "x k", "y", axis=axis, largest=largest)]
    nodes[0].output.append("i")
    proto = model(nodes, {"k": np.array([3])}, ("N", 4, 5), outputs=("y", "i"))
    proto.graph.output[1].type.tensor_type.elem_type = I64
    net = check_meaning(tmp_path, proto, rows=9)
    assert [node.layer.kind for node in net.nodes] == ["TopK", "ArgTopK"]
    alone = model(nodes, {"k": np.array([3])}, ("N", 4, 5))
    assert [node.layer.kind for node in read(tmp_path, alone).nodes] == ["TopK"]
    refused(tmp_path, model(nodes, {"k": np.array([9])}, ("N", 4, 5)), "bad k")


# -- scatter --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["none", "add"])
@pytest.mark.parametrize("data", ["zeros", "many", "value"])
def test_scattered(tmp_path, data, how):
    """Ids of a row differ, as ONNX requires: indices of the largest."""
    top = op("TopK", "x two", "v", axis=1)
    top.output.append("i")
    first = op("Relu", "x", "data") if data == "value" else op("Identity", data, "data")
    weights = {"two": np.array([2]), "zeros": np.zeros((1, 4), "f4"), "many": numbers(1, 4, seed=2)}
    if data != "value":  # ONNX Runtime needs the batch
        weights = {name: np.repeat(w, 5, axis=0) if w.shape == (1, 4) else w for name, w in weights.items()}
    nodes = [top, first, op("ScatterElements", "data i v", axis=1, reduction=how)]
    check_meaning(tmp_path, model(nodes, weights, (5, 4), opset=18))


def test_one_hot_by_scatter(tmp_path):
    proto = of([op("ScatterElements", "zeros x ones", axis=1)],
               {"zeros": np.zeros((5, 6), "f4"), "ones": np.full((5, 1), 2, "f4")}, I64, F32, (5, 1))  # fmt: skip
    check_meaning(tmp_path, proto)
    for word, changed in (
        ("shapes do not fit", {"zeros": np.zeros((5, 0), "f4")}),
        ("varies over the batch", {"ones": numbers(5, 1)}),
    ):
        weights = {"zeros": np.zeros((5, 6), "f4"), "ones": np.ones((5, 1), "f4")} | changed
        refused(tmp_path, of([op("ScatterElements", "zeros x ones", axis=1)], weights, I64, F32, (5, 1)), word)


# -- quantised networks ---------------------------------------------------------------------------------------------


def quantised(scale, zero, **axis):
    weights = {
        "s": np.array(scale, "f4"), "z": np.array(zero), "w": np.arange(-6, 6, dtype="i1").reshape(4, 3),
        "ws": np.array([0.1, 0.2, 0.05], "f4"), "wz": np.array([0, 1, -3], "i1"),
    }  # fmt: skip
    nodes = [
        op("QuantizeLinear", "x s z", "q", **axis), op("DequantizeLinear", "q s z", "d", **axis),
        op("DequantizeLinear", "w ws wz", "f"), op("MatMul", "d f"),
    ]  # fmt: skip
    return nodes, weights


@pytest.mark.parametrize("zero", [np.uint8(100), np.int8(0), np.int8(-20)], ids=str)
def test_quantised_in_floats(tmp_path, zero):
    check_meaning(tmp_path, model(*quantised(0.02, zero)), rows=40)


def test_quantised_per_channel(tmp_path):
    nodes, weights = quantised([0.02, 0.1, 0.5, 0.01], np.array([0, 3, -4, 100], "i1"), axis=1)
    check_meaning(tmp_path, model(nodes, weights), rows=40)


def test_quantised_inputs_and_outputs(tmp_path):
    nodes, weights = quantised(0.02, np.int8(-20))
    proto = model(nodes[:1], weights, outputs=("q",))
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.INT8
    assert check_meaning(tmp_path, proto, rows=40).output.dtype == "int8"
    proto = of([op("DequantizeLinear", "x s z")], weights, TensorProto.INT8, F32)
    check_meaning(tmp_path, proto, rows=40)


@pytest.mark.parametrize("kind", ["Div", "Mod"])
def test_a_constant_divisor_of_zero_is_refused(tmp_path, kind):
    refused(tmp_path, model([op(kind, "x k")], {"k": np.array([3, 0])}, ("N", 2), element=I64), "divides by zero")
