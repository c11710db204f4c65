"""Devices by name, on a machine with two fake GPUs."""

import pytest

from onchip.errors import DeviceError
from onchip.network.build import mlp
from onchip.plan.device import KNOWN
from onchip.plan.kernel import Job
from onchip.runtime.cuda import devices
from onchip.runtime.placement import device_name, may_use_gpu, plan_and_reason
from onchip.runtime.run_job import ranks_for


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch):
    monkeypatch.setattr(devices, "probe", lambda: ([KNOWN["h200"]] * 2, ""))


@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("gpu", 0), ("GPU", 0), ("cuda:1", 1), ("gpu:1", 1)])
def test_gpu_means_cuda(name, number):
    assert device_name(name) == name.lower().replace("gpu", "cuda")
    assert may_use_gpu(name, None)
    assert plan_and_reason(mlp(8, 16, 4), name)[1] == f"cuda:{number}"


def test_one_gpu_is_one_rank():
    for name in ("gpu:1", "CUDA:1"):
        assert ranks_for(mlp(8, 16, 4), name, Job()) == (1, "cuda:1 is one GPU")


@pytest.mark.parametrize("name", ["gpu:2", "gpu:x", "gpu1", "npu"])
def test_no_such_device(name):
    with pytest.raises(DeviceError):
        plan_and_reason(mlp(8, 16, 4), name)


def test_without_a_gpu(monkeypatch, cli):
    monkeypatch.setattr(devices, "probe", lambda: ([], "there is no NVIDIA driver on this machine"))
    ran = cli("plan", "decode", "--device", "gpu:1")
    assert ran.code == 2
    assert "device 'cuda:1' is not available" in ran.err
