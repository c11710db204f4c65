"""onchip train faces: folders, files, samples, checkpoints, bad pictures and bad options."""

import json

import numpy as np
import pytest

import onchip
from onchip.cli.stop import StoppedError
from onchip.workloads.gan_training import GanRun

Image = pytest.importorskip("PIL.Image")
SMALL = ("--width", 2, "--epochs", 2, "--batch-size", 6, "--device", "cpu")


def pictures(n=20, side=8, colours=3):
    return np.random.default_rng(0).integers(0, 256, (n, side, side, colours), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "photos").mkdir()
    for i, image in enumerate(pictures()):
        Image.fromarray(image).save(tmp_path / "photos" / f"{i:02}.png")
    return "photos"


def test_from_a_folder_to_a_grid(cli, tmp_path, folder):
    ran = cli("train", "faces", "--data", folder, *SMALL, "--samples", "grid.png", "-o", "net.onnx")
    assert ran.code == 0, ran.err
    assert "20 colour pictures of 8 x 8 pixels" in ran.err
    assert "shifted, cut and brightened and mirrored" in ran.err
    assert "2 epochs of 3 steps" in ran.out
    assert "Frechet distance" in ran.out
    assert "not the FID of papers" in ran.out
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == (64, 64)
        assert picture.text["Description"].startswith("synthetic")
    with Image.open(tmp_path / "grid.gif") as picture:
        assert (picture.size, picture.n_frames) == ((32, 32), 2)
    ran = cli("run", "net.onnx", "--grid", "3x2", "-o", "new.png")
    assert ran.code == 0, ran.err
    with Image.open(tmp_path / "new.png") as picture:
        assert picture.size == (24, 16)


def test_json_and_mnist(cli, tmp_path, monkeypatch):
    """Gray pictures are not mirrored; without pillow: a file of arrays needs none."""
    digits = pictures(30, 28, 1)[..., 0]
    monkeypatch.setenv("ONCHIP_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    head = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in digits.shape)
    for name in (
        "train-images-idx3-ubyte",
        "t10k-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        (tmp_path / "data" / "mnist" / name).write_bytes(head + digits.tobytes())
    ran = cli(
        "train", "faces", "--data", "mnist", *SMALL, "--seed", 3, "--no-augment", "--json", "-o", "net.safetensors"
    )
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert (document["pictures"], document["held_out"], document["skipped"]) == (30, 3, [])
    assert (document["augment"], document["flip"], document["seed"], document["width"]) == (False, False, 3, 2)
    assert len(document["epoch_losses"]) == 2
    assert document["epoch_losses"][0].keys() == {"discriminator", "generator"}
    assert document["frechet"]["generated"] > 0
    assert onchip.load(tmp_path / "net.safetensors").output.row_shape == (28, 28, 1)


def test_bad_pictures_are_named_or_skipped_and_counted(cli, tmp_path, folder):
    (tmp_path / folder / "bad.png").write_bytes(b"no picture")
    Image.fromarray(pictures(1, 9)[0]).save(tmp_path / folder / "large.png")
    ran = cli("train", "faces", "--data", folder, *SMALL, "-o", "net.onnx")
    assert ran.code == 2
    assert "photos/bad.png cannot be read as a picture" in ran.err
    assert "--skip-bad" in ran.err
    assert not (tmp_path / "net.onnx").exists()
    ran = cli("train", "faces", "--data", folder, *SMALL, "--skip-bad", "--json")
    assert ran.code == 0, ran.err
    assert "skipped 2 files: bad.png" in ran.err
    document = json.loads(ran.out)
    assert (document["pictures"], len(document["skipped"])) == (20, 2)


def test_a_stopped_run_continues_with_the_same_bytes(cli, tmp_path, folder, monkeypatch):
    def train(output, *flags):
        return cli("train", "faces", "--data", folder, *SMALL, "-o", output, *flags)

    assert train("whole.onnx", "--samples", "whole.png").code == 0
    step, kept = GanRun.step, ("--checkpoint", "run", "--checkpoint-every", 0)

    def stopped(run):
        if run.steps_done == 4:
            raise StoppedError
        return step(run)

    monkeypatch.setattr(GanRun, "step", stopped)
    ran = train("then.onnx", "--samples", "then.png", *kept)
    assert ran.code == 2
    assert "continue with onchip train faces --checkpoint run --resume" in ran.err
    assert not (tmp_path / "then.onnx").exists()
    assert (tmp_path / "then.png").is_file()  # of the first epoch
    monkeypatch.setattr(GanRun, "step", step)
    assert "checkpoints of another run" in train("then.onnx", *kept).err
    ran = train("then.onnx", "--samples", "then.png", *kept, "--resume")
    assert ran.code == 0, ran.err
    for suffix in ("onnx", "png", "gif"):
        assert (tmp_path / f"then.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["faces"], ["no pictures to train on", "--data FOLDER"]),
        (["faces", "--data", "nothing"], ["cannot read nothing"]),
        (["faces", "--data", "photos", "--hidden", "3"], ["--hidden is not an option of faces"]),
        (["faces", "--data", "photos", "--labels", "x.npy"], ["--labels is not an option of faces"]),
        (["faces", "--data", "photos", "--width", "0"], ["bad width"]),
        (["faces", "--data", "photos", "--epochs", "0"], ["bad number of epochs"]),
        (["faces", "--data", "photos", "--batch-size", "0"], ["bad batch size"]),
        (["faces", "--data", "photos", "--samples", "a.jpg"], ["unknown format", "--samples a.png"]),
        (["faces", "--data", "photos", "-o", "a.txt"], ["unknown format", "a.onnx"]),
        (["faces", "--data", "photos", "--resume"], ["no folder for checkpoints"]),
        (["faces", "--data", "odd.npy"], ["no generator for pictures of this size", "9 x 9"]),
        (["faces", "--data", "wide.npy"], ["the pictures are not square", "10 x 8 pixels"]),
        (["faces", "--data", "few.npy"], ["too few pictures", "15"]),
        (["faces", "--data", "few.npy", "-o", "few.npy"], ["--output would overwrite --data"]),
        (["digits", "--width", "3"], ["--width is not an option of digits", "train faces"]),
        (["mlp", "--skip-bad"], ["--skip-bad is for texts"]),
        (["mlp", "--samples", "s.png"], ["--samples is not an option of mlp"]),
    ],
)
def test_what_makes_no_sense_is_refused(cli, tmp_path, folder, args, words):
    np.save(tmp_path / "odd.npy", pictures(20, 9))
    np.save(tmp_path / "wide.npy", np.zeros((20, 8, 10, 3), np.uint8))
    np.save(tmp_path / "few.npy", pictures(15))
    before = sorted(tmp_path.rglob("*"))
    ran = cli("train", *args)
    assert ran.code == 2, ran.err
    assert all(word in ran.err for word in words), ran.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_config_file_cannot_choose_faces(cli, tmp_path):
    (tmp_path / "run.toml").write_text('model = "faces"\n')
    ran = cli("train", "--config", "run.toml")
    assert ran.code == 2
    assert "faces has no config file" in ran.err
