"""torch tensors through an engine on their GPU: streams, graphs, threads. Needs a GPU."""

import threading
import time

import numpy as np
import pytest

from checks import random_mlp, rows
from gpu_networks import BATCHES, DECODE, NET, two_groups
from onchip.errors import InputError, ShapeError
from onchip.network.build import sequential
from onchip.network.layers import CumSum
from onchip.network.types import TensorType
from onchip.runtime.cuda.launches import Graph
from onchip.runtime.engine import compile

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("B", [*BATCHES, 12_800, 100_000])
def test_torch_in_place_of_numpy(engine, torch, B):
    x = rows(B, 72)
    want, given = engine(x), torch.from_numpy(x).cuda()
    out = torch.full((B, 4), float("nan"), device="cuda")
    for _ in range(3):  # the first call prepares the launch
        out.fill_(float("nan"))
        assert engine(given, out=out) is out
        assert np.array_equal(out.cpu().numpy(), want)
    for _ in range(2):
        made = engine(given)
        assert (made.shape, made.dtype, made.device) == ((B, 4), torch.float32, given.device)
        assert np.array_equal(made.cpu().numpy(), want)


def test_torch_without_rows(engine, torch):
    for _ in range(2):
        assert engine(torch.empty(0, 72, device="cuda")).shape == (0, 4)


def test_torch_on_a_stream_of_the_callers(engine, torch):
    """The work waits for earlier work on that stream, and the host does not wait."""
    x = rows(12_800, 72)
    want = engine(x)
    source, given = torch.from_numpy(x).cuda(), torch.zeros(12_800, 72, device="cuda")
    out, stream = torch.empty(12_800, 4, device="cuda"), torch.cuda.Stream()
    engine(given, out=out)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        given.copy_(source)
        engine(given, out=out)
        was_done = stream.query()
    assert not was_done
    stream.synchronize()
    assert np.array_equal(out.cpu().numpy(), want)


def test_torch_on_two_streams_at_a_time(engine, torch):
    batches = [torch.from_numpy(rows(12_800, 72, seed=i)).cuda() for i in range(6)]
    wants = [engine(batch.cpu().numpy()) for batch in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    outs = [torch.empty(12_800, 4, device="cuda") for _ in batches]
    torch.cuda.synchronize()
    for _ in range(20):
        for batch, out, stream in zip(batches, outs, streams, strict=True):
            with torch.cuda.stream(stream):
                engine(batch, out=out)
    torch.cuda.synchronize()
    for out, want in zip(outs, wants, strict=True):
        assert np.array_equal(out.cpu().numpy(), want)


@pytest.mark.parametrize("groups", [1, 2])
def test_torch_captures_it_in_a_graph(engine, torch, groups):
    net = NET if groups == 1 else two_groups()
    one = engine if groups == 1 else compile(net, device="cuda")
    D = net.input.row_size
    x = torch.from_numpy(rows(500, D)).cuda()
    outs = tuple(torch.empty(500, net.types[name].row_size, device="cuda") for name in net.outputs)
    out = outs if groups == 2 else outs[0]
    one(x, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one(x, out=out)
    for seed in (5, 6):
        fresh = rows(500, D, seed=seed)
        x.copy_(torch.from_numpy(fresh))
        for y in outs:
            y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        want = one(fresh)
        for got, exact in zip(outs, want if groups == 2 else (want,), strict=True):
            assert np.array_equal(got.cpu().numpy(), exact)


@pytest.mark.parametrize("io", ["fp32", "fp16"])
def test_the_same_tensors_are_replayed_as_a_graph(torch, io):
    """The first calls launch and capture, later ones replay, with the same results."""
    one = compile(NET, device="cuda", io=io)
    dtype = getattr(torch, one.input.dtype)

    def fresh(seed):
        given = torch.from_numpy(rows(12_800, 72, seed=seed)).to(dtype)
        return given.cuda(), torch.from_numpy(one(given.numpy())).cuda()

    x, want = fresh(0)
    first, second = (torch.empty(12_800, 4, dtype=dtype, device="cuda") for _ in range(2))

    def check(out, stream=None):
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            assert one(x, out=out) is out
        (stream or torch.cuda.current_stream()).synchronize()
        assert torch.equal(out, want)

    for _ in range(5):
        check(first)
    changed, want = fresh(1)
    x.copy_(changed)
    check(first)
    for _ in range(3):
        check(second)
    for _ in range(4):  # alternating addresses, both as graphs
        check(first)
        check(second)
    other = torch.cuda.Stream()
    check(first, other)
    check(second, other)

    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):  # these two already have a graph
        for _ in range(3):
            one(x, out=first)
    changed, want = fresh(2)
    x.copy_(changed)
    first.zero_()
    torch.cuda.synchronize()
    assert not first.any()  # recorded, not run
    recorded.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, want)
    check(second)
    check(first)


