"""How a batch is cut into chunks that pass through the slots. The fake driver runs all work as late as possible, so
using memory too early gives wrong rows."""

import ctypes
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_cuda import FakeDriver, fake_gpu
from onchip.errors import DeviceError, KernelError
from onchip.network.types import numpy_dtype
from onchip.runtime.cuda import chunks, shared_work, staging
from onchip.runtime.cuda.chunks import (
    ALIGN_BYTES,
    CHUNK_BYTES,
    MAX_SLICES,
    MIN_CHUNK_BYTES,
    SLOT_BYTES,
    SLOTS,
    chunk_rows,
    cut_in_slices,
    place_in_slot,
)
from onchip.runtime.cuda.shared_work import Work, offer
from onchip.runtime.cuda.staging import Staging

SIZES = st.lists(st.integers(0, 1 << 16), min_size=1, max_size=4)


# -- chunks and slices ---------------------------------------------------------------------------------------


@given(row_bytes=SIZES, B=st.integers(1, 1 << 24))
def test_a_chunk_fits_its_slot_and_is_worth_a_copy(row_bytes, B):
    step = chunk_rows(row_bytes, B)
    *offsets, size = place_in_slot(row_bytes, step)
    assert step >= 1
    assert size <= SLOT_BYTES
    assert all(offset % ALIGN_BYTES == 0 for offset in offsets)
    for offset, end, row in zip(offsets, [*offsets[1:], size], row_bytes, strict=True):
        assert end - offset >= row * step
    whole = sum(row_bytes) * B
    if whole >= 2 * SLOTS * MIN_CHUNK_BYTES:
        assert -(-B // step) >= 2 * SLOTS - 1  # enough chunks to keep every slot busy
        # equal sizes: at worst slightly more than one chunk becomes two halves
        assert 2 * (step + 1) * sum(row_bytes) >= MIN_CHUNK_BYTES - ALIGN_BYTES * (len(row_bytes) + 1)


def test_a_row_larger_than_a_slot_is_a_chunk_of_its_own():
    assert chunk_rows([SLOT_BYTES, 4], 5) == 1


@given(nbytes=st.integers(0, 4 * SLOT_BYTES))
def test_pieces_are_the_whole_and_large(nbytes):
    pieces = cut_in_slices(nbytes, CHUNK_BYTES)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == nbytes
    assert all(end == begin for (_, end), (begin, _) in pairwise(pieces))
    assert 1 <= len(pieces) <= MAX_SLICES
    assert len(pieces) == 1 or all(end - begin >= CHUNK_BYTES for begin, end in pieces)
    assert len(pieces) == MAX_SLICES or nbytes < 2 * CHUNK_BYTES * len(pieces)


# -- batches -------------------------------------------------------------------------------------------------


@pytest.fixture
def driver():
    made = FakeDriver()
    made.lazy = True
    yield made
    assert not any(made.pending.values())  # nothing is left on a stream


@pytest.fixture
def gpu(monkeypatch, driver):
    monkeypatch.setattr(chunks, "SLOT_BYTES", 9000)
    monkeypatch.setattr(chunks, "MIN_CHUNK_BYTES", 2000)
    monkeypatch.setattr(staging, "MIN_SLOT_BYTES", 2048)
    for module in (chunks, staging):
        monkeypatch.setattr(module, "OFFERED_BYTES", 100)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 700)
    monkeypatch.setattr(staging, "MAPPED_BYTES", 2500)
    monkeypatch.setattr(staging, "SMALL_BYTES", 2500)
    return fake_gpu(monkeypatch, driver)


