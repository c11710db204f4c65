"""Streaming: same bits whatever the pieces, bounded memory, and sources that do not fit are refused."""

import dataclasses
import threading
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import random_mlp, rows
from onchip.errors import FormatError, InputError, ShapeError
from onchip.kernels.cpu import KERNELS
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cpu import this_cpu
from onchip.runtime.engine import compile, id_limits, kernels_for
from onchip.runtime.stream import (
    LEAST_PIECE_ROWS,
    FittedRows,
    RandomRows,
    open_input_rows,
    open_output,
    piece_rows,
    pieces,
    rows_not_finite,
    run_rows,
)
from onchip.spec.build import sequential
from onchip.spec.layers import Reshape
from onchip.spec.tokens import check_token_ids
from onchip.spec.types import TensorType
from onchip.workloads import sentiment

NET = random_mlp(20, 16, 3)


class Rows:
    """An array as a source; remembers what was asked for."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.asked = []

    def __len__(self):
        return len(self.array)

    def read(self, start, stop):
        self.asked.append((start, stop))
        return self.array[start:stop].copy()


class Kept:
    def __init__(self):
        self.pieces = []

    def write(self, piece):
        self.pieces.append(piece.copy())


@pytest.fixture(scope="module")
def engine():
    return compile(NET, device="cpu")


@settings(max_examples=25, deadline=None)
@given(B=st.integers(0, 200), batch_rows=st.integers(1, 250))
def test_the_pieces_do_not_matter(engine, B, batch_rows):
    x, sink, told = rows(B, 20), Kept(), []
    report = run_rows(engine, Rows(x), sink, batch_rows, lambda done, per_s: told.append((done, per_s)))
    whole = engine(x)
    assert b"".join(piece.tobytes() for piece in sink.pieces) == whole.tobytes()
    assert report.first_rows.tobytes() == whole[:5].tobytes()
    assert (report.rows, report.bad_rows, report.first_bad_row) == (B, 0, None)
    assert [done for done, _ in told] == [min(i + batch_rows, B) for i in range(0, B, batch_rows)]
    assert all(per_s > 0 for _, per_s in told)


def test_every_row_is_read_once(engine):
    source = Rows(rows(100, 20))
    run_rows(engine, source, None, 30)
    assert [(a, b) for a, b in source.asked if a < b] == [(0, 30), (30, 60), (60, 90), (90, 100)]


def test_memory_does_not_grow_with_the_rows(engine):
    class Endless:
        shape, dtype = (400_000, 20), np.dtype(np.float32)

        def __len__(self):
            return self.shape[0]

        def read(self, start, stop):
            return np.ones((stop - start, 20), np.float32)

    run_rows(engine, Rows(rows(10, 20)), None, 10)
    tracemalloc.start()
    try:
        run_rows(engine, Endless(), None, 4000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    piece_bytes = 4000 * (20 + 3) * 4
    assert peak < 4 * piece_bytes < 400_000 * 20 * 4 / 20


def test_bad_rows_are_counted_across_pieces(engine):
    x = rows(100, 20)
    x[[12, 13, 99], [0, 5, 19]] = [np.nan, np.inf, -np.inf]
    report = run_rows(engine, Rows(x), None, 7)
    assert (report.bad_rows, report.first_bad_row) == (3, 12)
    assert rows_not_finite(x).tolist() == [12, 13, 99]
    assert rows_not_finite(np.zeros((3, 2), np.int32)).size == 0


@pytest.mark.parametrize("batch_rows", [0, -1])
def test_pieces_have_rows(engine, batch_rows):
    with pytest.raises(InputError, match="at a time"):
        run_rows(engine, Rows(rows(3, 20)), None, batch_rows)


def test_an_error_of_the_source_arrives(engine):
    class Broken(Rows):
        def read(self, start, stop):
            if start >= 20:
                raise InputError("the file broke")
            return super().read(start, stop)

    with pytest.raises(InputError, match="the file broke"):
        run_rows(engine, Broken(rows(100, 20)), None, 10)


class Asked:
    """An engine that computes nothing but refuses ids that are in no table."""

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
        run_rows(Asked(), Rows(ids), sink, 5)
    assert len(sink.pieces) == 3  # those before it


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("batch_rows", [1, 7, 30, 31])
def test_a_piece_is_told_with_its_bad_rows(ahead, batch_rows):
    x = rows(30, 4)
    x[[3, 11], [0, 2]] = np.nan, np.inf
    told = [(start, piece.copy(), bad) for start, piece, bad in pieces(Rows(x), batch_rows, ahead)]
    assert [start for start, _, _ in told] == list(range(0, 30, batch_rows))
    assert np.array_equal(np.concatenate([piece for _, piece, _ in told]), x, equal_nan=True)
    assert [start + int(i) for start, _, bad in told for i in bad] == [3, 11]


def test_the_first_of_long_pieces_is_short():
    x = rows(3 << 16, 1)
    told = [(start, len(piece)) for start, piece, _ in pieces(Rows(x), 1 << 16, ahead=True)]
    assert told == [(0, 1 << 13), (1 << 13, 1 << 16), (9 << 13, 1 << 16), (17 << 13, 7 << 13)]
    assert [len(piece) for _, piece, _ in pieces(Rows(x), 1 << 16, ahead=False)] == [1 << 16] * 3


def test_the_next_piece_is_read_while_one_is_in_use():
    reads = [threading.Event() for _ in range(4)]

    class Told(Rows):
        def read(self, start, stop):
            reads[start // 10].set()
            return super().read(start, stop)

    for start, _, _ in pieces(Told(rows(40, 2)), 10, ahead=True):
        after = start // 10 + 1
        assert after == 4 or reads[after].wait(10)
        assert not any(event.is_set() for event in reads[after + 1 :])  # and no more than one: memory stays bounded


def test_an_error_of_a_source_that_is_read_ahead_arrives_after_the_pieces_before_it():
    class Broken(Rows):
        def read(self, start, stop):
            if start >= 20:
                raise InputError("the file broke")
            return super().read(start, stop)

    given = pieces(Broken(rows(40, 2)), 10, ahead=True)
    assert [next(given)[0], next(given)[0]] == [0, 10]
    with pytest.raises(InputError, match="the file broke"):
        next(given)


# -- how many rows make a piece ----------------------------------------------------------------------------


def plan_of(net):
    return make_plan(net, this_cpu(), KERNELS)


def test_a_piece_is_small_enough_for_memory():
    assert piece_rows(plan_of(NET)) == (8 << 20) // (23 * 4)
    assert piece_rows(plan_of(random_mlp(3000, 8))) == (8 << 20) // (3008 * 4)


def test_a_piece_is_short_enough_for_a_progress_bar():
    plan = plan_of(random_mlp(200, 4000, 4000, 4000, 20))
    piece = piece_rows(plan)
    assert LEAST_PIECE_ROWS <= piece < (8 << 20) // (220 * 4)
    assert piece == LEAST_PIECE_ROWS or 0.1e6 < plan.floor_at(piece) < 0.5e6


def test_a_large_network_still_shares_its_weights_between_some_rows(monkeypatch):
    monkeypatch.setattr("onchip.runtime.stream.PIECE_US", 1)
    assert piece_rows(plan_of(random_mlp(200, 1000, 20))) == LEAST_PIECE_ROWS


def test_a_gpu_takes_larger_pieces():
    plan = make_plan(NET, H200, (), whole=False)
    assert piece_rows(plan) == (64 << 20) // (23 * 4)


def test_values_between_groups_count(monkeypatch):
    plan = make_plan(sentiment.network(), H200, (), whole=False)  # no kernel: every layer is a group
    assert plan.between_bytes > 1 << 19
    small = dataclasses.replace(H200, memory_bytes=80 * plan.between_bytes)
    assert piece_rows(dataclasses.replace(plan, device=small)) == 10
    here = make_plan(sentiment.network(), this_cpu(), (), whole=False)
    monkeypatch.setattr("onchip.runtime.stream.BETWEEN_BYTES", 10 * here.between_bytes)
    assert piece_rows(here) == 10


def test_a_file_of_sentences_goes_through_a_gpu_in_few_long_pieces():
    job = Job("fp16", 10**8)
    assert piece_rows(make_plan(sentiment.network(), H200, kernels_for(H200), job)) > 500_000


# -- rows of files -----------------------------------------------------------------------------------------


def test_bare_numbers(tmp_path):
    ids = np.random.default_rng(0).integers(-9, 9, (7, 16)).astype("<i4")
    ids.tofile(tmp_path / "inputs.bin")
    with open_input_rows(tmp_path / "inputs.bin", TensorType(("B", 16), "int32")) as source:
        assert (source.shape, source.dtype) == ((7, 16), np.int32)
        assert np.array_equal(source.read(2, 5), ids[2:5])
    images = rows(3, 4, 5)
    images.tofile(tmp_path / "x.BIN")
    with open_input_rows(tmp_path / "x.BIN", TensorType(("B", 4, 5))) as source:
        assert np.array_equal(source.read(0, 3), images)


@pytest.mark.parametrize(
    ("size", "what"),
    [
        (0, "not one whole row"),
        (63, "not one whole row"),
        (65, "the last row, from byte 64 on, is not whole"),
        (64 * 5 + 60, "the last row, from byte 320 on, is not whole"),
    ],
)
def test_bare_numbers_of_another_size(tmp_path, size, what):
    (tmp_path / "inputs.bin").write_bytes(bytes(size))
    with pytest.raises(FormatError, match=what) as caught:
        open_input_rows(tmp_path / "inputs.bin", TensorType(("B", 16), "int32"))
    assert caught.value.got == f"{size} B"
    assert "a multiple of 64 B: rows of int32 (16,)" in caught.value.expected


def test_text(tmp_path):
    (tmp_path / "input.txt").write_text("2\n1 2 3 4 5 6\n-1 -2 -3\n-4 -5 -6\n")
    with open_input_rows(tmp_path / "input.txt", TensorType(("B", 2, 3))) as source:
        assert FittedRows(source, TensorType(("B", 2, 3))).read(1, 2).tolist() == [[[-1, -2, -3], [-4, -5, -6]]]


def test_other_files_say_what_they_are(tmp_path):
    np.save(tmp_path / "x.npy", rows(4, 3))
    (tmp_path / "x.npy").rename(tmp_path / "x.data")
    with open_input_rows(tmp_path / "x.data", TensorType(("B", 3))) as source:
        assert np.array_equal(source.read(0, 4), rows(4, 3))


# -- random rows -------------------------------------------------------------------------------------------


@given(cuts=st.lists(st.integers(0, 50), max_size=5))
def test_random_rows_do_not_depend_on_the_pieces(cuts):
    tiny = sentiment.network(vocabulary=7, embedding=2, channels=2, kernels=(3,), length=5, hidden=(3,))
    normal = np.random.default_rng(3).standard_normal((50, 20), dtype=np.float32)
    ids = np.random.default_rng(3).integers(0, 7, (50, 5), dtype=np.int32)
    for net, expected in ((NET, normal), (tiny, ids)):
        source, places = RandomRows(net.input, 50, 3, id_limits(net).get("ids")), sorted({0, 50, *cuts})
        got = np.concatenate([source.read(a, b) for a, b in pairwise(places)])
        assert (source.shape, len(source), source.dtype) == (expected.shape, 50, expected.dtype)
        assert got.dtype == expected.dtype
        assert np.array_equal(got, expected)


def test_random_rows_that_cannot_be():
    with pytest.raises(InputError, match="at least 1"):
        RandomRows(NET.input, 0, 0)
    with pytest.raises(InputError, match="seed"):
        RandomRows(NET.input, 1, -1)
    with pytest.raises(InputError, match="bad number of random rows"):
        RandomRows(NET.input, 10**30, 0)
    with pytest.raises(InputError, match="int64"):
        RandomRows(TensorType(("B", 4), "int64"), 1, 0)
    with pytest.raises(AssertionError, match="in order"):
        RandomRows(NET.input, 10, 0).read(1, 2)


# -- fitting -----------------------------------------------------------------------------------------------

IMAGE = TensorType(("B", 784))


def test_rows_of_the_same_size_are_reshaped():
    x = rows(5, 28, 28)
    fitted = FittedRows(Rows(x), IMAGE)
    assert fitted.shape == (5, 784)
    assert fitted.read(1, 3).tobytes() == x[1:3].tobytes()
    assert fitted.notes == ("rows of 28x28 are read as rows of 784",)
    assert FittedRows(Rows(rows(5, 784)), IMAGE).notes == ()


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float64", "float32"])
def test_scale_converts(dtype):
    x = np.arange(3 * 784).reshape(3, 784).astype(dtype)
    fitted = FittedRows(Rows(x), IMAGE, scale=255)
    got = fitted.read(0, 3)
    assert got.dtype == np.float32
    assert np.array_equal(got, x.astype(np.float32) / np.float32(255))
    assert dtype in fitted.notes[0]


@pytest.mark.parametrize("shape", [(5, 783), (784,), (5, 28, 27), (5,)])
def test_other_sizes_are_refused(shape):
    with pytest.raises(ShapeError, match="another shape"):
        FittedRows(Rows(np.zeros(shape, np.float32)), IMAGE)


def test_other_dtypes_are_refused_without_a_scale():
    with pytest.raises(ShapeError, match="--scale 255"):
        FittedRows(Rows(np.zeros((5, 784), np.uint8)), IMAGE)
    with pytest.raises(ShapeError, match="as int32"):
        FittedRows(Rows(np.zeros((5, 16), np.int64)), TensorType(("B", 16), "int32"))
    with pytest.raises(InputError, match="only float rows"):
        FittedRows(Rows(np.zeros((5, 16), np.int64)), TensorType(("B", 16), "int32"), scale=1)


# -- output ------------------------------------------------------------------------------------------------


def test_the_output_appears_only_when_the_block_ends_well(tmp_path):
    path = tmp_path / "y.npy"

    def stopped():
        with open_output(path, NET, 4) as sink:
            sink.write(np.zeros((4, 3), np.float32))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert list(tmp_path.iterdir()) == []
    with open_output(path, NET, 4) as sink:
        sink.write(np.ones((4, 3), np.float32))
    assert np.load(path).sum() == 12


def image_net(*shape, dtype="float32"):
    return sequential(TensorType(("B", 4 * 5 * 3), dtype), [("image", Reshape(shape))], {}, name="painter")


@pytest.mark.parametrize("suffix", [".npy", ".bin", ".txt", ".bmp", ".png", ".PNG"])
def test_the_suffix_says_the_format(tmp_path, suffix):
    y = np.random.default_rng(0).uniform(-1, 1, (7, 4, 5, 3)).astype(np.float32)
    path = tmp_path / f"y{suffix}"
    with open_output(path, image_net(4, 5, 3), 7) as sink:
        sink.write(y[:3])
        assert not path.exists()
        sink.write(y[3:])
    data = path.read_bytes()
    begin = {".npy": b"\x93NUMPY", ".bin": y.tobytes(), ".txt": b"7\n", ".bmp": b"BM", ".png": b"\x89PNG"}
    assert data.startswith(begin[suffix.lower()])
    if suffix == ".bin":
        assert data == y.astype("<f4").tobytes()
    if suffix == ".npy":
        assert np.array_equal(np.load(path), y)


@pytest.mark.parametrize("suffix", [".txt", ".bmp", ".png"])
def test_only_images_are_drawn(tmp_path, suffix):
    def open_it():
        with open_output(tmp_path / f"y{suffix}", NET, 4):
            pytest.fail("opened")

    with pytest.raises(InputError, match="makes no images") as caught:
        open_it()
    assert "float32[B, 3]" in caught.value.got
    assert ".npy, .bin" in caught.value.expected
    assert "y.npy" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_no_path_no_sink():
    with open_output(None, NET, 4) as sink:
        assert sink is None
