"""Engines of several launches: when they become a graph, and its kernel arguments. No GPU needed."""

import gc
import threading

import numpy as np
import pytest

from checks import rows
from fake_cuda import FREE_BYTES, Array, FakeDriver, fake_gpu, floats
from onchip.errors import DeviceError, KernelError
from onchip.kernels.cuda.mlp.fused import MlpFusedKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import Linear
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.planner import make_plan
from onchip.runtime.arrays.adapters import DlpackArrays
from onchip.runtime.cuda import driver as driver_module
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.bound_plan import MAX_GRAPHS
from onchip.runtime.cuda.checked_launches import check_every_launch
from onchip.runtime.engine import Engine


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(driver_module, "first_fault", [])
    return FakeDriver()


@pytest.fixture
def gpu(monkeypatch, driver):
    yield fake_gpu(monkeypatch, driver)
    DlpackArrays.release_all()  # arrays of the last call's work


def chain_of_two(outputs=("b",)):
    nodes = (Node("a", Linear(), ("x",), {"weight": "u"}), Node("b", Linear(), ("a",), {"weight": "v"}))
    weights = {"u": rows(9, 6, seed=3), "v": rows(4, 9, seed=4)}
    return Network({"x": TensorType(("B", 6))}, nodes, outputs, weights)


@pytest.fixture
def two_groups(gpu, driver, monkeypatch):
    """An engine of two launches with a value between them that is not an output."""
    from dataclasses import replace

    net = chain_of_two(("a", "b"))
    plan = make_plan(net, H200, [MlpFusedKernel()])
    assert len(plan.groups) == 2
    plan = replace(plan, network=net.replace(outputs=("b",)))  # the same groups, without output a

    def run(launched):
        x, _, y, B = launched.words
        widths, weight = ((6, 9), "u") if "Dense<6, 9" in launched.kernel else ((9, 4), "v")
        floats(y, B, widths[1])[...] = floats(x, B, widths[0]) @ net.weights[weight].T

    driver.run = run
    return Engine(plan, CudaBackend(0), "cuda:0")


def test_the_same_rows_at_the_same_place_become_a_graph(two_groups, driver, gpu):
    x, y = Array(gpu, rows(7, 6)), Array(gpu, rows(7, 4))
    want = x.values @ chain_of_two().weights["u"].T @ chain_of_two().weights["v"].T
    told = []
    for _ in range(4):
        driver.calls.clear()
        floats(y.buffer.pointer, 7, 4)[...] = 0
        assert two_groups(x, out=y) is y
        assert np.allclose(y.now, want, rtol=1e-5)
        told.append((driver.calls.count("cuLaunchKernelEx"), driver.calls.count("cuGraphLaunch")))
    assert told == [(2, 0), (0, 1), (0, 1), (0, 1)]  # launched; built as a graph and launched; launched as a graph
    (waits,) = driver.built.values()
    first, second = waits
    assert waits == {first: frozenset(), second: frozenset([first])}  # a group after the one that it reads


def test_other_arrays_are_told_to_the_graph_that_is_there(two_groups, driver, gpu):
    """Only the kernels that touch the caller's arrays, and only those that moved; no allocation, no wait."""
    xs = [Array(gpu, rows(7, 6, seed=i)) for i in range(3)]
    ys = [Array(gpu, rows(7, 4)) for _ in range(3)]
    u, v = (chain_of_two().weights[name] for name in "uv")
    for _ in range(2):
        two_groups(xs[0], out=ys[0])
    told = []
    for i, j in [(0, 0), (0, 1), (0, 2), (1, 2), (2, 0), (2, 0)]:
        driver.calls.clear()
        floats(ys[j].buffer.pointer, 7, 4)[...] = 0
        two_groups(xs[i], out=ys[j])
        assert np.allclose(ys[j].now, xs[i].values @ u.T @ v.T, rtol=1e-5)
        update = "cuGraphExecKernelNodeSetParams"
        assert driver.calls == [update] * driver.calls.count(update) + ["cuGraphLaunch"]
        told.append(driver.calls.count(update))
    assert told == [0, 1, 1, 1, 2, 0]
    assert len({graph for graph, _ in driver.replays}) == 1


