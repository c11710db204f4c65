"""onchip.profile: what it counts, what it prints, and the timeline that it writes."""

import json
from dataclasses import replace

import numpy as np
import pytest

import onchip
from fake_cuda import FakeDriver, fake_gpu
from onchip.errors import InputError
from onchip.kernels.cuda.mlp.fused import MlpFusedKernel
from onchip.measure import profile_network as profile_network_module
from onchip.measure.profile import Profile, profile, summarise
from onchip.measure.profile_network import profile_network
from onchip.measure.trace import trace_events
from onchip.network.build import mlp, sequential
from onchip.network.layers import CumSum
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.plan.step_info import steps_of
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.placement import kernels_for
from onchip.runtime.spans import COPY, MEMSET, Call, Recorder, Resources, Span
from takers import CPU


def two_groups():
    """A plan of two groups."""
    net = sequential(TensorType(("B", 3000), "float64"), [("s", CumSum(1)), ("t", CumSum(1))], {})
    return make_plan(net, CPU, kernels_for(CPU), Job(batch=4))


def span(group, begin_us, end_us, track="thread 0", rows=4):
    return Span(track, f"kernel {group}", group, begin_us * 1000, end_us * 1000, rows)


def recorder_of(*calls):
    recorder = Recorder(two_groups())
    for call in calls:
        recorder.append(call)
    return recorder


def test_the_times_of_a_group():
    """Two calls: the second stands for three, and two threads shared its rows."""
    found = summarise("cpu", recorder_of(
        Call(0, 100_000, 4, (span(0, 10, 30), span(1, 30, 90))),
        Call(200_000, 300_000, 4, (span(0, 200, 220, rows=2), span(0, 200, 240, "thread 1", 2), span(1, 240, 250)),
             workers=2, count=3),
    ))  # fmt: skip
    assert (found.calls, found.recorded, found.rows, found.call_us) == (4, 2, 16, 100.0)
    second, first = found.kernels if found.kernels[0].total_us < found.kernels[1].total_us else found.kernels[::-1]
    by_layer = {kernel.layers: kernel for kernel in (first, second)}
    s, t = by_layer["s",], by_layer["t",]
    assert s.total_us == pytest.approx(20 + 3 * 30)  # threads with different rows: their mean
    assert t.total_us == pytest.approx(60 + 3 * 5)
    assert s.mean_us == pytest.approx(s.total_us / 4)
    assert s.share + t.share == pytest.approx(1)
    assert [kernel.total_us for kernel in found.kernels] == sorted((s.total_us, t.total_us), reverse=True)
    step = steps_of(two_groups(), 4)[0]
    assert (s.nbytes, s.flop, s.estimate_us) == (step.nbytes, step.flop, pytest.approx(step.estimate_us))
    assert s.bytes_per_s == pytest.approx(step.nbytes / s.mean_us * 1e6)
    assert s.of_floor == pytest.approx(step.floor_us / s.mean_us)


def test_launches_of_a_group_that_overlap_count_once():
    """On one stream; those of another group, or on another stream, count for themselves."""
    stream = "stream 1"
    found = summarise("cuda:0", recorder_of(Call(0, 100_000, 4, (
        span(0, 10, 30, stream), span(0, 12, 20, stream), span(0, 25, 45, stream), span(0, 50, 55, stream),
        span(0, 52, 54, "stream 2"), span(1, 53, 63, stream),
    ))))  # fmt: skip
    times = {kernel.layers: kernel.mean_us for kernel in found.kernels}
    assert times == {("s",): pytest.approx(35 + 5 + 2), ("t",): pytest.approx(10)}


def test_kernels_that_overlap_run_for_no_more_than_the_call():
    """The time in which any of them runs counts once, also on several streams, and at most until the call ends."""
    calls = [
        Call(0, 100_000, 4, (span(0, 10, 50, "stream 1"), span(1, 20, 40, "stream 2"), span(0, 45, 90, "stream 2"))),
        Call(0, 100_000, 4, (span(0, 60, 70, "stream 1"), span(1, 80, 120, "stream 1")), count=3),
    ]
    found = summarise("cuda:0", recorder_of(*calls))
    assert found.kernel_us == pytest.approx((80 + 3 * 30) / 4)
    added = (40 + 20 + 45 + 3 * (10 + 40)) / 4
    assert (
        "a recorded call takes 100.0 µs: 42.5 µs in kernels, 57.5 µs before, between and after them; "
        f"kernels overlap: their times add up to {added:.1f} µs\n" in found.text + "\n"
    )
    assert "overlap" not in summarise("cuda:0", recorder_of(Call(0, 100_000, 4, calls[0].spans[:1]))).text


