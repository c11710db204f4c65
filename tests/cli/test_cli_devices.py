"""onchip devices: available devices, why there is no GPU, and devices for planning."""

import json

import pytest

from conftest import STATED_FLOPS
from onchip.plan.device import H200, KNOWN
from onchip.runtime import recording
from onchip.runtime.cpu.backend import core_count
from onchip.runtime.cuda import devices
from onchip.runtime.cuda.devices import cuda_devices, why_no_cuda


def test_table(cli):
    ran = cli("devices")
    assert ran.code == 0
    names = [line.split()[0] for line in ran.out.splitlines()[1:]]
    assert names == ["cpu", *(f"cuda:{i}" for i in range(len(cuda_devices()))), *KNOWN]
    if not cuda_devices():
        assert f"no GPU: {why_no_cuda()}" in ran.err


def test_json_and_measuring(spawn, monkeypatch, tmp_path):
    """In a separate process: this one has fixed rates."""
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    document = json.loads(spawn("devices", "--measure", "--json").communicate()[0])
    cpu = document["here"][0]
    assert cpu["flops"]["fp32"] != STATED_FLOPS * core_count()
    assert (cpu["kind"], cpu["units"]) == ("cpu", core_count())
    assert cpu["flops"]["fp32"] > 1e8
    assert cpu["bytes_per_s"] > 1e8
    assert [known["name"] for known in document["known"]] == list(KNOWN)
    assert (document["no_cuda"] is None) == bool(cuda_devices())


@pytest.mark.parametrize("clock", ["CUPTI 13.0", "CUDA events, one launch at a time: no CUPTI of CUDA 13"])
def test_the_clock_of_profiles(cli, monkeypatch, clock):
    for name, value in (("cuda_devices", [H200]), ("why_no_cuda", None), ("driver_version", "13.0")):
        monkeypatch.setattr(devices, name, lambda value=value: value)
    monkeypatch.setattr(recording, "clock_of_profiles", lambda: clock)
    assert f"onchip profile: times of kernels by {clock}\n" in cli("devices").err
    assert json.loads(cli("devices", "--json").out)["profile_clock"] == clock
