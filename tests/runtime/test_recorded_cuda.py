"""Calls recorded with CUDA events: on a fake driver with its own clock, emulated, and on a GPU; there also by CUPTI."""

import gc
import itertools
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from checks import rows
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from fake_cuda import Array, FakeDriver, fake_gpu, floats
from gpu_networks import NET, two_groups
from onchip.errors import InputError, KernelError
from onchip.kernels.cuda.common.arguments import Output, Scratch
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.mlp.fused import MlpFusedKernel
from onchip.measure import profile_network as profile_network_module
from onchip.measure.profile import summarise
from onchip.measure.trace import trace_events
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import CumSum, Embedding, Reshape, Softmax
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.planner import make_plan
from onchip.runtime import sampling
from onchip.runtime.arrays.adapters import DlpackArrays
from onchip.runtime.cuda import activities, chunks, recorded_plan, staging, timed_copies, timed_graph, timed_plan
from onchip.runtime.cuda import driver as driver_module
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.bound_plan import MAX_GRAPHS
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.cupti import CuptiError
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.timed_copies import INTO_PINNED, OUT_OF_PINNED, TO_GPU, TO_HOST
from onchip.runtime.cuda.timed_graph import EventGraphBuilder
from onchip.runtime.engine import Engine, compile
from onchip.runtime.spans import COPY, Recorder, Resources

EVENT_NS = 100  # of an event node, on the fake GPU
HOST_NS = 700  # of a host copy
KERNEL_NS = {"Dense<6, 9": 3000, "Dense<9, 4": 5000}


def recorded(plan):
    engine, recorder = Engine(plan, CudaBackend(0), "cuda:0"), Recorder(plan)
    engine.record(recorder)
    return engine, recorder


def load_nothing():
    raise CuptiError("not in this test")


@pytest.fixture(params=["events"])
def recorded_by(request, monkeypatch):
    """What times the launches."""
    if request.param == "events":
        monkeypatch.setattr(activities, "_activities", load_nothing)
    else:
        try:
            activities.begin_activities(Gpu.get()).end()
        except CuptiError as error:
            pytest.skip(str(error))
    return request.param


@pytest.fixture(autouse=True)
def _recorded_by(recorded_by):
    pass


@pytest.fixture(autouse=True)
def _every_call(request, monkeypatch):
    """Is recorded, unless a test is about the choice."""
    if "sampled" not in request.fixturenames:
        monkeypatch.setattr(sampling, "FIRST", 1 << 40)


@pytest.fixture
def sampled():
    pass


on_both_clocks = pytest.mark.parametrize("recorded_by", ["events", "cupti"], indirect=True)


class Clock:
    """Advanced by kernels and events alone; the GPU and the host read the same one."""

    def __init__(self):
        self.ns = 10**9

    def event(self):
        self.ns += EVENT_NS
        return self.ns / 1e9

    def host(self):
        """A thread that copies reads the clock, before and after."""
        self.ns += HOST_NS
        return self.ns


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (timed_plan, timed_graph, recorded_plan):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: made.ns)
    monkeypatch.setattr(timed_copies, "perf_counter_ns", made.host)
    return made


@pytest.fixture
def driver(monkeypatch, clock):
    monkeypatch.setattr(driver_module, "first_fault", [])
    made = FakeDriver()
    made.clock = clock.event
    return made


@pytest.fixture
def gpu(monkeypatch, driver):
    yield fake_gpu(monkeypatch, driver)
    DlpackArrays.release_all()


WEIGHTS = two_groups().weights


def expected(x):
    return (x @ WEIGHTS["u"].T) @ WEIGHTS["v"].T


@pytest.fixture
def plan(gpu, driver, clock):
    """Two launches, with a value between them that is not an output."""

    def run(launched):
        x, _, y, B = launched.words
        kernel = next(each for each in KERNEL_NS if each in launched.kernel)
        clock.ns += KERNEL_NS[kernel]
        widths, weight = ((6, 9), "u") if kernel == "Dense<6, 9" else ((9, 4), "v")
        floats(y, B, widths[1])[...] = floats(x, B, widths[0]) @ WEIGHTS[weight].T

    driver.run = run
    net = two_groups()
    made = make_plan(net, H200, [MlpFusedKernel()])
    return replace(made, network=net.replace(outputs=("b",)))


