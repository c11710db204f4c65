"""torch tensors on the fast path, with a fake driver in Python: launches, graph launches and errors. No GPU."""

import ctypes
import dataclasses
import gc
import threading

import numpy as np
import pytest

from checks import random_mlp, rows
from fake_cuda import FakeDriver, fake_gpu, floats
from onchip.errors import InputError, KernelError, ShapeError
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.mlp.fused import MlpFusedKernel
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import CumSum, Embedding, Linear
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.planner import make_plan
from onchip.runtime import sampling
from onchip.runtime.cuda import activities, bound_plan
from onchip.runtime.cuda import driver as driver_module
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.bound_plan import MAX_GRAPHS
from onchip.runtime.cuda.cupti import CuptiError
from onchip.runtime.engine import Engine
from onchip.runtime.spans import Recorder

torch = pytest.importorskip("torch")

STREAM = 4242
LAUNCH, REPLAY = ["cuLaunchKernelEx"], ["cuGraphLaunch"]


class OnGpu(torch.Tensor):
    """A host tensor that claims to be on the GPU, like the fake driver's memory."""

    __module__ = "torch"
    is_cuda, device = True, torch.device("cuda", 0)

    def get_device(self):
        return 0


def tensor(values):
    """A copy of the values, aligned like torch's GPU memory."""
    values = np.asarray(values)
    room = np.zeros(values.nbytes + 16, np.uint8)
    room = room[-room.ctypes.data % 16 :][: values.nbytes]
    room[:] = values.reshape(-1).view(np.uint8)
    return torch.from_numpy(room.view(values.dtype).reshape(values.shape)).as_subclass(OnGpu)


def expected(x):
    """Replaces the network."""
    return x.numpy()[:, :4] * np.float32(2) + x.numpy()[:, 2:]


def compute(launched):
    x, _, y, B = launched.words
    floats(y, B, 4)[...] = floats(x, B, 6)[:, :4] * np.float32(2) + floats(x, B, 6)[:, 2:]


class Torch:
    """torch's functions about the GPU."""

    stream, is_capturing, device_count, current = STREAM, False, 1, 0


@pytest.fixture
def said(monkeypatch):
    said = Torch()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: said.stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: said.is_capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: said.current, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: said.device_count)
    return said


@pytest.fixture
def driver(monkeypatch, said):
    monkeypatch.setattr(driver_module, "first_fault", [])
    driver = FakeDriver()
    fake_gpu(monkeypatch, driver)
    driver.run = compute
    return driver


@pytest.fixture
def engine(driver):
    return Engine(make_plan(random_mlp(6, 5, 4), H200, [MlpFusedKernel()]), CudaBackend(0), "cuda:0")


@pytest.fixture
def requested(engine, driver):
    """requested(x, y) -> the driver calls of engine(x, out=y), after checking the result."""

    def ask(x, y):
        y.zero_()
        driver.calls.clear()
        assert engine(x, out=y) is y
        assert np.array_equal(y.numpy(), expected(x))
        return list(driver.calls)

    return ask


def is_capture(calls):
    return "cuGraphInstantiate" in calls and calls[-1:] == REPLAY


def test_the_same_two_tensors_become_a_graph_and_stay_one(requested, driver):
    x, y = tensor(rows(9, 6)), tensor(rows(9, 4))
    assert requested(x, y) == LAUNCH  # the slow path, which prepares the launch
    assert requested(x, y) == LAUNCH
    assert is_capture(requested(x, y))
    for seed in range(3):
        x.copy_(torch.from_numpy(rows(9, 6, seed=seed)))
        assert requested(x, y) == REPLAY
    assert {stream for _, stream in driver.replays} == {STREAM}
    assert len({graph for graph, _ in driver.replays}) == 1


def test_other_tensors_are_launched_and_both_are_replayed_once_known(requested):
    x, y, z = tensor(rows(9, 6)), tensor(rows(9, 4)), tensor(rows(9, 4))
    assert [requested(x, out) for out in (y, z, y, z, y, z)] == [LAUNCH] * 6  # never twice in a row
    assert is_capture(requested(x, z))
    assert (requested(x, y), requested(x, z)) == (LAUNCH, REPLAY)
    assert is_capture(requested(x, y))  # replays between do not count
    assert [requested(x, out) for out in (y, z, y, z)] == [REPLAY] * 4
    other = tensor(rows(9, 6, seed=5))
    assert requested(other, y) == LAUNCH


def test_each_number_of_rows_has_its_own(requested):
    """The same addresses, another shape."""
    x, y = tensor(rows(9, 6)), tensor(rows(9, 4))
    for _ in range(4):
        requested(x, y)
    assert requested(x[:5], y[:5]) == LAUNCH
    assert requested(x[:5], y[:5]) == LAUNCH
    assert is_capture(requested(x[:5], y[:5]))
    assert (requested(x, y), requested(x[:5], y[:5])) == (REPLAY, REPLAY)


