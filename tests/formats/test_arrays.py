"""Rows read in chunks equal the rows written; a file whose size contradicts its header is refused."""

from __future__ import annotations

import gzip
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onchip.errors import FormatError, InputError, OnchipError, OutputError, ShapeError
from onchip.formats.arrays import row_files as arrays
from onchip.formats.arrays.row_files import NpyWriter, map_npy, open_flat_rows, open_rows
from onchip.network.types import numpy_dtype

SETTINGS = settings(max_examples=80)
NUMBERS = st.sampled_from(["?", "i1", "<i2", ">i4", "i8", "u1", ">u2", "u4", "<u8", "f2", ">f4", "f8"])
IDX = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array, code=None) -> bytes:
    code = IDX[array.dtype.str[1:]] if code is None else code
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, code, array.ndim]) + sizes + array.astype(array.dtype.newbyteorder(">")).tobytes()


def npy_bytes(header: str | bytes, data=b"", version=1) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + data


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def head(descr="'<f4'", fortran="False", shape="(2, 3)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


def check_rows(path, array, start=0, stop=None):
    with open_rows(path) as rows:
        assert (rows.shape, len(rows)) == (array.shape, len(array))
        assert rows.dtype == array.dtype.newbyteorder("=")
        got = rows.read(start, len(array) if stop is None else stop)
    assert got.dtype == array.dtype.newbyteorder("=")
    assert got.flags.c_contiguous
    assert got.flags.writeable
    np.testing.assert_array_equal(got, array[start:stop])


# -- reading -----------------------------------------------------------------------------------------------


@SETTINGS
@given(
    array=hnp.arrays(NUMBERS, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)),
    fortran=st.booleans(), version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
    start=st.integers(0, 6), n=st.integers(0, 6),
)  # fmt: skip
def test_npy_in_any_layout(tmp_path, array, fortran, version, start, n):
    import warnings

    array = np.asfortranarray(array) if fortran else array
    with (tmp_path / "rows.npy").open("wb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns that old versions cannot read 2.0 and 3.0
        np.lib.format.write_array(file, array, version=version)
    check_rows(tmp_path / "rows.npy", array, start, start + n)


@pytest.mark.parametrize("kind", IDX)
@pytest.mark.parametrize("name", ["rows.idx", "rows-idx2-ubyte", "rows-idx2-ubyte.gz"])
@pytest.mark.parametrize("shape", [(5, 3), (4,), (2, 3, 4), (0, 3), (3, 0)])
def test_idx(tmp_path, kind, name, shape):
    array = np.arange(np.prod(shape)).reshape(shape).astype(kind)
    data = idx_bytes(array)
    (tmp_path / name).write_bytes(packed(data) if name.endswith(".gz") else data)
    check_rows(tmp_path / name, array, 1, 3)


def test_large_rows_are_mapped_not_loaded(tmp_path):
    path = tmp_path / "rows.npy"
    path.write_bytes(npy_bytes(head(shape="(1048576, 16384)")))
    header_bytes = path.stat().st_size
    os.truncate(path, header_bytes + 4 * 2**34)  # 64 GiB, sparse
    with open_rows(path) as rows:
        assert rows.shape == (2**20, 2**14)
        assert not rows.read(2**20 - 2, 2**20).any()


@SETTINGS
@given(
    array=hnp.arrays(NUMBERS, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)), fortran=st.booleans()
)
def test_mapped_rows_are_the_rows_and_the_file_stays(tmp_path, array, fortran):
    path = tmp_path / "rows.npy"
    np.save(path, np.asfortranarray(array) if fortran else array)
    before = path.read_bytes()
    mapped = map_npy(path)
    np.testing.assert_array_equal(mapped, array)
    assert mapped.dtype == array.dtype
    mapped[...] = 1  # a private copy
    assert path.read_bytes() == before


def test_only_whole_npy_files_are_mapped(tmp_path):
    path = tmp_path / "rows.npy"
    for data in (
        b"",
        idx_bytes(np.zeros((2, 3), "f4")),
        npy_bytes(head(), bytes(23)),
        npy_bytes(head("'|O'"), bytes(48)),
    ):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=r"rows\.npy"):
            map_npy(path)


@pytest.mark.parametrize("kind", ["npy", "fortran", "idx", "bin"])
@pytest.mark.parametrize("left_bytes", [0, 100, 4095, 5000, 40_000])
def test_a_file_that_is_truncated_while_it_is_read_is_an_error(tmp_path, kind, left_bytes):
    """A process that maps it would get SIGBUS."""
    x, path = np.arange(20_000, dtype=np.float32).reshape(-1, 5), tmp_path / f"x.{kind}"
    if kind == "bin":
        path.write_bytes(x.tobytes())
    elif kind == "idx":
        path.write_bytes(b"\0\0\x0d\2" + struct.pack(">2I", *x.shape) + x.astype(">f4").tobytes())
    else:
        with path.open("wb") as file:
            np.save(file, np.asfortranarray(x) if kind == "fortran" else x)
    opened = open_flat_rows(path, (5,), np.dtype("float32")) if kind == "bin" else open_rows(path)
    with opened as source:
        assert np.array_equal(source.read(3990, 4000), x[3990:])
        os.truncate(path, left_bytes)
        with pytest.raises(FormatError, match="truncated while it was read") as caught:
            source.read(3990, 4000)
        assert str(path) in caught.value.what
        assert "80," in caught.value.expected


