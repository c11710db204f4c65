"""Driver calls of engines, recorded by a fake driver in Python: no GPU needed."""

import gc
import pickle
import threading
import weakref

import numpy as np
import pytest

from checks import random_mlp, rows
from fake_cuda import Array, FakeDriver, fake_gpu, floats
from onchip.errors import DeviceError, InputError, KernelError, ShapeError
from onchip.kernels.cuda.mlp.fused import MlpFusedKernel
from onchip.network.graph import Network
from onchip.network.types import TensorType
from onchip.plan.device import A100, H200
from onchip.plan.planner import make_plan
from onchip.runtime.arrays import dlpack
from onchip.runtime.arrays.adapters import DeviceArray, DlpackArrays
from onchip.runtime.cuda import chunks, staging
from onchip.runtime.cuda import devices as cuda_devices
from onchip.runtime.cuda import driver as driver_module
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.bound_plan import MAX_CALLS
from onchip.runtime.engine import Engine, compile


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(driver_module, "first_fault", [])
    return FakeDriver()


@pytest.fixture
def gpu(monkeypatch, driver):
    yield fake_gpu(monkeypatch, driver)
    DlpackArrays.release_all()  # arrays of the last call's work


def test_the_most_memory_that_was_allocated(gpu):
    gpu.reset_peak()
    before = gpu.peak_bytes
    kept = gpu.reserve(1000), gpu.allocate(300)
    gone = gpu.reserve(5000), gpu.allocate(7000)
    del gone
    gpu.reserve(4000)
    assert gpu.peak_bytes == before + 1000 + 5000 + 300 + 7000
    gpu.reset_peak()
    assert gpu.peak_bytes == before + 1000 + 300
    del kept
    gpu.reset_peak()
    assert gpu.peak_bytes == before


# -- engines -------------------------------------------------------------------------------------------------

NET = random_mlp(6, 5, 4)


def expected(x):
    """Replaces the network: a function of each row, exact to the bit."""
    return x[:, :4] * np.float32(2) + x[:, 2:]


def compute(launched):
    x, _, y, B = launched.words
    floats(y, B, 4)[...] = expected(floats(x, B, 6))


@pytest.fixture
def engine(gpu, driver):
    driver.run = compute
    return Engine(make_plan(NET, H200, [MlpFusedKernel()]), CudaBackend(0), "cuda:0")


def test_a_pickled_engine_finds_its_gpu_again_or_says_that_there_is_none(monkeypatch, gpu, driver):
    driver.run = compute
    monkeypatch.setattr(cuda_devices, "probe", lambda: ([H200], ""))
    engine = compile(NET, device="cuda")
    pickled, x = pickle.dumps(engine), rows(7, 6)
    twin = pickle.loads(pickled)
    assert str(twin.plan) == str(engine.plan)
    assert repr(twin) == repr(engine)
    assert np.array_equal(twin(x), expected(x))
    monkeypatch.setattr(cuda_devices, "probe", lambda: ([], "there is no NVIDIA driver on this machine"))
    with pytest.raises(DeviceError, match="'cuda:0' is not available"):
        pickle.loads(pickled)


@pytest.mark.parametrize("B", [0, 1, 7, 1000, 1638])
def test_few_rows_are_one_launch_and_no_copy(engine, driver, B):
    x = rows(B, 6)
    driver.calls.clear()
    assert np.array_equal(engine(x), expected(x))
    requested = [
        name for name in driver.calls if name not in ("cuStreamCreate", "cuMemHostAlloc")
    ]  # built once, then cached
    assert requested == (["cuLaunchKernelEx", "cuStreamSynchronize"] if B else [])


def test_rows_go_through_the_slots_in_chunks(engine, driver, monkeypatch):
    monkeypatch.setattr(chunks, "SLOT_BYTES", 8000)
    monkeypatch.setattr(chunks, "MIN_CHUNK_BYTES", 2000)
    monkeypatch.setattr(staging, "MAPPED_BYTES", 1000)
    monkeypatch.setattr(staging, "SMALL_BYTES", 1000)
    for B in (25, 26, 49, 51, 600, 1000, 4999):
        x, out = rows(B, 6), np.full((B, 4), np.nan, np.float32)
        driver.launches.clear()
        assert engine(x, out=out) is out
        assert np.array_equal(out, expected(x)), B
        sizes = [launched.words[3] for launched in driver.launches]
        assert sum(sizes) == B
        step = max(sizes)
        assert sizes[:-1] == [step] * (len(sizes) - 1)
        assert step * 40 <= 8000
        streams = [launched.stream for launched in driver.launches]
        assert streams == (streams[: chunks.SLOTS] * len(streams))[: len(streams)]
        assert len(set(streams)) == min(chunks.SLOTS, len(streams))
    assert driver.calls.count("cuMemHostAlloc") == chunks.SLOTS  # reused, not allocated per batch


