"""Streaming: same bits whatever the pieces, bounded memory, and sources that do not fit are refused."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import random_mlp, rows
from onchip.errors import InputError, ShapeError
from onchip.runtime.engine import compile
from onchip.runtime.stream import FittedRows, open_output, piece_rows, rows_not_finite, run_rows
from onchip.spec.types import TensorType

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


def test_a_piece_depends_on_the_network_alone():
    assert piece_rows(NET) == (8 << 20) // (23 * 4)
    assert piece_rows(random_mlp(3000, 3000)) == (8 << 20) // 24000


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


def test_no_path_no_sink():
    with open_output(None, NET, 4) as sink:
        assert sink is None
