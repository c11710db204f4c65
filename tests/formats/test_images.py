"""Images: another program reads them, tiles are in order, and no partial file is left."""

import struct

import numpy as np
import pytest

from onchip.errors import InputError
from onchip.formats.images import BmpWriter, PngWriter, is_image, to_pixels
from onchip.kernels import reference
from onchip.network.build import sequential
from onchip.network.layers import ToPixels
from onchip.network.types import TensorType

WRITERS = {".bmp": BmpWriter, ".png": PngWriter}


def images(N, H, W, C=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (N, H, W, C), dtype=np.uint8)


def tiled(pixels):
    """The square, by a naive loop."""
    N, H, W, _ = pixels.shape
    across = 0
    while across * across < N:
        across += 1
    square = np.zeros((across * H, across * W, 3), np.uint8)
    for i in range(N):
        top, left = i // across * H, i % across * W
        square[top : top + H, left : left + W] = pixels[i]
    return square


def write(path, rows, pieces=1):
    with WRITERS[path.suffix](path, rows.shape, rows.dtype) as out:
        for piece in np.array_split(rows, pieces):
            out.write(piece)


def read_back(path):
    Image = pytest.importorskip("PIL.Image")
    with Image.open(path) as image:
        assert image.mode == "RGB"
        image.load()
        return np.asarray(image)


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("N", [1, 2, 3, 4, 5, 9, 10, 17])
@pytest.mark.parametrize("size", [(4, 4), (3, 5), (1, 1), (2, 7)])  # line widths with and without padding
def test_tiles_form_a_square(tmp_path, suffix, N, size):
    pixels = images(N, *size)
    for pieces in (1, 2, N):
        path = tmp_path / f"grid{suffix}"
        write(path, pixels, pieces)
        assert np.array_equal(read_back(path), tiled(pixels))


def test_a_bmp_to_the_byte(tmp_path):
    write(tmp_path / "one.bmp", np.array([[[[1, 2, 3]], [[4, 5, 6]]]], np.uint8))  # 2 high, 1 wide
    data = (tmp_path / "one.bmp").read_bytes()
    assert struct.unpack("<2sIHHI", data[:14]) == (b"BM", 62, 0, 0, 54)
    assert struct.unpack("<IiiHHIIiiII", data[14:54]) == (40, 1, 2, 1, 24, 0, 8, 0, 0, 0, 0)
    assert data[54:] == bytes([6, 5, 4, 0, 3, 2, 1, 0])  # lowest line first, blue first, padded to 4 bytes


@pytest.mark.parametrize("suffix", WRITERS)
def test_gray_and_floats(tmp_path, suffix):
    gray = images(5, 3, 4, 1)
    for rows in (gray, gray[..., 0]):
        write(tmp_path / f"gray{suffix}", rows)
        assert np.array_equal(read_back(tmp_path / f"gray{suffix}"), tiled(np.repeat(gray, 3, axis=3)))
    x = np.random.default_rng(1).uniform(-1, 1, (5, 3, 4, 3)).astype(np.float32)
    write(tmp_path / f"float{suffix}", x)
    assert np.array_equal(read_back(tmp_path / f"float{suffix}"), tiled(to_pixels(x)))


def test_floats_become_bytes_as_in_the_layer():
    x = np.random.default_rng(2).uniform(-1.5, 1.5, (50, 6)).astype(np.float32)
    x.flat[:7] = [-1, 1, 0, -0.0, np.nan, np.inf, -np.inf]
    net = sequential(TensorType(("B", 6)), [("pixels", ToPixels())], {})
    assert np.array_equal(to_pixels(x), reference.forward(net, x, dtype="float32"))
    assert to_pixels(x).ravel()[:7].tolist() == [0, 255, 127, 127, 0, 255, 0]
    exact = np.float32([[-0.5, 0.5, 0.25]])
    assert to_pixels(exact).tolist() == [[int((v + 1) / 2 * 255) for v in (-0.5, 0.5, 0.25)]]


@pytest.mark.parametrize("suffix", WRITERS)
def test_what_cannot_be_drawn(tmp_path, suffix):
    path = tmp_path / f"grid{suffix}"
    for shape, dtype in [((4, 10), "float32"), ((4, 3, 3, 2), "uint8"), ((4, 3, 3), "int32"), ((4, 0, 3), "uint8")]:
        with pytest.raises(InputError, match="not images"):
            WRITERS[suffix](path, shape, dtype)
    with pytest.raises(InputError, match="no images"):
        WRITERS[suffix](path, (0, 64, 64, 3), "uint8")
    with pytest.raises(InputError, match="too large"):
        WRITERS[suffix](path, (1 << 60, 64, 64, 3), "uint8")
    with pytest.raises(InputError, match=r"a \.png has no such limit"):
        BmpWriter(tmp_path / "grid.bmp", (700 * 700, 64, 64, 3), "uint8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", WRITERS)
def test_an_image_appears_atomically(tmp_path, suffix):
    path, pixels = tmp_path / f"grid{suffix}", images(9, 4, 4)

    def stopped():
        with WRITERS[suffix](path, pixels.shape, "uint8") as out:
            out.write(pixels[:7])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    with pytest.raises(InputError, match="wrong number of rows"), WRITERS[suffix](path, pixels.shape, "uint8") as out:
        out.write(pixels[:8])
    assert list(tmp_path.iterdir()) == []


def test_is_image():
    for shape in [(64, 64, 3), (5, 4, 1), (7, 9)]:
        assert is_image(TensorType(("B", *shape)))
        assert is_image(TensorType(("B", *shape), "uint8"))
        assert not is_image(TensorType(("B", *shape), "int32"))
    for shape in [(), (10,), (3, 64, 64), (4, 4, 4, 3), (0, 4, 3)]:
        assert not is_image(TensorType(("B", *shape)))


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize(("N", "columns"), [(1, 1), (6, 3), (7, 3), (2, 5)])
def test_lines_of_so_many_columns(tmp_path, suffix, N, columns):
    pixels, lines = images(N, 3, 5), -(-N // columns)
    padded = np.concatenate([pixels, np.zeros((lines * columns - N, 3, 5, 3), np.uint8)])
    for pieces in (1, N):
        with WRITERS[suffix](tmp_path / f"a{suffix}", pixels.shape, "uint8", columns) as out:
            for piece in np.array_split(pixels, pieces):
                out.write(piece)
        expected = padded.reshape(lines, columns, 3, 5, 3).transpose(0, 2, 1, 3, 4).reshape(lines * 3, columns * 5, 3)
        assert np.array_equal(read_back(tmp_path / f"a{suffix}"), expected)


def test_a_png_says_that_it_is_synthetic(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    write(tmp_path / "a.png", images(4, 3, 3))
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.text == {"Description": "synthetic: computed by a neural network (onchip)"}