def test_the_graph_goes_to_the_stream_that_is_current(requested, said, driver):
    x, y = tensor(rows(9, 6)), tensor(rows(9, 4))
    for said.stream in (5, 5, 5, 77, 0, 5):
        requested(x, y)
    assert [stream for _, stream in driver.replays] == [5, 77, 0, 5]


def test_a_stream_that_records_gets_plain_launches(requested, said):
    x, y = tensor(rows(9, 6)), tensor(rows(9, 4))
    said.is_capturing = True
    assert [requested(x, y) for _ in range(5)] == [LAUNCH] * 5
    said.is_capturing = False
    assert is_capture(requested(x, y))
    assert requested(x, y) == REPLAY
    said.is_capturing = True
    assert [requested(x, y) for _ in range(3)] == [LAUNCH] * 3
    said.is_capturing = False
    assert requested(x, y) == REPLAY


def test_a_current_device_that_is_not_ours_gets_plain_launches(said, driver, requested):
    """The handle of torch's default stream is 0 on every GPU: a graph would run on the other one's."""
    said.device_count, said.stream = 2, 0
    x, y = tensor(rows(9, 6)), tensor(rows(9, 4))
    for _ in range(3):
        requested(x, y)
    assert requested(x, y) == REPLAY
    said.current = 1
    assert [requested(x, y) for _ in range(3)] == [LAUNCH] * 3
    said.current = 0
    assert requested(x, y) == REPLAY


def test_graphs_are_bounded_and_the_oldest_goes(engine, requested, driver):
    x = tensor(rows(9, 6))
    outs = [tensor(rows(9, 4)) for _ in range(MAX_GRAPHS + 3)]
    requested(x, outs[0])
    for y in outs:
        assert requested(x, y) == LAUNCH
        assert is_capture([call for call in requested(x, y) if call != "cuGraphExecDestroy"])
    assert len(driver.graphs) == MAX_GRAPHS
    assert [requested(x, y) for y in outs[:3]] == [LAUNCH] * 3
    assert [requested(x, y) for y in outs[3:]] == [REPLAY] * MAX_GRAPHS
    other = Engine(engine.plan, CudaBackend(0), "cuda:0")
    for _ in range(3):
        other(x, out=outs[0])
    assert len(driver.graphs) == MAX_GRAPHS + 1
    del other
    gc.collect()
    assert len(driver.graphs) == MAX_GRAPHS


def test_what_was_replayed_is_checked_again(engine, requested, driver):
    """The addresses are the same, the contents differ."""
    x, y = tensor(rows(9, 6)), tensor(rows(9, 4))
    for _ in range(4):
        requested(x, y)
    driver.calls.clear()
    for given, out, error, words in [
        (x.view(torch.int32), y, ShapeError, "input has the wrong dtype"),
        (x, y.view(torch.int32), ShapeError, "out has the wrong dtype"),
        (x, y.view(4, 9), ShapeError, "out has the wrong shape"),
        (x.view(6, 9), y, ShapeError, "input has the wrong shape"),
        (x, y[:8], ShapeError, "out has the wrong shape"),
        (x.as_strided((9, 6), (1, 9)), y, ShapeError, "input is not row-major"),
        (x, y.as_strided((9, 4), (1, 9)), ShapeError, "out is not row-major"),
        (x.as_subclass(torch.Tensor), y, InputError, "out is not on the host"),
        (x, y.as_subclass(torch.Tensor), InputError, "not on the GPU"),
        (x, x.view(-1)[:36].view(9, 4), ShapeError, "out overlaps an input"),
    ]:
        with pytest.raises(error, match=words):
            engine(given, out=out)
    assert not driver.calls
    assert requested(x, y) == REPLAY


def test_places_that_no_kernel_takes_go_the_long_way_each_time(requested):
    x, y = tensor(np.zeros((10, 6), np.float32)).view(-1)[1:55].view(9, 6), tensor(rows(9, 4))
    x.copy_(torch.from_numpy(rows(9, 6)))
    for _ in range(4):
        assert requested(x, y).count("cuMemcpyDtoDAsync") == 1


def test_an_error_of_a_graph_is_told(engine, requested, driver):
    x, y = tensor(rows(9, 6)), tensor(rows(9, 4))
    for _ in range(4):
        requested(x, y)
    driver.answers["cuGraphLaunch"] = 1
    with pytest.raises(KernelError, match="CUDA failed while launching a graph"):
        engine(x, out=y)
    driver.answers = {"cuGraphInstantiate": 999}
    z = tensor(rows(9, 4))
    engine(x, out=z)
    with pytest.raises(KernelError, match="CUDA failed while"):
        engine(x, out=z)
    driver.answers.clear()
    assert requested(x, y) == REPLAY


