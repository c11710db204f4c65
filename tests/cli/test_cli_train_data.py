"""onchip train with the user's tables and arrays."""

import json

import numpy as np
import pytest

from onchip.formats.load import load_file
from onchip.runtime.engine import compile

QUICK = ["--epochs", "30", "--lr", "0.1", "--hidden", "8", "--device", "cpu"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("onchip.workloads.table_cache.private_folder", lambda name: folder)
    return folder


@pytest.fixture
def table(tmp_path):
    """Two separated clusters of points, labelled no and yes."""
    rng = np.random.default_rng(0)
    lines = [
        f"{x:.4f},{y:.4f},{'yes' if x > 0 else 'no'}" for x, y in rng.choice([-2, 2], (200, 1)) + rng.random((200, 2))
    ]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,kind", *lines]))
    return tmp_path / "table.csv"


def test_a_table(cli, table, tmp_path):
    ran = cli("train", "mlp", "--data", "table.csv", "--labels", "kind", *QUICK, "-o", "net.onnx", "--json")
    assert ran.code == 0, ran.err
    assert "table.csv: read 200 rows" in ran.err
    assert "test: 40 of 200 rows (20%), chosen by seed 0" in ran.err
    assert "classes: 2: no, yes" in ran.err
    document = json.loads(ran.out)
    assert (document["layers"], document["classes"], document["test_share"]) == ([2, 8, 2], ["no", "yes"], 0.2)
    assert (document["accuracy"], document["test_rows"]) == (1, 40)
    y = compile(load_file(tmp_path / "net.onnx"))(np.array([[-2, -2], [2, 2]], np.float32))
    assert y.argmax(axis=1).tolist() == [0, 1]
    again = cli("train", "mlp", "--data", "table.csv", "--labels", "kind", *QUICK, "--json")
    assert "read 200 rows" not in again.err
    assert json.loads(again.out)["epoch_losses"] == document["epoch_losses"]
    further = cli("train", "net.onnx", "--data", "table.csv", "--labels", "last", "--epochs", 1, "--json")
    assert json.loads(further.out)["epoch_losses"][0] < document["epoch_losses"][0] / 2


def test_numbers(cli, tmp_path):
    x = np.random.default_rng(0).standard_normal((300, 4), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", x[:, :2] - x[:, 2:])
    args = ["--data", "x.npy", "--labels", "y.npy", "--loss", "mse", *QUICK]
    ran = cli("train", "mlp", *args, "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["layers"] == [4, 8, 2]
    assert document["accuracy"] is None
    assert document["test_mse"] < 0.3
    text = cli("train", "mlp", *args, "--test-data", "x.npy", "--test-labels", "y.npy").out
    assert text.startswith("mean squared error ")
    assert "on 300 test rows" in text
    none = cli("train", "mlp", *args, "--test-share", 0)
    assert none.code == 0, none.err
    assert none.out.startswith("training loss ")


def test_a_bad_cell_is_reported_with_its_position(cli, table):
    text = table.read_text().splitlines()
    text[3] = "1,oops,yes"
    table.write_text("\n".join(text))
    ran = cli("train", "mlp", "--data", "table.csv", "--labels", "last")
    assert ran.code == 2
    assert "table.csv: line 4, column 2 (b): not a number" in ran.err
    assert "'oops'" in ran.err


def test_a_network_that_does_not_fit_the_table(cli, table, tmp_path):
    cli("train", "mlp", "--data", "table.csv", "--labels", "last", *QUICK, "-o", "net.onnx")
    np.save(tmp_path / "x.npy", np.zeros((4, 3), np.float32))
    np.save(tmp_path / "y.npy", np.zeros(4, int))
    ran = cli("train", "net.onnx", "--data", "x.npy", "--labels", "y.npy")
    assert ran.code == 2
    assert "3 values per row" in ran.err


def test_help_names_the_cache_and_the_defaults(cli):
    import inspect

    from onchip.train.loop import fit
    from onchip.train.options import TrainOptions
    from onchip.workloads.table_data import TEST_SHARE

    text = " ".join(cli("train", "--help").out.split())
    assert "$ONCHIP_CACHE" in text
    for name in ("lr", "batch_size", "epochs", "optimiser", "step_factor"):
        assert f"[default: {getattr(TrainOptions(), name)}]" in text
    assert f"{TEST_SHARE} if not given" in text
    assert f"{inspect.signature(fit).parameters['checkpoint_every'].default:g} if not given" in text
