"""Calls recorded with CUPTI: on a fake CUPTI that watches a fake driver."""

import functools
import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from checks import random_mlp, rows
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from fake_cuda import Array, FakeDriver, fake_gpu, floats
from fake_cupti import KERNEL, MEMCPY, FakeCupti
from gpu_networks import two_groups
from onchip.errors import DeviceError, KernelError
from onchip.kernels.cuda.mlp.fused import MlpFusedKernel
from onchip.measure import profile_network as profile_network_module
from onchip.measure.profile import profile, summarise
from onchip.network.graph import Network, Node
from onchip.network.layers import CumSum, Reshape, Softmax
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.planner import make_plan
from onchip.runtime import sampling
from onchip.runtime.arrays.adapters import DlpackArrays
from onchip.runtime.cuda import activities, chunks, cupti, recorded_plan, staging, timed_copies, traced_plan
from onchip.runtime.cuda import driver as driver_module
from onchip.runtime.cuda.activities import Activities, Copy, Launch
from onchip.runtime.cuda.activities import Node as LaunchNode
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.cupti import MEMSET, Activity, Cupti, CuptiError
from onchip.runtime.cuda.timed_copies import INTO_PINNED, OUT_OF_PINNED, TO_GPU, TO_HOST
from onchip.runtime.cuda.timed_plan import TimedPlan
from onchip.runtime.cuda.traced_plan import TracedPlan
from onchip.runtime.engine import Engine, compile
from onchip.runtime.spans import COPY, Recorder, Span

COPY_NS = 250
KERNEL_NS = {"Dense<6, 9": 3000, "Dense<9, 4": 5000}
WEIGHTS = two_groups().weights


class Clock:
    ns = 10**10

    def now(self):
        return self.ns

    def advance(self, ns):
        self.ns += ns


@pytest.fixture(autouse=True)
def _every_call(monkeypatch):
    """Is recorded."""
    monkeypatch.setattr(sampling, "FIRST", 1 << 40)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (cupti, traced_plan, recorded_plan, timed_copies):
        monkeypatch.setattr(module, "perf_counter_ns", made.now)
    return made


@pytest.fixture
def driver(monkeypatch, clock):
    monkeypatch.setattr(driver_module, "first_fault", [])
    made = FakeDriver()

    def run(launched):
        x, _, y, B = launched.words
        kernel = next(each for each in KERNEL_NS if each in launched.kernel)
        clock.ns += KERNEL_NS[kernel]
        widths, weight = ((6, 9), "u") if kernel == "Dense<6, 9" else ((9, 4), "v")
        floats(y, B, widths[1])[...] = floats(x, B, widths[0]) @ WEIGHTS[weight].T

    made.run = run
    return made


@pytest.fixture
def library(monkeypatch, clock, driver):
    made = FakeCupti(clock.now)
    made.watch(driver, COPY_NS, clock.advance)
    monkeypatch.setattr(activities, "_activities", functools.cache(lambda: Activities(Cupti(made))))
    return made


@pytest.fixture
def gpu(monkeypatch, driver, library):
    yield fake_gpu(monkeypatch, driver)
    DlpackArrays.release_all()


@pytest.fixture
def plan(gpu):
    net = two_groups()
    made = make_plan(net, H200, [MlpFusedKernel()])
    return replace(made, network=net.replace(outputs=("b",)))


def recorded(plan):
    engine, recorder = Engine(plan, CudaBackend(0), "cuda:0"), Recorder(plan)
    engine.record(recorder)
    return engine, recorder


def expected(x):
    return (x @ WEIGHTS["u"].T) @ WEIGHTS["v"].T


def launches(call):
    return [span for span in call.spans if span.group != COPY]


def copies(call, name):
    return [span for span in call.spans if span.name == name]


# -- calls ---------------------------------------------------------------------------------------------------


def test_every_launch_of_a_call_is_a_span(plan):
    """The first call launches one by one, the later ones a graph."""
    engine, recorder = recorded(plan)
    assert isinstance(engine._bound, TracedPlan)
    assert recorder.clock == "CUPTI 13.0"
    for seed in range(3):
        x = rows(7, 6, seed=seed)
        assert np.allclose(engine(x), expected(x), rtol=1e-5)
    assert len(recorder.calls) == 3
    for call in recorder.calls:
        spans = launches(call)
        assert [(span.group, span.track, span.rows) for span in spans] == [(0, "stream 1", 7), (1, "stream 1", 7)]
        assert [span.end_ns - span.begin_ns for span in spans] == [3000, 5000]
        for span, kernel in zip(spans, KERNEL_NS, strict=True):
            assert span.name.startswith("mlp_fused<")
            assert kernel in span.name
        assert call.begin_ns <= spans[0].begin_ns <= spans[0].end_ns <= spans[1].begin_ns
        assert spans[1].end_ns <= call.end_ns
    assert recorder.lost == 0


