"""Streaming: the same bits for any chunks, bounded memory, and sources that do not fit are refused."""

import dataclasses
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import Rows, random_mlp, rows
from onchip.errors import InputError
from onchip.kernels.cpu import KERNELS
from onchip.network.tokens import check_token_ids
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cpu.backend import this_cpu
from onchip.runtime.engine import compile
from onchip.runtime.io.row_sources import rows_not_finite
from onchip.runtime.io.stream import (
    MIN_CHUNK_ROWS,
    chunk_rows,
    chunks_of,
    cut_rows,
    read_chunks,
    run_chunks,
    run_rows,
    share_rows,
)
from onchip.runtime.placement import kernels_for
from onchip.workloads import sentiment

NET = random_mlp(20, 16, 3)


class Kept:
    def __init__(self):
        self.pieces = []

    def write(self, piece):
        self.pieces.append(piece.copy())


@pytest.fixture(scope="module")
def engine():
    return compile(NET, device="cpu")


@settings(max_examples=25)
@given(B=st.integers(0, 200), batch_rows=st.integers(1, 250))
def test_the_pieces_do_not_matter(engine, B, batch_rows):
    x, sink = rows(B, 20), Kept()
    run_rows(engine, [Rows(x)], sink, batch_rows)
    assert b"".join(piece.tobytes() for piece in sink.pieces) == engine(x).tobytes()


def test_every_row_is_read_once(engine):
    source = Rows(rows(100, 20))
    run_rows(engine, [source], Kept(), 30)
    assert [(a, b) for a, b in source.requested if a < b] == [(0, 30), (30, 60), (60, 90), (90, 100)]


