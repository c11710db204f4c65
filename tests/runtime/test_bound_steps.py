"""Launch features: clusters, cooperative launches, branches, state, tensor maps, cleared scratch.

A fake driver in Python records the driver calls; on a GPU the kernels of launch_features.cu check the effect. They are
compiled everywhere.
"""

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fake_cuda import FakeDriver, fake_gpu
from onchip.kernels.cuda.common.arguments import Input, Output, Scratch, State, TensorMap, UInt32, Weight
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, LaunchConfig, Program, Steps
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.checked_launches import check_every_launch
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.launches import GraphBuilder
from onchip.runtime.cuda.nvrtc import compile_program

SOURCE = Path(__file__).parent.parent / "launch_features.cu"
KERNELS = {"cluster_ranks": 1, "meet": 2, "wait_for_other": 4, "add_two": 1, "count_calls": 2, "copy_box": 4}


def launch(kernel, *arguments, blocks=1, threads=1, after=None, **config):
    program = Program(SOURCE, kernel)
    return KernelLaunch(
        program, LaunchConfig((blocks, 1, 1), (threads, 1, 1), 0, **config), arguments, Budget(64), after
    )


def clusters(blocks):
    return Steps((launch("cluster_ranks", Output(0), blocks=2 * blocks, threads=32, cluster=blocks),))


def meeting(blocks):
    return Steps((launch("meet", Scratch(0), Output(0), blocks=blocks, cooperative=True),), 256, cleared_bytes=4)


def branches():
    """Two kernels that wait for each other, and one for both."""
    first, second = Scratch(0), Scratch(4)
    return Steps(
        (
            launch("wait_for_other", first, second, Output(0), UInt32(0)),
            launch("wait_for_other", second, first, Output(0), UInt32(1), after=()),
            launch("add_two", Output(0), after=(0, 1)),
        ),
        256,
        cleared_bytes=8,
    )  # fmt: skip


def box(row, column):
    source = TensorMap(Input(0), "float32", (64, 32), (16, 8))
    return Steps((launch("copy_box", source, Output(0), UInt32(row), UInt32(column), threads=128),))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernels_compile(kernel):
    assert compile_program(Program(SOURCE, kernel), "sm_90a").spill_bytes == 0


# -- driver calls --------------------------------------------------------------------------------------------


@pytest.fixture
def driver():
    return FakeDriver(KERNELS.__getitem__)


@pytest.fixture
def gpu(monkeypatch, driver):
    return fake_gpu(monkeypatch, driver)


@pytest.mark.parametrize("blocks", [2, 8, 16])
def test_a_cluster_is_a_launch_attribute_and_a_large_one_is_allowed(gpu, driver, blocks):
    BoundSteps(gpu, clusters(blocks)).enqueue([], [16], 0, 5)
    (launched,) = driver.launches
    assert (launched.cluster, launched.cooperative, launched.grid) == (blocks, False, (2 * blocks, 1, 1))
    assert driver.calls.count("cuFuncSetAttribute") == (blocks > 8)


def test_all_attributes_at_once(gpu, driver):
    told = launch("add_two", Output(0), cluster=4, cooperative=True, overlaps=True)
    BoundSteps(gpu, Steps((told,))).enqueue([], [16], 0, 5)
    (launched,) = driver.launches
    assert (launched.cluster, launched.cooperative, launched.overlaps) == (4, True, True)


def test_scratch_is_cleared_before_the_first_launch(gpu, driver):
    scratch = gpu.allocate(256)
    seen = []
    driver.run = lambda launched: seen.append(ctypes.c_uint32.from_address(launched.words[0]).value)
    BoundSteps(gpu, meeting(3)).enqueue([], [16], scratch.pointer, gpu.stream)
    assert seen == [0]
    assert (ctypes.c_uint8 * 5).from_address(scratch.pointer)[4] == 0xAB  # no more than requested


def test_state_and_weights_are_where_they_were_put(gpu, driver):
    state, weight = gpu.allocate(8), gpu.allocate(8)
    steps = Steps((launch("count_calls", State("count"), Weight("w")),))
    bound = BoundSteps(gpu, steps, {"w": weight}, {"count": state})
    for _ in range(2):
        bound.enqueue([], [], 0, 5)
    assert [launched.words for launched in driver.launches] == [(state.pointer, weight.pointer)] * 2


def test_a_tensor_map_is_encoded_anew_when_its_array_moves(gpu, driver):
    bound = BoundSteps(gpu, box(1, 2))
    for x in (1024, 1024, 2048):
        bound.enqueue([x], [16], 0, 5)
    assert [launched.words for launched in driver.launches] == [(x, 16, 1, 2) for x in (1024, 1024, 2048)]
    assert driver.calls.count("cuTensorMapEncodeTiled") == 2
    told = (ctypes.c_uint64 * 8).from_address(bound.calls[0].arguments[0].address)
    assert list(told) == [2048, 2, 64, 32, 64 * 4, 16, 8, 0]  # pointer, rank, sizes, bytes of a row, box, no swizzle