def test_rows_in_locked_memory_are_not_copied_by_the_host(engine, driver, monkeypatch):
    monkeypatch.setattr(staging, "MAPPED_BYTES", 0)
    monkeypatch.setattr(staging, "SMALL_BYTES", 0)
    x, sources, copy = rows(300, 6), [], driver.cuMemcpyHtoDAsync
    driver.cuMemcpyHtoDAsync = lambda target, source, *rest: (sources.append(source), copy(target, source, *rest))[1]
    for given, is_locked in ((x, False), (x.copy(), True)):
        begin, end = given.ctypes.data, given.ctypes.data + given.nbytes
        driver.locked = {begin, end - 1} if is_locked else set()
        sources.clear()
        assert np.array_equal(engine(given), expected(x))
        assert {begin <= source < end for source in sources} == {is_locked}  # the GPU copies them from where they are


def test_a_failure_in_the_middle_leaves_no_slot_in_use(engine, driver, monkeypatch):
    monkeypatch.setattr(staging, "MAPPED_BYTES", 0)
    monkeypatch.setattr(staging, "SMALL_BYTES", 0)
    monkeypatch.setattr(chunks, "SLOT_BYTES", 4000)
    monkeypatch.setattr(chunks, "MIN_CHUNK_BYTES", 4000)
    x = rows(1000, 6)
    driver.answers["cuLaunchKernelEx"] = 1
    with pytest.raises(KernelError, match="CUDA failed while launching"):
        engine(x)
    assert driver.calls[-chunks.SLOTS :] == ["cuStreamSynchronize"] * chunks.SLOTS
    driver.answers.clear()
    assert np.array_equal(engine(x), expected(x))


def test_a_plan_for_another_chip_is_refused(gpu):
    with pytest.raises(DeviceError, match="the plan is for another device"):
        CudaBackend(0).bind(make_plan(NET, A100, [MlpFusedKernel()]))


def test_weights_go_with_the_engine(engine, driver, gpu):
    engine(rows(3, 6))
    before = len(driver.memory)
    other = Engine(make_plan(NET, H200, [MlpFusedKernel()]), CudaBackend(0), "cuda:0")
    assert len(driver.memory) == before + 1
    del other
    assert len(driver.memory) == before


# -- arrays on the GPU ---------------------------------------------------------------------------------------


def test_an_array_on_the_gpu_is_one_launch_on_its_own_stream_and_nothing_else(engine, driver, gpu):
    x, y = Array(gpu, rows(9, 6)), Array(gpu, rows(9, 4))
    driver.calls.clear()
    assert engine(x, out=y) is y
    assert driver.calls == ["cuLaunchKernelEx"]
    assert driver.launches[-1].stream == 1234
    assert np.array_equal(y.now, expected(x.values))


def test_without_out_the_result_is_an_array_that_any_library_takes(engine, driver, gpu):
    x = Array(gpu, rows(9, 6), stream=None)
    y = engine(x)
    assert isinstance(y, DeviceArray)
    assert np.array_equal(y.numpy(), expected(x.values))
    facts = y.__cuda_array_interface__
    assert (facts["shape"], facts["typestr"], facts["stream"]) == ((9, 4), "<f4", 1)
    assert driver.launches[-1].stream == 1  # without a stream: CUDA's default one
    again = engine(Array(gpu, y.numpy() @ rows(4, 6)), out=y)  # it may be passed as out
    assert again is y
    assert engine(Array(gpu, rows(0, 6))).shape == (0, 4)


