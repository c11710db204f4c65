"""device="auto": the device with the lower estimate, and the reason. A fake GPU is enough."""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.errors import DeviceError, InputError, PlanError
from onchip.kernels.cuda.mlp.fused import MlpFusedKernel
from onchip.network.build import sequential
from onchip.network.layers import Conv2d, Linear, MaxPool2d, ReLU, Reshape, Softmax
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.device import H200, KNOWN
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.runtime import placement
from onchip.runtime.cuda import devices
from onchip.runtime.engine import Engine, compile
from onchip.runtime.placement import kernels_for, place, plan_and_reason
from onchip.workloads import decode, faces
from takers import CPU

HOST = dataclasses.replace(CPU, call_us=4.0)
SMALL = random_mlp(8, 16, 3)


def images():
    layers = [
        ("c1", Conv2d(pads=(1, 1, 1, 1))), ("r1", ReLU()), ("p1", MaxPool2d((2, 2), (2, 2))), ("c2", Conv2d()),
        ("r2", ReLU()), ("flat", Reshape((32 * 12 * 12,))), ("l", Linear()),
    ]  # fmt: skip
    weights = {"c1.weight": rows(16, 3, 3, 3), "c2.weight": rows(32, 16, 3, 3), "l.weight": rows(10, 32 * 12 * 12)}
    return sequential(TensorType(("B", 3, 28, 28)), layers, {name: 0.1 * weight for name, weight in weights.items()})


@pytest.fixture
def gpu_is_here(monkeypatch):
    """An H200 and two cores, as data: enough for planning."""
    monkeypatch.setattr(devices, "probe", lambda: ([H200], ""))
    monkeypatch.setattr(placement, "this_cpu", lambda: HOST)


@pytest.fixture
def backends(monkeypatch, gpu_is_here):
    """The names of the backends that were created."""
    made = []
    monkeypatch.setattr(placement, "_backend", lambda name, threads=None: made.append(name))
    return made


def said(net, **job):
    return plan_and_reason(net, "auto", Job(**job))[1]


@pytest.mark.parametrize(
    ("net", "B", "device"),
    [
        (SMALL, 1, "cpu"), (SMALL, 64, "cpu"), (SMALL, 1024, "cpu"), (SMALL, 1_000_000, "cuda:0"),
        (decode.network(), 1, "cpu"), (decode.network(), 64, "cpu"), (decode.network(), 1024, "cuda:0"),
        (decode.network(), 1_000_000, "cuda:0"), (images(), 64, "cuda:0"), (images(), 1_000_000, "cuda:0"),
    ],
)  # fmt: skip
def test_few_rows_of_small_networks_stay_on_the_cpu(backends, net, B, device):
    plan, _, chosen = place(net, "auto", Job(batch=B), None)
    name, _, reason = chosen.partition(" ")
    assert name == device
    assert backends == [device]  # and no backend for the other one
    assert plan.device is (H200 if device == "cuda:0" else HOST)
    assert f"{B:,} row" in reason
    assert ("on cuda:0)" if device == "cpu" else "on the CPU)") in reason
    assert "\n" not in chosen


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0"])
def test_a_device_that_is_asked_for_is_not_questioned(backends, device):
    for B in (1, 1_000_000):
        assert place(SMALL, device, Job(batch=B), None)[2] == ("cpu" if device == "cpu" else "cuda:0")


def test_without_a_gpu_the_reason_is_that(monkeypatch):
    monkeypatch.setattr(devices, "probe", lambda: ([], "the NVIDIA driver sees no GPU"))
    assert said(SMALL) == "cpu (auto: the NVIDIA driver sees no GPU)"
    with pytest.raises(DeviceError, match="does not compute in fp16"):
        said(SMALL, precision="fp16")


def test_threads_mean_the_cpu(backends):
    assert place(SMALL, "auto", Job(batch=10**6), 2)[2] == "cpu (auto: threads=2 selects it)"
    with pytest.raises(InputError, match="only a CPU has threads"):
        place(SMALL, "cuda", Job(), 2)


def test_a_layer_that_the_gpu_does_not_take_is_the_reason(monkeypatch, gpu_is_here):
    everything = kernels_for
    monkeypatch.setattr(placement, "kernels_for", lambda d: [MlpFusedKernel()] if d is H200 else everything(d))
    net = sequential(TensorType(("B", 3, 8)), [("s", Softmax(axis=1))], {})
    with pytest.raises(PlanError) as refused:
        plan_and_reason(net, "cuda", Job())
    assert said(net, batch=10**6) == f"cpu (auto: {refused.value.what})"
    with pytest.raises(PlanError):  # the CPU has another precision
        said(net, precision="fp16")


