"""A GPU on a fake driver: launches, memory, error messages."""

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest

from checks import rows
from fake_cuda import FREE_BYTES, FakeDriver, fake_gpu
from onchip.errors import DeviceError, KernelError
from onchip.kernels.cuda.common.arguments import Input, Int64, Output, Scratch, UInt32, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, LaunchConfig, Program, Steps
from onchip.runtime.cuda import driver as driver_module
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.launches import Call


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(driver_module, "first_fault", [])
    return FakeDriver()


@pytest.fixture
def gpu(monkeypatch, driver):
    return fake_gpu(monkeypatch, driver)


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path / "k.cu", "k<3>")


class Pointers(CStruct):
    source, c_name = Path("pointers.cu"), "Pointers"
    _fields_ = (("each", ctypes.c_void_p * 5), ("rest", ctypes.c_uint32))


# -- launches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_launch_says_what_it_was_given(gpu, driver, program, overlaps):
    function = gpu.load(program, 1000)
    config = LaunchConfig((5, 2, 1), (384, 1, 3), 777, overlaps=overlaps)
    gpu.launch(function, config, [2**63 + 5, ctypes.c_int64(-3), ctypes.c_float(1.5), ctypes.c_uint64(9)], 4242)
    (launched,) = driver.launches
    assert (launched.kernel, launched.grid, launched.block) == ("k<3>", (5, 2, 1), (384, 1, 3))
    assert (launched.shared_bytes, launched.stream, launched.overlaps) == (777, 4242, overlaps)
    assert launched.words[0] == 2**63 + 5
    assert launched.words[1] == 2**64 - 3
    assert launched.words[2] & 0xFFFFFFFF == 0x3FC00000  # 1.5 as a float
    assert launched.words[3] == 9


def test_a_written_down_launch_takes_new_values_in_place(gpu, driver, program):
    call = Call(gpu, gpu.load(program), LaunchConfig((1, 1, 1), (32, 1, 1), 0), [0, 0, 0, ctypes.c_int64(5)])
    for value in (16, 32):
        call.arguments[1].value = value
        call.launch(value + 1)
    assert [(launched.words, launched.stream) for launched in driver.launches] == [
        ((0, 16, 0, 5), 17),
        ((0, 32, 0, 5), 33),
    ]


def test_a_thread_without_a_context_launches_all_the_same_and_is_left_as_it_was(gpu, driver, program):
    function = gpu.load(program)
    driver.contexts.stack.clear()
    gpu.launch(function, LaunchConfig((1, 1, 1), (32, 1, 1), 0), [1, 2, 3, 4])
    assert len(driver.launches) == 1
    assert driver.contexts.stack == []


@pytest.mark.parametrize("stream", [0, 4242, None])
def test_a_graph_is_launched_where_it_is_told_in_any_thread(gpu, driver, program, stream):
    function = gpu.load(program)
    config = LaunchConfig((1, 1, 1), (32, 1, 1), 0)
    graph = gpu.capture(lambda recording: gpu.launch(function, config, [1, 2, 3, 4], recording))
    ran = []
    driver.run = ran.append
    driver.contexts.stack.clear()  # as in a new thread
    graph.launch(stream)
    assert driver.contexts.stack == []
    assert [on for _, on in driver.replays] == [gpu.stream if stream is None else stream]
    assert [launched.words for launched in ran] == [(1, 2, 3, 4)]
    driver.answers["cuGraphLaunch"] = 1
    with pytest.raises(KernelError, match="CUDA failed while launching a graph"):
        graph.launch(stream)
    del graph
    assert driver.calls[-1] == "cuGraphExecDestroy"


def test_handles_of_streams_are_bounded(gpu, driver, program, monkeypatch):
    monkeypatch.setattr("onchip.runtime.cuda.launches.MAX_STREAMS", 5)
    graph = gpu.capture(lambda recording: None)
    for stream in range(20):
        graph.launch(stream)
        assert len(gpu.streams) <= 5
    assert [on for _, on in driver.replays] == list(range(20))


def test_the_gpus_own_stream_is_where_work_goes_by_default(gpu, driver, program):
    gpu.launch(gpu.load(program), LaunchConfig((1, 1, 1), (32, 1, 1), 0), [1, 2, 3, 4])
    assert driver.launches[0].stream == gpu.stream