def test_memory_does_not_grow_with_the_rows(engine):
    class Endless:
        shape, dtype = (400_000, 20), np.dtype(np.float32)

        def __len__(self):
            return self.shape[0]

        def read(self, start, stop):
            return np.ones((stop - start, 20), np.float32)

    class Lost:
        def write(self, piece):
            pass

    run_rows(engine, [Rows(rows(10, 20))], Lost(), 10)
    tracemalloc.start()
    try:
        run_rows(engine, [Endless()], Lost(), 4000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    piece_bytes = 4000 * (20 + 3) * 4
    assert peak < 4 * piece_bytes < 400_000 * 20 * 4 / 20


def test_bad_rows_are_counted_across_pieces(engine):
    x = rows(100, 20)
    x[[12, 13, 99], [0, 5, 19]] = [np.nan, np.inf, -np.inf]
    done = list(run_chunks(engine, [Rows(x)], chunks_of(cut_rows(100, 7, ahead=False), 100), lambda done: done))
    assert [(d.bad_rows, d.first_bad_row) for d in done if d.bad_rows] == [(2, 12), (1, 99)]
    assert rows_not_finite(x).tolist() == [12, 13, 99]
    assert rows_not_finite(np.zeros((3, 2), np.int32)).size == 0


@pytest.mark.parametrize("batch_rows", [0, -1])
def test_pieces_have_rows(engine, batch_rows):
    with pytest.raises(InputError, match="rows per chunk"):
        run_rows(engine, [Rows(rows(3, 20))], Kept(), batch_rows)


def test_an_error_of_the_source_arrives(engine):
    class Broken(Rows):
        def read(self, start, stop):
            if start >= 20:
                raise InputError("the file broke")
            return super().read(start, stop)

    with pytest.raises(InputError, match="the file broke"):
        run_rows(engine, [Broken(rows(100, 20))], Kept(), 10)


class Asked:
    """An engine that only checks ids."""

    input, output = TensorType(("B", 4), "int32"), TensorType(("B", 1))
    plan = make_plan(NET, H200, (), whole=False)

    def check_ids(self, x, first_row=0):
        check_token_ids(x, 10, first_row)

    def __call__(self, x, out):
        self.check_ids(x)
        return out


def test_a_bad_id_is_named_by_its_row_in_the_file():
    ids = np.random.default_rng(0).integers(0, 10, (40, 4)).astype(np.int32)
    ids[[17, 33], [3, 0]] = 10
    sink = Kept()
    with pytest.raises(InputError, match="row 17, position 3: id 10, expected 0 to 9"):
        run_rows(Asked(), [Rows(ids)], sink, 5)
    assert len(sink.pieces) == 3  # those before it


def pieces(sources, batch_rows, ahead):
    chunks = chunks_of(cut_rows(len(sources[0]), batch_rows, ahead), len(sources[0]))
    for chunk, xs, bad in read_chunks(sources, chunks, ahead):
        yield chunk.start, xs, bad


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("batch_rows", [1, 7, 30, 31])
def test_a_piece_is_told_with_its_bad_rows(ahead, batch_rows):
    x = rows(30, 4)
    x[[3, 11], [0, 2]] = np.nan, np.inf
    told = [(start, piece.copy(), bad) for start, (piece,), bad in pieces([Rows(x)], batch_rows, ahead)]
    assert [start for start, _, _ in told] == list(range(0, 30, batch_rows))
    assert np.array_equal(np.concatenate([piece for _, piece, _ in told]), x, equal_nan=True)
    assert [start + int(i) for start, _, bad in told for i in bad] == [3, 11]


def test_a_row_is_bad_if_any_of_its_inputs_is():
    x, z = rows(20, 4), rows(20, 2)
    x[[3, 11], 0] = z[[5, 11], 1] = np.nan
    told = list(pieces([Rows(x), Rows(z), Rows(np.zeros(20, np.int32))], 10, ahead=False))
    assert [start + int(i) for start, _, bad in told for i in bad] == [3, 5, 11]
    assert [tuple(len(piece) for piece in xs) for _, xs, _ in told] == [(10, 10, 10)] * 2


def test_the_first_of_long_pieces_is_short():
    x = rows(3 << 16, 1)
    told = [(start, len(piece)) for start, (piece,), _ in pieces([Rows(x)], 1 << 16, ahead=True)]
    assert told == [(0, 1 << 13), (1 << 13, 1 << 16), (9 << 13, 1 << 16), (17 << 13, 7 << 13)]
    assert [len(piece) for _, (piece,), _ in pieces([Rows(x)], 1 << 16, ahead=False)] == [1 << 16] * 3


def test_the_next_piece_is_read_while_one_is_in_use():
    reads = [threading.Event() for _ in range(4)]

    class Told(Rows):
        def read(self, start, stop):
            reads[start // 10].set()
            return super().read(start, stop)

    for start, _, _ in pieces([Told(rows(40, 2))], 10, ahead=True):
        after = start // 10 + 1
        assert after == 4 or reads[after].wait()
        assert not any(event.is_set() for event in reads[after + 1 :])  # and no more than one: memory stays bounded


def test_an_error_of_a_source_that_is_read_ahead_arrives_after_the_pieces_before_it():
    class Broken(Rows):
        def read(self, start, stop):
            if start >= 20:
                raise InputError("the file broke")
            return super().read(start, stop)

    given = pieces([Broken(rows(40, 2))], 10, ahead=True)
    assert [next(given)[0], next(given)[0]] == [0, 10]
    with pytest.raises(InputError, match="the file broke"):
        next(given)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_chunk_that_was_read_is_given_when_there_is_no_other_yet(ahead):
    """Waiting for another chunk before running the current one could block forever."""
    first, second = chunks_of((0, 10), 20)
    requested = []

    def chunks():
        for chunk in (first, None, second, None):
            requested.append(chunk)
            yield chunk

    given = read_chunks([Rows(rows(20, 2))], chunks(), ahead)
    assert next(given)[0] == first
    assert second not in requested
    assert [found[0] for found in given if found is not None] == [second]


@pytest.mark.parametrize("ahead", [False, True])
def test_results_are_written_in_order_while_the_next_are_made(engine, monkeypatch, ahead):
    """On a GPU a thread writes; a chunk is written even if no other follows yet."""
    monkeypatch.setattr("onchip.runtime.io.stream.reads_ahead", lambda plan: ahead)
    x, written, threads = rows(35, 20), [], set()
    chunks = chunks_of((0, 10, 20, 30), 35)

    def then(done):
        written.append(done.y.copy())
        threads.add(threading.current_thread() is threading.main_thread())
        return done.chunk

    told = []

    def dealt():
        for chunk in chunks:
            yield chunk
            while chunk not in told:  # like a rank with one assigned chunk
                yield None

    for chunk in run_chunks(engine, [Rows(x)], dealt(), then):
        told.append(chunk)
    assert told == chunks
    assert np.concatenate(written).tobytes() == engine(x).tobytes()
    assert threads == {not ahead}


# -- rows per chunk ----------------------------------------------------------------------------------------


def plan_of(net):
    return make_plan(net, this_cpu(), KERNELS)


def test_a_piece_is_small_enough_for_memory():
    assert chunk_rows(plan_of(NET)) == (8 << 20) // (23 * 4)
    assert chunk_rows(plan_of(random_mlp(3000, 8))) == (8 << 20) // (3008 * 4)


def test_a_piece_is_short_enough_for_a_progress_bar():
    plan = plan_of(random_mlp(200, 4000, 4000, 4000, 20))
    piece = chunk_rows(plan)
    assert MIN_CHUNK_ROWS <= piece < (8 << 20) // (220 * 4)
    assert piece == MIN_CHUNK_ROWS or 0.1e6 < plan.floor_at(piece) < 0.5e6


def test_a_large_network_still_shares_its_weights_between_some_rows(monkeypatch):
    monkeypatch.setattr("onchip.runtime.io.stream.CHUNK_US", 1)
    assert chunk_rows(plan_of(random_mlp(200, 1000, 20))) == MIN_CHUNK_ROWS


def test_a_gpu_takes_larger_pieces():
    plan = make_plan(NET, H200, (), whole=False)
    assert chunk_rows(plan) == (64 << 20) // (23 * 4)


def test_values_between_groups_count(monkeypatch):
    plan = make_plan(sentiment.network(), H200, (), whole=False)  # without kernels every layer is a group
    assert plan.between_bytes > 1 << 19
    small = dataclasses.replace(H200, memory_bytes=80 * plan.between_bytes)
    assert chunk_rows(dataclasses.replace(plan, device=small)) == 10
    here = make_plan(sentiment.network(), this_cpu(), (), whole=False)
    monkeypatch.setattr("onchip.runtime.io.stream.BETWEEN_BYTES", 10 * here.between_bytes)
    assert chunk_rows(here) == 10


def test_a_file_of_sentences_goes_through_a_gpu_in_few_long_pieces():
    job = Job("fp16", 10**8)
    assert chunk_rows(make_plan(sentiment.network(), H200, kernels_for(H200), job)) > 500_000


def test_pieces_for_several_workers_become_short():
    plan = plan_of(NET)
    cuts = share_rows(plan, 1_000_000, 90_000, workers=2)
    sizes = np.diff([*cuts, 1_000_000])
    assert max(sizes) == sizes[0] == 90_000
    assert all(sizes[i] >= sizes[i + 1] for i in range(len(sizes) - 1))
    assert sizes[-1] < 45_000
    assert share_rows(plan, 1, 90_000, workers=8) == (0,)
    assert share_rows(plan, 0, 90_000, workers=8) == ()
