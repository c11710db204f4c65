"""onchip run on texts: --text, files and standard input; which network the name sentiment means."""

import csv
import io
import json
import sys

import numpy as np
import pytest

from onchip.formats.load import load_file, save
from onchip.formats.tables.csv_writer import top_classes
from onchip.network.meaning import Meaning
from onchip.network.text_cnn import text_cnn
from onchip.runtime.engine import compile
from onchip.text.shipped import SHIPPED
from onchip.text.text_rows import encode_texts
from onchip.text.vocabulary import TOKENISER

TEXTS = ["a waste of time", 'moving, "funny"\nand wonderful', "", "The film isn't bad."]


def scores(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def expected(net, texts):
    answers = top_classes(compile(net, "cpu")(encode_texts(texts, net)), net.meaning.classes, 1)
    return [["label", "probability"], *([label, f"{share:.6g}"] for ((label, share),) in answers)]


@pytest.fixture(scope="module")
def net():
    words = ("waste", "time", "moving", "bad", "n't")
    found = text_cnn(len(words) + 2, 7, 2, embedding=4, channels=5, seed=1)
    return found.replace(meaning=Meaning(classes=("down", "up"), words=words, tokeniser=TOKENISER))


@pytest.fixture
def table(tmp_path):
    with (tmp_path / "reviews.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(TEXTS)])
    return "reviews.csv"


def test_sentences_on_the_command_line(cli):
    ran = cli(
        "run", "sentiment", "--text", "a waste of time", "--text", "a moving and wonderful film", "--device", "cpu"
    )
    assert ran.code == 0, ran.err
    first, second = ran.out.splitlines()
    assert first.startswith("negative 0.")
    assert second.startswith("positive ")
    assert "random" not in ran.err


def test_the_plan_and_the_profile_of_sentences(cli):
    ran = cli("run", "sentiment", "--text", "fine", "--plan", "--profile", "--device", "cpu")
    assert ran.code == 0, ran.err
    assert "group" in ran.err
    assert "calls" in ran.err


def test_sentences_as_json(cli, tmp_path, net):
    save(net, tmp_path / "net.onnx")
    ran = cli("run", "net.onnx", "--text", TEXTS[0], "--top", 2, "--json")
    (answer,) = json.loads(ran.out)["answers"]
    assert answer["text"] == TEXTS[0]
    (label, share), other = answer["classes"]
    assert {label, other[0]} == {"up", "down"}
    assert abs(share + other[1] - 1) < 1e-6


@pytest.mark.parametrize("model", ["sentiment", "net.onnx"])
def test_a_table_is_scored(cli, tmp_path, table, net, model):
    save(net, tmp_path / "net.onnx")
    used = load_file(SHIPPED["sentiment"]) if model == "sentiment" else net
    ran = cli("run", model, table, "-o", "scores.csv", "--device", "cpu", "--batch", 3)
    assert ran.code == 0, ran.err
    assert scores(tmp_path / "scores.csv") == expected(used, TEXTS)
    ran = cli("run", model, table, "--column", "text", "-o", "again.csv", "--device", "cpu")
    assert ran.code == 0, ran.err
    assert scores(tmp_path / "again.csv") == scores(tmp_path / "scores.csv")


def test_lines_are_scored_also_from_standard_input(cli, tmp_path, net, monkeypatch):
    save(net, tmp_path / "net.onnx")
    lines = [text.replace("\n", " ") for text in TEXTS]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    assert cli("run", "net.onnx", "lines.txt", "-o", "scores.csv").code == 0
    assert scores(tmp_path / "scores.csv") == expected(net, lines)
    for column, text in (([], "\n".join(lines)), (["--column", "x"], "x\nbad\nmoving")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        ran = cli("run", "net.onnx", "-", *column, "-o", "stdin.csv")
        assert ran.code == 0, ran.err
        count = 2 if column else 4
        assert len(scores(tmp_path / "stdin.csv")) == 1 + count


def test_ids_still_run(cli, tmp_path, net):
    save(net, tmp_path / "net.onnx")
    ids = encode_texts(TEXTS, net)
    np.save(tmp_path / "ids.npy", ids)
    assert cli("run", "net.onnx", "ids.npy", "-o", "y.npy", "--device", "cpu").code == 0
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), compile(net, "cpu")(ids))


def test_the_workload_keeps_its_network(cli):
    ran = cli("plan", "sentiment", "--device", "h200", "--batch", 16384)
    assert "21,635" in ran.out


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["digits", "--text", "x"], "no class names"),
        (["sentiment", "--text", "fine", "--text", " "], "a text is empty"),
        (["decode", "--text", "x"], "no class names"),
        (["sentiment", "reviews.csv", "--text", "x"], "--text needs no rows"),
        (["sentiment", "--text", "x", "-o", "y.csv"], "--text needs no rows"),
        (["sentiment", "--text", "x", "--count", 3], "--text needs no rows"),
        (["sentiment", "--text", "x", "--top", 3], "bad number of classes"),
        (["sentiment", "reviews.csv", "--column", "review"], "no column 'review'"),
        (["sentiment", "bad.txt"], "line 2: not UTF-8"),
        (["digits", "x.npy", "--column", "text"], "--column is for texts"),
        (["sentiment"], "choose the rows to run on"),
    ],
)
def test_misuse(cli, tmp_path, table, args, what):
    (tmp_path / "bad.txt").write_bytes(b"fine\ncaf\xe9\n")
    np.save(tmp_path / "x.npy", np.zeros((2, 784), np.float32))
    ran = cli("run", *args)
    assert (ran.code, ran.out) == (2, "")
    assert what in ran.err
    assert not (tmp_path / "y.csv").exists()