def test_the_work_of_a_call_is_that_of_its_chunks():
    """A call of three chunks beside one of a single chunk; launches are those of a mean call."""
    stream, B = "stream 1", (16, 16, 4)
    spans = [span(0, 10 * i, 10 * i + 5, stream, rows) for i, rows in enumerate(B)]
    cleared = Span(stream, MEMSET, 0, 31_000, 32_000, 4)
    found = summarise("cuda:0", recorder_of(
        Call(0, 40_000, 36, (*spans, cleared), chunks=B), Call(0, 40_000, 36, (span(0, 1, 2, rows=36),), chunks=(36,)),
    ))  # fmt: skip
    kernel = next(kernel for kernel in found.kernels if kernel.layers == ("s",))
    large, small, whole = (steps_of(two_groups(), rows)[0] for rows in (16, 4, 36))
    for name, value in (
        ("nbytes", kernel.nbytes), ("flop", kernel.flop), ("floor_us", kernel.of_floor * kernel.mean_us),
        ("estimate_us", kernel.estimate_us),
    ):  # fmt: skip
        a, b, c = (getattr(step, name) for step in (large, small, whole))
        assert value == pytest.approx((2 * a + b + c) / 2), name
    assert kernel.launches == 2.0  # the memset is none


def test_bytes_and_flop_are_those_of_the_mean_call():
    """A call of 4 rows, and one of 40 that stands for nine."""
    found = summarise(
        "cpu", recorder_of(Call(0, 100, 4, (span(0, 0, 1),)), Call(0, 100, 40, (span(0, 0, 1),), count=9))
    )
    few, many = (steps_of(two_groups(), B)[0] for B in (4, 40))
    assert found.kernels[0].flop == pytest.approx((few.flop + 9 * many.flop) / 10)


def test_no_kernel_beats_its_floor():
    found = summarise("cpu", recorder_of(Call(0, 100, 1 << 20, (span(0, 0, 1),))))
    assert found.kernels[0].of_floor == 1.0


def test_threads():
    calls = [Call(0, 1000, 4, (span(0, 0, 1),), cpu_ns=(1000, 500)), Call(2000, 3000, 4, (span(0, 2, 3),))]
    found = summarise("cpu", recorder_of(*calls))
    assert found.threads == (1.0, 0.5)  # the second call was not counted
    assert found.imbalance == pytest.approx(1 / 0.75)
    assert "100%, 50%" in found.text


def test_a_gpu_has_columns_of_its_own():
    recorder = recorder_of(Call(0, 1000, 4, (span(0, 0, 1, "stream 1"), span(1, 0, 1, "stream 1"))))
    recorder.resources[0] = Resources(64, 1024, 0.5)
    text = summarise("cuda:0", recorder).text
    assert "registers" in text
    assert "1,024 B" in text
    assert "registers" not in summarise("cpu", recorder).text


def copy(name, begin_us, end_us, nbytes, track="stream 1"):
    return Span(track, name, COPY, begin_us * 1000, end_us * 1000, 0, nbytes)


def test_copies():
    """They have lines of their own and are not part of the kernels' time."""
    found = summarise("cuda:0", recorder_of(
        Call(0, 100_000, 4, (copy("in", 0, 10, 4000), span(0, 10, 40, "stream 1"), copy("out", 40, 60, 1 << 20))),
        Call(200_000, 300_000, 4, (copy("in", 200, 205, 500), span(0, 210, 220, "stream 1")), count=3),
    ))  # fmt: skip
    assert found.kernel_us == 15.0
    into, _ = found.copies
    assert (into.name, into.copies, into.total_us, into.nbytes) == ("in", 4, 25.0, 5500)
    assert into.bytes_per_s == pytest.approx(5500 / 25e-6)
    assert "out: 20.0 µs in total, 1.0 MiB, 52.4 GB/s each" in found.text
    assert found.to_dict()["copies"][0]["nbytes"] == 5500
    assert not summarise("cpu", recorder_of(Call(0, 1000, 4, (span(0, 0, 1),)))).copies


def test_the_timeline(tmp_path):
    recorder = recorder_of(Call(5000, 9000, 4, (span(0, 6, 7), span(1, 7, 8, "thread 1"), copy("in", 8, 9, 64))))
    found = Profile([("cpu (auto)", recorder), ("cpu", recorder_of())])
    found.save_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in complete] == [
        ("call, 4 rows", 0, 0.0, 4.0), ("kernel 0", 1, 1.0, 1.0), ("kernel 1", 2, 2.0, 1.0),
        ("in", 3, 3.0, 1.0),
    ]  # fmt: skip
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 0): "calls", (0, 1): "thread 0", (0, 2): "thread 1", (0, 3): "stream 1"}
    assert [e["args"] for e in complete[2:]] == [{"rows": 4, "group": 1}, {"bytes": 64}]
    assert all({"name", "ph", "pid", "tid"} <= event.keys() for event in events)


def test_spans_that_overlap_have_tracks_of_their_own():
    """The viewer draws events of a track inside each other."""
    spans = [span(0, 1, 5, "stream 1"), span(0, 2, 4, "stream 1"), span(1, 3, 9, "stream 1"), span(1, 5, 8, "stream 1")]
    spans.append(span(0, 3, 4, "stream 2"))
    events = list(trace_events([("cuda:0", recorder_of(Call(0, 9000, 4, tuple(spans))))]))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = [(names[event["tid"]], event["ts"]) for event in events if event["ph"] == "X" and event["tid"]]
    assert sorted(found) == [
        ("stream 1", 1), ("stream 1", 5), ("stream 1, overlapping 1", 2), ("stream 1, overlapping 2", 3),
        ("stream 2", 3),
    ]  # fmt: skip


