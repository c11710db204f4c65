"""Inputs and outputs retain their names from file to network, through a plan, and to the next file."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onchip
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.formats.value_names import name_values
from onchip.network.graph import Network, Node
from onchip.network.layers import Identity, Linear, ReLU
from onchip.network.types import TensorType
from onchip.runtime.placement import plan
from onnx_models import model, numbers, op, read, run_onnx

X = {"x": TensorType(("B", 4))}


def saved_names(path) -> tuple[list[str], list[str]]:
    graph = onnx.load(path).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


@pytest.mark.parametrize("name", ["scores", "a b/c:0", "größe", "1", "fc", "relu1", "w"])
def test_an_output_keeps_its_name_through_a_plan_and_both_formats(tmp_path, name):
    weights = {"w" if name != "w" else "v": numbers(4, 3)}
    nodes = [op("Relu", "x", "h", "fc"), op("Relu", "h", "i"), op("Gemm", f"i {next(iter(weights))}", name, "/2/Gemm")]
    net = read(tmp_path, model(nodes, weights, outputs=(name,)))
    assert (list(net.inputs), net.outputs) == (["x"], (name,))
    assert plan(net, "h200").network.outputs == onchip.compile(net, "cpu").plan.network.outputs == (name,)
    for suffix in (".onnx", ".safetensors"):
        onchip.save(net, tmp_path / f"again{suffix}")
        again = onchip.load(tmp_path / f"again{suffix}")
        assert (list(again.inputs), again.outputs) == (["x"], (name,))
    assert saved_names(tmp_path / "again.onnx") == (["x"], [name])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gxx)])  # an emulated GPU
def test_an_output_that_is_an_input_or_another_output_is_a_separate_value(tmp_path, monkeypatch, device):
    if device == "cuda":
        emulate_device(monkeypatch)
    nodes = [op("Relu", "x", "a"), op("Identity", "x", "same"), op("Identity", "a", "b"), op("Identity", "b", "c")]
    proto = model(nodes, outputs=("same", "b", "a", "c"))
    net, x = read(tmp_path, proto), numbers(3, 4)
    assert net.outputs == ("same", "b", "a", "c")
    onchip.save(net, tmp_path / "again.onnx")
    assert saved_names(tmp_path / "again.onnx")[1] == ["same", "b", "a", "c"]
    got = onchip.compile(net, device)(x)
    for y, expected in zip(got, run_onnx(proto, x), strict=True):
        assert y.tobytes() == expected.tobytes()


def test_an_output_listed_twice_is_one_value(tmp_path):
    net = read(tmp_path, model([op("Relu", "x"), op("Identity", "x", "z")], outputs=("y", "z", "y", "z")))
    assert net.outputs == ("y", "z", "y", "z")
    x = numbers(2, 4)
    assert [y.tobytes() for y in onchip.compile(net, "cpu")(x)] == 2 * [x.clip(0).tobytes(), x.tobytes()]


def test_an_input_that_is_an_output_keeps_its_name(tmp_path):
    net = read(tmp_path, model([op("Relu", "x")], outputs=("x", "y")))
    assert net.outputs == ("x", "y")
    assert len(net.nodes) == 1


def test_a_layer_that_has_an_outputs_name_gets_another(tmp_path):
    net = read(tmp_path, model([op("Relu", "x", "h", "y"), op("Sigmoid", "h", "y", "h")]))
    assert [(node.name, node.layer.kind) for node in net.nodes] == [("y_2", "ReLU"), ("y", "Sigmoid")]


def test_repeated_names_are_numbered():
    nodes = (Node("r", ReLU(), ("x",)), Node("s", ReLU(), ("r",)), Node("t", ReLU(), ("s",)))
    net = name_values(Network(X, nodes, ("s", "t", "x"), {}), {"x": "mask"}, ["mask", "mask", "mask"])
    assert (list(net.inputs), net.outputs) == (["mask"], ("mask_2", "mask_3", "mask"))
    swapped = name_values(Network(X, nodes, ("s", "t"), {}), {}, ["t", "s"])
    assert [(node.name, node.inputs) for node in swapped.nodes] == [("r", ("x",)), ("t", ("r",)), ("s", ("t",))]
    copied = name_values(Network(X, nodes[:1], ("r", "r", "r"), {}), {}, ["a", "b", "b"])
    assert (copied.outputs, copied.by_name["b"].layer) == (("a", "b", "b"), Identity())


def test_saving_renames_a_weight_rather_than_an_output(tmp_path):
    nodes = (Node("w", Linear(), ("x",), {"weight": "w"}),)
    net = Network(X, nodes, ("w",), {"w": numbers(3, 4)})
    onchip.save(net, tmp_path / "net.onnx")
    assert saved_names(tmp_path / "net.onnx") == (["x"], ["w"])
    assert list(onchip.load(tmp_path / "net.onnx").weights) == ["w_2"]
    assert np.allclose(run_onnx(tmp_path / "net.onnx", x := numbers(2, 4))[0], x @ net.weights["w"].T)
