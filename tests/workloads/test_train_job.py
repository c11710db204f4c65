"""A training job: its defaults, the data of each model, and the network built for it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sklearn.metrics import f1_score, r2_score

from onchip.errors import InputError
from onchip.formats.load import save
from onchip.network.build import mlp
from onchip.train.options import TrainOptions
from onchip.workloads import digits, table_cache, train_job
from onchip.workloads.classify import score_outputs
from onchip.workloads.table_data import TEST_SHARE, Source
from onchip.workloads.train_job import HIDDEN
from row_steps import images

SKLEARN = Source("sklearn")


@pytest.fixture(autouse=True)
def folder(tmp_path, tmp_path_factory, monkeypatch):
    tables = tmp_path_factory.mktemp("tables")
    monkeypatch.setattr(table_cache, "private_folder", lambda name: tables)
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).standard_normal((50, 6), dtype=np.float32))
    np.save("y.npy", np.arange(50) % 3)
    np.save("t.npy", np.ones((50, 2)))
    return tmp_path


def test_options_default_to_the_workloads(monkeypatch):
    special = dataclasses.replace(digits.TRAIN, lr=0.5, epochs=7)
    monkeypatch.setattr(digits, "TRAIN", special)
    job = train_job.train_job("digits", SKLEARN, {"epochs": 9})
    assert job.options == dataclasses.replace(special, epochs=9)
    assert train_job.train_job("mlp", Source("x.npy", "y.npy"), {}).options == TrainOptions()
    with pytest.raises(InputError, match="did you mean momentum"):
        train_job.train_job("digits", SKLEARN, {"momentun": 1})


def test_the_network_fits_the_data():
    job = train_job.train_job("mlp", Source("x.npy", "y.npy"), {"seed": 3})
    assert job.widths == (6, *HIDDEN, 3)
    assert job.source.test_share == TEST_SHARE
    assert (len(job.data.x_train), len(job.data.x_test)) == (40, 10)
    expected = mlp(6, *HIDDEN, 3, seed=3)
    np.testing.assert_array_equal(job.net.weights["fc1.weight"], expected.weights["fc1.weight"])
    job = train_job.train_job("mlp", Source("x.npy", "t.npy"), {"loss": "mse"}, hidden=(5, 4), activation="Tanh")
    assert job.widths == (6, 5, 4, 2)
    assert job.title == "mlp 6-5-4-2 on x.npy: sgd, lr 0.03, batch 64"
    job = train_job.train_job("digits", SKLEARN, {"momentum": 0.5, "schedule": "cosine"}, hidden=(7,))
    assert job.widths == (64, 7, 10)
    assert job.title == "digits 64-7-10 on sklearn digits: sgd, lr 0.03, batch 64, momentum 0.5, cosine"


def test_targets_from_0_to_1_are_not_scaled():
    job = train_job.train_job("mlp", Source("x.npy", "t.npy"), {"loss": "bce_with_logits"}, scale=True)
    assert job.standard.rows is not None
    assert job.standard.targets is None


def test_a_file_is_trained_on_files_or_on_digits():
    save(mlp(6, 4, 3), "net.onnx")
    assert train_job.train_job("net.onnx", Source("x.npy", "y.npy"), {}).widths == (6, 4, 3)
    save(mlp(64, 4, 10), "digits.onnx")
    job = train_job.train_job("digits.onnx", SKLEARN, {})
    assert (job.data.name, job.has_own_layers) == ("sklearn digits", True)
    assert not train_job.train_job("digits", SKLEARN, {}).has_own_layers


def test_a_network_that_is_no_mlp_has_no_widths():
    save(images(), "images.onnx")
    np.save("images.npy", np.zeros((50, 3, 8, 8), np.float32))
    job = train_job.train_job("images.onnx", Source("images.npy", "y.npy"), {})
    assert job.widths is None
    assert job.title == "network (479 parameters) on images.npy: sgd, lr 0.03, batch 64"


def test_a_workload_with_fixed_layers(monkeypatch):
    class Fixed:
        TRAIN = TrainOptions(loss="half_sse")

        @staticmethod
        def network(inputs, seed=0):
            return mlp(inputs, 5, 10, seed=seed)

        load_data = staticmethod(digits.load_data)

    monkeypatch.setitem(train_job.TRAINED, "fixed", Fixed)
    assert train_job.train_job("fixed", SKLEARN, {}).widths == (64, 5, 10)
    with pytest.raises(InputError, match="--hidden is for a new network"):
        train_job.train_job("fixed", SKLEARN, {}, hidden=(3,))


@pytest.mark.parametrize(("model", "source", "layers", "words"), [
    ("mlp", Source(), {}, ["no data to train on", "--data table.csv --labels last"]),
    ("digits", Source("x.npy", "y.npy"), {}, ["digits has its own data", "--data x.npy", "onchip train mlp"]),
    ("digits", Source("sklearn", "last"), {}, ["digits has its own data", "--labels last"]),
    ("digits", Source("sklearn", test_share=0.1), {}, ["--test-share 0.1"]),
    ("digits", Source("sklearn", test_data="x.npy"), {}, ["--test-data x.npy"]),
    ("digits", SKLEARN, {"activation": "selu"}, ["unknown activation", "ReLU, LeakyReLU, Sigmoid, Tanh"]),
    ("net.onnx", SKLEARN, {"activation": "ReLU"}, ["--activation is for a new network"]),
    ("net.onnx", SKLEARN, {"hidden": (3,)}, ["--hidden is for a new network", "onchip train mlp --hidden"]),
])  # fmt: skip
def test_bad_requests(model, source, layers, words):
    with pytest.raises(InputError) as caught:
        train_job.train_job(model, source, {}, **layers)
    for word in [*words, "got:", "expected:", "try:"]:
        assert word in str(caught.value)


def test_scores_of_classes_values_and_both():
    y = np.array([[0.9, 0.1], [0.2, 0.7], [0.4, 0.3]], np.float32)
    of_classes = score_outputs(None, y, np.array([0, 1, 1]), np.array([0, 1, 0]))
    assert (of_classes.accuracy, of_classes.test_mse) == (pytest.approx(2 / 3), None)
    assert of_classes.predictions.tolist() == [0, 1, 0]
    assert (of_classes.baseline_accuracy, of_classes.beats_baseline) == (pytest.approx(1 / 3), True)
    one_hot = score_outputs(None, y, np.eye(2, dtype=np.float32)[[0, 1, 1]], np.eye(2, dtype=np.float32)[[1, 1, 0]])
    assert one_hot.accuracy == pytest.approx(2 / 3)
    assert one_hot.test_mse == pytest.approx(np.mean([0.01, 0.01, 0.04, 0.09, 0.16, 0.49]))
    assert (one_hot.baseline_accuracy, one_hot.beats_baseline) == (pytest.approx(2 / 3), False)
    numbers = score_outputs(None, y, y + 2, y + 2)
    assert (numbers.accuracy, numbers.test_mse) == (None, pytest.approx(4))
    assert (numbers.baseline_mse, numbers.beats_baseline) == (pytest.approx(y.var(axis=0).mean()), False)
    nothing = score_outputs(None, y[:0], np.zeros(0, int), np.zeros(3, int))
    assert (nothing.accuracy, nothing.test_mse, nothing.beats_baseline) == (None, None, None)
    alike = score_outputs(None, y[:1], np.zeros(1, int), np.zeros(3, int))
    assert (alike.accuracy, alike.baseline_accuracy, alike.beats_baseline) == (1, 1, True)


@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    truth, y = rng.integers(0, 5, 20), rng.standard_normal((20, 7), dtype=np.float32)
    assert score_outputs(None, y, truth, truth).f1 == pytest.approx(f1_score(truth, y.argmax(axis=1), average="macro"))
    numbers = rng.standard_normal((20, 7), dtype=np.float32)
    numbers[:, 0], numbers[:, 1], y[:, 1] = 3, 2, 2
    assert score_outputs(None, y, numbers, numbers).r2 == pytest.approx(r2_score(numbers, y))
    assert score_outputs(None, y[:1], numbers[:1], numbers).r2 is None
