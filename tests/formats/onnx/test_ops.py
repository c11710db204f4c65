"""ONNX operators. ONNX Runtime runs the file; the float64 reference runs the network."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from onchip.formats.onnx.tensors import make_tensor
from onchip.kernels import reference
from onchip.network.layers import Dropout, Reshape
from onchip.network.types import TensorType
from onnx_models import check_meaning, model, numbers, op, read, refused


@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("c", [None, (), (1,), (3,), (1, 3), (1, 1)])
@pytest.mark.parametrize("scale", [{}, {"alpha": 0.5, "beta": -2.0}, {"beta": 0.0}])
def test_gemm(tmp_path, trans_b, c, scale):
    weights = {"w": numbers(3, 4) if trans_b else numbers(4, 3)}
    if c is not None:
        weights["c"] = numbers(*c, seed=1)
    proto = model([op("Gemm", "x w c" if c is not None else "x w", name="fc", transB=trans_b, **scale)], weights)
    net = check_meaning(tmp_path, proto)
    assert [node.name for node in net.nodes] == ["y"]
    assert set(net.weights) == ({"w"} if c is None or scale.get("beta") == 0 else {"w", "c"})
    assert net.weights["w"].flags.c_contiguous


@pytest.mark.parametrize("order", ["p b", "b p"])
@pytest.mark.parametrize("bias", [(), (1,), (3,), (1, 3)])
@pytest.mark.parametrize("row", [(4,), (2, 4)])
def test_matmul_and_add_are_one_linear(tmp_path, order, bias, row):
    weights = {"w": numbers(4, 3), "b": numbers(*bias, seed=1)}
    nodes = [op("MatMul", "x w", "p", "mm"), op("Add", order, name="add")]
    net = check_meaning(tmp_path, model(nodes, weights, ("N", *row)))
    assert [(node.name, *node.weights) for node in net.nodes] == [("y", "weight", "bias")]


def test_a_gemm_with_other_readers_stays_separate(tmp_path):
    weights = {"w": numbers(4, 3), "b": numbers(3, seed=1)}
    nodes = [op("MatMul", "x w", "p", "mm"), op("Identity", "p", "q"), op("Add", "q b", "s", "add"), op("Relu", "p")]
    net = check_meaning(tmp_path, model(nodes, weights, outputs=("y", "s")))
    layers = [(node.name, *node.weights) for node in net.nodes]
    assert layers == [("mm", "weight"), ("s", "weight", "bias"), ("y",)]
    nodes = [op("MatMul", "x w", "p", "mm"), op("Add", "p b", "s", "add")]
    assert len(check_meaning(tmp_path, model(nodes, weights, outputs=("p", "s"))).nodes) == 2
    nodes = [op("MatMul", "x w", "p", "mm"), op("Identity", "p", "q"), op("Add", "q b")]
    assert len(check_meaning(tmp_path, model(nodes, weights)).nodes) == 1


def test_weights_shared_with_and_without_transposition(tmp_path):
    nodes = [op("Gemm", "x w", "a"), op("Gemm", "a w", "b", transB=1), op("Gemm", "b w", "y")]
    net = check_meaning(tmp_path, model(nodes, {"w": numbers(4, 4)}), tolerance=1e-5)
    assert set(net.weights) == {"w", "w_2"}
    assert [node.name for node in net.nodes] == ["gemm1", "gemm2", "y"]


@pytest.mark.parametrize("kind", ["Relu", "Sigmoid", "Tanh"])
def test_elementwise(tmp_path, kind):
    check_meaning(tmp_path, model([op(kind, "x")]))


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("opset", "shape", "axis", "expected"), [
    (13, ("N", 4), None, -1), (17, ("N", 3, 4), None, -1), (17, ("N", 3, 4), 1, 1), (17, ("N", 3, 4), -2, 1),
    (17, ("N", 3, 4), 2, -1), (12, ("N", 4), None, -1), (11, ("N", 4), -1, -1), (7, ("N", 1, 4), None, -1),
    (12, ("N", 3, 4), 2, -1), (11, ("N", 3, 1, 4), 2, -1),
])  # fmt: skip
def test_softmax(tmp_path, kind, opset, shape, axis, expected):
    attributes = {} if axis is None else {"axis": axis}
    net = check_meaning(tmp_path, model([op(kind, "x", **attributes)], x=shape, opset=opset))
    assert net.nodes[0].layer.axis == expected


@pytest.mark.parametrize(("opset", "shape", "axis", "words"), [
    (12, ("N", 3, 4), None, "several axes"), (11, ("N", 3, 4), -2, "several axes"),
    (12, ("N", 4), 0, "several axes"), (17, ("N", 4), 0, "axis 0 is the batch"),
    (17, ("N", 4), 2, "axis out of range"), (17, ("N", 4), -3, "axis out of range"),
])  # fmt: skip
def test_softmax_refused(tmp_path, opset, shape, axis, words):
    attributes = {} if axis is None else {"axis": axis}
    proto = model([op("Softmax", "x", "y", "s", **attributes)], x=shape, opset=opset)
    refused(tmp_path, proto, words, "node 's' (Softmax)")


@pytest.mark.parametrize(("x", "shape", "row_shape"), [
    (("N", 2, 6), [0, -1], (12,)), (("N", 2, 6), [-1, 12], (12,)), (("N", 12), [0, 3, 4], (3, 4)),
    (("N", 2, 6), [0, 0, 3, 2], (2, 3, 2)), ((1, 2, 6), [1, -1], (12,)), ((3, 2, 6), [3, 12], (12,)),
    ((None, 2, 6), [-1, 4, 3], (4, 3)), (("N", 1), [0], ()), (("N", 2, 6), [0, 0, -1], (2, 6)),
])  # fmt: skip
def test_reshape(tmp_path, x, shape, row_shape):
    proto = model([op("Reshape", "x s")], {"s": np.array(shape)}, x)
    net = check_meaning(tmp_path, proto, rows=x[0] if isinstance(x[0], int) else 5)
    assert net.output == TensorType(("B", *row_shape))


@pytest.mark.parametrize(("x", "shape", "words"), [
    (("N", 2, 6), [1, -1], "first size must be the batch"), ((2, 2, 6), [3, 8], "first size must be the batch"),
    ((2, 6), [12], "first size must be the batch"),
    (("N", 2, 6), [-1, -1], "two sizes are -1"), (("N", 6), [], "bad shape operand"),
    (("N", 6), [[0, 6]], "bad shape operand"), (("N", 6), [0, 3, 0], "missing size"),
    (("N", 6), [0, -2], "bad row shape"), (("N", 6), [0, 0, 5], "row sizes differ"),
])  # fmt: skip
def test_reshape_refused(tmp_path, x, shape, words):
    proto = model([op("Reshape", "x s", name="r")], {"s": np.array(shape, np.int64)}, x)
    refused(tmp_path, proto, words, "node 'r' (Reshape)")


def test_reshape_by_a_value_or_with_allowzero_is_refused(tmp_path):
    refused(tmp_path, model([op("Reshape", "x x")]), "input 1 must be a constant")
    shape = {"s": np.array([0, 4])}
    refused(tmp_path, model([op("Reshape", "x s", allowzero=1)], shape), "first size must be the batch")
    refused(tmp_path, model([op("Reshape", "x s")], {"s": np.array([0, 4], "f4")}), "bad shape operand")


@pytest.mark.parametrize("axis", [None, 1, -2])
def test_flatten(tmp_path, axis):
    attributes = {} if axis is None else {"axis": axis}
    net = check_meaning(tmp_path, model([op("Flatten", "x", **attributes)], x=("N", 2, 3)))
    assert net.nodes[0].layer == Reshape((-1,))


@pytest.mark.parametrize("axis", [0, 2, -1])
def test_flatten_refused(tmp_path, axis):
    words = "keeps rows separate" if axis == 2 else "mix the rows"
    refused(tmp_path, model([op("Flatten", "x", axis=axis)], x=("N", 2, 3)), words)


def test_identity_and_constants_leave_nothing_and_dropout_a_layer(tmp_path):
    nodes = [
        helper.make_node("Constant", [], ["w"], value=make_tensor("", numbers(4, 3))),
        op("Identity", "w", "w_again"), op("Dropout", "x", "d", "drop"), op("Identity", "d", "e"),
        op("Gemm", "e w_again", "f", "fc"), op("Dropout", "f none", "y"),
    ]  # fmt: skip
    net = check_meaning(tmp_path, model(nodes, {"none": np.float32(0)}))
    assert [node.name for node in net.nodes] == ["drop", "y"]
    assert net.nodes[0].layer == Dropout(0.5)
    assert (net.outputs, set(net.weights)) == (("y",), {"w_again"})


def test_constants_of_every_spelling(tmp_path):
    nodes = [
        helper.make_node("Constant", [], ["s"], value_ints=[0, 4]), op("Reshape", "x s", "r"), op("MatMul", "r w", "p"),
        helper.make_node("Constant", [], ["b"], value_floats=[1.0, 2.0, 3.0]), op("Add", "p b", "q"),
        helper.make_node("Constant", [], ["v"], value_float=0.5), op("MatMul", "q v_matrix", "t"), op("Add", "v t"),
    ]  # fmt: skip
    check_meaning(tmp_path, model(nodes, {"w": numbers(4, 3), "v_matrix": numbers(3, 2)}))
    refused(tmp_path, model([helper.make_node("Constant", [], ["y"], value_string="no")]), "no numeric value")


def test_dropout_in_training_mode(tmp_path):
    weights = {"ratio": np.float32(0.5), "mode": np.array(True)}
    refused(tmp_path, model([op("Dropout", "x ratio mode")], weights), "training mode", "eval mode")
    weights["mode"] = np.array(False)
    (node,) = read(tmp_path, model([op("Dropout", "x ratio mode")], weights)).nodes
    assert node.layer == Dropout(0.5)


def test_initializers_that_are_inputs_too(tmp_path):
    proto = model([op("Gemm", "x w b")], {"w": numbers(4, 3), "b": numbers(3)}, input_weights=True)
    assert list(check_meaning(tmp_path, proto).inputs) == ["x"]


def test_node_names(tmp_path):
    kinds = ["x", "relu1", "", "relu2", "relu1", ""]
    nodes = [op("Relu", f"v{i}" if i else "x", f"v{i + 1}", name) for i, name in enumerate(kinds)]
    net = read(tmp_path, model(nodes, outputs=("v6",)))
    assert [node.name for node in net.nodes] == ["relu3", "relu1", "relu4", "relu2", "relu5", "v6"]


@pytest.mark.parametrize("rows", ["N", None, 1, 128])
def test_the_first_dimension_is_the_batch(tmp_path, rows):
    net = read(tmp_path, model([op("Relu", "x")], x=(rows, 4)))
    assert net.input == TensorType(("B", 4))


def test_an_old_supported_opset(tmp_path):
    nodes = [op("MatMul", "x w", "p"), op("Add", "p b", "q", broadcast=1, axis=1), op("Gemm", "q v c", broadcast=1)]
    weights = {"w": numbers(4, 3), "b": numbers(3), "v": numbers(3, 2), "c": numbers(2)}
    net = read(tmp_path, model(nodes, weights, opset=6))
    x = numbers(3, 4)
    expected = (x @ weights["w"] + weights["b"]) @ weights["v"] + weights["c"]
    np.testing.assert_allclose(reference.forward(net, x), expected, rtol=1e-5)
    nodes[1] = op("Add", "p b", "q", broadcast=1, axis=0)
    refused(tmp_path, model(nodes, weights, opset=6), "varies over the batch")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("raw", [True, False])
def test_weight_dtypes_and_both_encodings(tmp_path, dtype, raw):
    w = numbers(4, 3, dtype=dtype)
    tensor = make_tensor("w", w)
    if not raw:
        tensor.ClearField("raw_data")
        fields = {"float64": tensor.double_data, "float32": tensor.float_data}
        bits = w.view(np.uint16) if w.itemsize == 2 else w
        fields.get(dtype, tensor.int32_data).extend(bits.ravel().tolist())
    proto = model([op("MatMul", "x w")], element=tensor.data_type)
    proto.graph.initializer.append(tensor)
    got = read(tmp_path, proto).weights["w"]
    assert got.dtype == w.dtype
    assert got.tobytes() == np.ascontiguousarray(w.T).tobytes()