def test_ranks_are_processes_of_the_timeline_and_have_tables(tmp_path):
    found = Profile([("cpu (auto)", recorder_of(Call(5000, 9000, 4, (span(0, 6, 7),))))])
    other = recorder_of(Call(7000, 8000, 9, (span(0, 7, 8, rows=9),)))
    other.where = "rank 1 on b"
    found.add_ranks("rank 0 on a", [("cuda:3", other)])
    found.save_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    name = other.plan.network.name
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: f"rank 0 on a: {name} on cpu", 1: f"rank 1 on b: {name} on cuda:3"}
    assert [event["ts"] for event in events if event["name"] == "call, 9 rows"] == [2.0]
    assert f"rank 0 on a: {name} on cpu (auto): 1 call, 4 rows" in str(found)
    assert f"rank 1 on b: {name} on cuda:3: 1 call, 9 rows" in str(found)
    assert [each["where"] for each in found.to_dict()["engines"]] == ["rank 0 on a", "rank 1 on b"]


# -- the context manager -------------------------------------------------------------------------------------


def test_it_records_engines_that_exist_and_those_that_are_made():
    old, x = onchip.compile(mlp(8, 4, name="old"), "cpu"), np.ones((3, 8), np.float32)
    y = old(x)
    with onchip.profile() as found:
        np.testing.assert_array_equal(old(x), y)
        new = onchip.compile(mlp(8, 5, name="new"), "cpu")
        new(x)
        new(x)
    assert {each.network: each.calls for each in found.engines} == {"old": 1, "new": 2}
    before = str(found)
    old(x)  # no longer
    assert str(found) == before
    assert "old on cpu" in before
    assert json.dumps(found.to_dict())


def test_one_profile_at_a_time():
    with profile(), pytest.raises(InputError, match="two profiles"), profile():
        pass
    with profile() as found:  # the first ended
        pass
    assert str(found) == "no calls were recorded"


def test_an_error_ends_it():
    engine = onchip.compile(mlp(8, 4), "cpu")
    with pytest.raises(KeyError), profile() as found:
        raise KeyError
    engine(np.ones((3, 8), np.float32))
    assert not found.engines


# -- a network -----------------------------------------------------------------------------------------------


def test_a_network():
    found, calls = profile_network(mlp(72, 64, 4), 100, "cpu", Job(batch=100), seconds=0.05)
    assert found.call_us > 0
    assert found.B == 100
    assert found.engine.rows == 100 * found.engine.calls
    (kernel,) = found.engine.kernels
    assert kernel.kernel.startswith("mlp_fused")
    assert 0 < found.utilisation <= 1
    text = found.fitted(200)
    for word in ("plain calls", "recording takes", "planned in", "mlp_fused"):
        assert word in text
    assert json.dumps(found.to_dict(), default=str)
    assert calls.engines[0].calls == found.engine.calls
    assert found.gpu_peak_bytes == 0
    assert "on the host" in text
    assert "on the GPU" not in text
    other = replace(found, peak_bytes=3 << 20, gpu_peak_bytes=5 << 20)
    assert "the process took at most 3.0 MiB on the host, 5.0 MiB on the GPU" in other.fitted(200)
    assert "the process took at most 5.0 MiB on the GPU" in replace(other, peak_bytes=0).fitted(200)


def test_a_network_on_a_gpu(monkeypatch):
    """Its weights, and the memory of the slots, count; what was freed before the profile does not."""
    gpu = fake_gpu(monkeypatch, FakeDriver())
    gpu.reserve(64 << 20)
    net = mlp(72, 64, 4)
    plan = make_plan(net, H200, [MlpFusedKernel()])
    monkeypatch.setattr(profile_network_module, "place", lambda *_: (plan, CudaBackend(0), "cuda:0"))
    found, _ = profile_network(net, 100, "cuda", Job(batch=100), seconds=0.01)
    assert plan.weight_bytes <= found.gpu_peak_bytes < 64 << 20
    assert found.engine.copies


def test_it_can_be_stopped(monkeypatch):
    """Between any two calls, however long it is to run."""
    monkeypatch.setattr(profile_network_module, "SHOW_S", 0)
    shown = []

    def stop(share, text):
        shown.append(text)
        if len(shown) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_network(mlp(72, 64, 4), 10, "cpu", Job(batch=10), seconds=3600, progress=stop)
    assert shown == ["plain calls"] * 4


def test_more_rows_than_fit_into_memory():
    with pytest.raises(InputError, match="does not fit into memory"):
        profile_network(mlp(72, 64, 4), 1 << 40, "cpu", Job(batch=10))