class Network:
    """Bytes in, bytes out: output j of a row is a function of all its inputs and of j."""

    def __init__(self, driver, in_bytes, out_bytes):
        self.driver, self.in_bytes, self.out_bytes = driver, in_bytes, out_bytes
        self.chunks = []  # rows of each
        self.fails_at = -1

    def forward(self, inputs):
        total = sum(x.sum(axis=1, dtype=np.uint8) for x in inputs)
        columns = [np.arange(1, size + 1, dtype=np.uint8) + np.uint8(j) for j, size in enumerate(self.out_bytes)]
        return [total[:, None] * column for column in columns]

    def enqueue(self, given, made, rows, stream):
        if len(self.chunks) == self.fails_at:
            raise KernelError("told to fail")
        self.chunks.append(rows)

        def run():
            sources = [view(pointer, rows, size) for pointer, size in zip(given, self.in_bytes, strict=True)]
            targets = [view(pointer, rows, size) for pointer, size in zip(made, self.out_bytes, strict=True)]
            for target, values in zip(targets, self.forward(sources), strict=True):
                target[...] = values

        self.driver.put(stream, run)

    def batch(self, B, seed):
        generator = np.random.default_rng(seed)
        inputs = [generator.integers(0, 256, (B, size), np.uint8) for size in self.in_bytes]
        return inputs, [np.full((B, size), 0xCD, np.uint8) for size in self.out_bytes]


def view(pointer, rows, size):
    return np.ctypeslib.as_array((ctypes.c_uint8 * (rows * size)).from_address(pointer)).reshape(rows, size)


def assert_runs(stage, network, B, seed=0):
    inputs, outputs = network.batch(B, seed)
    network.chunks.clear()
    stage.run(inputs, outputs, B, network.enqueue)
    assert sum(network.chunks) == B
    for got, want in zip(outputs, network.forward(inputs), strict=True):
        assert np.array_equal(got, want), B


@pytest.mark.parametrize("mapped", [0, 2500, 1 << 20])
@pytest.mark.parametrize(
    "sizes", [((24,), (16,)), ((7, 1, 33), (5,)), ((3,), (2, 50)), ((2100,), (9,)), ((5, 0), (8, 3))]
)
def test_every_row_comes_back(gpu, driver, monkeypatch, mapped, sizes):
    monkeypatch.setattr(staging, "MAPPED_BYTES", mapped)
    monkeypatch.setattr(staging, "SMALL_BYTES", mapped)
    stage, network = Staging(gpu), Network(driver, *sizes)
    for seed, B in enumerate((1, 2, 49, 61, 127, 300, 1001, 2999, 49)):
        assert_runs(stage, network, B, seed)
    assert_runs(stage, network, 1, 99)


def test_small_chunks_are_read_in_place_and_larger_ones_copied(gpu, driver):
    stage, network = Staging(gpu), Network(driver, [24], [16])
    for B, count, copies in ((40, 1, 0), (200, 6, 0), (3000, 15, 15)):
        driver.calls.clear()
        assert_runs(stage, network, B)
        assert len(network.chunks) == count
        assert driver.calls.count("cuMemcpyHtoDAsync") == driver.calls.count("cuMemcpyDtoHAsync") == copies
        assert driver.calls.count("cuStreamSynchronize") == count


@pytest.mark.parametrize("B", [60, 1000])
def test_a_locked_array_is_read_and_written_where_it_is(gpu, driver, monkeypatch, B):
    stage, network = Staging(gpu), Network(driver, [24, 3], [16, 5])
    inputs, outputs = network.batch(B, 0)
    copied, copy = [], staging._copy
    monkeypatch.setattr(staging, "_copy", lambda target, source: (copied.append(source.nbytes), copy(target, source)))
    for array in (inputs[0], outputs[1]):
        driver.locked |= {array.ctypes.data, array.ctypes.data + array.nbytes - 1}
    stage.run(inputs, outputs, B, network.enqueue)
    assert sum(copied) == inputs[1].nbytes + outputs[0].nbytes
    for got, want in zip(outputs, network.forward(inputs), strict=True):
        assert np.array_equal(got, want)


def test_the_only_chunk_goes_to_the_gpu_in_pieces_as_they_are_copied(gpu, driver, monkeypatch):
    monkeypatch.setattr(chunks, "MIN_CHUNK_BYTES", 9000)
    monkeypatch.setattr(staging, "OFTEN_BYTES", 0)
    stage, network = Staging(gpu), Network(driver, [24, 2], [16])
    for B, copies in ((2, 2), (9, 3), (60, 5), (100, 6)):  # rows of 24 B: slices of 100 B or more, four at most
        inputs, outputs = network.batch(B, B)
        network.chunks.clear()
        driver.calls.clear()
        stage.run(inputs, outputs, B, network.enqueue, is_read_often=True)
        assert network.chunks == [B]
        assert driver.calls.count("cuMemcpyHtoDAsync") == copies, B
        assert np.array_equal(outputs[0], network.forward(inputs)[0])


