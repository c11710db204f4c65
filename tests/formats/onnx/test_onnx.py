"""ONNX Runtime runs the ONNX files that onchip writes, and onchip reads them back."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onchip.errors import InputError
from onchip.formats.onnx.reader import read_onnx
from onchip.formats.onnx.writer import write_onnx
from onchip.kernels import reference
from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import LAYERS, AvgPool2d, CumSum, GlobalMax, Layer, Linear, MaxPool2d, ReLU, Reshape
from onchip.network.recipe import Recipe
from onchip.network.types import TensorType
from onnx_models import SETTINGS, every_layer, image_layers, numbers, rows_of, run_onnx
from takers import doubled


@SETTINGS
@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    activation=st.sampled_from(["ReLU", "Tanh", "Sigmoid"]),
    output=st.sampled_from([None, "Softmax", "LogSoftmax"]),
    bias=st.booleans(),
)
def test_round_trip_of_any_mlp(tmp_path, widths, activation, output, bias):
    net = mlp(*widths, activation=activation, output=output, bias=bias)
    write_onnx(net, tmp_path / "net.onnx")
    back = read_onnx(tmp_path / "net.onnx")
    assert (back.name, back.inputs, back.nodes, back.outputs) == (net.name, net.inputs, net.nodes, net.outputs)
    assert {name: w.tobytes() for name, w in back.weights.items()} == {n: w.tobytes() for n, w in net.weights.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-6), ("float16", 5e-3)])
def test_onnxruntime_runs_what_is_written(tmp_path, dtype, tolerance):
    net = every_layer(dtype)
    write_onnx(net, tmp_path / "net.onnx")
    for rows in (1, 7):
        x = numbers(rows, 8, seed=rows, dtype=dtype)
        (got,) = run_onnx(tmp_path / "net.onnx", x)
        np.testing.assert_allclose(got, reference.forward(net, x), rtol=tolerance, atol=tolerance)


def test_onnxruntime_runs_a_network_of_windows(tmp_path):
    net = image_layers()
    write_onnx(net, tmp_path / "net.onnx")
    for rows in (1, 3):
        (x,) = rows_of(net, rows)
        (got,) = run_onnx(tmp_path / "net.onnx", x)
        np.testing.assert_allclose(got, reference.forward(net, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [every_layer, image_layers])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_every_layer_round_trips(tmp_path, dtype, layers):
    net = layers(dtype)
    write_onnx(net, tmp_path / "net.onnx")
    back = read_onnx(tmp_path / "net.onnx")
    assert [(node.name, node.layer.kind) for node in back.nodes] == [(n.name, n.layer.kind) for n in net.nodes]
    assert back.types == net.types
    for name, array in net.weights.items():
        assert back.weights[name].dtype == array.dtype
        assert back.weights[name].tobytes() == array.tobytes()


def test_metadata(tmp_path):
    write_onnx(mlp(3, 2), tmp_path / "net.onnx")
    proto = onnx.load(tmp_path / "net.onnx")
    assert (proto.ir_version, proto.opset_import[0].version) == (8, 17)
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "B"
    assert proto.graph.output[0].name == "fc1"


@pytest.mark.parametrize(("layer", "dtype", "opset"), [
    (AvgPool2d((2, 2), dilation=(2, 1)), "float32", 22), (AvgPool2d((2, 2)), "float32", 17),
    (MaxPool2d((1, 1), (2, 2), ceil=True), "float32", 22), (MaxPool2d((2, 2), ceil=True), "bfloat16", 22),
    (GlobalMax((2, 3)), "bfloat16", 17),
])  # fmt: skip
def test_a_newer_opset_only_where_it_is_needed(tmp_path, layer, dtype, opset):
    net = sequential(TensorType(("B", 3, 4, 6), dtype), [("top", GlobalMax((1,), keep=True)), ("layer", layer)], {})
    write_onnx(net, tmp_path / "net.onnx")
    assert onnx.load(tmp_path / "net.onnx").opset_import[0].version == opset
    back = read_onnx(tmp_path / "net.onnx")
    assert (back.nodes, back.output) == (net.nodes, net.output)


def test_recipes_and_wider_values(tmp_path):
    recipe = Recipe.of(doubled, ("w",), (3, 4), "float16", 12)
    weights = {"w": numbers(3, 4, dtype="float16"), "w2": recipe}
    net = Network({"x": TensorType(("B", 4))}, (Node("fc", Linear(), ("x",), {"weight": "w2"}),), ("fc",), weights)
    write_onnx(net, tmp_path / "net.onnx")
    np.testing.assert_array_equal(read_onnx(tmp_path / "net.onnx").weights["w2"], 2.0 * weights["w"].astype("f4"))
    narrow = net.replace(weights={"w2": numbers(3, 4, dtype="float64")})
    with pytest.raises(InputError, match=r"layer 'fc': .* one dtype"):
        write_onnx(narrow, tmp_path / "narrow.onnx")
    assert os.listdir(tmp_path) == ["net.onnx"]


def test_names_that_clash_in_onnx_and_outputs_of_no_node(tmp_path):
    nodes = (Node("w", Linear(), ("x",), {"weight": "x"}), Node("", ReLU(), ("w",)))
    net = Network({"x": TensorType(("B", 4))}, nodes, ("w", "x", "w", ""), {"x": numbers(3, 4)}, name="")
    write_onnx(net, tmp_path / "net.onnx")
    x = numbers(2, 4, seed=3)
    got = run_onnx(tmp_path / "net.onnx", x)
    product = x @ net.weights["x"].T
    for value, expected in zip(got, (product, x, product, product.clip(0)), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert read_onnx(tmp_path / "net.onnx").outputs == ("w", "x_out", "w_out", "value")


def test_one_weight_used_both_ways(tmp_path):
    nodes = (
        Node("a", Linear(), ("x",), {"weight": "w"}), Node("r", Reshape((1, 4)), ("a",)),
        Node("b", Linear(), ("r",), {"weight": "w"}), Node("c", Linear(), ("b",), {"weight": "w"}),
    )  # fmt: skip
    net = Network({"x": TensorType(("B", 4))}, nodes, ("c",), {"w": numbers(4, 4)})
    write_onnx(net, tmp_path / "net.onnx")
    x = numbers(3, 4, seed=1)
    np.testing.assert_allclose(run_onnx(tmp_path / "net.onnx", x)[0], reference.forward(net, x), rtol=1e-4)
    np.testing.assert_array_equal(reference.forward(read_onnx(tmp_path / "net.onnx"), x), reference.forward(net, x))


def test_what_cannot_be_written(tmp_path):
    class Odd(Layer):
        def infer(self, inputs, weights):
            return inputs[0]

        def row_flop(self, inputs, weights):
            return 0

        def forward(self, xs, w):
            return xs[0]

    LAYERS.pop("Odd")
    with pytest.raises(InputError, match=r"layer 'odd' \(Odd\)"):
        write_onnx(sequential(TensorType(("B", 2)), [("odd", Odd())], {}), tmp_path / "n.onnx")
    with pytest.raises(InputError, match="float8_e5m2"):
        write_onnx(sequential(TensorType(("B", 2), "float8_e5m2"), [("r", ReLU())], {}), tmp_path / "n.onnx")
    with pytest.raises(InputError, match=r"cannot be written as ONNX[\s\S]*int8"):
        write_onnx(sequential(TensorType(("B", 2), "int8"), [("c", CumSum())], {}), tmp_path / "n.onnx")
    with pytest.raises(InputError, match="empty rows"):
        write_onnx(sequential(TensorType(("B", 0, 2)), [("r", Reshape())], {}), tmp_path / "n.onnx")
    assert not os.listdir(tmp_path)