def launches(call):
    return [span for span in call.spans if span.group != COPY]


def copies(call, name):
    return [span for span in call.spans if span.name == name]


def assert_ordered(call):
    """Every launch of a track begins after the one before it has ended; all are within the call."""
    for track in {span.track for span in call.spans}:
        times = [at for span in call.spans if span.track == track for at in (span.begin_ns, span.end_ns)]
        assert times == sorted(times)
        assert call.begin_ns <= times[0] <= times[-1] <= call.end_ns


def test_every_launch_of_a_call_is_a_span(plan):
    engine, recorder = recorded(plan)
    for x in (rows(7, 6), rows(7, 6, seed=2)):
        assert np.allclose(engine(x), expected(x), rtol=1e-5)
    assert len(recorder.calls) == 2
    for call in recorder.calls:
        spans = launches(call)
        assert [(span.group, span.track, span.rows) for span in spans] == [(0, "stream 1", 7), (1, "stream 1", 7)]
        assert [span.end_ns - span.begin_ns for span in spans] == [3000, 5000]  # without the events
        for span, kernel in zip(spans, KERNEL_NS, strict=True):
            assert span.name.startswith("mlp_fused<")
            assert kernel in span.name
        assert (call.rows, call.workers) == (7, 1)
        assert_ordered(call)
    assert recorder.calls[0].end_ns <= recorder.calls[1].begin_ns