def test_reading_past_the_end_is_cut_and_bad_ranges_are_refused(tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(6).reshape(3, 2))
    with open_rows(tmp_path / "rows.npy") as rows:
        assert len(rows.read(2, 9)) == 1
        assert rows.read(7, 9).shape == (0, 2)
        for start, stop in ((-1, 2), (2, 1)):
            with pytest.raises(InputError, match="bad row range"):
                rows.read(start, stop)
    with pytest.raises(InputError, match="closed"):
        rows.read(0, 1)
    rows.close()  # twice is fine


@pytest.mark.parametrize(("data", "words"), [
    (b"", "0 B"),
    (b"hello world", "68 65 6c 6c 6f 20"),
    (b"PK\3\4", ".npy"),
    (npy_bytes(head(), bytes(23)), "truncated"),
    (npy_bytes(head(), bytes(23)), "24 B of float32 (2, 3)"),
    (npy_bytes(head(), bytes(25)), "extra bytes"),
    (npy_bytes(head(), bytes(24))[:40], "inside its header"),
    (npy_bytes(head(), bytes(24))[:6], "version missing"),
    (npy_bytes(head(), bytes(24))[:9], "inside its header"),
    (npy_bytes(head(), bytes(24), version=4), "version 04"),
    (npy_bytes(head(shape="()"), bytes(4)), "not an array of rows"),
    (npy_bytes(head(shape="(2, -3)"), bytes(24)), "bad shape"),
    (npy_bytes(head(shape="(2, 3.0)"), bytes(24)), "bad shape"),
    (npy_bytes(head(shape="(2, True)"), bytes(24)), "bad shape"),
    (npy_bytes(head(shape="[2, 3]"), bytes(24)), "bad shape"),
    (npy_bytes(head(shape="(0, 2**62)"), b""), "garbage"),
    (npy_bytes(head(shape=f"(0, {2**62}, {2**62})"), b""), "bad shape"),
    (npy_bytes(head(shape=f"({2**62}, {2**62})"), bytes(24)), "truncated"),
    (npy_bytes(head(shape=f"({'9,' * 65})"), bytes(24)), "1 to 64 axes"),
    (npy_bytes(head(shape=f"({f'{2**62},' * 2000})"), bytes(24)), "1 to 64 axes"),
    (npy_bytes(head(shape="(" + "9" * 5000 + ",)"), bytes(24)), "garbage"),
    (npy_bytes(head(fortran="1"), bytes(24)), "fortran_order"),
    (npy_bytes(head("'|O'"), bytes(48)), "can run code"),
    (npy_bytes(head("'<U3'"), bytes(72)), "unsupported dtype"),
    (npy_bytes(head("'<c8'"), bytes(48)), "unsupported dtype"),
    (npy_bytes(head("'<M8[ns]'"), bytes(48)), "unsupported dtype"),
    (npy_bytes(head("[('a', '<f4')]"), bytes(24)), "unsupported dtype"),
    (npy_bytes(head("'<V2'"), bytes(12)), "unsupported dtype"),
    (npy_bytes(head("'<,('"), bytes(12)), "unsupported dtype"),
    (npy_bytes("{'descr': '<f4'}"), "garbage"),
    (npy_bytes("[1]"), "garbage"),
    (npy_bytes("__import__('os')"), "garbage"),
    (npy_bytes("(" * 10_000), "garbage"),
    (npy_bytes("'\\d'"), "garbage"),
    (npy_bytes(b"\xff", version=3), "garbage"),
    (npy_bytes(b"x" * 70_000, version=2), "at most 65,536 B"),
    (idx_bytes(np.zeros((2, 3), "f4"))[:-1], "35 B"),
    (idx_bytes(np.zeros((2, 3), "f4")) + b"x", "extra bytes"),
    (idx_bytes(np.zeros((2, 3), "f4"))[:7], "7 B"),
    (idx_bytes(np.zeros((2, 3), "f4"), code=0x0A), "not an idx file"),
    (b"\0\0\x08\0x", "not an array of rows"),
    (b"\0\0\x08", "not an idx file"),
    (b"\0\0\x08\xff" + b"\xff" * 1020, "1 to 64 axes"),
    (packed(idx_bytes(np.zeros((2, 3), "f4"))[:-1]), "truncated"),
    (packed(idx_bytes(np.zeros((2, 3), "f4")) + b"x"), "extra bytes"),
    (packed(idx_bytes(np.zeros((2, 3), "f4")))[:-1], "damaged"),
    (packed(idx_bytes(np.zeros((2, 3), "f4"))) + b"x", "damaged"),
    (packed(b"hello"), "not an idx file"),
    (packed(b"\0\0\x08\2" + b"\xff" * 8), "declares more"),
    (packed(b"\0\0\x08\x40" + b"\xff" * 256), "declares more"),
    (b"\x1f\x8b garbage", "damaged"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_hostile_arrays(tmp_path, data, words):
    path = tmp_path / "rows.npy"
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        open_rows(path)
    assert words in str(caught.value)
    assert "rows.npy" in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("limit", ["MAX_UNPACKED_BYTES", "free_memory"])
def test_a_gzip_bomb_is_refused_by_its_header(tmp_path, monkeypatch, limit):
    """Its header is honest and exceeds the limit; one byte less is read."""
    path = tmp_path / "rows.gz"
    path.write_bytes(packed(idx_bytes(np.zeros((1 << 10, 1 << 10), "u1"))))
    monkeypatch.setattr(arrays, limit, (1 << 20) if limit.isupper() else lambda: 2 << 20)
    open_rows(path).close()
    monkeypatch.setattr(arrays, limit, (1 << 20) - 1 if limit.isupper() else lambda: (2 << 20) - 1)
    with pytest.raises(FormatError, match="declares more") as caught:
        open_rows(path)
    assert "1,048,576 B" in caught.value.got
    assert "1,048,575 B" in caught.value.expected


def test_missing_file(tmp_path):
    with pytest.raises(FormatError, match="No such file"):
        open_rows(tmp_path / "none.npy")


@settings(SETTINGS, max_examples=300)
@given(
    kind=st.sampled_from(["npy", "idx", "gz"]), cut=st.integers(0, 10**6),
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), max_size=3),
)  # fmt: skip
def test_damage_is_an_error_or_rows(tmp_path, kind, cut, flips):
    array = np.arange(12, dtype="f4").reshape(4, 3)
    idx = idx_bytes(array)
    npy = npy_bytes(head(shape="(4, 3)"), array.tobytes())
    data = bytearray({"npy": npy, "idx": idx, "gz": packed(idx)}[kind])
    for place, bit in flips:
        data[place % len(data)] ^= 1 << bit
    (tmp_path / "rows").write_bytes(data[: cut % (2 * len(data)) + 1])
    try:
        with open_rows(tmp_path / "rows") as rows:
            assert rows.read(0, len(rows)).shape == rows.shape
    except OnchipError as error:
        assert isinstance(error, FormatError)  # noqa: PT017


# -- writing -----------------------------------------------------------------------------------------------


@settings(SETTINGS, max_examples=30)
@given(
    array=hnp.arrays(NUMBERS, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6)), step=st.integers(1, 4)
)
def test_chunks_write_the_same_file_as_numpy(tmp_path, array, step):
    path = tmp_path / "out.npy"
    with NpyWriter(path, array.shape, array.dtype) as out:
        for start in range(0, len(array), step):
            out.write(array[start : start + step])
    np.testing.assert_array_equal(np.load(path), array)
    check_rows(path, array)


