"""onchip train sentiment: from files of texts to an ONNX file that holds its vocabulary."""

import json

import numpy as np
import onnx
import pytest

from onchip.formats.load import load_file
from onchip.text.text_rows import encode_texts
from onchip.text.vocabulary import TOKENISER
from text_data import write_csv, write_folder

QUICK = ["--network", "small", "--epochs", "8", "--lr", "0.01", "--device", "cpu"]


@pytest.fixture
def reviews(tmp_path):
    write_csv(tmp_path / "reviews.csv", 100)
    return ["--data", "reviews.csv", "--column", "review", "--labels", "label"]


def test_train_and_save(cli, tmp_path, reviews):
    ran = cli("train", "sentiment", *reviews, *QUICK, "-o", "net.onnx", "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["accuracy"] == 1
    assert (document["classes"], document["column"], document["network"]) == (
        ["negative", "positive"],
        "review",
        "small",
    )
    assert "80 training rows, 20 test rows" in ran.err
    assert "vocabulary:" in ran.err
    (stored,) = (json.loads(prop.value) for prop in onnx.load(tmp_path / "net.onnx").metadata_props)
    meaning = load_file(tmp_path / "net.onnx").meaning
    assert (stored["tokeniser"], meaning.tokeniser, meaning.classes) == (TOKENISER, TOKENISER, ("negative", "positive"))
    assert meaning.words[:1] == tuple(stored["words"][:1])
    assert "n't" in meaning.words


def test_a_killed_training_continues(cli, tmp_path, reviews):
    whole = cli("train", "sentiment", *reviews, *QUICK, "-o", "whole.onnx")
    assert whole.code == 0
    states = ["--checkpoint", "run", "--checkpoint-every", "0"]
    assert cli("train", "sentiment", *reviews, *QUICK, *states).code == 0
    newest = max((tmp_path / "run").glob("checkpoint-*"))
    newest.unlink()  # as if it had been killed before
    ran = cli("train", "sentiment", *reviews, *QUICK, "-o", "net.onnx", *states, "--resume")
    assert ran.code == 0, ran.err
    net, other = load_file("net.onnx"), load_file("whole.onnx")
    assert all(net.weights[name].tobytes() == other.weights[name].tobytes() for name in net.weights)


def test_a_file_is_trained_further(cli, tmp_path, reviews):
    assert cli("train", "sentiment", *reviews, *QUICK, "-o", "net.onnx").code == 0
    ran = cli("train", "net.onnx", *reviews, "--epochs", 2, "--validation", 0, "--patience", 0, "-o", "further.onnx")
    assert ran.code == 0, ran.err
    assert "the network's" in ran.err
    net, further = load_file(tmp_path / "net.onnx"), load_file(tmp_path / "further.onnx")
    assert net.meaning == further.meaning
    assert not (net.weights["fc.weight"] == further.weights["fc.weight"]).all()
    np.save(tmp_path / "ids.npy", encode_texts(["fine", "dull"] * 20, net))
    np.save(tmp_path / "y.npy", np.arange(40) % 2)
    assert cli("train", "net.onnx", "--data", "ids.npy", "--labels", "y.npy", "--epochs", 1).code == 0
    (tmp_path / "other.csv").write_text("text,label\na film,neutral\na play,positive\n")
    ran = cli("train", "net.onnx", "--data", "other.csv")
    assert ran.code == 2
    assert "a class that the network does not have" in ran.err


def test_folds(cli, tmp_path):
    write_folder(tmp_path / "mr", 60)
    ran = cli("train", "sentiment", "--data", "mr", *QUICK, "--folds", "3")
    assert ran.code == 0, ran.err
    assert "+-" in ran.out
    assert "over 3 folds" in ran.out
    assert ran.err.count("fold ") == 3
    document = json.loads(cli("train", "sentiment", "--data", "mr", *QUICK, "--folds", "3", "--json").out)
    assert len(document["folds"]) == 3
    assert (document["batch_size"], document["network"]) == (50, "small")


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["sentiment"], "no data to train on"),
        (["digits", "--data", "sklearn", "--network", "small"], "unknown network"),
        (["sentiment", "--data", "mr", "--network", "kin"], "did you mean kim"),
        (["digits", "--folds", "3"], "--folds is for new networks for texts"),
        (["digits", "--column", "text"], "--column is for texts"),
        (["digits", "--skip-bad"], "--skip-bad is for texts"),
        (["mlp", "--data", "reviews.csv", "--labels", "label", "--column", "review"], "--column is for texts"),
        (["sentiment", "--data", "reviews.csv", "--hidden", "3"], "--hidden is for tables"),
        (["sentiment", "--data", "reviews.csv", "--labels", "label"], "no column 'text'"),
        (["sentiment", "--data", "mr", "--folds", "3", "-o", "net.onnx"], "--output is for a single network"),
        (["sentiment", "--data", "mr", "--folds", "3", "--seeds", "2"], "two kinds of repetition"),
        (["sentiment", "--data", "mr", "-o", "net.safetensors"], "stored in ONNX"),
        (["sentiment", "--data", "mr", "--folds", "100"], "bad number of folds"),
        (["sentiment", "--data", "mr", "--loss", "mse"], "classes"),
    ],
)
def test_misuse(cli, tmp_path, reviews, args, what):
    write_folder(tmp_path / "mr", 20)
    ran = cli("train", *args)
    assert (ran.code, ran.out) == (2, "")
    assert what in ran.err


def test_seeds_and_a_validation_set(cli, tmp_path):
    for name in ("train", "dev", "test"):
        (tmp_path / f"a.{name}").write_text("1 fine film\n0 dull film\n" * 20)
    assert cli("train", "sentiment", "--data", ".", *QUICK).code == 0
    ran = cli("train", "sentiment", "--data", ".", *QUICK, "--seeds", "2")
    assert ran.code == 2
    assert "--seeds" in ran.err
