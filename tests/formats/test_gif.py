"""Animations: another program reads them, frame by frame, and the colours are near."""

import numpy as np
import pytest

from onchip.errors import InputError
from onchip.formats.gif import GifWriter, compress, reduce_colours
from onchip.formats.images import SYNTHETIC, to_pixels

Image = pytest.importorskip("PIL.Image")


def images(N, H, W, C, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (N, H, W, C), dtype=np.uint8)


def write(path, rows, pieces=1):
    with GifWriter(path, rows.shape, rows.dtype) as out:
        for piece in np.array_split(rows, pieces):
            out.write(piece)


def read_back(path):
    frames = []
    with Image.open(path) as picture:
        assert picture.info["comment"] == SYNTHETIC.encode()
        assert picture.info["loop"] == 0
        for i in range(picture.n_frames):
            picture.seek(i)
            frames.append(np.asarray(picture.convert("RGB")))
    return np.stack(frames)


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (7, 3), (64, 64), (150, 131)])  # below and past a full table of codes
@pytest.mark.parametrize("pieces", [1, 3])
def test_gray_frames_are_exact(tmp_path, size, pieces):
    gray = images(3, *size, 1)
    write(tmp_path / "a.gif", gray, pieces)
    assert np.array_equal(read_back(tmp_path / "a.gif"), np.repeat(gray, 3, axis=3))


@pytest.mark.parametrize("level", [0, 255])
def test_long_runs_of_one_value(tmp_path, level):
    for side in (8, 130):
        flat = np.full((2, side, side, 1), level, np.uint8)
        write(tmp_path / "a.gif", flat)
        assert (read_back(tmp_path / "a.gif") == level).all()


def test_the_code_widths_at_every_length():
    """A decoder written here reads the stream that ends after any number of pixels."""
    pixels = images(1, 1, 5000, 1).tobytes()
    for length in (*range(1, 20), *range(250, 262), *range(760, 775), *range(3830, 3850), 5000):
        assert decompress(compress(pixels[:length])) == pixels[:length]


def decompress(data):
    """LZW of 8-bit pixels; asserts that the stream ends with its end code and at most 7 more bits."""
    bits, at, out = int.from_bytes(data, "little"), 0, bytearray()
    table, width, previous = [], 9, b""
    while True:
        code = bits >> at & (1 << width) - 1
        at += width
        if code == 257:
            assert 0 <= 8 * len(data) - at < 8
            return bytes(out)
        if code == 256:
            table, width, previous = [bytes([i]) for i in range(256)] + [b"", b""], 9, b""
            continue
        entry = table[code] if code < len(table) else previous + previous[:1]
        if previous and len(table) < 4096:
            table.append(previous + entry[:1])
        if len(table) >= 1 << width and width < 12:
            width += 1
        out += entry
        previous = entry


def test_few_colours_are_near_and_each_frame_has_its_own(tmp_path):
    few = np.random.default_rng(0).integers(0, 256, (2, 200, 3), dtype=np.uint8)
    frames = np.stack([each[np.random.default_rng(1).integers(0, 200, (20, 30))] for each in few])
    write(tmp_path / "a.gif", frames)
    assert np.abs(read_back(tmp_path / "a.gif").astype(int) - frames).max() <= 7  # 5 bits per channel


def test_many_colours_are_reduced_to_256():
    y, x = np.mgrid[0:128, 0:128]
    frame = np.stack([2 * x, 2 * y, x + y], axis=-1).astype(np.uint8)
    colours, index = reduce_colours(frame)
    error = np.abs(colours[index].astype(int) - frame)
    assert colours.shape == (256, 3)
    assert len(np.unique(index)) == 256
    assert error.mean() < 5
    assert error.max() < 40


def test_floats_and_files_that_cannot_be_written(tmp_path):
    x = np.random.default_rng(1).uniform(-1, 1, (2, 5, 4)).astype(np.float32)
    write(tmp_path / "a.gif", x)
    assert np.array_equal(read_back(tmp_path / "a.gif")[..., 0], to_pixels(x))
    with pytest.raises(InputError, match="not images"):
        GifWriter(tmp_path / "b.gif", (4, 10), "float32")
    with pytest.raises(InputError, match="no images"):
        GifWriter(tmp_path / "b.gif", (0, 4, 4), "uint8")
    with pytest.raises(InputError, match="frames are too large"):
        GifWriter(tmp_path / "b.gif", (1, 4, 70_000), "uint8")

    def stopped():
        with GifWriter(tmp_path / "b.gif", (2, 4, 4), "uint8") as out:
            out.write(images(1, 4, 4, 1)[..., 0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert [path.name for path in tmp_path.iterdir()] == ["a.gif"]