def test_a_recorded_call_launches_what_a_plain_call_does(plan, driver):
    engine = Engine(plan, CudaBackend(0), "cuda:0")
    x, made = rows(7, 6), []
    for recorder in (None, Recorder(plan)):
        engine.record(recorder)
        engine(x)
        engine(x)
        driver.calls.clear()
        driver.replays.clear()
        engine(x)
        made.append((list(driver.calls), len(driver.replays)))
    assert made[0] == made[1]
    assert "cuEventRecord" not in driver.calls
    assert made[0][1] == 1


def test_activities_are_read_when_the_calls_are(plan, library):
    engine, recorder = recorded(plan)
    flushes = library.flushes
    for _ in range(10):
        engine(rows(7, 6))
    assert library.flushes == flushes
    assert len(recorder.calls) == len(recorder.calls) == 10
    assert library.flushes == flushes + 1  # once, as nothing is left to read


def test_a_long_job_reads_now_and_then(plan, library, monkeypatch):
    monkeypatch.setattr(cupti, "_BUFFER_BYTES", 1024)
    monkeypatch.setattr(traced_plan, "MAX_BYTES", 4096)
    engine, recorder = recorded(plan)
    flushes = library.flushes
    for _ in range(60):
        engine(rows(7, 6))
    assert 3 < library.flushes - flushes < 30
    assert [len(launches(call)) for call in recorder.calls] == [2] * 60
    assert not activities._activities()._found
    assert not activities._activities()._tag_of


