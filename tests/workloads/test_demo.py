"""The demo's peers: each on the printed device; PyTorch on the GPU if onchip runs there."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from checks import rows
from onchip.kernels import reference
from onchip.network.build import mlp
from onchip.runtime.engine import compile
from onchip.workloads import demo


class Tensor:
    """A tensor with a device: it works only with tensors of that device, and converts to NumPy only on the CPU."""

    def __init__(self, array, device="cpu"):
        self.array, self.device = array, device

    def to(self, device):
        return Tensor(self.array, device)

    def cpu(self):
        return self.to("cpu")

    def numpy(self):
        assert self.device == "cpu", f"a tensor on {self.device} is no NumPy array"
        return self.array


@pytest.fixture
def torch(monkeypatch):
    """A stand-in for PyTorch; `torch.used` are the devices of its matmuls, `torch.has_gpu` can be set."""

    class Mode:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    def linear(x, weight, bias):
        assert x.device == weight.device == bias.device
        fake.used.append(x.device)
        return Tensor(x.array @ weight.array.T + bias.array, x.device)

    fake = SimpleNamespace(
        used=[], has_gpu=True, from_numpy=Tensor, inference_mode=Mode, set_num_threads=lambda n: None,
        relu_=lambda y: Tensor(np.maximum(y.array, 0), y.device),
        nn=SimpleNamespace(functional=SimpleNamespace(linear=linear)),
        cuda=SimpleNamespace(is_available=lambda: fake.has_gpu),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "device"),
    [("cuda:0", True, "cuda:0"), ("cuda:1", True, "cuda:1"), ("cuda:0", False, "cpu"), ("cpu", True, "cpu")],
)
def test_torch_runs_where_onchip_runs_if_it_can(torch, wanted, has_gpu, device):
    torch.has_gpu = has_gpu
    net, x = mlp(8, 16, 3), rows(5, 8)
    run, told = demo.torch_layers(net, wanted)
    np.testing.assert_allclose(run(x), reference.forward(net, x, "float64"), rtol=1e-4, atol=1e-6)
    assert told == device
    assert set(torch.used) == {device}


@pytest.mark.parametrize(("chosen", "device"), [("cuda:1 (auto: NVIDIA H200)", "cuda:1"), ("cpu", "cpu")])
def test_a_timing_names_its_device(torch, monkeypatch, chosen, device):
    monkeypatch.setattr(demo, "REPEATS", 1)
    engine = compile(mlp(8, 16, 3), device="cpu")
    engine.chosen = chosen
    timings = demo.time_rows(engine, rows(5, 8), rows=20)
    assert [(t.engine.partition(",")[0], t.device) for t in timings] == [
        ("onchip", device), ("NumPy", "cpu"), ("PyTorch", device),
    ]  # fmt: skip
    assert set(torch.used) == {device}
