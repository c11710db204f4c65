"""Pictures to train on: folders and files of arrays, with damaged files and other sizes among them."""

import sys

import numpy as np
import pytest

from onchip.errors import FormatError, InputError, MissingPackageError, ShapeError
from onchip.formats.pictures import read_pictures

Image = pytest.importorskip("PIL.Image")


def pixels(N=3, H=8, W=8, C=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (N, H, W, C), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Three pictures, one of them in a folder inside, and a file that is none."""
    images = pixels()
    (tmp_path / "more").mkdir()
    for image, name in zip(images, ("a.png", "b.PNG", "more/c.png"), strict=True):
        Image.fromarray(image).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


def test_a_folder_is_read_by_name(folder):
    found = read_pictures(folder)
    assert np.array_equal(found.images, pixels())
    assert found.skipped == ()
    Image.fromarray(pixels()[0]).save(folder / "d.jpg", quality=95)
    assert read_pictures(folder).images.shape == (4, 8, 8, 3)


def test_gray_pictures_stay_gray_unless_one_is_in_colour(folder, tmp_path_factory):
    gray = tmp_path_factory.mktemp("gray")
    for i, image in enumerate(pixels(C=1)):
        Image.fromarray(image[..., 0]).save(gray / f"{i}.png")
    assert np.array_equal(read_pictures(gray).images, pixels(C=1))
    Image.fromarray(pixels()[0]).save(gray / "9.png")
    assert np.array_equal(read_pictures(gray).images[:3], np.repeat(pixels(C=1), 3, axis=3))


def test_a_damaged_file_is_named_or_skipped(folder):
    whole = (folder / "a.png").read_bytes()
    for name, data in (("e.png", whole[:60]), ("f.jpg", b"not a picture"), ("g.png", b"")):
        (folder / name).write_bytes(data)
        with pytest.raises(FormatError, match=rf"(?s){name} cannot be read as a picture.*--skip-bad"):
            raise_as_text(folder)
        found = read_pictures(folder, skip_bad=True)
        assert len(found.images) == 3
        assert len(found.skipped) == 1
        assert found.skipped[0].startswith(f"{name}: ")
        (folder / name).unlink()


def raise_as_text(folder):
    try:
        read_pictures(folder)
    except FormatError as error:
        raise FormatError(str(error)) from None


def test_a_picture_of_another_size_is_named_or_skipped(folder):
    Image.fromarray(pixels(1, 9, 8)[0]).save(folder / "0.png")  # the first is not the one that counts
    with pytest.raises(FormatError, match=r"(?s)0\.png has another size.*8 x 9 pixels.*8 x 8 pixels, as 3 of 4"):
        raise_as_text(folder)
    found = read_pictures(folder, skip_bad=True)
    assert np.array_equal(found.images, pixels())
    assert found.skipped == ("0.png: 8 x 9 pixels",)


def test_nothing_to_read(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(FormatError, match="no pictures in"):
        read_pictures(empty)
    (empty / "a.png").write_bytes(b"")
    with pytest.raises(FormatError, match="cannot be read"):
        read_pictures(empty, skip_bad=True)
    with pytest.raises(FormatError, match="is a single picture"):
        read_pictures(folder / "a.png")
    with pytest.raises(InputError, match="cannot read"):
        read_pictures(folder / "none.npz")


def test_files_of_arrays(tmp_path):
    images = pixels(5, 4, 4, 1)
    np.savez(tmp_path / "a.npz", images=images, labels=np.zeros(5))
    np.save(tmp_path / "a.npy", images[..., 0])
    idx = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (5, 4, 4)) + images.tobytes()
    (tmp_path / "train-images").write_bytes(idx)
    for name in ("a.npz", "a.npy", "train-images"):
        assert np.array_equal(read_pictures(tmp_path / name).images, images)
    for bad in (images.astype(np.float32), images[..., 0, 0], images.transpose(0, 3, 1, 2), images[:0]):
        np.save(tmp_path / "b.npy", bad)
        with pytest.raises(ShapeError, match="holds no pictures"):
            read_pictures(tmp_path / "b.npy")


def test_without_pillow_the_error_names_its_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingPackageError, match="needs Pillow"):
        read_pictures(folder)
    np.save(folder / "a.npy", pixels())
    assert len(read_pictures(folder / "a.npy").images) == 3
