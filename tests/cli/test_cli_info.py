"""onchip info: what a network is, and what is refused."""

import json

import numpy as np
import pytest

import onchip
from every_network import every_network
from onchip.runtime.info import describe_network

onnx = pytest.importorskip("onnx")
helper, FLOAT = onnx.helper, onnx.TensorProto.FLOAT


def save_onnx(path, nodes, inputs, outputs):
    def infos(ends):
        return [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in ends.items()]

    graph = helper.make_graph(nodes, "net", infos(inputs), infos(outputs))
    onnx.save(helper.make_model(graph, producer_name="a test"), path)
    return path


def test_a_workload(cli):
    ran = cli("info", "decode")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert "input       x float32[B, 72]" in lines
    assert "layers      5: Linear x3, ReLU x2" in lines
    assert "8,960" in ran.out
    assert all(line.endswith("nothing") for line in lines[-2:])
    assert ran.err == ""


def test_json_of_a_file(cli, tmp_path):
    onchip.save(onchip.mlp(6, 5, 3), tmp_path / "net.onnx")
    ran = cli("info", tmp_path / "net.onnx", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["file"]["operators"] == {"Gemm": 2, "Relu": 1}
    network = found["network"]
    assert (network["parameters"], network["weight_bytes"]) == (53, 212)
    assert network["layers"] == {"Linear": 2, "ReLU": 1}
    assert [device["refused"] for device in network["devices"]] == [{}, {}]
    assert found["refused"] is None


def test_nothing_is_computed(cli, monkeypatch):
    monkeypatch.setattr("onchip.network.recipe.evaluate", lambda *given: pytest.fail("a weight was computed"))
    assert cli("info", "sentiment").code == 0


def test_a_file_that_does_not_load_is_described_all_the_same(cli, tmp_path):
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("GridSample", ["a", "g"], ["y"], "sampler")]
    inputs, outputs = {"x": ("N", 3, "H", 8), "g": ("N", 4, 4, 2)}, {"y": ("N", 3, 4, 4)}
    path = save_onnx(tmp_path / "net.onnx", nodes, inputs, outputs)
    ran = cli("info", path)
    assert ran.code == 1
    assert "operators  2: Relu, GridSample" in ran.out
    assert "input      x float32[N, 3, H, 8]" in ran.out
    assert "a test" in ran.out.splitlines()[0]
    assert "GridSample (1 node, 'sampler')" in ran.err
    assert json.loads(cli("info", path, "--json").out)["network"] is None


def test_open_sizes(cli, tmp_path):
    path = save_onnx(tmp_path / "net.onnx", [helper.make_node("Relu", ["x"], ["y"])], *[{n: ("N", "T")} for n in "xy"])
    ran = cli("info", path)
    assert ran.code == 1
    assert "--shape" in ran.err
    ran = cli("info", path, "--shape", "x=B,7")
    assert ran.code == 0, ran.err
    assert "7 flop/row" in ran.out


def test_layers_that_a_device_refuses(cli, monkeypatch):
    monkeypatch.setattr("onchip.kernels.cuda.KERNELS", ())
    monkeypatch.setattr("onchip.runtime.info.cuda_devices", list)
    ran = cli("info", "decode", "--json")
    assert ran.code == 1
    (cpu, gpu) = json.loads(ran.out)["network"]["devices"]
    assert (cpu["kernels"], cpu["refused"]) == (1, {})
    assert list(gpu["refused"]) == ["fc1", "relu1", "fc2", "relu2", "fc3"]


def test_memory_is_that_of_the_plan(cli):
    """mlp_fused on a CPU keeps what is between layers in cache: a row is x and y."""
    (cpu, _) = json.loads(cli("info", "decode", "--json").out)["network"]["devices"]
    assert cpu["row_bytes"] == (72 + 4) * np.dtype(np.float32).itemsize


@pytest.mark.parametrize("content", [b"", b"no protobuf", bytes(300)])
def test_damaged_files(cli, tmp_path, content):
    (tmp_path / "net.onnx").write_bytes(content)
    ran = cli("info", tmp_path / "net.onnx")
    assert ran.code == 2
    assert ran.out == ""
    assert "net.onnx" in ran.err


@pytest.mark.parametrize("name", sorted(every_network())[:6])
def test_written_networks(cli, tmp_path, name):
    onchip.save(every_network()[name].net, tmp_path / "net.onnx")
    ran = cli("info", tmp_path / "net.onnx")
    assert ran.code == 0, ran.err


def test_memory_counts_values_between_kernels(monkeypatch):
    monkeypatch.setattr("onchip.runtime.info.cuda_devices", list)
    (_, found) = describe_network(onchip.load("digits"), 64).devices  # an H200
    assert found.kernels > 1
    assert found.row_bytes == (784 + 10) * 4 + (320 + 160) * 4
