"""Rows from files, random rows, and rows that are converted or refused."""

import contextlib
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import Rows, random_mlp, rows
from onchip.errors import FormatError, InputError, ShapeError
from onchip.formats.arrays.row_files import RowSource
from onchip.network.types import TensorType
from onchip.runtime.engine import id_limits
from onchip.runtime.io.row_sources import (
    CountedLengths,
    FittedRows,
    RandomRows,
    length_limits,
    open_input_rows,
    padded_inputs,
    random_inputs,
)
from onchip.workloads import sentiment

NET = random_mlp(20, 16, 3)

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
        (0, "less than one row"),
        (63, "less than one row"),
        (65, "the last row, at byte 64, is incomplete"),
        (64 * 5 + 60, "the last row, at byte 320, is incomplete"),
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
    source = RandomRows(NET.input, 10, 0)
    source.read(0, 2)
    with pytest.raises(AssertionError, match="in order"):
        source.read(1, 2)


def test_rows_are_found_again_by_another_process(tmp_path, monkeypatch):
    """A pickled source of random rows or of a file works in another process; random rows may be skipped."""
    monkeypatch.setattr("onchip.runtime.io.row_sources.SKIPPED_ELEMENTS", 100)
    x = RandomRows(NET.input, 50, 3).read(0, 50)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "x.bin").write_bytes(x.tobytes())
    with contextlib.ExitStack() as stack:
        paths = (tmp_path / "x.npy", tmp_path / "x.bin")
        opened = [stack.enter_context(open_input_rows(path, NET.input)) for path in paths]
        for source in (RandomRows(NET.input, 50, 3), *opened, FittedRows(opened[0], NET.input, 2.0)):
            again = pickle.loads(pickle.dumps(source))
            scale = 2.0 if isinstance(source, FittedRows) else 1.0
            for a, b in ((17, 20), (41, 50)):
                assert np.array_equal(again.read(a, b), x[a:b] / np.float32(scale))
        packed = pickle.dumps(opened[0])
        np.save(tmp_path / "x.npy", x[:40])
        with pytest.raises(FormatError, match="changed since"):
            pickle.loads(packed)
    in_memory = RowSource(x, lambda: None)
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(in_memory)


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
    with pytest.raises(ShapeError, match="wrong shape"):
        FittedRows(Rows(np.zeros(shape, np.float32)), IMAGE)


def test_other_dtypes_are_refused_without_a_scale():
    with pytest.raises(ShapeError, match="--scale 255"):
        FittedRows(Rows(np.zeros((5, 784), np.uint8)), IMAGE)
    with pytest.raises(ShapeError, match="as int32"):
        FittedRows(Rows(np.zeros((5, 16), np.int64)), TensorType(("B", 16), "int32"))
    with pytest.raises(InputError, match="only float rows"):
        FittedRows(Rows(np.zeros((5, 16), np.int64)), TensorType(("B", 16), "int32"), scale=1)


# -- several inputs ----------------------------------------------------------------------------------------

LENGTHS = sentiment.network(vocabulary=9, embedding=4, channels=5, kernels=(2, 3), length=6, hidden=(), lengths=True)


def test_lengths_are_drawn_from_none_to_the_whole_sequence():
    assert length_limits(LENGTHS) == {"lengths": 7}
    ids, lengths = (source.read(0, 200) for source in random_inputs(LENGTHS, 200, 3))
    assert np.array_equal(ids, np.random.default_rng(3).integers(0, 9, (200, 6), dtype=np.int32))
    assert np.array_equal(lengths, np.random.default_rng(4).integers(0, 7, 200, dtype=np.int32))


def test_lengths_are_counted_up_to_the_padding():
    ids = np.array([[5, 0, 7, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [1, 2, 3, 4, 5], [3, 0, 0, 0, 0]])
    counted = CountedLengths(Rows(ids), 0, TensorType(("B",), "int32"))
    assert (counted.shape, counted.dtype, len(counted)) == ((5,), np.int32, 5)
    assert counted.read(0, 5).tolist() == [3, 0, 5, 5, 1]
    assert counted.read(2, 3).tolist() == [5]
    assert CountedLengths(Rows(ids[:0]), 0, TensorType(("B",), "int64")).read(0, 0).shape == (0,)
    assert CountedLengths(Rows(ids[:, :0]), 0, TensorType(("B",), "int64")).read(0, 5).tolist() == [0] * 5


def test_whose_lengths_are_counted_is_clear():
    assert padded_inputs(LENGTHS) == ("ids", "lengths")
    for other in (NET, sentiment.network(vocabulary=9, embedding=4, channels=5, kernels=(2,), length=6, hidden=())):
        with pytest.raises(InputError, match="no lengths to count"):
            padded_inputs(other)
