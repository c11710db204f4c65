"""Flat weight files: views in order, sizes checked to the byte, seeded weights by a documented formula."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onchip.errors import FormatError, InputError
from onchip.formats.weights.flat_file import FlatTensor, draw_flat, read_flat
from onchip.network.recipe import materialise

LAYOUT = [FlatTensor("first", (3, 4), 1.0), FlatTensor("second", (5,), 0.1, 1.0), FlatTensor("third", (2, 3, 2), 2.0)]
NUMBERS = 12 + 5 + 12


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.bin"


@given(shapes=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=5))
def test_tensors_are_contiguous(tmp_path_factory, shapes):
    rng = np.random.default_rng(len(shapes))
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    file = tmp_path_factory.mktemp("flat") / "weights.bin"
    file.write_bytes(b"".join(array.astype("<f4").tobytes() for array in arrays))
    found = read_flat(file, [FlatTensor(f"t{i}", tuple(shape), 1.0) for i, shape in enumerate(shapes)])
    assert list(found) == [f"t{i}" for i in range(len(shapes))]
    for array, got in zip(arrays, found.values(), strict=True):
        assert got.dtype == np.float32
        assert np.array_equal(got, array)


def test_nothing_is_copied(path):
    np.arange(NUMBERS, dtype=np.float32).tofile(path)
    found = read_flat(path, LAYOUT)
    assert not any(array.flags.owndata or array.flags.writeable for array in found.values())
    # They are views of the file: a write to it is visible.
    with path.open("r+b") as file:
        file.seek(12 * 4)
        file.write(np.float32(-7).tobytes())
    assert found["second"][0] == -7


@pytest.mark.parametrize(
    ("size", "where"),
    [
        (0, "the file is empty"),
        (1, "the file ends inside 'first', bytes 0 to 47"),
        (47, "inside 'first'"),
        (48, "the file ends inside 'second', bytes 48 to 67"),
        (67, "inside 'second'"),
        (115, "the file ends inside 'third', bytes 68 to 115"),
        (117, "the file has extra bytes after 'third', from byte 116"),
        (1000, "after 'third'"),
    ],
)
def test_other_sizes(path, size, where):
    path.write_bytes(bytes(size))
    with pytest.raises(FormatError) as caught:
        read_flat(path, LAYOUT)
    assert str(path) in caught.value.what
    assert where in caught.value.what
    assert caught.value.got == f"{size:,} B"
    assert caught.value.expected == "116 B: 29 float32 from 'first' to 'third'"
    assert caught.value.hint


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(path, monkeypatch, bad):
    monkeypatch.setattr("onchip.formats.weights.flat_file.CHUNK", 5)
    numbers = np.ones(NUMBERS, np.float32)
    numbers[[24, 27]] = bad
    numbers.tofile(path)
    with pytest.raises(FormatError, match=r"'third'\[1, 0, 1\]") as caught:
        read_flat(path, LAYOUT)
    assert caught.value.got == f"{bad} at byte 96"


def test_big_endian_weights_are_seen(path):
    # Ones byte-swapped are tiny numbers, but among real weights some become NaN or Inf.
    np.random.default_rng(0).standard_normal(40_000).astype(">f4").tofile(path)
    with pytest.raises(FormatError, match="little-endian"):
        read_flat(path, [FlatTensor("weight", (40_000,), 1.0)])


def test_no_file(path):
    with pytest.raises(FormatError, match="No such file"):
        read_flat(path, LAYOUT)
    with pytest.raises(FormatError, match="a folder"):
        read_flat(path.parent, LAYOUT)


def test_drawn_weights_follow_the_formula():
    drawn = draw_flat(LAYOUT, seed=3)
    for i, tensor in enumerate(LAYOUT):
        normal = np.random.default_rng([3, i]).standard_normal(tensor.shape, dtype=np.float32)
        expected = np.float32(tensor.center) + np.float32(tensor.spread) * normal
        recipe = drawn[tensor.name]
        assert (recipe.shape, recipe.dtype, recipe.sources) == (tensor.shape, "float32", ())
        assert np.array_equal(materialise(tensor.name, drawn), expected)
    assert not np.array_equal(materialise("first", drawn), materialise("first", draw_flat(LAYOUT, seed=4)))
    with pytest.raises(InputError, match="seed"):
        draw_flat(LAYOUT, seed=-1)
