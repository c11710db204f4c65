"""onchip run faces: the generator that comes with onchip, grids and walks; and those of trained files."""

import json

import numpy as np
import pytest

import onchip
from onchip.formats.images import to_pixels
from onchip.kernels import reference
from onchip.workloads import faces
from small_reports import small_faces

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def small(tmp_path):
    """A network of 24x24 pictures, as a file."""
    onchip.save(small_faces(), tmp_path / "small.onnx")
    return "small.onnx"


def read(path):
    with Image.open(path) as picture:
        frames = []
        for i in range(getattr(picture, "n_frames", 1)):
            picture.seek(i)
            frames.append(np.asarray(picture.convert("RGB")))
    return np.stack(frames)


def test_without_a_count_there_are_64_synthetic_faces(cli, tmp_path):
    ran = cli("run", "faces", "-o", "grid.png")
    assert ran.code == 0, ran.err
    assert "the generator that comes with onchip; its pictures are synthetic, of no person" in ran.err
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == (512, 512)
        assert picture.text["Description"].startswith("synthetic")
    assert cli("run", "faces", "--count", 64, "--seed", 0, "-o", "same.png").code == 0
    assert (tmp_path / "same.png").read_bytes() == (tmp_path / "grid.png").read_bytes()


def test_the_shipped_generator_is_trained_and_small():
    """Its pictures differ from each other, and are smooth: neighbours are alike, as in a photograph."""
    net = faces.shipped()
    assert (net.input.row_shape, net.output.row_shape) == ((100,), (64, 64, 3))
    assert faces.SHIPPED.stat().st_size < 2 << 20
    x = onchip.compile(net, "cpu")(np.random.default_rng(0).standard_normal((32, 100), np.float32))
    between = np.abs(x[0::2] - x[1::2]).mean()
    assert between > 0.2
    assert np.abs(np.diff(x, axis=2)).mean() < between / 2
    middle, corners = x[:, 24:40, 24:40].mean(axis=(1, 2)), x[:, :6, :6].mean(axis=(1, 2))
    assert (middle[:, 0] - middle[:, 2]).mean() > 0.15 + (corners[:, 0] - corners[:, 2]).mean()  # skin in the middle


def test_elsewhere_faces_is_the_network_of_the_workload(cli):
    assert onchip.load("faces").parameters == 5_137_283
    assert "5,137,283" in cli("info", "faces").out


@pytest.mark.parametrize("suffix", [".png", ".bmp"])
def test_a_grid_has_so_many_columns_and_lines(cli, tmp_path, small, suffix):
    ran = cli("run", small, "--grid", "5x2", "--seed", 3, "-o", f"grid{suffix}")
    assert ran.code == 0, ran.err
    z = np.random.default_rng(3).standard_normal((10, 100), np.float32)
    expected = to_pixels(reference.forward(small_faces(), z, "float32")).reshape(2, 5, 24, 24, 3)
    got = read(tmp_path / f"grid{suffix}")[0].astype(int)
    assert np.abs(got - expected.transpose(0, 2, 1, 3, 4).reshape(48, 120, 3)).max() <= 1


def test_a_walk_goes_from_row_to_row_and_back(cli, tmp_path, small):
    ran = cli("run", small, "--count", 3, "--walk", 4, "--seed", 5, "-o", "walk.npy", "--batch", 5)
    assert ran.code == 0, ran.err
    z = np.random.default_rng(5).standard_normal((3, 100), np.float32)
    rows = [
        np.cos(t) * z[i] + np.sin(t) * z[(i + 1) % 3]
        for i in range(3)
        for t in (0, np.pi / 8, np.pi / 4, 3 * np.pi / 8)
    ]
    expected = reference.forward(small_faces(), np.float32(rows))
    got = np.load(tmp_path / "walk.npy")
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert cli("run", small, "--count", 3, "--walk", 4, "--seed", 5, "-o", "walk.gif").code == 0
    assert np.abs(read(tmp_path / "walk.gif").astype(int) - to_pixels(np.float32(expected))).mean() < 8
    assert json.loads(cli("run", small, "--walk", 2, "--json").out)["shape"] == [10, 24, 24, 3]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--grid", "5"], ["bad --grid", "columns x lines"]),
        (["--grid", "0x3"], ["bad --grid"]),
        (["--grid", "2x2", "--count", "4"], ["--grid says how many", "omit --count 4"]),
        (["--grid", "2x2", "--walk", "4"], ["--grid says how many", "omit --walk"]),
        (["z.npy", "--grid", "2x2"], ["--grid says how many", "INPUT"]),
        (["z.npy", "--walk", "4"], ["--walk is for random rows"]),
        (["--walk", "0"], ["bad number of frames"]),
        ([], ["choose the rows to run on"]),
    ],
)
def test_what_makes_no_sense_is_refused(cli, tmp_path, small, flags, words):
    np.save(tmp_path / "z.npy", np.zeros((2, 100), np.float32))
    ran = cli("run", small, *flags, "-o", "y.png")
    assert ran.code == 2
    assert all(word in ran.err for word in words), ran.err
    assert not (tmp_path / "y.png").exists()


def test_ids_have_no_walk(cli):
    ran = cli("run", "sentiment", "--walk", 3)
    assert ran.code == 2
    assert "cannot walk between ids" in ran.err