def test_chunks_of_a_call_are_spans_of_several_streams(plan, driver, monkeypatch):
    """More chunks than streams: each graph is launched several times in one call."""
    for module, name, value in (
        (chunks, "SLOT_BYTES", 8000), (chunks, "MIN_CHUNK_BYTES", 2000),
        (staging, "MAPPED_BYTES", 1000), (staging, "SMALL_BYTES", 1000),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    driver.lazy = True  # events are recorded when the stream is waited for
    engine, recorder = recorded(plan)
    x = rows(4999, 6)
    assert np.allclose(engine(x), expected(x), rtol=1e-5)
    (call,) = recorder.calls
    assert {span.track for span in launches(call)} == {f"stream {1 + i}" for i in range(chunks.SLOTS)}
    for group in (0, 1):
        of_group = [span.rows for span in call.spans if span.group == group]
        assert sorted(of_group) == sorted(call.chunks)
        assert sum(call.chunks) == 4999
    assert len(launches(call)) > 4 * chunks.SLOTS
    assert_ordered(call)
    engine(x[:300])
    assert sum(span.rows for span in recorder.calls[1].spans) == 600


# -- copies --------------------------------------------------------------------------------------------------


@pytest.fixture
def bus(driver, clock):
    """A byte takes a nanosecond on the bus."""

    def timed(real):
        def copy(target, source, nbytes, stream):
            driver.put(stream, lambda: setattr(clock, "ns", clock.ns + nbytes))
            return real(target, source, nbytes, stream)

        return copy

    driver.cuMemcpyHtoDAsync = timed(driver.cuMemcpyHtoDAsync)
    driver.cuMemcpyDtoHAsync = timed(driver.cuMemcpyDtoHAsync)


def test_a_small_batch_has_no_copy_on_the_bus(plan, bus):
    """Kernels read the mapped memory."""
    engine, recorder = recorded(plan)
    engine(rows(7, 6))
    (call,) = recorder.calls
    found = [(span.name, span.nbytes, span.end_ns - span.begin_ns) for span in call.spans if span.group == COPY]
    assert found == [(INTO_PINNED, 7 * 6 * 4, HOST_NS), (OUT_OF_PINNED, 7 * 4 * 4, HOST_NS)]
    assert [span.group for span in call.spans] == [COPY, 0, 1, COPY]
    assert {span.track for span in call.spans if span.group == COPY} == {"host thread MainThread"}
    assert_ordered(call)


@pytest.fixture
def small_slots(monkeypatch):
    for module, name, value in (
        (chunks, "SLOT_BYTES", 8000), (chunks, "MIN_CHUNK_BYTES", 4000), (chunks, "OFFERED_BYTES", 900),
        (staging, "OFFERED_BYTES", 100),  # other threads copy, too
        (staging, "MAPPED_BYTES", 1000), (staging, "SMALL_BYTES", 1000),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def test_copies_of_a_batch_of_one_chunk(plan, bus, small_slots, driver):
    """Its input crosses the bus in slices, in this order: into pinned memory, to the GPU; back in the other."""
    driver.lazy = True
    engine, recorder = recorded(plan)
    x = rows(80, 6)
    assert np.allclose(engine(x), expected(x), rtol=1e-5)
    (call,) = recorder.calls
    assert [span.nbytes for span in copies(call, INTO_PINNED)] == [960, 960]
    assert [span.nbytes for span in copies(call, OUT_OF_PINNED)] == [1280]
    to_gpu, to_host = copies(call, TO_GPU), copies(call, TO_HOST)
    assert [span.nbytes for span in to_gpu] == [960, 960]
    assert [span.nbytes for span in to_host] == [1280]
    for span in (*to_gpu, *to_host):
        assert (span.track, span.group, span.rows) == ("stream 1", COPY, 0)
        assert span.end_ns - span.begin_ns == span.nbytes + EVENT_NS
    assert [span.name for span in call.spans if span.track == "stream 1"][2:4] == [s.name for s in launches(call)]
    assert_ordered(call)


def test_copies_of_many_chunks(plan, bus, small_slots, gpu, driver, monkeypatch):
    """Each is on the stream of its slot; the host waits no more than without a recorder, and events are reused."""
    monkeypatch.setattr(staging, "OFFERED_BYTES", 1 << 20)  # no other thread advances the clock
    driver.lazy = True
    x = rows(4999, 6)
    engine, recorder = recorded(plan)
    waits = []
    for _ in range(2):
        driver.calls.clear()
        engine(x)
        waits.append((driver.calls.count("cuStreamSynchronize"), driver.calls.count("cuEventCreate")))
    chunk_count = len(launches(recorder.calls[0])) // 2
    assert chunk_count > 3 * chunks.SLOTS
    assert waits[1] == (chunk_count, 0)
    for call in recorder.calls:
        for name, width in ((INTO_PINNED, 6), (TO_GPU, 6), (TO_HOST, 4), (OUT_OF_PINNED, 4)):
            assert sum(span.nbytes for span in copies(call, name)) == 4999 * width * 4
        for name in (TO_GPU, TO_HOST):
            assert len(copies(call, name)) == chunk_count
            assert all(span.end_ns - span.begin_ns == span.nbytes + EVENT_NS for span in copies(call, name))
        for track in {span.track for span in launches(call)}:
            names = [span.name for span in call.spans if span.track == track]
            assert names == [TO_GPU, *(span.name for span in launches(call)[:2]), TO_HOST] * (len(names) // 4)
        for track in {span.track for span in call.spans if span.track.startswith("stream")}:
            times = [at for span in call.spans if span.track == track for at in (span.begin_ns, span.end_ns)]
            assert times == sorted(times)


def test_nothing_is_timed_without_a_recorder(plan, small_slots, driver):
    engine, _ = recorded(plan)
    engine.record(None)
    driver.calls.clear()
    engine(rows(4999, 6))
    assert "cuMemcpyHtoDAsync" in driver.calls
    assert "cuEventRecord" not in driver.calls


def test_chunks_of_a_small_arena_are_on_one_stream(plan, gpu, driver):
    engine, recorder = recorded(plan)
    engine._bound.max_arena_bytes = 16 * 9 * 4 + 256
    driver.lazy = True
    x, y = Array(gpu, rows(70, 6)), Array(gpu, rows(70, 4))
    engine(x, out=y)
    assert np.allclose(y.now, expected(x.values), rtol=1e-5)
    (call,) = recorder.calls
    assert [(span.group, span.rows) for span in call.spans] == [(0, 16), (1, 16)] * 4 + [(0, 6), (1, 6)]
    assert call.rows == 70
    assert_ordered(call)


def test_arrays_on_the_gpu_are_waited_for(plan, gpu, driver):
    driver.lazy = True
    engine, recorder = recorded(plan)
    for B, stream in ((7, 1234), (9, 1234), (7, 77), (7, 1234)):
        x, y = Array(gpu, rows(B, 6, seed=stream), stream=stream), Array(gpu, rows(B, 4))
        assert engine(x, out=y) is y
        assert np.allclose(y.now, expected(x.values), rtol=1e-5)
    assert [call.rows for call in recorder.calls] == [7, 9, 7, 7]
    tracks = [{span.track for span in call.spans} for call in recorder.calls]
    assert tracks == [{"stream 1"}, {"stream 1"}, {"stream 2"}, {"stream 1"}]
    for call in recorder.calls:
        assert [(span.group, span.end_ns - span.begin_ns) for span in call.spans] == [(0, 3000), (1, 5000)]
        assert_ordered(call)


def test_what_the_caller_captures_is_not_recorded(plan, gpu, driver):
    engine, recorder = recorded(plan)
    x, y = Array(gpu, rows(7, 6)), Array(gpu, rows(7, 4))
    engine(x, out=y)
    y.buffer = gpu.upload(np.zeros((7, 4), np.float32))
    driver.calls.clear()

    def enqueue(stream):
        x.facts["stream"] = stream
        engine(x, out=y)

    gpu.capture(enqueue).launch()
    assert driver.calls.count("cuLaunchKernelEx") == 2
    assert "cuGraphAddEventRecordNode" not in driver.calls
    assert np.allclose(y.now, expected(x.values), rtol=1e-5)
    assert len(recorder.calls) == 1
    x.facts["stream"] = 1234
    engine(x, out=y)
    assert len(recorder.calls) == 2


def test_the_plain_plan_keeps_its_weights_and_graphs(plan, gpu, driver):
    """Nothing is uploaded or loaded again, and the plain plan launches no events."""
    engine, recorder = Engine(plan, CudaBackend(0), "cuda:0"), Recorder(plan)
    driver.calls.clear()
    engine.record(recorder)
    assert not {"cuModuleLoadData", "cuMemAlloc", "cuMemcpyHtoDAsync"} & set(driver.calls)
    x = rows(7, 6)
    want = engine(x)
    engine.record(None)
    driver.calls.clear()
    for _ in range(3):
        assert np.array_equal(engine(x), want)
    assert "cuGraphAddEventRecordNode" not in driver.calls
    assert len(recorder.calls) == 1


def test_resources_are_of_the_launches_of_the_first_call(plan, driver):
    engine, recorder = recorded(plan)
    assert recorder.resources == {}
    engine(rows(7, 6))
    (first, second), (of_first, of_second) = (engine._bound.at(7).steps, recorder.resources.values())
    assert list(recorder.resources) == [0, 1]
    for (group, _), found in ((first, of_first), (second, of_second)):
        (made,) = group.lowering.at(7).launches
        warps = -(-made.config.block[0] // 32)
        assert found == Resources(40, 128 + made.config.shared_bytes, 2 * warps / 64)
    before = dict(recorder.resources)
    driver.cuOccupancyMaxActiveBlocksPerMultiprocessor = lambda *_: (0, 1)
    engine(rows(1000, 6))
    assert recorder.resources == before


def test_a_call_that_fails_is_not_recorded(plan, driver):
    engine, recorder = recorded(plan)
    x = rows(7, 6)
    engine(x)
    for function in ("cuGraphLaunch", "cuStreamSynchronize"):
        driver.answers[function] = 999
        with pytest.raises(KernelError):
            engine(x)
        driver.answers.clear()
        driver_module.first_fault.clear()
    engine(x)
    assert [len(launches(call)) for call in recorder.calls] == [2, 2]


def test_events_are_reused_and_destroyed(plan, gpu, driver):
    before = len(driver.alive_events)
    engine, recorder = recorded(plan)
    x = rows(7, 6)
    engine(x)
    alive = len(driver.alive_events)
    for _ in range(20):
        engine(x)
    assert len(driver.alive_events) == alive
    for B in range(1, 3 * MAX_GRAPHS):
        engine(rows(B, 6))
    assert len(driver.alive_events) <= alive + (alive - before) * MAX_GRAPHS
    assert all(len(launches(call)) == 2 for call in recorder.calls)
    del engine
    gc.collect()
    assert len(driver.alive_events) == before


def test_a_call_of_more_graphs_than_are_kept_loses_none(plan, gpu, driver, monkeypatch):
    monkeypatch.setattr(timed_plan, "MAX_GRAPHS", 1)
    engine, recorder = recorded(plan)
    engine._bound.max_arena_bytes = 16 * 9 * 4 + 256
    engine(Array(gpu, rows(70, 6)), out=Array(gpu, rows(70, 4)))  # chunks of 16 rows and of 6
    assert sum(span.rows for span in recorder.calls[0].spans) == 140


def test_threads_do_not_mix_their_spans(plan, gpu):
    """Two of them use the same stream."""
    engine, recorder = recorded(plan)
    failures = []

    def work(B, stream):
        x, y = Array(gpu, rows(B, 6, seed=B), stream=stream), Array(gpu, rows(B, 4))
        for _ in range(20):
            engine(x, out=y)
            engine(x.values)
        if not np.allclose(y.now, expected(x.values), rtol=1e-5):
            failures.append(B)

    threads = [threading.Thread(target=work, args=each) for each in ((7, 1234), (8, 1234), (9, 77), (9, 78))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(recorder.calls) == 160
    for call in recorder.calls:
        assert [(span.group, span.rows) for span in launches(call)] == [(0, call.rows), (1, call.rows)]


def test_two_threads_on_one_stream_and_batch_size_each_get_their_spans(plan, gpu, driver):
    """The second thread launches the graph again before the first one has read it."""
    engine, recorder = recorded(plan)
    waits, synchronise = [], gpu.synchronise
    x, y = Array(gpu, rows(7, 6)), Array(gpu, rows(7, 4))

    def interrupted(stream=None, kernel=""):
        waits.append(stream)
        if len(waits) == 2:  # the first one is before the call
            thread = threading.Thread(target=engine, args=(x,), kwargs={"out": y})
            thread.start()
            thread.join()
        synchronise(stream, kernel)

    gpu.synchronise = interrupted
    engine(x, out=y)
    inner, outer = recorder.calls
    assert [span.group for span in inner.spans] == [span.group for span in outer.spans] == [0, 1]
    assert outer.spans[-1].end_ns <= inner.spans[0].begin_ns


def test_the_clocks_are_compared_again_after_a_second(plan, clock, driver):
    engine, recorder = recorded(plan)
    engine(rows(7, 6))
    clock.ns += 2 * 10**9
    driver.clock = lambda: clock.event() + 0.5  # the GPU's clock has drifted
    engine(rows(7, 6))
    assert_ordered(recorder.calls[1])


def test_an_event_node_that_takes_longer_than_a_launch(plan, clock, driver, monkeypatch):
    monkeypatch.setitem(KERNEL_NS, "Dense<6, 9", -50)
    engine, recorder = recorded(plan)
    engine(rows(7, 6))
    assert [span.end_ns - span.begin_ns for span in launches(recorder.calls[0])] == [0, 5000]


def test_launches_run_one_after_the_other(gpu, driver):
    """Also those that branch or overlap, and the memset of scratch memory."""
    one_thread = LaunchConfig((1, 1, 1), (1, 1, 1), 0)
    first = KernelLaunch(Program(Path("a.cu"), "first"), one_thread, (Output(0),) * 4, Budget(64))
    branch = KernelLaunch(Program(Path("a.cu"), "branch"), one_thread, (Scratch(0),) * 4, Budget(64), after=())
    overlapping = replace(first, config=replace(one_thread, overlaps=True))
    bound = BoundSteps(gpu, Steps((first, branch, overlapping), 256, cleared_bytes=4))
    driver.built.clear()
    builder = EventGraphBuilder(gpu)
    _, ends = bound.add_to(builder, [], [16], gpu.allocate(256).pointer)
    bound.add_to(builder, [], [16], gpu.allocate(256).pointer, ends)
    (waits,) = driver.built.values()
    nodes = list(waits)
    assert list(waits.values()) == [frozenset(), *(frozenset([node]) for node in nodes[:-1])]
    assert len(nodes) == 1 + 2 * 2 * 4
    assert builder.names == ["memset", "first", "branch", "first"] * 2
    assert len(builder.names) == 2 * bound.node_count
    assert not driver.begins_before


# -- few of many calls ---------------------------------------------------------------------------------------


def total(recorder):
    return sum(call.count for call in recorder.calls)


PLAIN_NS = sum(KERNEL_NS.values())


def test_recording_takes_little_of_the_time_of_all_calls(plan, clock, sampled):
    """Events and copies make a recorded call a third longer here: a few in a thousand are recorded."""
    engine, recorder = recorded(plan)
    x = rows(7, 6)
    want, begin = engine(x), clock.ns
    for number in range(1, 20_000):
        assert np.array_equal(engine(x), want)
        if number in (50, 5000):
            assert total(recorder) == number + 1
    assert PLAIN_NS < (clock.ns - begin) / 19_999 < PLAIN_NS * (1 + sampling.LIMIT)
    assert total(recorder) == 20_000
    assert 20 < len(recorder.calls) < 1000
    for call in recorder.calls:
        assert [(span.group, span.rows) for span in launches(call)] == [(0, 7), (1, 7)]


def test_calls_that_take_long_are_nearly_all_recorded(plan, clock, driver, sampled):
    engine, recorder = recorded(plan)
    run = driver.run
    driver.run = lambda launched: (run(launched), setattr(clock, "ns", clock.ns + 10**7))
    for _ in range(200):
        engine(rows(7, 6))
    assert 180 < len(recorder.calls) < 200
    assert total(recorder) == 200


def test_each_batch_size_is_counted(plan, gpu, driver, sampled):
    """Rows of host arrays and of GPU arrays; the totals of a profile are exact."""
    engine, recorder = recorded(plan)
    x, y = Array(gpu, rows(9, 6)), Array(gpu, rows(9, 4))
    for number in range(3000):
        engine(rows(7, 6))
        if not number % 3:
            engine(x, out=y)
    found = summarise("cuda:0", recorder)
    assert (found.calls, found.rows) == (4000, 3000 * 7 + 1000 * 9)
    assert f"\n{found.recorded} of 4,000 calls were recorded, to keep recording below 3% of their time; " in found.text
    assert found.recorded == len(recorder.calls) < 400
    for kernel, ns in zip(sorted(found.kernels, key=lambda kernel: kernel.layers), KERNEL_NS.values(), strict=True):
        assert (kernel.calls, kernel.mean_us) == (4000, pytest.approx(ns / 1e3))
        assert kernel.total_us == pytest.approx(4000 * ns / 1e3)
    assert sum(copy.nbytes for copy in found.copies) == 3000 * 7 * (6 + 4) * 4


def test_skipped_calls_with_gpu_arrays_return_at_once(plan, gpu, driver, sampled):
    """Recorded ones begin when the stream is idle: work of earlier calls is not part of them."""
    driver.lazy = True
    engine, recorder = recorded(plan)
    x, y = Array(gpu, rows(7, 6)), Array(gpu, rows(7, 4))
    waits = []
    for _ in range(1000):
        driver.calls.clear()
        engine(x, out=y)
        waits.append(driver.calls.count("cuStreamSynchronize"))
        if not waits[-1]:
            assert driver.calls == ["cuGraphLaunch"]
    gpu.synchronise(1234)
    assert np.allclose(y.now, expected(x.values), rtol=1e-5)
    assert waits.count(0) > 900
    assert total(recorder) == 1000
    assert len({call.end_ns - call.begin_ns for call in recorder.calls}) == 1


def test_errors_of_skipped_calls_are_raised(plan, gpu, driver, sampled):
    engine, recorder = recorded(plan)
    x = rows(7, 6)
    for _ in range(100):
        engine(x)
    driver.answers["cuGraphLaunch"] = 999
    for _ in range(3):
        with pytest.raises(KernelError):
            engine(x)
        driver_module.first_fault.clear()
    driver.answers.clear()
    engine(x)
    assert total(recorder) == 101


def test_the_printed_overhead_is_that_of_all_calls(plan, clock, monkeypatch, sampled):
    monkeypatch.setattr(profile_network_module, "place", lambda *_: (plan, CudaBackend(0), "cuda:0"))
    now = SimpleNamespace(perf_counter=lambda: clock.ns / 1e9, perf_counter_ns=lambda: clock.ns)
    monkeypatch.setattr(profile_network_module, "time", now)
    found, calls = profile_network_module.profile_network(plan.network, 7, "cuda", plan.job, seconds=0.2)
    assert found.call_us == pytest.approx(PLAIN_NS / 1e3)
    assert 0 < found.overhead < sampling.LIMIT
    assert found.engine.calls > 10_000 > 10 * found.engine.recorded
    assert f"recording takes {found.overhead:+.1%} of their time" in found.fitted(200)
    (name,) = {event["args"]["name"] for event in trace_events(calls.recorded) if event["name"] == "thread_name"
               and event["tid"] == 0}  # fmt: skip
    assert name == f"calls, {found.engine.recorded:,} of {found.engine.calls:,} recorded"


# -- emulated kernels ----------------------------------------------------------------------------------------


def with_a_view():
    """Two launches, with a group between them that launches nothing."""
    nodes = (
        Node("s", Softmax(1), ("x",)), Node("r", Reshape((3, 8)), ("s",)), Node("t", Softmax(1), ("r",)),
    )  # fmt: skip
    return Network({"x": TensorType(("B", 4, 6))}, nodes, ("t",), {})


@needs_gxx
def test_results_are_those_of_the_plain_plan_to_the_bit(monkeypatch):
    gpu = emulate_device(monkeypatch)
    plain = compile(with_a_view(), "cuda")
    engine, recorder = recorded(plain.plan)
    for B in (1, 300, 1):
        x = rows(B, 4, 6)
        want = plain(x)
        assert np.array_equal(engine(x), want)
        assert np.array_equal(engine(Array(gpu, x)).numpy(), want)
    assert [call.rows for call in recorder.calls] == [1, 1, 300, 300, 1, 1]
    groups = [i for i, group in enumerate(engine.plan.groups) if not group.claim.is_view]
    assert groups == [0, 2]
    assert sorted(recorder.resources) == groups
    for call in recorder.calls:
        by_group = [engine._bound.at(call.rows).steps[i][1].functions for i in range(2)]
        names = [(group, f.name) for group, functions in zip(groups, by_group, strict=True) for f in functions]
        assert [(span.group, span.name) for span in launches(call)] == names


@needs_gxx
@pytest.mark.parametrize("B", [7, 900])
def test_ids_outside_their_table_still_raise(monkeypatch, B):
    gpu = emulate_device(monkeypatch)
    net = sequential(TensorType(("B", 5), "int32"), [("e", Embedding()), ("s", CumSum(1))], {"e.weight": rows(40, 12)})
    plain = compile(net, "cuda")
    engine, recorder = recorded(plain.plan)
    good = np.random.default_rng(0).integers(0, 40, (B, 5)).astype(np.int32)
    bad = good.copy()
    bad[B - 3, 1] = 77
    want, told = plain(good), f"row {B - 3}, position 1: id 77, expected 0 to 39"
    for _ in range(2):
        with pytest.raises(InputError, match=told):
            engine(bad)
        assert np.array_equal(engine(good), want)
    engine(Array(gpu, bad))  # as in the plain plan, reported by the next call or wait
    with pytest.raises(InputError, match=told):
        engine.wait()
    assert np.array_equal(engine(Array(gpu, good)).numpy(), want)
    assert len(recorder.calls) == 4  # the two that raised are left out
    assert all(call.spans for call in recorder.calls)


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@on_both_clocks
@pytest.mark.parametrize("net", [NET, two_groups(), with_a_view()], ids=["one launch", "two", "a view"])
def test_on_a_gpu(net, recorded_by):
    plain = compile(net, "cuda")
    engine, recorder = recorded(plain.plan)
    groups = {i for i, group in enumerate(plain.plan.groups) if not group.claim.is_view}
    for B in (1, 1000, 400_000, 1000):
        x = rows(B, *net.input.row_shape)
        want, got = plain(x), engine(x)
        for a, b in zip(*((each if isinstance(each, tuple) else (each,)) for each in (got, want)), strict=True):
            assert np.array_equal(a, b)
        call = recorder.calls[-1]
        assert (call.rows, recorder.lost) == (B, 0)
        assert {span.group for span in launches(call)} == groups == set(recorder.resources)
        assert sum(span.nbytes for span in copies(call, INTO_PINNED)) == x.nbytes
        assert sum(span.nbytes for span in copies(call, TO_GPU)) in (0, x.nbytes)  # 0: mapped memory
        for group in groups:
            assert sum(span.rows for span in call.spans if span.group == group) >= B
        assert all(span.end_ns > span.begin_ns for span in call.spans)
        for track in {span.track for span in call.spans}:
            spans = [span for span in call.spans if span.track == track]
            if recorded_by == "events":  # with CUPTI, kernels may overlap
                assert all(a.end_ns <= b.begin_ns for a, b in itertools.pairwise(spans))
            assert sum(span.end_ns - span.begin_ns for span in spans) <= call.end_ns - call.begin_ns
    for found in recorder.resources.values():
        assert 0 < found.occupancy <= 1
        assert found.registers > 0
    assert recorder.clock.startswith("CUDA events" if recorded_by == "events" else "CUPTI 13.")


@pytest.mark.gpu
@pytest.mark.parametrize("recorded_by", ["cupti"], indirect=True)
def test_both_clocks_agree_on_a_gpu(monkeypatch, recorded_by):
    """The time of a kernel that takes much longer than an event, and where it lies in the call."""
    plain, times = compile(NET, "cuda"), {}
    x = rows(1_000_000, 72)
    for clock in ("cupti", "events"):
        if clock == "events":
            monkeypatch.setattr(activities, "_activities", load_nothing)
        engine, recorder = recorded(plain.plan)
        for _ in range(5):
            engine(x)
        engine.record(None)
        for call in recorder.calls:
            assert all(
                call.begin_ns - 50_000 < span.begin_ns < span.end_ns < call.end_ns + 50_000 for span in call.spans
            )
        kinds = {"kernel": launches, TO_GPU: lambda call: copies(call, TO_GPU)}
        times[clock] = {
            kind: min(sum(span.end_ns - span.begin_ns for span in of(call)) for call in recorder.calls)
            for kind, of in kinds.items()
        }
    for kind, ns in times["cupti"].items():
        assert ns == pytest.approx(times["events"][kind], rel=0.2), kind


@pytest.mark.gpu
@on_both_clocks
def test_torch_tensors_on_a_gpu(torch):
    plain = compile(NET, "cuda")
    engine, recorder = recorded(plain.plan)
    x = torch.from_numpy(rows(50_000, 72)).cuda()
    for _ in range(3):
        assert torch.equal(engine(x), plain(x))
    y, graph = torch.empty(50_000, 4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine(x, out=y)
    graph.replay()
    assert torch.equal(y, plain(x))
    assert [call.rows for call in recorder.calls] == [50_000] * 3
    for call in recorder.calls:
        assert all(span.end_ns > span.begin_ns for span in call.spans)
        assert sum(span.end_ns - span.begin_ns for span in call.spans) <= call.end_ns - call.begin_ns