def test_launches_that_are_checked_use_the_arrays_of_each_call(two_groups, driver, gpu):
    """No graph: the calls in its place read the addresses of the current call."""
    check_every_launch()
    u, v = (chain_of_two().weights[name] for name in "uv")
    for i in range(4):
        x, y = Array(gpu, rows(7, 6, seed=i)), Array(gpu, rows(7, 4))
        driver.calls.clear()
        two_groups(x, out=y)
        assert np.allclose(y.now, x.values @ u.T @ v.T, rtol=1e-5)
        waited = [name for name in driver.calls if name in ("cuLaunchKernelEx", "cuStreamSynchronize")]
        assert waited == ["cuLaunchKernelEx", "cuStreamSynchronize"] * 2
    assert not driver.graphs


def test_an_update_that_fails_is_told_and_tried_again(two_groups, driver, gpu):
    x, y, z = Array(gpu, rows(7, 6)), Array(gpu, rows(7, 4)), Array(gpu, rows(7, 4))
    for _ in range(2):
        two_groups(x, out=y)
    driver.answers["cuGraphExecKernelNodeSetParams"] = 999
    with pytest.raises(KernelError, match="CUDA failed while updating"):
        two_groups(x, out=z)
    driver.answers.clear()
    floats(z.buffer.pointer, 7, 4)[...] = 0
    two_groups(x, out=z)
    assert np.array_equal(z.now, y.now)


def test_a_stream_has_one_arena_and_graphs_of_its_own(two_groups, driver, gpu):
    arrays = {B: (Array(gpu, rows(B, 6)), Array(gpu, rows(B, 4))) for B in (300, 200, 7)}
    before = len(driver.memory)
    engine = Engine(two_groups.plan, CudaBackend(0), "cuda:0")
    weights = len(driver.memory) - before
    for stream in (1234, 77):
        for x, y in arrays.values():
            x.facts["stream"] = stream
            for _ in range(2):
                engine(x, out=y)
    assert len(driver.memory) == before + weights + 2  # of the largest batch, for each stream
    assert len({graph for graph, _ in driver.replays}) == 6
    del engine
    gc.collect()
    assert len(driver.memory) == before


def test_a_threads_own_default_stream_shares_nothing_with_other_threads(two_groups, driver, gpu):
    """The per-thread default stream has the same handle in every thread."""
    failures = []

    def work(seed):
        x, y = Array(gpu, rows(7, 6, seed=seed), stream=2), Array(gpu, rows(7, 4))
        for _ in range(3):
            two_groups(x, out=y)
        if not np.array_equal(y.now, x.values @ chain_of_two().weights["u"].T @ chain_of_two().weights["v"].T):
            failures.append(seed)

    before = len(driver.memory)
    for seed in range(3):
        thread = threading.Thread(target=work, args=(seed,))
        thread.start()
        thread.join()
    assert not failures
    assert len(driver.memory) <= before + 3


def test_graphs_are_bounded(two_groups, driver, gpu):
    for B in range(1, 2 * MAX_GRAPHS):
        x, y = Array(gpu, rows(B, 6)), Array(gpu, rows(B, 4))
        for _ in range(2):
            two_groups(x, out=y)
    assert len(driver.graphs) == MAX_GRAPHS


def test_a_stream_that_records_gets_plain_launches(two_groups, driver, gpu):
    x, y = Array(gpu, rows(7, 6)), Array(gpu, rows(7, 4))
    two_groups(x, out=y)
    driver.calls.clear()

    def enqueue(stream):
        x.facts["stream"] = stream
        for _ in range(3):
            two_groups(x, out=y)

    recorded = gpu.capture(enqueue)
    assert (driver.calls.count("cuLaunchKernelEx"), driver.calls.count("cuGraphInstantiate")) == (6, 1)
    assert recorded is not None


def test_no_memory_between_groups_says_what_batch_fits(two_groups, driver, gpu):
    x, y = Array(gpu, rows(100, 6)), Array(gpu, rows(100, 4))
    driver.max_bytes = 1000
    with pytest.raises(DeviceError, match=f"at most {FREE_BYTES // ((6 + 9 + 4) * 4)} rows at a time: each needs 76 B"):
        two_groups(x, out=y)