def test_a_graph_is_made_while_another_thread_captures(engine, torch):
    """An engine's call does not break its capture in the strictest mode."""
    x, other_x = torch.from_numpy(rows(500, 72)).cuda(), torch.from_numpy(rows(501, 72)).cuda()
    out, other_out = torch.zeros(500, 4, device="cuda"), torch.zeros(501, 4, device="cuda")
    want, other_want = (engine(given.cpu().numpy()) for given in (x, other_x))
    engine(x, out=out)
    torch.cuda.synchronize()
    stream, failures = torch.cuda.Stream(), []

    def work():
        try:
            with torch.cuda.stream(stream):  # the default stream is unusable while the other thread captures
                for _ in range(5):
                    engine(other_x, out=other_out)
        except Exception as error:
            failures.append(error)

    recorded, thread = torch.cuda.CUDAGraph(), threading.Thread(target=work)
    with torch.cuda.graph(recorded):
        engine(x, out=out)
        thread.start()
        thread.join()
    assert not failures
    out.zero_()
    recorded.replay()
    torch.cuda.synchronize()
    assert np.array_equal(out.cpu().numpy(), want)
    assert np.array_equal(other_out.cpu().numpy(), other_want)


def test_two_groups_in_torch_become_a_graph(torch, monkeypatch):
    net, launched, launch = two_groups(), [], Graph.launch
    monkeypatch.setattr(Graph, "launch", lambda self, *stream: launched.append(self) or launch(self, *stream))
    two = compile(net, device="cuda")
    x = torch.from_numpy(rows(5000, 6)).cuda()
    out = (torch.empty(5000, 9, device="cuda"), torch.empty(5000, 4, device="cuda"))
    want = two(x.cpu().numpy())
    for _ in range(5):
        for y in out:
            y.zero_()
        two(x, out=out)
        for got, exact in zip(out, want, strict=True):
            assert np.array_equal(got.cpu().numpy(), exact)
    assert launched


def ten_groups():
    """Ten launches, one input and one output: consecutive sums, one group each."""
    layers = [(f"s{i}", CumSum(1)) for i in range(10)]
    return sequential(TensorType(("B", 50)), layers, {})


def test_many_launches_with_ever_other_tensors(torch):
    """One graph, whose first and last kernel are updated: earlier launches are not affected."""
    ten = compile(ten_groups(), device="cuda")
    assert len(ten.plan.groups) == 10
    xs = [torch.from_numpy(rows(64, 50, seed=i)).cuda() for i in range(4)]
    wants = [ten(x.cpu().numpy()) for x in xs]
    outs = [torch.empty(64, 50, device="cuda") for _ in range(20)]
    for turn in range(3):
        for y in outs:
            y.fill_(float("nan"))
        for i, y in enumerate(outs):  # all in flight before the first is read
            ten(xs[(i + turn) % 4], out=y)
        for i, y in enumerate(outs):
            assert np.array_equal(y.cpu().numpy(), wants[(i + turn) % 4])


