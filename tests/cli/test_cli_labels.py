"""Train on a table; the saved network stores columns, classes and scale, and run prints labels."""

import csv
import io
import json
import subprocess
import sys

import numpy as np
import onnx
import pytest

import onchip
from onchip.errors import FormatError
from onchip.formats.tables.csv_writer import top_classes
from onchip.network.meaning import Meaning
from onchip.network.reading import naming_file

NAMES = ("ash", 'be,ech "old"')


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of two columns whose difference determines the class, and a network trained on it."""
    folder = tmp_path_factory.mktemp("labels")
    x = np.random.default_rng(0).normal(size=(80, 2)).astype(np.float32)
    with (folder / "trees.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["height", "kind", "girth"])
        lines.writerows([a, NAMES[int(a > b)], b] for a, b in x.tolist())
    return folder, x


@pytest.fixture(scope="module")
def trained(table):
    folder, x = table
    from onchip.cli.main import main

    net = folder / "trees.onnx"
    args = ["train", "mlp", "--data", str(folder / "trees.csv"), "--labels", "kind", "--hidden", "8", "--epochs", "60"]
    assert main([*args, "--lr", "0.3", "--device", "cpu", "-o", str(net)]) == 0
    return folder, net, x


def test_the_file_knows_columns_and_classes(trained):
    _, net, _ = trained
    assert onchip.load(net).meaning == Meaning(("height", "girth"), NAMES)
    onnx.checker.check_model(str(net))


def test_run_answers_with_labels_and_probabilities(cli, trained, tmp_path):
    folder, net, x = trained
    out = tmp_path / "answers.csv"
    ran = cli("run", net, folder / "trees.csv", "-o", out)  # the label column is not an input of the network
    assert ran.code == 0, ran.err
    head, *lines = csv.reader(out.read_text().splitlines())
    assert head == ["label", "probability"]
    truth = [NAMES[int(a > b)] for a, b in x]
    assert np.mean([line[0] == name for line, name in zip(lines, truth, strict=True)]) > 0.9
    assert all(0.5 <= float(line[1]) <= 1 for line in lines)
    shown = cli("run", net, folder / "trees.csv", "--top", "2")
    assert "row 0: " in shown.out
    first = json.loads(cli("run", net, folder / "trees.csv", "--top", "2", "--json").out)["first_answers"][0]
    assert sum(share for _, share in first) == pytest.approx(1)


def test_a_label_is_no_formula(cli, tmp_path):
    """A spreadsheet shows all of them unchanged; numbers stay numbers."""
    names = ("=cmd()", "+1+cmd()", "-1-cmd()", "@SUM(A1)", "\t=cmd()", "\r=cmd()", "＝cmd()", "-inf", "-", "=1", "-1²",
             "=1,2;3")  # fmt: skip
    same = ("-1", "+1", "-1.5e-3", "-.5", "a=b", "'=x", "", " =x", "a\r=x", "a;=x", 'a",=x', "a\n=x")
    net = onchip.mlp(2, len(names + same)).replace(meaning=Meaning(classes=names + same))
    onchip.save(net, tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", np.ones((1, 2), np.float32))
    ran = cli("run", "net.onnx", "x.npy", "-o", "y.csv", "--top", len(names + same), "--device", "cpu")
    assert ran.code == 0, ran.err
    with (tmp_path / "y.csv").open(newline="") as file:
        _, cells = csv.reader(file)
    assert 'a;=x",' in (tmp_path / "y.csv").read_text()
    assert set(cells[::2]) == {f"'{name}" for name in names} | set(same)
    ran = cli("run", "net.onnx", "x.npy", "--json", "--top", 3, "--device", "cpu")
    assert {label for label, _ in json.loads(ran.out)["first_answers"][0]} < {
        *names,
        *same,
    }  # JSON needs no escape for spreadsheets


@pytest.mark.parametrize("kind", ["csv", "npy", "npz"])
def test_standard_input_is_read(trained, tmp_path, kind):
    _, net, x = trained
    buffer = io.BytesIO()
    if kind == "csv":
        np.savetxt(buffer, x, delimiter=",")
    else:
        (np.save if kind == "npy" else np.savez)(buffer, x)
    command = [sys.executable, "-m", "onchip", "run", str(net), "-", "-o", str(tmp_path / "y.npy"), "--device", "cpu"]
    ran = subprocess.run(command, input=buffer.getvalue(), capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert np.array_equal(np.load(tmp_path / "y.npy"), onchip.compile(onchip.load(net), "cpu")(x))


@pytest.mark.parametrize(("given", "words"), [("", " is empty"), ("1,x\n", ": line 1, column 2: not a number")])
def test_errors_name_standard_input(cli, monkeypatch, given, words):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    ran = cli("run", "decode", "-")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"standard input{words}\n")


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_a_table_without_a_header(cli, tmp_path, kind):
    x = np.ones((3, 72), np.float32)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", **{next(iter(onchip.load("decode").inputs)): x, "other": x[:1]})
    assert cli("run", "decode", tmp_path / f"x.{kind}", "-o", tmp_path / "y.csv").code == 0
    got = np.loadtxt(tmp_path / "y.csv", np.float32, delimiter=",", skiprows=1)
    assert np.array_equal(got, onchip.compile(onchip.load("decode"), "cpu")(x))


def test_bytes_are_scaled_as_in_training(cli, tmp_path):
    net = onchip.mlp(4, 3).replace(meaning=Meaning(classes=("a", "b", "c"), scale=255.0))
    onchip.save(net, tmp_path / "net.onnx")
    pixels = np.arange(8, dtype=np.uint8).reshape(2, 4) * 30
    np.save(tmp_path / "pixels.npy", pixels)
    ran = cli("run", tmp_path / "net.onnx", tmp_path / "pixels.npy", "-o", tmp_path / "y.npy")
    assert "divided by 255" in ran.err
    assert np.array_equal(np.load(tmp_path / "y.npy"), onchip.compile(net, "cpu")(pixels.astype(np.float32) / 255))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["decode", "--count", "3", "--top", "3"], "no class names"),
        (["net.onnx", "--count", "3", "--top", "4"], "1 to 3"),
        (["net.onnx", "bad.npz"], "no such array"),
        (["net.onnx", "not.npz"], "not an .npz file"),
        (["net.onnx", "other.csv"], "no column 'width'"),
        (["net.onnx", "twice.csv"], "two columns are called 'width'"),
    ],
)
def test_bad_requests(cli, tmp_path, args, words):
    meaning = Meaning(("width", "height"), ("a", "b", "c"))
    onchip.save(onchip.mlp(2, 3).replace(meaning=meaning), tmp_path / "net.onnx")
    np.savez(tmp_path / "bad.npz", a=np.ones((1, 2)), b=np.ones((1, 2)))
    (tmp_path / "not.npz").write_bytes(b"PK no zip")
    (tmp_path / "other.csv").write_text("widht,height\n1,2\n")
    (tmp_path / "twice.csv").write_text("width,height,width\n1,2,3\n")
    ran = cli("run", *args)
    assert ran.code == 2
    assert words in ran.err


def test_training_refuses_columns_of_one_name(cli, tmp_path):
    """Otherwise both would be trained on, and the first read twice."""
    (tmp_path / "twice.csv").write_text("a,a,label\n1,2,x\n3,4,y\n")
    ran = cli("train", "mlp", "--data", "twice.csv", "--labels", "label", "--device", "cpu", "-o", "net.onnx")
    assert ran.code == 2
    assert "two columns are called 'a'" in ran.err
    assert not (tmp_path / "net.onnx").exists()


def test_likeliest_are_sorted_and_ties_are_stable():
    assert top_classes(np.array([[0.0, 2.0, 2.0]]), "abc", 2)[0] == [("b", pytest.approx(0.4683, abs=1e-4)),
                                                                   ("c", pytest.approx(0.4683, abs=1e-4))]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"classes": "ab"}', '{"classes": [1]}', '{"scale": -1}', '{"scale": NaN}', "[" * 10_000,
             f'{{"scale": {"9" * 400}}}', f'{{"scale": {"9" * 5000}}}', '{"scale": 1e400}', '{"scale": true}',
             r'{"classes": ["a", "\ud800"]}', r'{"columns": ["b\udfff"]}'],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_a_damaged_description_is_refused(tmp_path, text):
    with pytest.raises(FormatError, match=r"net\.onnx"), naming_file(tmp_path / "net.onnx"):
        Meaning.from_text(text)


def test_a_description_of_another_network_is_refused(tmp_path):
    onchip.save(onchip.mlp(2, 3).replace(meaning=Meaning(classes=("a", "b"))), tmp_path / "net.onnx")
    with pytest.raises(FormatError, match="does not fit"):
        onchip.load(tmp_path / "net.onnx")
