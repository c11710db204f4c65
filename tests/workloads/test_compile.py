"""onchip.compile accepts everything that onchip.load accepts."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import onchip
from onchip.errors import InputError


@pytest.fixture
def net():
    return onchip.mlp(4, 5, 3)


@pytest.mark.parametrize("suffix", [".onnx", ".safetensors"])
def test_a_file_by_its_path(tmp_path, net, suffix):
    path, x = tmp_path / f"net{suffix}", np.random.default_rng(0).standard_normal((3, 4), dtype=np.float32)
    onchip.save(net, path)
    expected = onchip.compile(net, "cpu")(x)
    for given in (path, str(path)):
        assert onchip.compile(given, device="cpu")(x).tobytes() == expected.tobytes()


def test_a_workload_by_its_name():
    assert onchip.compile("Decode", "cpu", batch_hint=64).plan.network.name == "decode"


def test_options_by_position_and_by_name(net):
    for engine in (
        onchip.compile(net, "cpu", "fp32", 1), onchip.compile(net, None, "cpu", "fp32", 1),
        onchip.compile(net, device="cpu", threads=1), onchip.compile(net, "cpu", threads=1),
    ):  # fmt: skip
        assert (engine.plan.device.kind, engine._backend.requested) == ("cpu", ("cpu", 1))
    with pytest.raises(TypeError, match="device"):
        onchip.compile(net, "cpu", device="cpu")
    with pytest.raises(TypeError, match="colour"):
        onchip.compile(net, colour="red")
    assert list(inspect.signature(onchip.compile).parameters)[:4] == ["model", "example", "device", "precision"]


def test_objects_that_are_not_models_are_refused(net):
    class Fitted:
        network_ = net

    with pytest.raises(InputError, match=r"not a network[\s\S]*its \.network_"):
        onchip.compile(Fitted())
    with pytest.raises(InputError, match="not a model"):
        onchip.compile(3)
    with pytest.raises(InputError, match="unknown model"):
        onchip.compile("decoed")


def test_a_module_and_its_example():
    torch = pytest.importorskip("torch")
    module, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), torch.randn(5, 4)
    expected = module(x).detach().numpy()
    for engine in (
        onchip.compile(module, x[:1], device="cpu"), onchip.compile(module, x[:1], "cpu"),
        onchip.compile(module, example=x[:1], device="cpu"),
    ):  # fmt: skip
        np.testing.assert_allclose(engine(x.numpy()), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="needs an example"):
        onchip.compile(module, "cpu")