def test_many_launches_on_many_streams_and_threads(torch):
    ten, failures = compile(ten_groups(), device="cuda"), []

    def work(seed):
        try:
            streams = [torch.cuda.Stream() for _ in range(3)]
            for B in (64, 300):
                x = torch.from_numpy(rows(B, 50, seed=seed)).cuda()
                want = ten(x.cpu().numpy())
                torch.cuda.synchronize()
                outs = [torch.zeros(B, 50, device="cuda") for _ in range(7)]
                torch.cuda.synchronize()
                for i in range(40):
                    with torch.cuda.stream(streams[i % 3]):
                        ten(x, out=outs[i % 7])
                torch.cuda.synchronize()
                failures.extend((seed, B) for y in outs if not np.array_equal(y.cpu().numpy(), want))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_host_time_of_many_launches(torch):
    """A graph launch, and an update of the kernel that writes to a new address."""
    ten, x = compile(ten_groups(), device="cuda"), torch.randn(64, 50, device="cuda")
    outs = [torch.empty(64, 50, device="cuda") for _ in range(20)]

    def median_us(given):
        times = []
        for i in range(600):
            if i % 20 == 0:
                torch.cuda.synchronize()  # the queue never fills
            started = time.perf_counter()
            ten(x, out=given[i % len(given)])
            times.append(time.perf_counter() - started)
        return np.median(times[100:]) * 1e6

    same, other = median_us(outs[:1]), median_us(outs)
    print(f"ten groups at B = 64: {same:.1f} us with the same tensors, {other:.1f} us with 20 outs in turn")
    assert other < same + 15


def test_threads_with_streams_of_their_own(engine, torch):
    failures = []

    def work(seed):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for B in (1000, 777, 12_800):
                    x = torch.from_numpy(rows(B, 72, seed=seed)).cuda()
                    want = engine(x.cpu().numpy())
                    out = torch.empty(B, 4, device="cuda")
                    for _ in range(50):
                        engine(x, out=out)
                    if not np.array_equal(out.cpu().numpy(), want):
                        failures.append((seed, B))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_slice_that_is_not_aligned(engine, torch):
    x = rows(1000, 72)
    want = engine(x)
    given = torch.zeros(1000 * 72 + 1, device="cuda")[1:].view(1000, 72)
    given.copy_(torch.from_numpy(x))
    room = torch.full((1000 * 4 + 4,), 7.0, device="cuda")
    out = room[3:-1].view(1000, 4)
    for _ in range(2):
        engine(given, out=out)
        assert np.array_equal(out.cpu().numpy(), want)
    assert room[:3].tolist() == [7.0] * 3
    assert room[-1:].tolist() == [7.0]


def test_what_torch_tensors_are_refused(engine, torch):
    x, y = torch.zeros(100, 72, device="cuda"), torch.zeros(100, 4, device="cuda")
    for _ in range(2):  # the second time the shape is known
        for given, out, error, words in [
            (x.cpu(), y, InputError, "out is not on the host"),
            (x, y.cpu(), InputError, "not on the GPU"),
            (x.double(), y, ShapeError, "input has the wrong dtype"),
            (x, y.half(), ShapeError, "out has the wrong dtype"),
            (x[:, :71], y, ShapeError, "input has the wrong shape"),
            (x, y[:99], ShapeError, "out has the wrong shape"),
            (torch.zeros(72, 100, device="cuda").T, y, ShapeError, "input is not row-major"),
            (x, x.view(-1)[:400].view(100, 4), ShapeError, "out overlaps an input"),
            (x, np.zeros((100, 4), np.float32), InputError, "arrays of different kinds"),
            (np.zeros((100, 72), np.float32), y, InputError, "arrays of different kinds"),
        ]:
            with pytest.raises(error, match=words):
                engine(given, out=out)
        engine(x, out=y)


def test_a_result_outlives_its_engine(torch):
    """The weights are freed with the engine, but only after the kernel that reads them is done."""
    x = torch.from_numpy(rows(12_800, 72)).cuda()
    want = compile(NET, device="cuda")(x.cpu().numpy())
    results = []
    for _ in range(20):
        torch.cuda._sleep(2_000_000)
        results.append(compile(NET, device="cuda")(x))
        compile(random_mlp(*DECODE, seed=9), device="cuda")  # reuses memory that was just freed
    for y in results:
        assert np.array_equal(y.cpu().numpy(), want)


def test_no_python_between_the_caller_and_the_launch(engine, torch):
    """A call from Python costs a few times an empty launch at most: 50 us would mean a slower path."""
    x, out = torch.randn(12_800, 72, device="cuda"), torch.empty(12_800, 4, device="cuda")
    for _ in range(100):
        engine(x, out=out)
    torch.cuda.synchronize()
    times = []
    for _ in range(300):
        started = time.perf_counter()
        engine(x, out=out)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    print(f"engine(x, out=y), 12,800 rows, synchronised: {np.median(times) * 1e6:.1f} us")
    assert np.median(times) < 50e-6
