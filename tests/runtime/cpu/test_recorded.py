"""Recorded calls on the CPU: when each group ran, on which thread, and the same bits as without."""

import threading

import numpy as np
import pytest

import onchip
from onchip.errors import InputError
from onchip.kernels.cpu.threading import timed
from onchip.kernels.cpu.threading.launches import SLOTS
from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Conv2d, CumSum, Embedding, GlobalMean, Linear, MaxPool2d, ReLU, Softmax, ToInts
from onchip.network.types import TensorType
from onchip.runtime import sampling
from onchip.runtime.cpu import recorded
from onchip.runtime.spans import Recorder


def weights(**shapes):
    rng = np.random.default_rng(0)
    return {name.replace("_", "."): rng.standard_normal(shape, dtype=np.float32) / 8 for name, shape in shapes.items()}


def network(kind):
    if kind == "one group":
        return mlp(72, 64, 4)
    if kind == "python launches":  # a long scan is not a compiled launch
        t = TensorType(("B", 3000), "float64")
        return sequential(t, [("s", CumSum(1)), ("t", CumSum(1))], {})
    layers = [("c", Conv2d()), ("p", MaxPool2d((2, 2))), ("g", GlobalMean((2, 3))), ("f", Linear()), ("s", Softmax(1))]
    return sequential(TensorType(("B", 3, 12, 12)), layers, weights(c_weight=(8, 3, 3, 3), f_weight=(5, 8)))


def rows(engine, B, seed=1):
    return np.random.default_rng(seed).standard_normal((B, *engine.input.row_shape)).astype(engine.input.dtype)


def record(engine):
    engine.record(recorder := Recorder(engine.plan))
    return recorder


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("B", [1, 7, 3000])
@pytest.mark.parametrize("kind", ["one group", "several groups", "python launches"])
def test_every_group_of_every_call_is_recorded(kind, B, threads):
    engine = onchip.compile(network(kind), "cpu", threads=min(threads, recorded_threads()))
    x = rows(engine, B)
    y = engine(x)
    recorder = record(engine)
    for _ in range(3):
        np.testing.assert_array_equal(engine(x), y)
    calls = recorder.calls
    assert {call.rows for call in calls} == {B}
    assert sum(call.count for call in calls) == 3
    groups = {i for i, group in enumerate(engine.plan.groups) if not group.claim.is_view}
    for call in calls:
        assert {span.group for span in call.spans} == groups
        for group in groups:
            of_group = [span for span in call.spans if span.group == group]
            assert sum(span.rows for span in of_group) == B
            assert {span.name for span in of_group} == {engine.plan.groups[group].claim.label}
        assert all(call.begin_ns <= span.begin_ns <= span.end_ns <= call.end_ns for span in call.spans)
        assert {span.track for span in call.spans} <= {f"thread {i}" for i in range(call.workers)}
    engine.record(None)
    engine(x)
    assert recorder.calls == calls


def recorded_threads():
    from onchip.runtime.cpu.backend import core_count

    return core_count()


@pytest.fixture
def few(monkeypatch):
    """As if to record a call took 18 minutes: no more are recorded than those that are compared with plain ones."""
    monkeypatch.setattr(sampling, "AFTER_NS", 1 << 40)


LEARNING = sampling.FIRST + sampling.PAIRS + 1  # recorded calls, the last of which is followed by many that are not


def counts(recorder):
    """Calls, and recorded ones, by rows."""
    found = {}
    for call in recorder.calls:
        all_calls, some = found.get(call.rows, (0, 0))
        found[call.rows] = all_calls + call.count, some + 1
    return found


@pytest.mark.parametrize("kind", ["one group", "several groups", "python launches"])
def test_few_of_many_short_calls_are_recorded(few, kind):
    engine = onchip.compile(network(kind), "cpu")
    x = rows(engine, 2)
    y, recorder = engine(x), record(engine)
    for many in (50, 57):
        for _ in range(many - sum(call.count for call in recorder.calls)):
            np.testing.assert_array_equal(engine(x), y)
        assert counts(recorder) == {2: (many, LEARNING)}
        assert all(len({span.group for span in call.spans}) == len(engine.plan.groups) for call in recorder.calls)
    for _ in range(10):
        np.testing.assert_array_equal(engine(x[::-1]), y[::-1])  # rows that are copied first: not a quick call
    assert counts(recorder) == {2: (67, LEARNING)}
    engine(x[:1])
    assert counts(recorder) == {2: (67, LEARNING), 1: (1, 1)}


def test_batch_sizes_of_one_slot_are_counted(few):
    """Compiled code counts the calls that are skipped, in a slot for several numbers of rows, one at a time."""
    engine = onchip.compile(network("one group"), "cpu")
    batches = [rows(engine, 2 + i * SLOTS) for i in (0, 1, 2)] + [rows(engine, 7)]
    recorder = record(engine)
    for _ in range(30):
        for x in batches:
            engine(x)
    for x in batches:
        for _ in range(20):
            engine(x)
    assert counts(recorder) == {len(x): (50, LEARNING) for x in batches}
    engine.record(None)
    engine.record(recorder)  # another plan: its first calls are recorded
    for x in batches:
        for _ in range(9):
            engine(x)
    assert counts(recorder) == {len(x): (59, LEARNING + sampling.FIRST) for x in batches}


def test_skipped_calls_from_several_threads_are_counted(few):
    engine = onchip.compile(network("several groups"), "cpu")
    x, recorder = rows(engine, 3), record(engine)
    for _ in range(20):
        engine(x)

    def run():
        for _ in range(500):
            engine(x)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(recorder) == {3: (2020, LEARNING)}