def test_a_program_is_loaded_once_and_may_ask_for_more_shared_memory(gpu, driver, program):
    function = gpu.load(program, 100)
    assert gpu.load(program, 50) is function
    assert (driver.calls.count("cuModuleLoadData"), driver.calls.count("cuFuncSetAttribute")) == (1, 1)
    gpu.load(Program(program.source, program.name_expression), 200)
    assert (driver.calls.count("cuModuleLoadData"), driver.calls.count("cuFuncSetAttribute")) == (1, 2)
    assert (function.name, function.registers, function.spill_bytes) == ("k<3>", 40, 0)
    assert (function.static_shared_bytes, function.blocks_per_sm(128, 0)) == (128, 2)


def test_threads_that_ask_for_shared_memory_leave_the_most_that_was_asked_for(gpu, driver, program):
    function, limits, others = gpu.load(program), [], []

    def slow(handle, attribute, value):
        if not others:  # meanwhile another thread requests more
            others.append(threading.Thread(target=function.allow_shared, args=(90_000,)))
            others[0].start()
            others[0].join(0.1)
        limits.append(value)
        return (0,)

    driver.cuFuncSetAttribute = slow
    function.allow_shared(60_000)
    others[0].join()
    assert limits == [60_000, 90_000]


def test_pointers_in_a_struct_are_those_of_the_call(gpu, driver, program, monkeypatch):
    sizes = 1, ctypes.sizeof(Pointers), 1, 1
    monkeypatch.setattr(driver, "argument", lambda kernel, number, at: ctypes.string_at(at, sizes[number]))
    pointers = Input(1), Weight("w"), Scratch(24), Output(0), Int64(-1)
    told = Pointers.of(each=pointers, rest=int.from_bytes(b"abcd", "little"))
    config = LaunchConfig((1, 1, 1), (32, 1, 1), 0)
    launch = KernelLaunch(program, config, (Input(0), told, UInt32(5), Int64(6)), Budget(32))
    with gpu:
        weight = gpu.upload(rows(2, 3))
        bound = BoundSteps(gpu, Steps((launch,), 100), {"w": weight})
        for x, y, scratch in ((160, 320, 4800), (16, 32, 48)):
            bound.enqueue([1, x], [y], scratch, 7)
            words = (x, weight.pointer, scratch + 24, y, 2**64 - 1)
            expected = b"".join(word.to_bytes(8, "little") for word in words) + b"abcd"
            assert driver.launches[-1].words[1] == expected.ljust(ctypes.sizeof(Pointers), b"\0")


# -- memory --------------------------------------------------------------------------------------------------


def test_memory_comes_back_when_it_is_collected(gpu, driver):
    pooled, kept = gpu.allocate(100), gpu.reserve(50)
    assert len(driver.memory) == 2
    del pooled
    assert driver.calls[-1] == "cuMemFreeAsync"
    del kept
    assert driver.calls[-1] == "cuMemFree"
    assert not driver.memory


def test_up_and_down(gpu):
    x = rows(7, 5)
    buffer = gpu.upload(x.T)  # not row-major: copied first
    assert buffer.nbytes == x.nbytes
    assert np.array_equal(gpu.download(buffer, np.empty((5, 7), np.float32)), x.T)
    assert gpu.upload(np.empty((0, 3))).nbytes == 0


def test_out_of_memory_says_how_much_and_what_fits(gpu, driver):
    driver.max_bytes = 1000
    with pytest.raises(DeviceError) as error:
        gpu.allocate(5000, row_bytes=300)
    assert error.value.what == "out of memory on NVIDIA H200"
    assert error.value.got == f"5,000 B requested, {FREE_BYTES:,} of {2 * FREE_BYTES:,} B free"
    assert error.value.hint == f"at most {FREE_BYTES // 300} rows at a time: each needs 300 B"


# -- error messages ------------------------------------------------------------------------------------------


def test_a_fault_is_told_once_and_then_the_context_is_lost(gpu, driver):
    driver.answers["cuStreamSynchronize"] = 700
    with pytest.raises(KernelError) as first:
        gpu.synchronise()
    assert "illegal address" in first.value.what
    assert "--debug" in first.value.hint
    with pytest.raises(KernelError) as later:
        gpu.synchronise()
    assert "context is lost" in later.value.what
    assert first.value.what in later.value.got


def test_other_errors_name_the_call(gpu, driver, program):
    driver.answers["cuStreamSynchronize"] = 999
    with pytest.raises(KernelError, match="CUDA failed while waiting for the GPU"):
        gpu.synchronise()
    driver.answers["cuLaunchKernelEx"] = 1
    with pytest.raises(KernelError, match="CUDA failed while launching k<3>"):
        gpu.launch(gpu.load(program), LaunchConfig((1, 1, 1), (2000, 1, 1), 0), [1, 2, 3, 4])
    driver.answers["cuEventCreate"] = 2
    with pytest.raises(DeviceError, match="out of GPU memory while calling"):
        gpu.event()