def test_branches_run_on_side_streams_tied_by_events(gpu, driver):
    bound = BoundSteps(gpu, branches())
    driver.calls.clear()
    scratch = gpu.allocate(256)
    bound.enqueue([], [16], scratch.pointer, 5)
    first, second, third = (launched.stream for launched in driver.launches)
    assert first == third == 5
    assert second != 5
    wanted = ("cuLaunchKernelEx", "cuEventRecord", "cuStreamWaitEvent")
    assert [name[2:] for name in driver.calls if name in wanted] == [
        "EventRecord", "LaunchKernelEx",  # the beginning, and the first
        "StreamWaitEvent", "LaunchKernelEx", "EventRecord",  # the second waits only for the beginning
        "StreamWaitEvent", "LaunchKernelEx", "StreamWaitEvent",  # the third for both, and later work, too
    ]  # fmt: skip
    del bound
    assert driver.calls.count("cuStreamDestroy") == 1


def test_captured_branches_are_branches_of_the_graph(gpu, driver):
    bound = BoundSteps(gpu, branches())
    scratch = gpu.allocate(256)
    gpu.capture(lambda stream: bound.enqueue([], [16], scratch.pointer, stream))
    (captured,) = driver.captured
    clear, first, second, third = captured.nodes
    assert captured.after == {
        clear: frozenset(), first: frozenset([clear]), second: frozenset([clear]), third: frozenset([first, second]),
    }  # fmt: skip


def test_a_launch_after_the_one_before_and_a_chain_beside_it(gpu, driver):
    """0 -> 1 -> 4 in parallel with 2 -> 3; a launch without dependencies has no event."""
    afters = [None, None, (), (2,), (1,)]
    steps = Steps(tuple(launch("add_two", Output(0), after=after) for after in afters))
    bound = BoundSteps(gpu, steps)
    bound.enqueue([], [16], 0, 5)
    main, side = 5, driver.launches[2].stream
    assert [launched.stream for launched in driver.launches] == [main, main, side, side, main]
    assert driver.calls.count("cuStreamWaitEvent") == 2  # the beginning, and the end of the chain


def test_no_launch_waits_for_a_later_one(gpu):
    with pytest.raises(AssertionError, match="launch 0 cannot wait"):
        BoundSteps(gpu, Steps((launch("add_two", Output(0), after=(0,)),)))


def test_a_graph_of_branches_clears_first_and_joins_last(gpu, driver):
    builder, bound = GraphBuilder(gpu), BoundSteps(gpu, branches())
    scratch = gpu.allocate(256)
    nodes, ends = bound.add_to(builder, [], [16], scratch.pointer)
    (waits,) = driver.built.values()
    (clear,) = set(waits) - set(nodes)
    first, second, third = nodes
    assert waits == {
        clear: frozenset(), first: frozenset([clear]), second: frozenset([clear]), third: frozenset([first, second]),
    }  # fmt: skip
    assert ends == [third]
    behind, _ = BoundSteps(gpu, box(1, 2)).add_to(builder, [1024], [16], 0, ends)
    assert waits[behind[0]] == {third}
    assert "cuStreamBeginCapture" not in driver.calls


def test_what_comes_behind_waits_for_every_branch(gpu, driver):
    """Two parallel chains that do not wait for each other."""
    steps = Steps((launch("add_two", Output(0)), launch("add_two", Output(0), after=())))
    builder = GraphBuilder(gpu)
    nodes, ends = BoundSteps(gpu, steps).add_to(builder, [], [16], 0)
    assert ends == nodes
    (behind,), _ = BoundSteps(gpu, clusters(2)).add_to(builder, [], [16], 0, ends)
    (waits,) = driver.built.values()
    assert waits[behind] == set(nodes)


def test_a_kernel_that_waits_by_itself_may_begin_before_the_one_before_it_ends(gpu, driver):
    first = launch("add_two", Output(0))
    second = replace(first, config=replace(first.config, overlaps=True))
    builder = GraphBuilder(gpu)
    nodes, _ = BoundSteps(gpu, Steps((second, first, second))).add_to(builder, [], [16], 0)
    assert driver.begins_before == {(nodes[1], nodes[2])}  # the first has no dependency
    (waits,) = driver.built.values()
    assert waits[nodes[2]] == {nodes[1]}


def test_a_graph_keeps_what_a_launch_says(gpu, driver):
    builder = GraphBuilder(gpu)
    (node,), _ = BoundSteps(gpu, clusters(16)).add_to(builder, [], [16], 0)
    (made,) = driver.graphs.values()
    assert made[node].cluster == 16
    (node,), _ = BoundSteps(gpu, meeting(132)).add_to(GraphBuilder(gpu), [], [16], gpu.allocate(256).pointer)
    assert next(nodes[node] for nodes in driver.graphs.values() if node in nodes).cooperative


