"""onchip train prints the score of a constant prediction, and warns if the network is no better."""

import json

import numpy as np
import pytest

QUICK = ["--hidden", "4", "--device", "cpu", "--labels", "y.npy"]


@pytest.fixture
def arrays(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 3), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", (x[:, 0] > 1).astype(int))  # one row in six
    np.save(tmp_path / "t.npy", x[:, :1] + 10)
    return tmp_path


def test_classes(cli, arrays):
    args = ["train", "mlp", "--data", "x.npy", *QUICK]
    ran = cli(*args, "--lr", "0.3")
    assert ran.code == 0, ran.err
    assert "most common class: " in ran.out
    assert "macro F1 " in ran.out
    assert "warning" not in ran.err
    told = json.loads(cli(*args, "--lr", "0.3", "--json").out)
    assert told["accuracy"] > told["baseline_accuracy"] > 0.7
    assert told["beats_baseline"] is True
    ran = cli(*args, "--lr", "1e-6", "--epochs", "1", "--seed", "3")
    assert ran.code == 0, ran.err
    assert "no better than the most common class" in ran.err
    ran = cli(*args, "--lr", "1e-6", "--epochs", "1", "--seed", "3", "--seeds", "2", "--json")
    assert "warning: " in ran.err
    assert {result["beats_baseline"] for result in json.loads(ran.out)["results"]} == {False}


def test_numbers(cli, arrays):
    args = ["train", "mlp", "--data", "x.npy", *QUICK[:-1], "t.npy", "--loss", "mse"]
    ran = cli(*args)
    assert ran.code == 0, ran.err
    assert "mean of the targets: " in ran.out
    assert "R2 " in ran.out
    assert json.loads(cli(*args, "--json").out)["r2"] > 0.5
    ran = cli(*args, "--lr", "1e-6", "--epochs", "1")
    assert "no better than the mean of the targets" in ran.err


def test_nothing_to_test_on(cli, arrays):
    ran = cli("train", "mlp", "--data", "x.npy", *QUICK, "--test-share", "0", "--epochs", "1", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["beats_baseline"] is None
    assert "warning" not in ran.err