def test_a_layer_that_only_the_gpu_takes_is_the_reason(monkeypatch, gpu_is_here):
    everything = kernels_for
    monkeypatch.setattr(placement, "kernels_for", lambda d: everything(d) if d is H200 else [])
    assert said(SMALL, batch=1).startswith("cuda:0 (auto: on the CPU, ")


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_a_precision_that_the_cpu_has_not_is_the_reason(monkeypatch, gpu_is_here, precision):
    monkeypatch.setattr(placement, "this_cpu", None)  # never called
    assert said(SMALL, precision=precision, batch=1) == f"cuda:0 (auto: the CPU does not compute in {precision})"


def test_a_gpu_that_no_cpu_beats_is_chosen_without_loading_the_cpus_kernels():
    script = (
        "import sys\n"
        "from onchip.plan.device import H200\n"
        "from onchip.runtime.cuda import devices\n"
        "from onchip.runtime.placement import plan_and_reason\n"
        "from onchip.workloads import faces\n"
        "devices.probe = lambda: ([H200], '')\n"
        "print(plan_and_reason(faces.network())[1])\n"
        "print([name for name in sys.modules if name == 'numba' or name.startswith('onchip.kernels.cpu.')])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    ran = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    reason, loaded = ran.stdout.splitlines()
    assert reason.startswith("cuda:0 (auto: 1,024 rows take about ")
    assert " at least " in reason
    assert loaded == "[]"


def test_training_is_where_a_kernel_trains(gpu_is_here):
    """One core finishes a step of few rows before a GPU has started; for digits, a GPU is faster."""
    small = training_step(SMALL, TrainingStep("mse"))
    assert said(small, batch=16).startswith("cpu (auto: 16 rows take about ")
    digits = training_step(random_mlp(784, 320, 160, 10), TrainingStep("cross_entropy"))
    assert said(digits, batch=64).startswith("cuda:0 (auto: 64 rows ")
    assert "the CPU does not compute in tf32" in said(small, precision="tf32")


def test_a_job_in_small_calls_is_priced_by_the_call(backends):
    job = Job(batch=1_000_000)
    assert place(decode.network(), "auto", job, None)[2].startswith("cuda:0")
    assert place(decode.network(), "auto", job, None, call_rows=7)[2].startswith("cpu (auto: 7 rows take")
    assert place(decode.network(), "auto", job, None, 1 << 40)[2] == place(decode.network(), "auto", job, None)[2]


def test_the_second_gpu_is_never_chosen_but_can_be_asked_for(monkeypatch, backends):
    monkeypatch.setattr(devices, "probe", lambda: ([H200, H200], ""))
    assert place(decode.network(), "auto", Job(batch=10**6), None)[2].startswith("cuda:0 ")
    assert place(decode.network(), "cuda:1", Job(), None)[2] == "cuda:1"
    with pytest.raises(DeviceError, match="no such GPU"):
        place(decode.network(), "cuda:2", Job(), None)


# -- reasons ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("B", [1, 1_000_000])
def test_plan_says_the_device_and_why(cli, gpu_is_here, B):
    ran = cli("plan", "decode", "--batch", B)
    reason = said(decode.network(), batch=B)
    assert ran.code == 0
    assert ran.err == f"device: {reason}\n"
    assert json.loads(cli("plan", "decode", "--batch", B, "--json").out)["chosen"] == reason


@pytest.mark.parametrize("device", [*KNOWN, "cuda", "cpu"])
def test_plan_gives_no_reason_for_a_device_that_was_asked_for(cli, gpu_is_here, device):
    assert cli("plan", "decode", "--device", device).err == ""


def test_run_says_the_device_and_why(cli, gpu_is_here):
    reason = said(decode.network(), batch=5)
    assert reason.startswith("cpu (auto: 5 rows take")
    assert f"device: {reason}\n" in cli("run", "decode", "--count", "5").err
    assert json.loads(cli("run", "decode", "--count", "5", "--json").out)["device"] == reason
    ran = cli("run", "decode", "--count", 20_000, "--batch", "3")
    assert "device: cpu (auto: 3 rows take" in ran.err


def test_devices_says_what_auto_goes_by(cli, monkeypatch, gpu_is_here):
    monkeypatch.setattr("onchip.runtime.cuda.devices.driver_version", lambda: "13.0")
    ran = cli("devices")
    assert "auto: the device estimated faster" in ran.err
    gpu = json.loads(cli("devices", "--json").out)["here"][1]
    assert (gpu["call_us"], gpu["bus_bytes_per_s"]) == (H200.call_us, H200.bus_bandwidth)


def test_an_engine_says_it(gpu_is_here):
    engine = compile(SMALL, batch_hint=64)
    assert engine.chosen == said(SMALL, batch=64)
    assert engine.chosen in repr(engine)
    assert engine(rows(7, 8)).shape == (7, 3)


# -- GPU arrays, where auto chose the CPU ----------------------------------------------------------------------


class Shown:
    """An array with `__cuda_array_interface__`."""

    @property
    def __cuda_array_interface__(self):
        return {}


class Handed:
    """An array with `__dlpack__`; torch has both interfaces, but only this one for tensors with a gradient."""

    def __init__(self, device):
        self.device = device

    def __dlpack_device__(self):
        return self.device, 0

    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("it requires a gradient")


@pytest.mark.parametrize("x", [Shown(), Handed(2), Handed(13)])
def test_arrays_of_a_gpu_are_refused_with_a_way_out(gpu_is_here, x):
    engine = compile(SMALL, batch_hint=64)
    with pytest.raises(InputError, match="the rows are on a GPU") as caught:
        engine(x)
    assert type(x).__name__ in caught.value.got
    assert engine.chosen in caught.value.expected
    assert "device='cuda'" in caught.value.hint


def test_arrays_of_the_host_that_are_not_numpys_are_refused_as_before():
    with pytest.raises(InputError, match="not an array"):
        compile(SMALL, "cpu")(Handed(1))


# -- on a GPU --------------------------------------------------------------------------------------------------

CASES = [
    (SMALL, 1, "cpu"), (SMALL, 7, "cpu"), (decode.network(), 7, "cpu"),
    (random_mlp(784, 320, 160, 10), 12_800, "cuda:0"), (decode.network(), 1_000_000, "cuda:0"),
    (images(), 4096, "cuda:0"), (faces.network(), 64, "cuda:0"),
]  # fmt: skip
# Where their times are close, which depends on the CPU, either is accepted.
NEAR = [(SMALL, 1024, ""), (decode.network(), 1024, ""), (decode.network(), 25_600, ""), (images(), 7, "")]
LONG_S = 0.2  # of a call: a few samples are enough then


def median_s(engines: list[Engine], x: np.ndarray) -> list[float]:
    """Interleaved times of a call on each."""
    for engine in engines:
        for _ in range(3):
            engine(x)
    times: list[list[float]] = [[] for _ in engines]
    while len(times[0]) < 31 and sum(map(sum, times)) < LONG_S * 31:
        for engine, taken in zip(engines, times, strict=True):
            engine(x)  # untimed: the other engine's threads may still spin
            started = time.perf_counter()
            engine(x)
            taken.append(time.perf_counter() - started)
    return list(map(statistics.median, times))


@pytest.mark.gpu
@pytest.mark.parametrize(("net", "B", "expected"), [*CASES, *NEAR])
@pytest.mark.usefixtures("measured_rates")
def test_the_chosen_device_is_not_much_slower_than_the_other_one(net, B, expected):
    chosen = compile(net, batch_hint=B).chosen
    x = rows(B, *net.input.row_shape)
    here, there = median_s([compile(net, device, batch_hint=B) for device in ("cpu", "cuda")], x)
    measured = f"{chosen}; measured {here * 1e6:,.1f} µs on the CPU, {there * 1e6:,.1f} µs on the GPU"
    print(measured)
    assert chosen.startswith(expected), measured
    mine, other = (here, there) if chosen.startswith("cpu") else (there, here)
    assert mine <= (1.5 if expected else 2.5) * other, measured


@pytest.mark.gpu
def test_torch_tensors_of_a_gpu_and_an_engine_that_auto_put_on_the_cpu(torch):
    x = torch.ones(4, 8, device="cuda", requires_grad=True)
    with pytest.raises(InputError, match="the rows are on a GPU"):
        compile(SMALL, batch_hint=1)(x)
    with pytest.raises(InputError, match="the rows are on a GPU"):
        compile(SMALL, "cpu")(x.detach())
    assert compile(SMALL, "cuda")(x.detach()).shape == (4, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_a_precision_of_the_gpu_alone(precision):
    engine = compile(SMALL, precision=precision, batch_hint=1)
    assert engine.chosen == f"cuda:0 (auto: the CPU does not compute in {precision})"
    assert engine(rows(3, 8)).shape == (3, 3)