def test_the_driver_is_asked_once_about_an_array(gpu, driver, monkeypatch):
    stage, network, requested = Staging(gpu), Network(driver, [24], [16]), []
    answer = driver.cuPointerGetAttribute
    monkeypatch.setattr(driver, "cuPointerGetAttribute", lambda *what: requested.append(what) or answer(*what))
    inputs, outputs = network.batch(1000, 0)
    for array in (inputs[0], outputs[0]):
        driver.locked |= {array.ctypes.data, array.ctypes.data + array.nbytes - 1}
    for xs, times in ((inputs, 4), (inputs, 4), ([inputs[0][:]], 6)):  # the last is another array at the same address
        stage.run(xs, outputs, 1000, network.enqueue)
        assert len(requested) == times
        assert np.array_equal(outputs[0], network.forward(inputs)[0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64"])
def test_a_small_batch_keeps_its_bits_whatever_the_type(gpu, driver, dtype):
    stage, dtype = Staging(gpu), numpy_dtype(dtype)
    network = Network(driver, [3 * dtype.itemsize], [2 * dtype.itemsize])
    for seed in range(3):
        (x,), _ = network.batch(11, seed)  # any bits: NaNs too
        out = np.empty((11, 2), dtype)
        stage.run([x.view(dtype).reshape(11, 3)], [out], 11, network.enqueue)
        assert np.array_equal(out.view(np.uint8), network.forward([x])[0])


def test_memory_is_kept_and_bounded(gpu, driver):
    stage, network = Staging(gpu), Network(driver, [24], [16])
    for _ in range(2):
        for B in (1, 40, 3000, 10_000, 7):
            assert_runs(stage, network, B)
    assert len(driver.memory) == 2 * SLOTS + 1  # each slot's on both sides, and the small batches'
    assert sum(len(kept) for kept in driver.memory.values()) <= 2 * (SLOTS + 1) * (16384 + 512)
    driver.calls.clear()
    assert_runs(stage, network, 10_000)
    assert "cuMemHostAlloc" not in driver.calls
    assert "cuMemAlloc" not in driver.calls


def test_layouts_of_small_batches_are_kept_and_bounded(gpu, driver):
    stage, network = Staging(gpu), Network(driver, [2], [1])
    for seed in range(2):
        for B in range(1, 2 * staging.MAX_LAYOUTS):
            assert_runs(stage, network, B, seed)
            assert len(stage._layouts) <= staging.MAX_LAYOUTS
    (layout,) = [kept for key, kept in stage._layouts.items() if key[2][0] == (B, 2)]
    assert_runs(stage, network, B)
    assert layout in stage._layouts.values()


def test_small_batches_survive_a_want_of_memory(gpu, driver):
    stage, network = Staging(gpu), Network(driver, [24], [16])
    assert_runs(stage, network, 1)
    driver.answers["cuMemHostAlloc"] = 2
    inputs, outputs = network.batch(50, 0)
    with pytest.raises(DeviceError, match="cannot allocate pinned host memory"):
        stage.run(inputs, outputs, 50, network.enqueue)
    with pytest.raises(DeviceError, match="cannot allocate pinned host memory"):  # its memory was freed
        stage.run([inputs[0][:1]], [outputs[0][:1]], 1, network.enqueue)
    driver.answers.clear()
    assert_runs(stage, network, 1)
    assert_runs(stage, network, 50)


@pytest.mark.parametrize("fails_at", [0, 1, 2, 5, 13])
def test_a_failure_in_the_middle_leaves_nothing_behind(gpu, driver, monkeypatch, fails_at):
    """After a failed call nothing writes to the caller's arrays or the slots, and the next batch is correct."""
    stage, network = Staging(gpu), Network(driver, [24], [16])
    busy, copy = [], staging._copy

    def slow_copy(target, source):
        busy.append(1)
        time.sleep(0.001)
        copy(target, source)
        busy.pop()

    monkeypatch.setattr(staging, "_copy", slow_copy)
    network.fails_at = fails_at
    inputs, outputs = network.batch(3000, 0)
    with pytest.raises(KernelError, match="told to fail"):
        stage.run(inputs, outputs, 3000, network.enqueue)
    assert not busy
    assert not any(driver.pending.values())
    before = outputs[0].copy()
    time.sleep(0.01)
    assert not busy
    assert np.array_equal(outputs[0], before)
    network.fails_at = -1
    assert_runs(stage, network, 3000)
    assert_runs(stage, network, 3)


@pytest.mark.parametrize(
    "function", ["cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuMemHostAlloc"]
)
def test_an_error_of_the_driver_is_told_and_passes(gpu, driver, function):
    stage, network = Staging(gpu), Network(driver, [24], [16])
    inputs, outputs = network.batch(3000, 0)
    driver.answers[function] = 999
    with pytest.raises(KernelError):
        stage.run(inputs, outputs, 3000, network.enqueue)
    driver.answers.clear()
    assert_runs(stage, network, 3000)


def test_threads_take_turns(gpu, driver):
    stage, failures = Staging(gpu), []

    def work(seed):
        network = Network(driver, [24], [16])
        try:
            for B in (3, 500, 41, 1200):
                assert_runs(stage, network, B, seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -- work that threads share -----------------------------------------------------------------------------------


def test_work_is_done_once():
    done, gate = [], threading.Event()
    works = [Work(done.append, i) for i in range(50)]

    def do_all():
        gate.wait()
        for work in works:
            work.wait()

    threads = [threading.Thread(target=do_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.set()
    for work in works:
        offer(work)
        work.wait()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(50))


def test_another_thread_does_what_is_offered(monkeypatch):
    monkeypatch.setattr(shared_work, "core_count", lambda: 3)
    shared_work.pool.cache_clear()
    try:
        who, done = [], threading.Event()
        offer(Work(lambda: (who.append(threading.current_thread()), done.set())))
        assert done.wait()
        assert who[0].name.startswith("onchip-copy-")
        assert who[0].daemon  # ends with the process
    finally:
        shared_work.pool.cache_clear()


def test_with_one_core_the_one_who_waits_does_it(monkeypatch):
    monkeypatch.setattr(shared_work, "core_count", lambda: 1)
    shared_work.pool.cache_clear()
    try:
        who = []
        work = Work(lambda: who.append(threading.current_thread()))
        offer(work)
        assert not who
        work.wait()
        assert who == [threading.current_thread()]
    finally:
        shared_work.pool.cache_clear()


def test_dropped_work_is_never_done_or_was_waited_for():
    done, begun, go_on = [], threading.Event(), threading.Event()
    work = Work(done.append, 1)
    work.drop()
    work.do()
    assert not done
    slow = Work(lambda: (begun.set(), go_on.wait(), done.append(2)))
    thread = threading.Thread(target=slow.do)
    thread.start()
    begun.wait()
    threading.Timer(0.02, go_on.set).start()
    slow.drop()
    assert done == [2]
    thread.join()


@pytest.mark.parametrize(
    ("B", "is_read_often", "is_copied"), [(50, True, False), (5000, True, True), (5000, False, False)]
)
def test_rows_that_are_read_often_do_not_stay_across_the_bus(gpu, driver, monkeypatch, B, is_read_often, is_copied):
    for name, nbytes in (("OFTEN_BYTES", 4 << 10), ("SMALL_BYTES", 1 << 20), ("MAPPED_BYTES", 1 << 20)):
        monkeypatch.setattr(staging, name, nbytes)
    stage, network = Staging(gpu), Network(driver, [24], [16])
    inputs, outputs = network.batch(B, 0)
    stage.run(inputs, outputs, B, network.enqueue, is_read_often)
    assert np.array_equal(outputs[0], network.forward(inputs)[0])
    assert ("cuMemcpyHtoDAsync" in driver.calls) == is_copied