def test_a_slice_that_is_not_aligned_is_copied_once(engine, driver, gpu):
    whole_x, whole_y = Array(gpu, rows(9, 6).reshape(-1)), Array(gpu, rows(9, 4).reshape(-1))
    x = Array(gpu, rows(8, 6), data=(whole_x.buffer.pointer + 8, False))
    y = Array(gpu, rows(8, 4), data=(whole_y.buffer.pointer + 4, False))
    driver.calls.clear()
    engine(x, out=y)
    want = expected(whole_x.values[2:50].reshape(8, 6))
    assert np.array_equal(whole_y.now[1:33].reshape(8, 4), want)
    assert driver.calls.count("cuMemcpyDtoDAsync") == 2
    assert np.array_equal(whole_y.now[33:], whole_y.values[33:])


@pytest.mark.parametrize(
    ("facts", "error", "words"),
    [
        ({"typestr": "<f8"}, ShapeError, "input has the wrong dtype"),
        ({"shape": (9, 7)}, ShapeError, "input has the wrong shape"),
        ({"shape": (54,)}, ShapeError, "input has the wrong shape"),
        ({"shape": ()}, ShapeError, "input has the wrong shape"),
        ({"strides": (4, 36)}, ShapeError, "input is not row-major"),
        ({"strides": (48, 4)}, ShapeError, "input is not row-major"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_any_launch(engine, driver, gpu, facts, error, words):
    with pytest.raises(error, match=words):
        engine(Array(gpu, rows(9, 6), **facts))
    assert not driver.launches


def test_strides_of_rows_one_behind_the_other_are_fine(engine, gpu):
    x = Array(gpu, rows(9, 6), strides=(24, 4))
    assert np.array_equal(engine(x).numpy(), expected(x.values))
    one = Array(gpu, rows(1, 6), strides=(999, 4))  # the stride of a single row is irrelevant
    assert np.array_equal(engine(one).numpy(), expected(one.values))


def test_outs_that_do_not_fit_are_refused_before_any_launch(engine, driver, gpu, monkeypatch):
    x = Array(gpu, rows(9, 6))
    for out, error, words in [
        (Array(gpu, rows(8, 4)), ShapeError, "out has the wrong shape"),
        (Array(gpu, rows(9, 5)), ShapeError, "out has the wrong shape"),
        (Array(gpu, rows(9, 4).astype(np.float64)), ShapeError, "out has the wrong dtype"),
        (Array(gpu, rows(9, 4), data=(x.buffer.pointer + 16, False)), ShapeError, "out overlaps an input"),
        (Array(gpu, rows(9, 4), data=(x.buffer.pointer, True)), InputError, "out cannot be written to|overlaps"),
        ((x, x), ShapeError, "wrong number of outputs"),
        (np.empty((9, 4), np.float32), InputError, "arrays of different kinds"),
    ]:
        with pytest.raises(error, match=words):
            engine(x, out=out)
    with pytest.raises(InputError, match="arrays of different kinds"):
        engine(rows(9, 6), out=Array(gpu, rows(9, 4)))
    with pytest.raises(InputError, match="wrong number of inputs"):
        engine(x, x)
    monkeypatch.setattr(driver, "cuPointerGetAttribute", lambda attribute, pointer: (0, 1))
    with pytest.raises(InputError, match="input is on another device"):
        engine(x)
    assert not driver.launches


def test_what_is_no_array_is_refused(engine):
    with pytest.raises(ShapeError, match="input 'x' is not an array"):
        engine({1.0})


def test_lists_and_torch_tensors_of_the_host_go_there_and_back(engine):
    torch = pytest.importorskip("torch")
    x = rows(9, 6)
    assert np.array_equal(engine(x.tolist()), expected(x))
    for _ in range(2):  # the second time the shape is known
        y = engine(torch.from_numpy(x))
        assert isinstance(y, torch.Tensor)
        assert np.array_equal(y.numpy(), expected(x))
        assert engine(torch.from_numpy(x), out=y) is y


def test_threads_do_not_write_over_each_others_arguments(engine, driver, gpu):
    pairs = [(Array(gpu, rows(33, 6, seed=i)), Array(gpu, rows(33, 4))) for i in range(8)]
    failures = []

    def work(x, y):
        for _ in range(50):
            engine(x, out=y)
            if not np.array_equal(y.now, expected(x.values)):
                failures.append(x)

    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_written_down_launches_are_bounded(engine):
    bound = CudaBackend(0).bind(engine.plan)
    launches = [weakref.ref(bound.at(B)) for B in range(1, 3 * MAX_CALLS)]
    gc.collect()
    assert sum(each() is not None for each in launches) <= MAX_CALLS


class Exchanged:
    """An array with only DLPack."""

    def __init__(self, gpu, values):
        self.array, self.requested = Array(gpu, values), []

    def __dlpack_device__(self):
        return dlpack.CUDA, 0

    def __dlpack__(self, *, stream):
        self.requested.append(stream)
        values = self.array.values
        return dlpack.export(self.array.buffer.pointer, values.shape, values.dtype.name, 0, self)


def test_dlpack_is_told_which_stream_waits_and_keeps_the_memory_until_the_work_is_done(engine, driver, gpu):
    x = Exchanged(gpu, rows(9, 6))
    values, gone = x.array.values, weakref.ref(x)
    driver.answers["cuEventQuery"] = 600  # CUDA_ERROR_NOT_READY
    driver.calls.clear()
    y = engine(x)
    assert isinstance(y, DeviceArray)
    assert x.requested == [gpu.stream] == [driver.launches[-1].stream]
    assert "cuStreamSynchronize" not in driver.calls
    assert np.array_equal(y.numpy(), expected(values))
    del x
    gc.collect()
    assert gone() is not None  # a kernel may still read it
    del driver.answers["cuEventQuery"]
    engine(Exchanged(gpu, rows(3, 6)))
    assert gone() is None


def test_an_out_of_dlpack_is_waited_for_since_its_owner_cannot_know(engine, driver, gpu):
    x, y = Exchanged(gpu, rows(9, 6)), Exchanged(gpu, rows(9, 4))
    assert engine(x, out=y) is y
    assert driver.calls[-1] == "cuStreamSynchronize"
    assert np.array_equal(y.array.now, expected(x.array.values))


def test_a_result_tells_dlpack_when_it_is_ready(engine, driver, gpu):
    y = engine(Array(gpu, rows(9, 6)))
    for stream, waits in [(None, True), (55, True), (-1, False)]:
        driver.calls.clear()
        found = dlpack.describe(y.__dlpack__(stream=stream))
        assert (found.shape, found.dtype, found.pointer) == ((9, 4), "float32", y.__cuda_array_interface__["data"][0])
        assert ("cuStreamWaitEvent" in driver.calls) is waits
    assert y.__dlpack_device__() == (dlpack.CUDA, 0)


def test_a_result_that_others_may_use_goes_back_when_all_work_is_done(engine, driver, gpu):
    """Its readers' streams are unknown: it is not from the pool, and freeing it waits for the GPU (cuMemFree)."""
    x = Array(gpu, rows(9, 6))
    y = engine(x)
    before = len(driver.memory)
    driver.calls.clear()
    del y
    assert "cuMemFree" in driver.calls
    assert "cuMemFreeAsync" not in driver.calls
    assert len(driver.memory) == before - 1


def test_no_result_is_made_while_a_graph_is_captured(engine, gpu):
    with pytest.raises(InputError, match=r"engine\(x, out=y\)"):
        gpu.capture(lambda stream: engine(Array(gpu, rows(9, 6), stream=stream)))


def test_arrays_of_the_host_are_refused_with_words(engine, driver):
    class OnHost:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **options):
            raise AssertionError("nobody should ask")

    with pytest.raises(InputError, match="a OnHost is not on the GPU"):
        engine(OnHost())
    assert not driver.launches


def test_an_input_handed_on_and_an_output_asked_for_twice(gpu, driver):
    net = NET.replace(outputs=("x", *NET.outputs, *NET.outputs))
    driver.run = compute
    engine = Engine(make_plan(net, H200, [MlpFusedKernel()]), CudaBackend(0), "cuda:0")
    x = Array(gpu, rows(5, 6))
    same, first, second = engine(x)
    assert np.array_equal(same.numpy(), x.values)
    assert np.array_equal(first.numpy(), expected(x.values))
    assert np.array_equal(second.numpy(), expected(x.values))


def test_a_network_without_layers_hands_its_input_on(gpu, driver):
    net = Network({"x": TensorType(("B", 6))}, (), ("x",), {})
    engine = Engine(make_plan(net, H200, [MlpFusedKernel()]), CudaBackend(0), "cuda:0")
    x, y = Array(gpu, rows(3, 6)), Array(gpu, rows(3, 6, seed=9))
    engine(x, out=y)
    assert driver.calls.count("cuMemcpyDtoDAsync") == 1
    assert "cuLaunchKernelEx" not in driver.calls
    assert np.array_equal(engine(rows(3, 6)), rows(3, 6))