def test_strided_rows_are_written_in_order(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    with NpyWriter(tmp_path / "out.npy", (4, 3), "float32") as out:
        out.write(array)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), array)


@pytest.mark.parametrize("rows", [2, 4])
def test_a_wrong_number_of_rows_leaves_the_old_file(tmp_path, rows):
    path = tmp_path / "out.npy"
    path.write_bytes(b"old")
    with pytest.raises(InputError, match="wrong number of rows"), NpyWriter(path, (3, 2), "f4") as out:
        out.write(np.zeros((rows, 2), "f4"))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.npy"]


def test_an_exception_leaves_nothing(tmp_path):
    def interrupted():
        with NpyWriter(tmp_path / "out.npy", (3, 2), "f4") as out:
            out.write(np.zeros((3, 2), "f4"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not os.listdir(tmp_path)


def test_rows_must_match_the_declared_shape(tmp_path):
    for rows in (np.zeros((1, 3), "f4"), np.zeros((1, 2), "f8"), np.float32(3), np.zeros((1, 2, 1), "f4")):
        with pytest.raises(ShapeError, match="do not match"), NpyWriter(tmp_path / "out.npy", (3, 2), "f4") as out:
            out.write(rows)
    with pytest.raises(InputError, match="bfloat16"):
        NpyWriter(tmp_path / "out.npy", (3, 2), numpy_dtype("bfloat16"))
    for shape in ((), (3, -1)):
        with pytest.raises(InputError, match="shape"):
            NpyWriter(tmp_path / "out.npy", shape, "f4")
    with pytest.raises(OutputError), NpyWriter(tmp_path / "no" / "out.npy", (3, 2), "f4"):
        pass
    assert not os.listdir(tmp_path)