def test_launches_that_are_checked_clear_first_and_run_in_order(gpu, driver):
    check_every_launch()
    builder, bound = gpu.graph_builder(), BoundSteps(gpu, branches())
    scratch = gpu.allocate(256)
    bound.add_to(builder, [], [16], scratch.pointer)
    graph = builder.finish(None)
    assert not driver.launches
    for _ in range(2):
        driver.calls.clear()
        graph.launch(5)
        done = ["cuLaunchKernelEx", "cuStreamSynchronize"]
        assert [name for name in driver.calls if name in ("cuMemsetD8Async", *done)] == ["cuMemsetD8Async", *done * 3]
    assert [launched.stream for launched in driver.launches] == [5] * 6


def test_a_graphs_kernel_takes_the_arguments_that_its_launch_has(gpu, driver):
    builder, bound, ran = GraphBuilder(gpu), BoundSteps(gpu, box(1, 2)), []
    nodes, _ = bound.add_to(builder, [1024], [16], 0)
    graph = builder.finish(None)
    update = graph.update_of(nodes[0], bound.calls[0])
    driver.run = lambda launched: ran.append(launched.words)
    driver.lazy = True
    graph.launch(5)
    for (argument, _), pointer in zip(bound.uses[0], (2048, 32), strict=True):
        argument.value = pointer
    update()
    graph.launch(5)
    driver.cuStreamSynchronize(5)
    assert ran == [(1024, 16, 1, 2), (2048, 32, 1, 2)]  # launches in flight keep their pointers


# -- on a GPU ------------------------------------------------------------------------------------------------


class OnGpu:
    """Steps on a GPU with an output of ints, run as launches and as a graph."""

    def __init__(self, steps, count, **kept):
        self.gpu = Gpu.get()
        if self.gpu.device.arch != "sm_90a":
            pytest.skip(f"clusters and tensor maps of Hopper, not {self.gpu.device.arch}")
        self.bound = BoundSteps(self.gpu, steps, **kept)
        self.scratch = self.gpu.reserve(steps.scratch_bytes)
        self.y = self.gpu.upload(np.full(count, -1, np.int32))
        self.count = count

    def enqueue(self, stream):
        self.bound.enqueue([], [self.y.pointer], self.scratch.pointer, stream)

    def results(self):
        """The results of two launched runs, one captured graph and one built graph."""
        made = []
        captured, builder = self.gpu.capture(self.enqueue), GraphBuilder(self.gpu)
        self.bound.add_to(builder, [], [self.y.pointer], self.scratch.pointer)
        built = builder.finish(None)
        for run in (self.enqueue, self.enqueue, captured.launch, built.launch):
            run(self.gpu.stream)
            made.append(self.gpu.download(self.y, np.empty(self.count, np.int32)).tolist())
        return made


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [2, 8, 16])
def test_clusters_of_this_size_run(blocks):
    want = [100 * blocks + rank for rank in range(blocks)] * 2
    assert OnGpu(clusters(blocks), 2 * blocks).results() == [want] * 4


@pytest.mark.gpu
def test_all_blocks_of_a_cooperative_launch_meet_at_a_cleared_word():
    units = Gpu.get().device.units
    assert OnGpu(meeting(units), units).results() == [[units] * units] * 4


@pytest.mark.gpu
def test_branches_run_at_the_same_time_and_come_together():
    assert OnGpu(branches(), 3).results() == [[1, 1, 2]] * 4


@pytest.mark.gpu
def test_state_is_as_the_last_call_left_it():
    count = Gpu.get().upload(np.zeros(1, np.int32))
    steps = Steps((launch("count_calls", State("count"), Output(0)),))
    assert OnGpu(steps, 1, state={"count": count}).results() == [[1], [2], [3], [4]]


@pytest.mark.gpu
def test_a_tensor_map_moves_the_box_that_it_should_and_follows_its_array():
    on = OnGpu(box(8, 32), 128)
    gpu, bound = on.gpu, on.bound
    arrays = [np.arange(32 * 64, dtype=np.float32).reshape(32, 64) + 10_000 * i for i in range(3)]
    xs = [gpu.upload(array) for array in arrays]
    ys = [gpu.upload(np.zeros((8, 16), np.float32)) for _ in range(4)]

    def is_box(i, y):
        return np.array_equal(gpu.download(y, np.empty((8, 16), np.float32)), arrays[i][8:16, 32:48])

    bound.enqueue([xs[0].pointer], [ys[0].pointer], 0, gpu.stream)
    assert is_box(0, ys[0])
    builder = GraphBuilder(gpu)
    nodes, _ = bound.add_to(builder, [xs[1].pointer], [ys[1].pointer], 0)
    graph = builder.finish(None)
    update = graph.update_of(nodes[0], bound.calls[0])
    graph.launch()
    for (argument, _), pointer in zip(bound.uses[0], (xs[2].pointer, ys[2].pointer), strict=True):
        argument.value = pointer
    update()
    graph.launch()
    assert is_box(1, ys[1])
    assert is_box(2, ys[2])
    assert not gpu.download(ys[3], np.empty((8, 16), np.float32)).any()
