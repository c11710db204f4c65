"""Arithmetic, gemms, tables, norms and exported GELUs. ONNX Runtime is the reference."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from onchip.kernels import reference
from onchip.network.layers import (
    GELU,
    Add,
    BatchNorm1d,
    BatchNorm2d,
    Clip,
    Concat,
    CumSum,
    Embedding,
    LeakyReLU,
    Linear,
    Mul,
    Permute,
    ReLU,
    Reshape,
    SiLU,
    ToPixels,
)
from onchip.network.types import TensorType
from onnx_models import F32, check_meaning, model, numbers, op, read, refused, run_onnx


def kinds(net):
    return [node.layer.kind for node in net.nodes]


def two_inputs(nodes, first, second, weights=None, opset=17):
    proto = model(nodes, weights, first, opset)
    proto.graph.input.append(helper.make_tensor_value_info("z", F32, second))
    return proto


@pytest.mark.parametrize("kind", ["Add", "Mul", "Sub", "Div", "Max"])
@pytest.mark.parametrize(("first", "second"), [((3, 4), (3, 4)), ((3, 4), (1, 4)), ((3, 1), (3, 4)), ((), ())])
def test_two_values(tmp_path, kind, first, second):
    net = check_meaning(tmp_path, two_inputs([op(kind, "x z", name="n")], ("N", *first), ("N", *second)))
    assert list(net.inputs) == ["x", "z"]
    assert net.outputs == ("y",)
    assert kinds(net) == [kind]


@pytest.mark.parametrize("kind", ["Add", "Mul", "Sub", "Div"])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 4), (3, 1), (1, 3, 4), (1, 1, 1)])
def test_a_value_and_a_constant(tmp_path, kind, shape):
    for order in ("x c", "c x"):
        net = check_meaning(tmp_path, model([op(kind, order, name="n")], {"c": numbers(*shape, seed=3)}, ("N", 3, 4)))
        assert net.outputs == ("y",)
        assert net.output == TensorType(("B", 3, 4))


def test_a_constant_may_widen_rows(tmp_path):
    net = check_meaning(tmp_path, model([op("Add", "x c")], {"c": numbers(5, 4)}, ("N", 1, 4)))
    assert net.output == TensorType(("B", 5, 4))


def test_neg_and_sums_of_many(tmp_path):
    nodes = [op("Neg", "x", "n"), op("Sum", "x n c x d")]
    net = check_meaning(tmp_path, model(nodes, {"c": numbers(4), "d": numbers(3, 1)}, ("N", 3, 4)))
    assert kinds(net) == ["Mul", "Add"]
    assert len(net.nodes[1].inputs) == 3
    assert kinds(check_meaning(tmp_path, model([op("Sum", "x")]))) == ["Identity"]


def test_an_add_after_a_biased_linear_stays(tmp_path):
    nodes = [op("Gemm", "x w b", "g"), op("Add", "g b", "s"), op("Add", "s x4")]
    proto = model(nodes, {"w": numbers(4, 3), "b": numbers(3), "x4": numbers(1, 3)})
    assert kinds(check_meaning(tmp_path, proto)) == ["Linear", "Add", "Add"]
    wide = model([op("MatMul", "x w", "p"), op("Add", "p c")], {"w": numbers(4, 1), "c": numbers(3)})
    assert kinds(check_meaning(tmp_path, wide)) == ["Linear", "Add"]


def test_a_residual_block_reads_one_value_twice(tmp_path):
    nodes = [op("MatMul", "x w", "p"), op("Relu", "p", "r"), op("Add", "x r", "s"), op("Mul", "s s")]
    net = check_meaning(tmp_path, model(nodes, {"w": numbers(4, 4)}), tolerance=1e-5)
    assert kinds(net) == ["Linear", "ReLU", "Add", "Mul"]
    assert net.nodes[2].inputs == ("x", "relu1")


@pytest.mark.parametrize(("axis", "shape"), [(1, (3,)), (2, (4,)), (1, (3, 4)), (-1, (4,))])
def test_broadcasting_before_opset_7(tmp_path, axis, shape):
    c = numbers(*shape, seed=1)
    attributes = {"broadcast": 1} if axis == -1 else {"broadcast": 1, "axis": axis}
    net = read(tmp_path, model([op("Add", "x c", **attributes)], {"c": c}, ("N", 3, 4), opset=6))
    x = numbers(5, 3, 4)
    laid = c.reshape(*shape, 1) if (axis, shape) == (1, (3,)) else c
    np.testing.assert_allclose(reference.forward(net, x), x + laid, rtol=1e-6)


def test_concat(tmp_path):
    net = check_meaning(tmp_path, two_inputs([op("Concat", "x z x", axis=-2)], ("N", 3, 4), ("N", 2, 4)))
    assert net.nodes[0].layer == Concat(1)
    assert net.output == TensorType(("B", 8, 4))


# -- GELU and SiLU -------------------------------------------------------------------------------------------------

ROOT, HALF, ONE = np.float32(2**0.5), np.float32(0.5), np.float32(1)
ERF = [op("Div", "x root", "d"), op("Erf", "d", "e"), op("Add", "e one", "a")]
EXACT = {
    "torch": [*ERF, op("Mul", "x a", "m"), op("Mul", "m half")],
    "half first": [op("Mul", "x half", "h"), *ERF, op("Mul", "h a")],
    "half inside": [*ERF, op("Mul", "half a", "m"), op("Mul", "m x")],
    "times the inverse": [op("Mul", "x inverse", "d"), *ERF[1:], op("Mul", "a x", "m"), op("Mul", "half m")],
    "sum": [*ERF[:2], op("Sum", "one e", "a"), op("Mul", "a x", "m"), op("Mul", "half m")],
    "made here": [op("Sqrt", "two", "root"), *ERF, op("Mul", "x a", "m"), op("Mul", "m half")],
}


@pytest.mark.parametrize("case", EXACT)
def test_the_nodes_of_a_gelu_are_one_layer(tmp_path, case):
    weights = {"half": HALF, "one": ONE, "inverse": 1 / ROOT, "two": np.float32(2), "root": ROOT}
    if case == "made here":
        del weights["root"]
    net = check_meaning(tmp_path, model(EXACT[case], weights))
    assert [node.layer for node in net.nodes] == [GELU()]
    assert dict(net.weights) == {}


TANH = [
    op("Mul", "x x", "sq"), op("Mul", "x sq", "cu"), op("Mul", "c cu", "cc"), op("Add", "x cc", "in"),
    op("Mul", "s in", "sc"), op("Tanh", "sc", "t"), op("Add", "one t", "a"), op("Mul", "x a", "m"), op("Mul", "half m"),
]  # fmt: skip


def test_the_nodes_of_its_approximation_too(tmp_path):
    weights = {"half": HALF, "one": ONE, "c": np.float32(0.044715), "s": np.float32(np.sqrt(2 / np.pi))}
    net = check_meaning(tmp_path, model(TANH, weights))
    assert [node.layer for node in net.nodes] == [GELU("tanh")]
    for name, other in (("half", 0.25), ("one", 2), ("c", 0.05), ("s", 0.8)):  # almost a GELU
        net = check_meaning(tmp_path, model(TANH, {**weights, name: np.float32(other)}))
        assert len(net.nodes) == len(TANH)
    net = check_meaning(tmp_path, model(TANH, weights, outputs=("y", "t")))  # the inner value is an output too
    assert kinds(net) == ["Mul", "Mul", "Mul", "Add", "Mul", "Tanh", "GELU"]


@pytest.mark.parametrize("word", ["none", "tanh"])
def test_gelu_of_opset_20(tmp_path, word):
    net = check_meaning(tmp_path, model([op("Gelu", "x", approximate=word)], opset=20))
    assert net.nodes[0].layer == GELU(word)


@pytest.mark.parametrize("order", ["x s", "s x"])
def test_silu(tmp_path, order):
    nodes = [op("Sigmoid", "x", "s"), op("Mul", order)]
    assert [node.layer for node in check_meaning(tmp_path, model(nodes)).nodes] == [SiLU()]
    assert kinds(check_meaning(tmp_path, model(nodes, outputs=("s", "y")))) == ["Sigmoid", "SiLU"]
    nodes = [op("Sigmoid", "x", "s"), op("Relu", "x", "r"), op("Mul", "s r")]
    assert kinds(check_meaning(tmp_path, model(nodes))) == ["Sigmoid", "ReLU", "Mul"]


def test_clip_bounds_are_decimal(tmp_path):
    low, high = np.float32(-0.1), np.float32(0.3)
    for nodes, weights, opset in (
        ([op("Clip", "x", min=-0.1, max=0.3)], {}, 10),
        ([op("Clip", "x low high")], {"low": low, "high": high}, 11),
        ([op("Clip", "x low high")], {"low": low, "high": high}, 17),
    ):
        net = check_meaning(tmp_path, model(nodes, weights, opset=opset))
        assert [node.layer for node in net.nodes] == [Clip(-0.1, 0.3)]


@pytest.mark.parametrize("opset", [9, 17])
def test_a_clip_at_zero_from_below_is_a_relu(tmp_path, opset):
    nodes = [op("Clip", "x", min=0.0)] if opset < 11 else [op("Clip", "x zero")]
    net = check_meaning(tmp_path, model(nodes, {} if opset < 11 else {"zero": np.float32(0)}, opset=opset))
    assert [node.layer for node in net.nodes] == [ReLU()]


def test_clips_that_cannot_be_read(tmp_path):
    refused(tmp_path, model([op("Relu", "x", "r"), op("Clip", "x r")]), "must be a constant")
    refused(tmp_path, model([op("Clip", "x low")], {"low": np.float64(0)}), "mixes dtypes")
    refused(tmp_path, model([op("Clip", "x low")], {"low": numbers(2)}), "do not fit")
    refused(tmp_path, model([op("Clip", "x low")], {"low": np.float32(np.nan)}), "bad bounds")


PIXELS = {"one": 1, "two": 2, "full": 255, "zero": 0}


def pixels_model(to=TensorProto.UINT8, **changes):
    """uint8(Clip(Where(IsNaN(y), 0, y), 0, 255)), y = (x + 1) / 2 * 255, with other constants."""
    nodes = [
        op("Add", "x one", "a"), op("Div", "a two", "b"), op("Mul", "b full", "c"), op("IsNaN", "c", "n"),
        op("Where", "n zero c", "w"), op("Clip", "w zero full", "k"), op("Cast", "k", to=to),
    ]  # fmt: skip
    proto = model(nodes, {name: np.float32(number) for name, number in {**PIXELS, **changes}.items()})
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.UINT8
    return proto


def test_pixels_are_recognised(tmp_path):
    assert [node.layer for node in read(tmp_path, pixels_model()).nodes] == [ToPixels()]


@pytest.mark.parametrize("changes", [{"one": 2}, {"two": 3}, {"full": 254}, {"zero": 1}, {"to": F32}], ids=str)
def test_patterns_similar_to_pixels_stay_separate_layers(tmp_path, changes):
    assert ToPixels() not in [node.layer for node in read(tmp_path, pixels_model(**changes)).nodes]


def test_where_and_is_nan_of_other_values(tmp_path):
    check_meaning(tmp_path, model([op("IsNaN", "x", "n"), op("Cast", "n", to=F32)]))
    others = [op("IsNaN", "x", "n"), op("Relu", "x", "r"), op("Where", "n zero r")]
    check_meaning(tmp_path, model(others, {"zero": np.float32(0)}))


@pytest.mark.parametrize("order", ["m x z", "m x c", "m c x", "m x zero"])
def test_where_with_a_constant_condition(tmp_path, order):
    """Two values, or one and a constant; masked elements may be NaN."""
    weights = {"m": numbers(3, 4) > 0, "c": np.float32(-np.inf), "zero": np.zeros(4, "f4")}
    nodes = [op("Where", order, name="n")]
    proto = two_inputs(nodes, ("N", 3, 4), ("N", 1, 4), weights) if "z" in order.split() else None
    net = check_meaning(tmp_path, proto or model(nodes, weights, ("N", 3, 4)))
    assert kinds(net)[0] == "Mask"
    x = numbers(2, 3, 4)
    x[:, ~weights["m"] if order[2] == "x" else weights["m"]] = np.nan
    if proto is None:
        assert not np.isnan(reference.forward(net, x)).any()


POWERS = {2: ["Mul"], 3: ["Mul"], 1: [], 0.5: ["Pow"], -1: ["Reciprocal"], -0.5: ["Pow"], 2.5: ["Pow"]}


@pytest.mark.parametrize("power", POWERS)
def test_powers(tmp_path, power):
    nodes = [op("Abs", "x", "a"), op("Pow", "a p")]
    net = check_meaning(tmp_path, model(nodes, {"p": np.float32(power)}), tolerance=1e-5)
    assert kinds(net) == ["Abs", *POWERS[power]]


def test_bounds_that_are_a_maximum_or_a_minimum(tmp_path):
    nodes = [op("Max", "x zero", "a"), op("Min", "six a", "b"), op("Max", "b x", "c"), op("Mean", "c x")]
    net = check_meaning(tmp_path, model(nodes, {"zero": np.float32(0), "six": np.float32(6)}))
    assert kinds(net) == ["ReLU", "Clip", "Max", "Add", "Mul"]


ACTIVATIONS = {
    "HardSwish": [op("HardSwish", "x")], "Mish": [op("Softplus", "x", "s"), op("Tanh", "s", "t"), op("Mul", "t x")],
    "SELU": [op("Selu", "x")], "ELU": [op("Celu", "x")], "LeakyReLU": [op("PRelu", "x slope")],
    "PReLU": [op("PRelu", "x slopes")],
}  # fmt: skip


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_several_spellings(tmp_path, kind):
    weights = {"slope": np.full((1,), 0.3, "f4"), "slopes": numbers(4, seed=2)}
    assert kinds(check_meaning(tmp_path, model(ACTIVATIONS[kind], weights))) == [kind]
    other = [op("Celu", "x", "c", alpha=0.5), op("Selu", "c", gamma=2.0)]
    assert kinds(check_meaning(tmp_path, model(other, {}))) == ["Mul", "ELU", "Mul", "ELU", "Mul"]


@pytest.mark.parametrize("kind", ["L1", "L2", "Sum", "Min", "SumSquare", "LogSum", "LogSumExp"])
@pytest.mark.parametrize("keep", [0, 1])
def test_reductions(tmp_path, kind, keep):
    nodes = [op("Exp", "x", "e"), op(f"Reduce{kind}", "e axes", keepdims=keep)]
    proto = model(nodes, {"axes": np.array([2, -3])}, ("N", 3, 4, 5), opset=18)
    net = check_meaning(tmp_path, proto, tolerance=1e-5)
    assert net.output.row_shape == ((1, 1, 5) if keep else (5,))


# -- gemms of two values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [((3, 4), (4, 5)), ((2, 3, 4), (1, 4, 5)), ((2, 3, 4), (4, 5))])
def test_gemms_of_two_values(tmp_path, first, second):
    proto = two_inputs([op("MatMul", "x z", name="n")], ("N", *first), ("N", *second))
    net = check_meaning(tmp_path, proto, tolerance=1e-5) if len(first) == len(second) else read(tmp_path, proto)
    assert kinds(net)[-1] == "MatMul"


@pytest.mark.parametrize(("order", "shape"), [("c x", (5, 3)), ("c x", (3,)), ("x c", (2, 4, 5)), ("c x", (2, 5, 3))])
def test_a_gemm_with_a_constant_that_is_not_a_linear(tmp_path, order, shape):
    proto = model([op("MatMul", order, name="n")], {"c": numbers(*shape)}, ("N", 2, 3, 4))
    net = check_meaning(tmp_path, proto, tolerance=1e-5)
    assert "MatMul" in kinds(net)


def test_a_gemm_that_would_mix_rows(tmp_path):
    refused(tmp_path, two_inputs([op("MatMul", "x z")], ("N", 4), ("N", 4, 3)), "mix the rows of the batch")
    refused(tmp_path, model([op("MatMul", "c x")], {"c": numbers(2, 5, 3)}, ("N", 3, 4)), "varies over the batch")


def test_leaky_relu_slope_is_decimal(tmp_path):
    nodes = [op("LeakyRelu", "x", "l"), op("LeakyRelu", "l", alpha=0.3)]
    net = check_meaning(tmp_path, model(nodes))
    assert [node.layer for node in net.nodes] == [LeakyReLU(0.01), LeakyReLU(0.3)]


# -- tables, norms, scans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", [TensorProto.INT32, TensorProto.INT64])
@pytest.mark.parametrize("table", [(9, 3), (9,), (9, 2, 3)])
@pytest.mark.parametrize("ids", [(), (4,), (2, 3)])
def test_gather_is_embedding(tmp_path, element, table, ids):
    proto = model([op("Gather", "t x", name="e")], {"t": numbers(*table)}, ("N", *ids), element=element)
    del proto.graph.output[0].type.tensor_type.shape.dim[:]
    proto.graph.output[0].type.tensor_type.elem_type = F32
    net = check_meaning(tmp_path, proto)
    assert isinstance(net.nodes[0].layer, Embedding)
    assert (net.output.row_shape, net.outputs) == ((*ids, *table[1:]), ("y",))


@pytest.mark.parametrize("row", [(3,), (3, 5), (3, 4, 2), (3, 2, 2, 2)])
@pytest.mark.parametrize("opset", [6, 9, 14, 17])
def test_batch_norm(tmp_path, row, opset):
    weights = {"w": numbers(3), "b": numbers(3, seed=1), "m": numbers(3, seed=2), "v": abs(numbers(3, seed=3))}
    attributes = {"is_test": 1} if opset == 6 else {}
    proto = model([op("BatchNormalization", "x w b m v", epsilon=1e-3, **attributes)], weights, ("N", *row), opset)
    net = read(tmp_path, proto)
    x = numbers(5, *row, seed=7)
    shape = (3, *[1] * (len(row) - 1))
    parts = {name: array.reshape(shape) for name, array in weights.items()}
    expected = (x - parts["m"]) / np.sqrt(parts["v"] + 1e-3) * parts["w"] + parts["b"]
    np.testing.assert_allclose(reference.forward(net, x), expected, rtol=1e-5, atol=1e-6)
    norm = next(node for node in net.nodes if not isinstance(node.layer, Reshape))
    assert norm.layer == (BatchNorm2d(1e-3) if len(row) == 3 else BatchNorm1d(1e-3))
    assert dict(norm.weights) == {"weight": "w", "bias": "b", "mean": "m", "var": "v"}


@pytest.mark.parametrize("given", [{}, {"exclusive": 1}, {"reverse": 1}, {"exclusive": 1, "reverse": 1}])
@pytest.mark.parametrize("axis", [np.array(1), np.array([-1]), np.array(2, np.int32)])
def test_cumsum(tmp_path, given, axis):
    net = check_meaning(tmp_path, model([op("CumSum", "x a", **given)], {"a": axis}, ("N", 3, 4)))
    assert isinstance(net.nodes[0].layer, CumSum)


# -- several at once -----------------------------------------------------------------------------------------------


def test_gemm_adds_a_value(tmp_path):
    for beta in (1.0, 0.5):
        proto = two_inputs([op("Gemm", "x w z", beta=beta)], ("N", 4), ("N", 3), {"w": numbers(4, 3)})
        assert kinds(check_meaning(tmp_path, proto))[-1] == "Add"
    vector = model([op("MatMul", "x v")], {"v": numbers(4)}, ("N", 3, 4))
    assert check_meaning(tmp_path, vector).output == TensorType(("B", 3))


def test_unused_layers_are_dropped(tmp_path):
    nodes = [op("Tanh", "x", "t"), op("MatMul", "t w", "u"), op("Relu", "x")]
    net = check_meaning(tmp_path, model(nodes, {"w": numbers(4, 3)}))
    assert kinds(net) == ["ReLU"]
    assert dict(net.weights) == {}


def test_several_inputs_and_outputs(tmp_path):
    nodes = [op("MatMul", "x w", "p"), op("Add", "p z", "s"), op("Transpose", "t3", "y", perm=[0, 2, 1])]
    nodes.insert(2, op("Unsqueeze", "s one", "t3"))
    proto = two_inputs(nodes, ("N", 4), (None, 3), {"w": numbers(4, 3), "one": np.array([1])})
    proto.graph.output.append(helper.make_tensor_value_info("s", F32, None))
    net = check_meaning(tmp_path, proto)
    assert [type(node.layer) for node in net.nodes] == [Linear, Add, Reshape, Permute]
    assert len(net.outputs) == 2


@pytest.mark.parametrize("opset", [1, 3, 5])
def test_opsets_before_6(tmp_path, opset):
    shape = {"shape": [0, -1]} if opset < 5 else {}
    nodes = [
        op("Conv", "x w b", "c", pads=[1, 1, 1, 1]), op("BatchNormalization", "c b b b v", "n", is_test=1),
        op("Relu", "n", "r"), op("MaxPool", "r", "m", kernel_shape=[2, 2], strides=[2, 2]),
        op("Reshape", "m" if shape else "m s", "f", **shape), op("Gemm", "f g", transB=1, broadcast=1),
    ]  # fmt: skip
    nodes[-1] = op("Gemm", "f g h", transB=1, broadcast=1)
    weights = {"w": numbers(4, 3, 3, 3), "b": numbers(4), "v": abs(numbers(4)), "g": numbers(2, 36), "h": numbers(2)}
    if not shape:
        weights["s"] = np.array([0, -1])
    net = read(tmp_path, model(nodes, weights, ("N", 3, 6, 6), opset, input_weights=True))
    modern = [op("Conv", "x w b", "c", pads=[1, 1, 1, 1]), op("BatchNormalization", "c b b b v", "n"), *nodes[2:4],
              op("Flatten", "m", "f"), op("Gemm", "f g h", transB=1)]  # fmt: skip
    x = numbers(3, 3, 6, 6, seed=9)
    (expected,) = run_onnx(model(modern, weights, ("N", 3, 6, 6)), x)
    np.testing.assert_allclose(reference.forward(net, x), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(net.weights["w"], weights["w"])


def test_mul_by_a_constant_is_a_mul(tmp_path):
    net = check_meaning(tmp_path, model([op("Mul", "x half")], {"half": HALF}))
    assert [node.layer for node in net.nodes] == [Mul()]
    assert net.nodes[0].weights == {"constant": "half"}
