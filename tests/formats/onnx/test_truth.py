"""Comparisons of ids and of floats: masks and selections, exactly as in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from onnx_models import check_meaning, model, numbers, op, refused

KINDS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
CAST = op("Cast", "m", to=TensorProto.FLOAT)


def masks(nodes, weights, element=TensorProto.INT64):
    proto = model(nodes, weights, ("N", 7), element=element)
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    return proto


@pytest.mark.parametrize("operands", ["x k", "k x"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element", [TensorProto.INT64, TensorProto.INT32])
def test_comparisons(tmp_path, kind, operands, element):
    for number in (0, 2, -1, 1 << 30):  # ids are 0 to 4
        k = np.array(number, "i8" if element == TensorProto.INT64 else "i4")
        check_meaning(tmp_path, masks([op(kind, operands, "m"), CAST], {"k": k}, element), rows=40)


def test_a_mask_of_ids_other_than_padding(tmp_path):
    nodes = [
        op("Equal", "x k", "same"), op("Not", "same", "other"), op("Unsqueeze", "other last", "m"),
        op("Cast", "m", "mask", to=TensorProto.FLOAT), op("Gather", "table x", "rows"), op("Mul", "rows mask"),
    ]  # fmt: skip
    weights = {"k": np.array(0), "last": np.array([-1]), "table": np.ones((5, 3), "f4")}
    check_meaning(tmp_path, masks(nodes, weights))


@pytest.mark.parametrize("kind", KINDS)
def test_floats(tmp_path, kind):
    """With constants equal to some elements, on either side; and with another value."""
    near = numbers(5, 4, seed=3).round().astype("f4")
    nodes = [
        op("Mul", "x near", "z"), op("Clip", "z low high", "c"), op(kind, "c near", "a"), op(kind, "near c", "b"),
        op(kind, "c x", "d"), op("And", "a b", "e"), op("Or", "e d", "m"), CAST,
    ]  # fmt: skip
    weights = {"near": near[:1], "low": np.array(-1, "f4"), "high": np.array(1, "f4")}
    check_meaning(tmp_path, model(nodes, weights))


def test_ids_with_ids(tmp_path):
    nodes = [op("Gather", "x one", "k", axis=1), op("LessOrEqual", "x k", "m"), CAST]
    check_meaning(tmp_path, masks(nodes, {"one": np.array([1])}), rows=40)
    several = [op("Equal", "x many", "m"), CAST]
    check_meaning(tmp_path, masks(several, {"many": np.arange(7)}), rows=40)


@pytest.mark.parametrize("axis", [-1, 1])
def test_one_hot(tmp_path, axis):
    weights = {"depth": np.array(5), "of": np.array([0.5, 2], "f4"), "bits": np.array([0, 1])}
    check_meaning(tmp_path, masks([op("OneHot", "x depth of", axis=axis)], weights))
    check_meaning(tmp_path, masks([op("OneHot", "x depth bits", "m", axis=axis), CAST], weights))
    refused(tmp_path, masks([op("OneHot", "x depth bits", axis=0)], weights), "axis out of range")


CHOICES = {
    "soft threshold": "Where(x > t, x - t, 0)",
    "scores": "Softmax(Where(x <= t, -inf, x))",
    "values": "Where(not x < t, exp(99 x), sign(x))",
    "numbers": "Where(x == t, many, 3)",
}


@pytest.mark.parametrize("case", CHOICES)
def test_where(tmp_path, case):
    nodes = {
        "soft threshold": [op("Greater", "x t", "m"), op("Sub", "x t", "a"), op("Where", "m a zero")],
        "scores": [op("LessOrEqual", "x t", "m"), op("Where", "m less x", "s"), op("Softmax", "s", axis=-1)],
        "values": [op("Less", "x t", "n"), op("Not", "n", "m"), op("Mul", "x high", "h"), op("Exp", "h", "a"),
                   op("Reciprocal", "a", "r"), op("Sign", "x", "b"), op("Where", "m r b")],
        "numbers": [op("Equal", "x t", "m"), op("Where", "m many three")],
    }[case]  # fmt: skip
    constants = {"t": 0.1, "zero": 0, "less": -np.inf, "high": 99, "three": 3}
    weights = {name: np.array(number, "f4") for name, number in constants.items()}
    check_meaning(tmp_path, model(nodes, weights | {"many": numbers(1, 4)}))


REFUSED = {
    "between zeros": ([op("Equal", "x k", "m"), op("Where", "m f0 f0")], "selects between zeros"),
    "and": ([op("And", "x x")], "And that computes 'y' needs a bool"),
    "bools that are chosen": ([op("Equal", "x k", "m"), op("Concat", "m m", "n", axis=1), op("Where", "n n n")],
                              "cannot select bools"),
    "a sum": ([op("Equal", "x k", "m"), op("Add", "m m")], "unsupported dtype"),
    "not of numbers": ([op("Not", "x")], "needs a bool"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    nodes, word = REFUSED[case]
    weights = {"k": np.array(0), "f0": np.array(0, "f4")}
    refused(tmp_path, masks(nodes, weights), word)


@pytest.mark.parametrize("kind", ["And", "Or", "Xor"])
def test_inputs_that_are_true_or_false(tmp_path, kind):
    """As a mask of legal actions."""
    nodes = [
        op("Not", "x", "n"), op(kind, "n k", "a"), op(kind, "x a", "b"), op("Expand", "b sizes", "m"),
        op("Where", "m many one", "w"), op("Cast", "x", "f", to=TensorProto.FLOAT), op("Add", "w f"),
    ]  # fmt: skip
    weights = {
        "k": np.arange(7) % 2 == 0, "sizes": np.array([1, 7]), "many": np.arange(7, dtype="f4"),
        "one": np.array(-np.inf, "f4"),
    }  # fmt: skip
    check_meaning(tmp_path, masks(nodes, weights, TensorProto.BOOL), rows=40)


@pytest.mark.parametrize("kind", ["Less", "LessOrEqual"])
def test_steps_past_a_length(tmp_path, kind):
    """Attention scores, and a mean, over the valid steps."""
    nodes = [
        op("Unsqueeze", "x last", "n"), op(kind, "places n", "m"), op("Not", "m", "past"),
        op("Gather", "scores x", "e"), op("Where", "past never e", "f"), op("Softmax", "f", "p"),
        op("Cast", "m", "g", to=TensorProto.FLOAT), op("Mul", "p g"),
    ]  # fmt: skip
    weights = {
        "last": np.array([1]), "places": np.arange(4)[None] - (kind == "Less"), "scores": numbers(5, 4),
        "never": np.array(-1e9, "f4"),
    }  # fmt: skip
    proto = model(nodes, weights, ("N",), element=TensorProto.INT64)
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    check_meaning(tmp_path, proto, rows=40)
