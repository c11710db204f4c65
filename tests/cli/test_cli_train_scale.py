"""onchip train on raw tables: columns and targets are standardised, the saved network reads raw rows, and a network
that is no better than the most common class, or the mean, is warned of."""

import csv
import json

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_wine
from sklearn.metrics import r2_score

import onchip
from onchip.errors import OutputError
from onchip.train.checkpoint import Checkpoints
from onchip.train.order import hold_out
from onchip.train.standardise import columns_of

WINE = ["train", "mlp", "--data", "wine.csv", "--labels", "target", "--device", "cpu"]
DIABETES = ["train", "mlp", "--data", "diabetes.csv", "--labels", "target", "--loss", "mse", "--device", "cpu"]
SAID = "columns standardised; folded into the first layer; --no-scale turns it off"


def write_table(path, x, y, names):
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow([*(name.replace(",", " ") for name in names), "target"])
        lines.writerows([*row, target] for row, target in zip(x.tolist(), y.tolist(), strict=True))


@pytest.fixture(autouse=True)
def tables(tmp_path, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("onchip.workloads.table_cache.private_folder", lambda name: folder)
    wine, diabetes = load_wine(), load_diabetes(scaled=False)
    write_table(tmp_path / "wine.csv", wine.data, wine.target, wine.feature_names)
    write_table(tmp_path / "diabetes.csv", diabetes.data, diabetes.target, diabetes.feature_names)
    return {"wine": (wine.data.astype(np.float32), wine.target),
            "diabetes": (diabetes.data.astype(np.float32), diabetes.target)}  # fmt: skip


def test_wine_is_learnt_as_it_comes(cli, tmp_path, tables):
    ran = cli(*WINE, "-o", "wine.onnx", "--json")
    assert ran.code == 0, ran.err
    assert SAID in ran.err
    assert "warning" not in ran.err
    told = json.loads(ran.out)
    assert told["accuracy"] > 0.9
    assert told["f1"] > 0.9
    assert told["baseline_accuracy"] < 0.5
    assert (told["beats_baseline"], told["scale"], told["scale_targets"]) == (True, True, False)
    x, y = tables["wine"]
    _, held = hold_out(len(x), 0.2, 0)
    got = onchip.compile(onchip.load(tmp_path / "wine.onnx"), "cpu")(x)  # raw rows, no scaler
    assert np.mean(got[held].argmax(axis=1) == y[held]) == told["accuracy"]
    assert np.mean(got.argmax(axis=1) == y) > 0.95
    shown = f"accuracy {told['accuracy']:.2%} (most common class: {told['baseline_accuracy']:.2%}), macro F1 "
    assert cli(*WINE).out.startswith(shown)


def test_a_warning_without_scaling(cli):
    ran = cli(*WINE, "--no-scale")
    assert ran.code == 0, ran.err
    assert "columns are not scaled (--no-scale)" in ran.err
    assert "no better than the most common class" in ran.err
    assert "omit --no-scale" in ran.err
    told = json.loads(cli(*WINE, "--no-scale", "--json").out)
    assert (told["beats_baseline"], told["scale"]) == (False, False)


def test_targets_of_any_size_are_learnt(cli, tmp_path, tables):
    x, y = tables["diabetes"]
    rows, held = hold_out(len(x), 0.2, 0)
    for factor, shift in ((1, 0), (1e6, 0), (1e-3, 5)):
        write_table(tmp_path / "diabetes.csv", x, y * factor + shift, map(str, range(10)))
        ran = cli(*DIABETES, "-o", "net.onnx", "--json")
        assert ran.code == 0, ran.err
        assert "targets standardised" in ran.err
        told = json.loads(ran.out)
        assert told["r2"] > 0.3
        truth = (y * factor + shift).astype(np.float32)
        got = onchip.compile(onchip.load(tmp_path / "net.onnx"), "cpu")(x)[:, 0]
        assert told["r2"] == pytest.approx(r2_score(truth[held], got[held]), rel=1e-6)
        assert told["baseline_mse"] == pytest.approx(np.square(truth[held] - truth[rows].mean()).mean(), rel=1e-5)
    assert "mean of the targets: " in cli(*DIABETES).out
    ran = cli(*DIABETES, "--no-scale", "--lr", "1e-5")
    assert "no better than the mean of the targets" in ran.err


def test_the_test_rows_decide_nothing(cli, tmp_path, tables):
    """They do not affect the network: the statistics are those of the training rows."""
    x, y = tables["diabetes"]
    rows, held = hold_out(len(x), 0.2, 0)
    networks = []
    for changed in (0, 1e6):
        other, target = x.copy(), y.copy()
        other[held] += changed
        target[held] += changed
        write_table(tmp_path / "diabetes.csv", other, target, map(str, range(10)))
        assert cli(*DIABETES, "-o", f"{changed}.onnx").code == 0
        networks.append(onchip.load(tmp_path / f"{changed}.onnx"))
    for name, weight in networks[0].weights.items():
        assert np.array_equal(weight, networks[1].weights[name]), name
    found = columns_of(x[rows])
    np.testing.assert_allclose(found.mean, x[rows].astype(np.float64).mean(axis=0))


def test_a_config_file_says_it_too(cli, tmp_path):
    for value in ("false", "true"):
        (tmp_path / "run.toml").write_text(
            f'model = "mlp"\ndata = "wine.csv"\nlabels = "target"\ndevice = "cpu"\nscale = {value}\n'
        )
        ran = cli("train", "--config", "run.toml", "--json")
        assert json.loads(ran.out)["scale"] is (value == "true")
    assert json.loads(cli("train", "--config", "run.toml", "--no-scale", "--json").out)["scale"] is False


def test_a_run_that_was_cut_short_resumes_with_the_same_bits(cli, tmp_path, monkeypatch):
    long = [*DIABETES, "--epochs", "40"]
    whole = cli(*long, "-o", "whole.onnx", "--json")
    save = Checkpoints.save

    def save_and_stop(self, at):
        save(self, at)
        if at.epoch >= 20:
            raise OutputError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", save_and_stop)
        assert cli(*long, "--checkpoint", "run", "--checkpoint-every", 0).code == 2
    other = cli(*long, "--checkpoint", "run", "--resume", "--no-scale")
    assert other.code == 2
    assert "belongs to another run" in other.err
    resumed = cli(*long, "--checkpoint", "run", "--resume", "-o", "resumed.onnx", "--json")
    assert resumed.code == 0, resumed.err
    assert json.loads(resumed.out)["epoch_losses"] == json.loads(whole.out)["epoch_losses"]
    assert (tmp_path / "resumed.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()


def test_seeds_share_the_statistics(cli, tmp_path):
    ran = cli(*DIABETES, "--seeds", 2, "--json", "-o", "best.onnx")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert all(result["beats_baseline"] and result["r2"] > 0.2 for result in told["results"])
    alone = json.loads(cli(*DIABETES, "--json").out)
    assert told["results"][0]["test_mse"] == alone["test_mse"]
    text = cli(*WINE, "--no-scale", "--seeds", 2)
    assert "most common class" in text.out
    assert "warning" in text.err


def test_a_saved_network_is_trained_further_on_raw_rows(cli, tmp_path, tables):
    assert cli(*DIABETES, "-o", "net.onnx").code == 0
    before = json.loads(cli(*DIABETES, "--json").out)
    further = ["train", "net.onnx", *DIABETES[2:], "--epochs", "2"]
    ran = cli(*further, "-o", "further.onnx", "--json")
    assert ran.code == 0, ran.err
    assert SAID in ran.err
    told = json.loads(ran.out)
    assert told["epoch_losses"][0] < 1.1 * before["epoch_losses"][-1]
    got = onchip.compile(onchip.load(tmp_path / "further.onnx"), "cpu")(tables["diabetes"][0])
    assert r2_score(tables["diabetes"][1], got[:, 0]) > 0.4
    onchip.save(onchip.mlp(10, 8, 1, bias=False), tmp_path / "bare.onnx")
    bare = ["train", "bare.onnx", *further[2:], "--lr", "1e-9"]
    assert "cannot be folded into the network: layer 'fc1' has no bias" in cli(*bare).err
    ran = cli(*bare, "--scale")
    assert ran.code == 2
    assert "a Linear with a bias" in ran.err


def test_rows_that_are_not_a_table_are_not_scaled(cli, tmp_path):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (60, 4, 3), dtype=np.uint8)
    np.save(tmp_path / "bytes.npy", pixels.reshape(60, 12))
    np.save(tmp_path / "floats.npy", pixels.reshape(60, 12).astype(np.float32) / np.float32(255))
    np.save(tmp_path / "images.npy", rng.random((60, 4, 3), dtype=np.float32))
    np.save(tmp_path / "table.npy", rng.random((60, 12), dtype=np.float32))
    np.save(tmp_path / "y.npy", np.arange(60) % 2)
    for name, words in (("bytes", "images, series or bytes"), ("floats", "like pixels"),
                        ("images", "images, series or bytes"), ("table", SAID)):  # fmt: skip
        args = ["train", "mlp", "--data", f"{name}.npy", "--labels", "y.npy", "--epochs", 1, "--device", "cpu"]
        assert words in cli(*args).err
        assert SAID in cli(*args, "--scale").err


def test_bad_requests(cli, tmp_path):
    np.save(tmp_path / "x.npy", np.where(np.arange(30).reshape(10, 3) == 7, np.nan, 1).astype(np.float32))
    np.save(tmp_path / "y.npy", np.arange(10) % 2)
    ran = cli("train", "mlp", "--data", "x.npy", "--labels", "y.npy", "--test-share", "0", "--device", "cpu")
    assert ran.code == 2
    assert "rows of x.npy are not finite" in ran.err
    assert "nan in row 2, position 1" in ran.err
    ran = cli("train", "digits", "--data", "sklearn", "--scale")
    assert ran.code == 2
    assert "--scale is for your own data" in ran.err
