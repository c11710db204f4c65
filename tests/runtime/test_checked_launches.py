"""Debug mode: the kernel that failed is named, whoever launches it. A fake driver in Python: no GPU needed."""

import gc
import threading

import numpy as np
import pytest

import onchip
from checks import random_mlp, rows
from fake_cuda import FakeDriver, fake_gpu
from onchip.errors import KernelError
from onchip.kernels.cuda.common.program import LaunchConfig, Program
from onchip.ladders.decode_cuda import LADDER
from onchip.ladders.device import DeviceRows
from onchip.network.build import mlp
from onchip.plan.device import H200
from onchip.runtime import scan as scan_module
from onchip.runtime.cuda import devices as cuda_devices
from onchip.runtime.cuda import driver as driver_module
from onchip.runtime.cuda import scan as gpu_scan
from onchip.runtime.cuda.checked_launches import check_every_launch
from onchip.runtime.engine import compile
from onchip.train.loop import fit
from onchip.workloads import decode

MISALIGNED = 716
SEPARATE = next(rung for rung in LADDER.rungs if rung.name == "separate")()


class Failing(FakeDriver):
    """The n-th kernel launched fails: whatever waits for the GPU afterwards sees it."""

    def __init__(self) -> None:
        super().__init__(lambda kernel: 0)
        self.ran: list[str] = []
        self.fails_at = 0  # the launch that fails, from 1; 0: none
        self.run = self._run

    def _run(self, launched):
        self.ran.append(launched.kernel)
        if len(self.ran) == self.fails_at:
            waits = "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"
            self.answers.update(dict.fromkeys((*waits, "cuMemcpyDtoHAsync"), MISALIGNED))


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(driver_module, "first_fault", [])
    monkeypatch.setattr(cuda_devices, "probe", lambda: ([H200], ""))
    return Failing()


@pytest.fixture
def gpu(monkeypatch, driver):
    monkeypatch.setattr(scan_module, "find_device", lambda device, threads: (None, None, "cuda:0"))
    monkeypatch.setattr("onchip.ladders.device.calls_per_sample", lambda ms: 3)  # not by the clock
    monkeypatch.setattr("onchip.train.training_run.REPORT_SECONDS", 1e9)
    yield fake_gpu(monkeypatch, driver)
    gpu_scan.bound_scan.cache_clear()


def run_engine():
    engine, x = compile(random_mlp(2000, 2000, 2000, 4), device="cuda"), rows(3, 2000)
    for _ in range(3):  # the same arrays: unchecked, the second call builds a graph
        engine(x)


def train():
    fit(mlp(784, 320, 160, 10), rows(900, 784), np.zeros(900, np.int64), batch_size=300, epochs=2, device="cuda")


def scan():
    onchip.scan(np.ones(100_000, np.float32), device="cuda")


def climb():
    run = SEPARATE.prepare(decode.network(), DeviceRows(decode.inputs(50)), 1)
    run()
    run.sample_ms()


WORK = {work.__name__: work for work in (run_engine, train, scan, climb)}


@pytest.mark.parametrize("work", WORK)
def test_every_kernel_is_named_where_it_fails(gpu, driver, monkeypatch, work):
    check_every_launch()
    WORK[work]()
    names = list(driver.ran)
    assert len(set(names)) > 1
    assert not driver.replays  # of graphs
    for fails_at in sorted({1, 2, len(names) // 2, len(names)}):
        monkeypatch.setattr(driver_module, "first_fault", [])
        driver.ran.clear()
        driver.fails_at = fails_at
        with pytest.raises(KernelError) as error:
            WORK[work]()
        assert error.value.what == f"kernel {names[fails_at - 1]} failed on the GPU: misaligned address"
        assert "compute-sanitizer" in error.value.hint
        assert len(driver.ran) == fails_at  # nothing is launched after it
        driver.answers.clear()


@pytest.mark.parametrize("work", WORK)
def test_without_debug_no_kernel_is_waited_for(gpu, driver, work):
    WORK[work]()
    driver.ran.clear()
    driver.fails_at = 1
    with pytest.raises(KernelError, match="kernel unknown failed") as error:
        WORK[work]()
    assert "--debug" in error.value.hint


@pytest.mark.parametrize("work", [
    lambda: compile(random_mlp(6, 5, 4), device="cuda", debug=True)(rows(3, 6)),
    lambda: fit(mlp(40, 30, 3), rows(90, 40), np.zeros(90, np.int64), epochs=1, device="cuda", debug=True),
])  # fmt: skip
def test_debug_of_compile_and_fit(gpu, driver, work):
    driver.fails_at = 1
    with pytest.raises(KernelError, match="misaligned address") as error:
        work()
    assert f"kernel {driver.ran[0]} failed" in error.value.what


@pytest.fixture
def launch(gpu, tmp_path):
    """launch(stream) launches a kernel, checked."""
    check_every_launch()
    call = gpu.prepare(gpu.load(Program(tmp_path / "k.cu", "k")), LaunchConfig((1, 1, 1), (32, 1, 1), 0), [0])
    return call.launch


def test_a_stream_that_is_captured_is_not_waited_for(gpu, driver, launch):
    stream = gpu.new_stream()
    driver.cuStreamBeginCapture(stream, 0)
    driver.calls.clear()
    launch(stream)
    assert driver.calls == ["cuLaunchKernelEx"]
    driver.cuStreamEndCapture(stream)
    launch(stream)
    assert driver.calls == ["cuLaunchKernelEx"] * 2 + ["cuStreamSynchronize"]


def test_what_would_be_captured_is_launched_each_time(gpu, driver, launch):
    graph = gpu.capture(launch)
    assert not driver.launches
    graph.launch()
    graph.launch(gpu.stream)
    assert [launched.stream for launched in driver.launches] == [gpu.stream] * 2
    del graph
    gc.collect()
    assert "cuGraphExecDestroy" not in driver.calls


def test_one_kernel_at_a_time(gpu, driver, launch, monkeypatch):
    """While a thread waits for its kernel, no other thread launches one: the wait would end with that one's fault."""
    launched, other = threading.Event(), threading.Thread(target=launch, args=(gpu.stream,))
    synchronise = driver.cuStreamSynchronize

    def wait(stream):
        if not other.ident:
            driver.run = lambda _: launched.set()
            other.start()
            assert not launched.wait(0.1)
        return synchronise(stream)

    monkeypatch.setattr(driver, "cuStreamSynchronize", wait, raising=False)
    launch(gpu.stream)
    other.join()
    assert launched.is_set()