def test_each_thread_has_graphs_of_its_own(engine, driver):
    pairs = [(tensor(rows(33, 6, seed=i)), tensor(rows(33, 4))) for i in range(6)]
    shared, failures = tensor(rows(33, 6, seed=9)), []

    def work(x, y):
        for i in range(40):
            for given in (x,) if i < 20 else (x, shared):
                y.zero_()
                engine(given, out=y)
                if not np.array_equal(y.numpy(), expected(given)):
                    failures.append(i)

    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len({graph for graph, _ in driver.replays}) == 2 * len(pairs)  # of x and of what they share


# -- several launches ------------------------------------------------------------------------------------------


@pytest.fixture
def two_launches(driver):
    """x -> Linear -> Linear as two launches with a value between them."""
    nodes = (Node("a", Linear(), ("x",), {"weight": "u"}), Node("b", Linear(), ("a",), {"weight": "v"}))
    weights = {"u": rows(9, 6, seed=3), "v": rows(4, 9, seed=4)}
    net = Network({"x": TensorType(("B", 6))}, nodes, ("a", "b"), weights)
    plan = make_plan(net, H200, [MlpFusedKernel()])
    assert len(plan.groups) == 2

    def run(launched):
        x, _, y, B = launched.words
        widths, weight = ((6, 9), "u") if "Dense<6, 9" in launched.kernel else ((9, 4), "v")
        floats(y, B, widths[1])[...] = floats(x, B, widths[0]) @ weights[weight].T

    driver.run = run
    plan = dataclasses.replace(plan, network=net.replace(outputs=("b",)))  # the same groups, without output a
    return Engine(plan, CudaBackend(0), "cuda:0"), weights


def test_several_launches_are_one_graph_when_the_same_tensors_come_again(two_launches, driver):
    engine, weights = two_launches
    x, y = tensor(rows(7, 6)), tensor(np.zeros((7, 4), np.float32))
    told = []
    for _ in range(5):
        y.zero_()
        before = len(driver.calls)
        engine(x, out=y)
        requested = driver.calls[before:]
        told.append((requested.count("cuLaunchKernelEx"), requested.count("cuGraphLaunch"), len(requested)))
        np.testing.assert_array_equal(y.numpy(), x.numpy() @ weights["u"].T @ weights["v"].T)
    assert [launches for launches, _, _ in told[:2]] == [2, 0]  # the slow path, then as a graph
    assert told[3] == told[4] == (0, 1, 1)  # one driver call, and no allocation


def test_several_launches_with_ever_other_tensors_stay_one_graph(two_launches, driver):
    """The kernel that touches what moved is updated: no launch, no memory, no wait."""
    engine, weights = two_launches
    x, outs = tensor(rows(7, 6)), [tensor(np.zeros((7, 4), np.float32)) for _ in range(20)]
    want = x.numpy() @ weights["u"].T @ weights["v"].T
    for y in (*outs[:2], *outs):
        driver.calls.clear()
        engine(x, out=y)
        np.testing.assert_array_equal(y.numpy(), want)
    for y in outs:
        y.zero_()
        driver.calls.clear()
        engine(x, out=y)
        assert driver.calls == ["cuGraphExecKernelNodeSetParams", "cuGraphLaunch"]
        np.testing.assert_array_equal(y.numpy(), want)
    assert len({graph for graph, _ in driver.replays}) == 1


def test_streams_have_graphs_of_their_own_and_keep_their_tensors(two_launches, driver, said):
    engine, weights = two_launches
    pairs = {stream: (tensor(rows(7, 6, seed=stream)), tensor(np.zeros((7, 4), np.float32))) for stream in (5, 6, 7)}
    for turn in range(4):
        for said.stream, (x, y) in pairs.items():
            y.zero_()
            driver.calls.clear()
            engine(x, out=y)
            np.testing.assert_array_equal(y.numpy(), x.numpy() @ weights["u"].T @ weights["v"].T)
            assert turn < 2 or driver.calls == REPLAY
    assert len(set(driver.replays)) == 3


def test_several_launches_while_a_stream_records(two_launches, driver, said):
    engine, weights = two_launches
    x, y = tensor(rows(7, 6)), tensor(np.zeros((7, 4), np.float32))
    for said.is_capturing in (False, False, False, True, True, False):
        y.zero_()
        driver.calls.clear()
        engine(x, out=y)
        np.testing.assert_array_equal(y.numpy(), x.numpy() @ weights["u"].T @ weights["v"].T)
        assert ("cuGraphLaunch" in driver.calls) is not (said.is_capturing or not driver.replays)
    assert driver.calls == REPLAY


