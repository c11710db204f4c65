"""Arrays in .npz files: damage is refused for every compression method."""

import io
import random
import zipfile

import numpy as np
import pytest

from checks import rows
from onchip.errors import FormatError
from onchip.formats.arrays.npz import open_npz

X = rows(20, 3)
METHODS = {
    "stored": zipfile.ZIP_STORED, "deflate": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA,
}  # fmt: skip


def packed(method, name="wörter"):
    array, archive = io.BytesIO(), io.BytesIO()
    np.save(array, X)
    with zipfile.ZipFile(archive, "w", METHODS[method]) as file:
        file.writestr(f"{name}.npy", array.getvalue())
    return archive.getvalue()


@pytest.mark.parametrize("method", METHODS)
def test_any_flipped_bit_is_refused_or_changes_nothing(tmp_path, method):
    path, data, draw = tmp_path / "x.npz", packed(method), random.Random(3)
    path.write_bytes(data)
    with open_npz(path, "x") as source:
        assert np.array_equal(source.read(0, 20), X)
    refused = 0
    for _ in range(100):
        at, bit = draw.randrange(len(data)), draw.randrange(8)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        try:
            with open_npz(path, "x") as source:
                assert np.array_equal(source.read(0, 20), X)
        except FormatError as error:
            refused += 1
            str(error).encode()
    assert refused > 30


@pytest.mark.parametrize("method", METHODS)
def test_a_damaged_member_is_named(tmp_path, method):
    data = packed(method)
    middle = data.index(b".npy") + 60
    (tmp_path / "x.npz").write_bytes(data[:middle] + b"\xff" * 8 + data[middle + 8 :])
    with pytest.raises(FormatError, match=r"x\.npz") as caught:
        open_npz(tmp_path / "x.npz", "x")
    assert caught.value.got


def test_a_name_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(packed("stored").replace("ö".encode(), b"\xff\xff"))
    with pytest.raises(FormatError, match=r"x\.npz: not an \.npz file"):
        open_npz(tmp_path / "x.npz", "x")