def test_chunks_of_a_call_are_on_several_streams(plan, driver, library, monkeypatch):
    for module, name, value in (
        (chunks, "SLOT_BYTES", 8000), (chunks, "MIN_CHUNK_BYTES", 4000), (staging, "MAPPED_BYTES", 1000),
        (staging, "SMALL_BYTES", 1000),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    driver.lazy = True
    engine, recorder = recorded(plan)
    x = rows(4999, 6)
    for _ in range(2):
        assert np.allclose(engine(x), expected(x), rtol=1e-5)
    for call in recorder.calls:
        assert {span.track for span in launches(call)} == {f"stream {1 + i}" for i in range(chunks.SLOTS)}
        assert sum(call.chunks) == 4999
        for group in (0, 1):
            assert sorted(span.rows for span in call.spans if span.group == group) == sorted(call.chunks)
        for name, width in ((INTO_PINNED, 6), (TO_GPU, 6), (TO_HOST, 4), (OUT_OF_PINNED, 4)):
            assert sum(span.nbytes for span in copies(call, name)) == 4999 * width * 4
        for name in (TO_GPU, TO_HOST):
            assert {span.end_ns - span.begin_ns for span in copies(call, name)} == {COPY_NS}
        begins = [span.begin_ns for span in call.spans]
        assert begins == sorted(begins)
    assert len(launches(recorder.calls[0])) > 4 * chunks.SLOTS
    assert not library._here.ids  # later work has no id


def test_arrays_on_the_gpu_and_captured_streams(plan, gpu, driver):
    driver.lazy = True
    engine, recorder = recorded(plan)
    x, y = Array(gpu, rows(7, 6)), Array(gpu, rows(7, 4))
    for _ in range(3):
        assert engine(x, out=y) is y
        assert np.allclose(y.now, expected(x.values), rtol=1e-5)

    def enqueue(stream):
        x.facts["stream"] = stream
        engine(x, out=y)

    gpu.capture(enqueue).launch()
    gpu.synchronise()
    engine.record(None)
    assert [[span.group for span in call.spans] for call in recorder.calls] == [[0, 1]] * 3
    assert recorder.lost == 0


def test_the_memset_of_scratch_memory_belongs_to_its_group(plan):
    engine, _ = recorded(plan)
    launched = SimpleNamespace(node_count=2, functions=[SimpleNamespace(entry="_Za", name="a<1>")])
    bound = SimpleNamespace(steps=[(SimpleNamespace(index=4), launched)])
    assert engine._bound._nodes_of(bound, 9) == (LaunchNode("", "memset", 4), LaunchNode("_Za", "a<1>", 4))


def test_many_batch_sizes(plan, monkeypatch):
    monkeypatch.setattr(traced_plan, "MAX_CALLS", 3)
    engine, recorder = recorded(plan)
    for B in range(1, 8):
        engine(rows(B, 6))
    assert len(engine._bound._nodes) <= 3
    assert [[span.rows for span in launches(call)] for call in recorder.calls] == [[B, B] for B in range(1, 8)]


def test_what_others_launch_is_not_counted(plan, library, gpu):
    engine, recorder = recorded(plan)
    library.ran("other_kernel", library.now(), library.now(), 99)
    with gpu:
        gpu.clear(gpu.allocate(16).pointer, 16, gpu.stream)
    engine(rows(7, 6))
    (call,) = recorder.calls
    assert [span.group for span in launches(call)] == [0, 1]


def test_threads_do_not_mix_their_spans(plan, gpu):
    engine, recorder = recorded(plan)

    def work(B, stream):
        x, y = Array(gpu, rows(B, 6, seed=B), stream=stream), Array(gpu, rows(B, 4))
        for _ in range(20):
            engine(x, out=y)
            engine(x.values)

    threads = [threading.Thread(target=work, args=each) for each in ((7, 1234), (8, 1234), (9, 77), (9, 78))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.calls) == 160
    for call in recorder.calls:
        assert sorted((span.group, span.rows) for span in launches(call)) == [(0, call.rows), (1, call.rows)]


def test_a_call_that_fails_is_not_recorded(plan, driver):
    engine, recorder = recorded(plan)
    x = rows(7, 6)
    for _ in range(2):
        engine(x)
    for function in ("cuGraphLaunch", "cuStreamSynchronize"):
        driver.answers[function] = 999
        with pytest.raises(KernelError):
            engine(x)
        driver.answers.clear()
        driver_module.first_fault.clear()
    engine(x)
    assert [len(launches(call)) for call in recorder.calls] == [2, 2, 2]
    assert recorder.lost == 0


def chain_with_views():
    """Groups of several launches, with one between them that launches nothing."""
    nodes = (
        Node("s", Softmax(1), ("x",)), Node("r", Reshape((3, 8)), ("s",)), Node("c", CumSum(1), ("r",)),
        Node("t", Softmax(1), ("c",)),
    )  # fmt: skip
    return Network({"x": TensorType(("B", 4, 6))}, nodes, ("t",), {})


@needs_gxx
@pytest.mark.parametrize("net", [chain_with_views(), random_mlp(20, 70, 30, 5)], ids=["views", "mlp"])
def test_emulated_kernels(monkeypatch, net):
    """The results are the plain plan's to the bit, and the kernels are those that events time, in the same order."""
    gpu = emulate_device(monkeypatch)
    library = FakeCupti(itertools.count(10**12, 100).__next__)
    library.watch(gpu.driver)
    monkeypatch.setattr(activities, "_activities", functools.cache(lambda: Activities(Cupti(library))))
    engine = compile(net, "cuda")
    found = []
    for kind in (TracedPlan, TimedPlan):
        library.answers["cuptiSubscribe"] = 0 if kind is TracedPlan else 39
        recorder = Recorder(engine.plan)
        for B in (1, 50):
            x = rows(B, *net.input.row_shape)
            engine.record(None)
            want = engine(x)
            engine.record(recorder)
            assert type(engine._bound) is kind
            for _ in range(3):
                assert np.array_equal(engine(x), want)
        engine.record(None)
        found.append([[(span.group, span.name, span.rows) for span in launches(call)] for call in recorder.calls])
        assert recorder.lost == 0
    assert found[0] == found[1]
    assert [len(found[0]), len({group for group, _, _ in found[0][0]}) > 1] == [6, True]


# -- records that are missing --------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [KERNEL, MEMCPY])
def test_a_call_without_all_its_times_is_left_out(plan, library, monkeypatch, missing):
    """It gets a second chance: another thread's work may delay its records."""
    for module, name in ((staging, "MAPPED_BYTES"), (staging, "SMALL_BYTES")):
        monkeypatch.setattr(module, name, 100)  # with copies
    engine, recorder = recorded(plan)
    x = rows(70, 6)
    engine(x)
    library.delivers = lambda kind: kind != missing
    engine(x)
    library.delivers = lambda kind: True
    engine(x)
    assert (len(recorder.calls), recorder.lost) == (2, 0)
    assert (len(recorder.calls), recorder.lost) == (2, 1)
    engine.record(None)
    assert (len(recorder.calls), recorder.lost) == (2, 1)
    told = summarise("cuda:0", recorder).text
    assert "\ntimes of kernels by CUPTI 13.0; 1 call left out: some of their times are missing\n" in told


def test_few_of_many_short_calls_are_recorded(plan, library, monkeypatch):
    """To record one takes long in Python. A call that is lost takes those with it that it stands for."""
    monkeypatch.setattr(sampling, "FIRST", 2)
    engine, recorder = recorded(plan)
    x, tags = rows(7, 6), itertools.count()
    push = activities._activities().push
    monkeypatch.setattr(activities._activities(), "push", lambda: (next(tags), push())[1])
    for _ in range(1000):
        assert np.allclose(engine(x), expected(x), rtol=1e-5)
    assert len(recorder.calls) == next(tags) < 50
    assert sum(call.count for call in recorder.calls) == 1000
    library.delivers = lambda kind: kind != KERNEL
    for _ in range(1000):
        engine(x)
    engine.record(None)
    assert recorder.lost > 800
    assert sum(call.count for call in recorder.calls) + recorder.lost == 2000


def test_records_that_come_late_still_count(plan, library):
    engine, recorder = recorded(plan)
    finish = library._finish_buffer
    engine(rows(7, 6))
    library._finish_buffer = lambda: None
    assert len(recorder.calls) == 0
    library._finish_buffer = finish
    assert len(recorder.calls) == 1


def test_a_profile_without_any_time_says_so(plan, library, monkeypatch):
    engine, recorder = recorded(plan)
    library.delivers = lambda kind: kind != KERNEL
    engine(rows(7, 6))
    engine.record(None)
    assert summarise("cuda:0", recorder).text.endswith("no calls; 1 call left out: some of their times are missing")
    monkeypatch.setattr(profile_network_module, "place", lambda *_: (plan, CudaBackend(0), "cuda:0"))
    library.delivers = lambda kind: kind != KERNEL
    with pytest.raises(DeviceError, match=r"no times of .* calls, by CUPTI 13\.0"):
        profile_network_module.profile_network(plan.network, 7, "cuda", plan.job, seconds=0.01)


# -- begin and end -------------------------------------------------------------------------------------------


def test_nothing_is_recorded_after_the_profile(plan, library):
    engine = Engine(plan, CudaBackend(0), "cuda:0")
    with profile() as found:
        other = Engine(plan, CudaBackend(0), "cuda:0")
        assert library.subscribers == 1
        for each in (engine, other):
            each(rows(7, 6))
        del each, other  # it is gone before the profile ends
    assert [each.calls for each in found.engines] == [1, 1]
    assert "times of kernels by CUPTI 13.0" in found.text
    assert (library.subscribers, library.enabled, library.enabled_calls) == (0, set(), set())
    flushes = library.flushes
    engine(rows(7, 6))
    assert [each.calls for each in found.engines] == [1, 1]
    assert library.flushes == flushes


def test_a_call_that_ends_after_the_profile_is_left_out(plan, gpu, library):
    engine, recorder = recorded(plan)
    synchronise, x, y = gpu.synchronise, Array(gpu, rows(7, 6)), Array(gpu, rows(7, 4))

    def ended(stream=None, kernel=""):
        gpu.synchronise = synchronise
        engine.record(None)
        synchronise(stream, kernel)

    gpu.synchronise = ended
    engine(x, out=y)
    assert (recorder.calls, recorder.lost) == ([], 1)


def test_a_recorder_can_begin_again(plan):
    engine, recorder = recorded(plan)
    engine(rows(7, 6))
    engine.warm_up()  # is not recorded
    engine(rows(8, 6))
    assert [call.rows for call in recorder.calls] == [7, 8]


@pytest.mark.parametrize(("function", "code", "why"), [
    ("cuptiSubscribe", 39, "another profiler uses CUPTI"),
    ("cuptiSubscribe", 15, "cuptiSubscribe fails: CUPTI_ERROR_15"),
    ("cuptiActivityEnable", 14, "cuptiActivityEnable fails: CUPTI_ERROR_14"),
    ("cuptiActivityFlushAll", 999, "cuptiActivityFlushAll fails: CUPTI_ERROR_999"),
    ("cuptiActivityGetNextRecord", 21, "cuptiActivityGetNextRecord fails: CUPTI_ERROR_21"),
])  # fmt: skip
def test_events_where_cupti_fails(plan, library, function, code, why):
    library.answers[function] = code
    engine, recorder = recorded(plan)
    assert isinstance(engine._bound, TimedPlan)
    assert recorder.clock == f"CUDA events, one launch at a time: {why}"
    x = rows(7, 6)
    assert np.allclose(engine(x), expected(x), rtol=1e-5)
    assert f"\ntimes of kernels by {recorder.clock}\n" in summarise("cuda:0", recorder).text
    assert library.subscribers == 0
    assert not library.enabled


def test_events_where_cupti_sees_nothing(plan, library):
    """As under some virtual machines."""
    library.delivers = lambda kind: False
    engine, recorder = recorded(plan)
    assert isinstance(engine._bound, TimedPlan)
    assert recorder.clock.endswith(": CUPTI 13.0 does not record this GPU")
    assert library.subscribers == 0


def test_every_gpu_is_checked_once(plan, gpu, library, driver, monkeypatch):
    cleared = []
    monkeypatch.setattr(gpu, "clear", lambda *arguments: (cleared.append(0), type(gpu).clear(gpu, *arguments)))
    assert [type(recorded(plan)[0]._bound) for _ in range(2)] == [TracedPlan] * 2
    assert cleared == [0]
    fake_gpu(monkeypatch, driver)  # another one
    library.delivers = lambda kind: False
    assert type(recorded(plan)[0]._bound) is TimedPlan


def test_events_without_cupti(plan, monkeypatch):
    def none():
        raise CuptiError("no CUPTI of CUDA 13: pip install 'onchip[profile]'")

    monkeypatch.setattr(activities, "_activities", none)
    engine, recorder = recorded(plan)
    assert isinstance(engine._bound, TimedPlan)
    assert recorder.clock.endswith("one launch at a time: no CUPTI of CUDA 13: pip install 'onchip[profile]'")


# -- spans ---------------------------------------------------------------------------------------------------

A, B, CLEAR = (LaunchNode(*each) for each in (("_Za", "a<1>", 0), ("_Zb", "b<2>", 1), ("", "memset", 1)))


def ran(name, begin, end, kind=10):
    return Activity(kind, 1, begin, end, 0), name


def span(node, begin, end):
    return Span("stream 1", node.name, node.group, 1000 + begin, 1000 + end, 7)


@pytest.mark.parametrize(("nodes", "found", "spans"), [
    ([A, B], [ran("_Zb", 20, 30), ran("_Za", 10, 20)], [span(A, 10, 20), span(B, 20, 30)]),
    # overlapping kernels keep their times
    ([A, B], [ran("_Za", 10, 30), ran("_Zb", 15, 40)], [span(A, 10, 30), span(B, 15, 40)]),
    # the same kernel in two groups
    ([A, A._replace(group=2)], [ran("_Za", 30, 40), ran("_Za", 10, 20)],
     [span(A, 10, 20), span(A._replace(group=2), 30, 40)]),
    # a memset is not a kernel, or one of the driver's own, or not recorded
    ([A, CLEAR, B], [ran("_Za", 10, 20), ran("", 20, 22, MEMSET), ran("_Zb", 22, 30)],
     [span(A, 10, 20), span(CLEAR, 20, 22), span(B, 22, 30)]),
    ([A, CLEAR, B], [ran("_Za", 10, 20), ran("memset32", 20, 22), ran("_Zb", 22, 30)],
     [span(A, 10, 20), span(CLEAR, 20, 22), span(B, 22, 30)]),
    ([CLEAR, B], [ran("_Zb", 22, 30)], [span(B, 22, 30)]),
    # a kernel is missing, or has no time
    ([A, B], [ran("_Za", 10, 20)], None),
    ([A, B], [ran("_Za", 10, 20), ran("_Zb", 0, 0)], None),
    ([A], [ran("_Zb", 10, 20)], None),
    ([A, B], [], None),
])  # fmt: skip
def test_activities_become_spans(nodes, found, spans):
    assert Launch(5, "stream 1", 7, nodes).spans(found, 1000) == spans


def test_a_copy_becomes_a_span():
    copy = Copy(5, "stream 1", TO_GPU, 96)
    assert copy.spans([ran("", 10, 20, 1)], 1000) == [Span("stream 1", TO_GPU, COPY, 1010, 1020, 0, 96)]
    assert copy.spans([ran("", 0, 0, 1)], 1000) is None
    assert copy.spans([], 1000) is None