def test_threads_with_several_launches_each(two_launches, driver):
    engine, weights = two_launches
    failures = []

    def work(seed):
        x, outs = tensor(rows(33, 6, seed=seed)), [tensor(np.zeros((33, 4), np.float32)) for _ in range(3)]
        want = x.numpy() @ weights["u"].T @ weights["v"].T
        for i in range(60):
            y = outs[i % 3]
            y.zero_()
            engine(x, out=y)
            if not np.array_equal(y.numpy(), want):
                failures.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_rows_that_go_in_chunks_stay_on_the_long_way(two_launches, driver, monkeypatch):
    whole, weights = two_launches
    monkeypatch.setattr(bound_plan, "ARENA_PART", 1 << 62)  # so a chunk is 16 rows, the fewest
    engine = Engine(whole.plan, CudaBackend(0), "cuda:0")
    x, y = tensor(rows(40, 6)), tensor(np.zeros((40, 4), np.float32))
    for _ in range(4):
        y.zero_()
        before = driver.calls.count("cuLaunchKernelEx") + 2 * driver.calls.count("cuGraphLaunch")
        engine(x, out=y)
        after = driver.calls.count("cuLaunchKernelEx") + 2 * driver.calls.count("cuGraphLaunch")
        assert after - before >= 2 * 3
        np.testing.assert_array_equal(y.numpy(), x.numpy() @ weights["u"].T @ weights["v"].T)


# -- ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
def test_ids_are_looked_at_by_the_kernel_and_told_later(monkeypatch, said, groups):
    """Launched, captured and replayed: the kernels write to the status word of their stream."""
    monkeypatch.setattr(driver_module, "first_fault", [])
    driver = FakeDriver(lambda kernel: 8 if "gather" in kernel else 4)
    fake_gpu(monkeypatch, driver)

    def run(launched):
        if "gather" in launched.kernel:
            ids, _, _, status, count, V = launched.words[:6]
            given = np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(ids))
            words = (ctypes.c_uint64 * 3).from_address(status)
            for place in np.flatnonzero((given < 0) | (given >= V)).tolist():
                told = [place << 24 | int(given[place]) >> 24 * i & 0xFFFFFF for i in range(3)]
                words[:] = list(map(min, words, told))

    driver.run = run
    layers = [("e", Embedding()), ("s", CumSum(1))][:groups]
    net = sequential(TensorType(("B", 5), "int64"), layers, {"e.weight": rows(9, 4)})
    engine = Engine(make_plan(net, H200, KERNELS), CudaBackend(0), "cuda:0")
    assert len(engine.plan.groups) == groups
    good, y = tensor(np.zeros((7, 5), np.int64)), tensor(np.zeros((7, 5, 4), np.float32))
    bad, z = tensor(np.zeros((7, 5), np.int64)), tensor(np.zeros((7, 5, 4), np.float32))
    bad[6, 4], bad[3, 2] = 2**60, -4
    for said.stream in (5, 6, 5):
        for _ in range(4):
            for out in (y, z):
                engine(bad, out=out)
                with pytest.raises(InputError, match="row 3, position 2: id -4, expected 0 to 8"):
                    engine(good, out=y)
                engine(good, out=out)
    driver.calls.clear()
    engine(good, out=out)
    assert driver.calls == REPLAY
    assert "cuStreamSynchronize" not in driver.calls
    said.stream = 6
    engine(bad, out=out)
    said.stream = 5
    with pytest.raises(InputError, match="row 3"):  # raised by the next call
        engine(good, out=y)
    engine.wait()


# -- recorded ------------------------------------------------------------------------------------------------


def test_most_calls_of_a_recorded_engine_take_the_fast_path(engine, driver, said, monkeypatch):
    """Few are recorded, or timed; calls that are captured are neither."""

    def load_nothing():
        raise CuptiError("not in this test")

    monkeypatch.setattr(activities, "_activities", load_nothing)
    monkeypatch.setattr(sampling, "AFTER_NS", 10**12)  # of each recorded call, so that few are recorded
    x, y = tensor(rows(9, 6)), tensor(rows(9, 4))
    recorder = Recorder(engine.plan)
    engine.record(recorder)
    made = []
    for _ in range(500):
        y.zero_()
        driver.calls.clear()
        assert engine(x, out=y) is y
        assert np.array_equal(y.numpy(), expected(x))
        made.append(list(driver.calls))
    assert made[-400:] == [REPLAY] * 400
    assert (len(recorder.calls), sum(call.count for call in recorder.calls)) == (8, 500)
    said.is_capturing = True
    monkeypatch.setattr(engine._bound.gpu, "is_capturing", lambda stream: True)
    engine(x, out=y)
    assert sum(call.count for call in recorder.calls) == 500
    with pytest.raises(ShapeError):
        engine(tensor(np.float32(1)))