def test_calls_with_several_inputs_are_skipped(few):
    nodes = (Node("s", Add(), ("a", "b")), Node("t", ReLU(), ("s",)))
    net = Network({name: TensorType(("B", 5)) for name in "ab"}, nodes, ("s", "t"), {})
    engine = onchip.compile(net, "cpu")
    a, b = (np.random.default_rng(seed).standard_normal((4, 5), np.float32) for seed in (0, 1))
    recorder = record(engine)
    for _ in range(40):
        s, t = engine(a, b)
        np.testing.assert_array_equal(s, a + b)
        np.testing.assert_array_equal(t, np.maximum(a + b, 0))
    assert counts(recorder) == {4: (40, LEARNING)}


def test_more_runs_than_are_kept_between_two_collections(monkeypatch):
    monkeypatch.setattr(recorded, "CAPACITY", 4)
    monkeypatch.setattr(timed, "CAPACITY", 4)
    monkeypatch.setattr(sampling, "FIRST", 1 << 40)  # all calls are recorded
    engine = onchip.compile(network("several groups"), "cpu", threads=1)
    recorder, x = record(engine), rows(engine, 1)
    for _ in range(11):
        engine(x)
    assert [len({span.group for span in call.spans}) for call in recorder.calls] == [len(engine.plan.groups)] * 11


def test_a_bad_id_is_reported_and_its_call_is_not_recorded():
    net = sequential(TensorType(("B", 5), "int32"), [("e", Embedding())], weights(e_weight=(10, 8)))
    engine = onchip.compile(net, "cpu")
    ids = np.random.default_rng(0).integers(0, 10, (6, 5), dtype=np.int32)
    y, recorder = engine(ids), record(engine)
    np.testing.assert_array_equal(engine(ids), y)
    bad = ids.copy()
    bad[3, 2] = 10
    with pytest.raises(InputError, match="10"):
        engine(bad)
    np.testing.assert_array_equal(engine(ids), y)
    assert all(len(call.spans) == 1 for call in recorder.calls)


def test_a_bad_id_that_the_network_computes():
    """Its kernel sets a flag, and the call is run again to report it."""
    layers = [("i", ToInts("int32")), ("e", Embedding())]
    engine = onchip.compile(sequential(TensorType(("B", 5)), layers, weights(e_weight=(10, 8))), "cpu")
    x = np.random.default_rng(0).integers(0, 10, (6, 5)).astype(np.float32)
    y = engine(x)
    record(engine)
    np.testing.assert_array_equal(engine(x), y)
    bad = x.copy()
    bad[3, 2] = 10
    with pytest.raises(InputError, match="10"):
        engine(bad[::-1])  # not a quick call: it is recorded
    np.testing.assert_array_equal(engine(x[::-1]), y[::-1])


def test_skipped_calls_that_fail_are_not_counted(few):
    """Compiled code finds the bad id, and the call is run again to report it."""
    layers = [("i", ToInts("int32")), ("e", Embedding())]
    engine = onchip.compile(sequential(TensorType(("B", 5)), layers, weights(e_weight=(10, 8))), "cpu")
    x = np.random.default_rng(0).integers(0, 10, (6, 5)).astype(np.float32)
    y, recorder = engine(x), record(engine)
    for _ in range(30):
        np.testing.assert_array_equal(engine(x), y)
    bad = x.copy()
    bad[3, 2] = 10
    for _ in range(5):
        with pytest.raises(InputError, match="10"):
            engine(bad)
    np.testing.assert_array_equal(engine(x), y)
    assert counts(recorder) == {6: (31, LEARNING)}


def test_calls_from_several_threads(monkeypatch):
    monkeypatch.setattr(sampling, "FIRST", 1 << 40)
    engine = onchip.compile(network("several groups"), "cpu")
    batches = [rows(engine, B, seed=B) for B in (1, 2, 3, 40)]
    expected = [engine(x) for x in batches]
    recorder, wrong = record(engine), []

    def run(x, y):
        for _ in range(20):
            if not np.array_equal(engine(x), y):
                wrong.append(len(x))

    threads = [threading.Thread(target=run, args=each) for each in zip(batches, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sorted(call.rows for call in recorder.calls) == sorted([1, 2, 3, 40] * 20)
    assert all(len({span.group for span in call.spans}) == len(engine.plan.groups) for call in recorder.calls)


def test_warming_up_is_not_recorded():
    engine = onchip.compile(network("one group"), "cpu")
    recorder = record(engine)
    engine.warm_up()
    assert not recorder.calls
    engine(rows(engine, 3))
    assert len(recorder.calls) == 1


def test_a_helper_that_starts_during_a_call(monkeypatch):
    """Of another engine with more threads: its CPU time is counted from the next call on."""
    monkeypatch.setattr(recorded, "_CPU_NS", -1)
    monkeypatch.setattr(recorded, "_LONG_NS", -1)
    engine = onchip.compile(network("several groups"), "cpu", threads=1)
    recorder, x = record(engine), rows(engine, 3)
    engine(x)
    known = len(recorder.calls[0].cpu_ns)
    helpers, count = [*recorded.HELPERS], recorded._cpu_ns
    monkeypatch.setattr(recorded, "HELPERS", helpers)

    def starts(threads):
        monkeypatch.setattr(recorded, "_cpu_ns", count)
        helpers.append(threading.current_thread())
        return count(threads)

    monkeypatch.setattr(recorded, "_cpu_ns", starts)
    engine(x[::-1])
    engine(x[::-1])
    counts = [len(call.cpu_ns) for call in recorder.calls]
    assert counts == [known, known, known + 1] if known else not any(counts)
