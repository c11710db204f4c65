"""onchip run on models of several inputs: files by name, sentence lengths given or counted, on both devices."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

from checks import assert_error_within, assert_refused, rows
from conftest import SRC
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.formats.load import save
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import Add
from onchip.network.types import TensorType
from onchip.workloads import sentiment
from small_reports import make_small, write_words


@pytest.fixture
def words(monkeypatch, tmp_path):
    """The small sentiment's files; its network, 34 sentences that end with zeros, and their lengths."""
    make_small(monkeypatch)
    ids, lengths = write_words(tmp_path, 34), (np.arange(34) % 17).astype(np.int32)
    ids = np.where(np.arange(16) < lengths[:, None], np.maximum(ids, 1), 0).astype(np.int32)
    ids.tofile(tmp_path / "inputs.bin")
    np.save(tmp_path / "lengths.npy", lengths)
    return sentiment.network(tmp_path / "params.bin", lengths=True), ids, lengths


def help_lines(cli, word):
    return [line.strip() for line in cli("run", "--help").out.splitlines() if line.strip().startswith(word)]


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("emulated", marks=needs_gxx), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_the_examples_of_sentences(cli, monkeypatch, tmp_path, words, device):
    """Every command with sentences that --help shows; a short sentence differs from a padded one."""
    if device == "emulated":
        emulate_device(monkeypatch)
    net, *given = words
    plain, *of_lengths = (line for line in help_lines(cli, "onchip run sentiment") if "--weights" in line)
    shorter = {
        "w.bin": "params.bin",
        "x.bin": "inputs.bin",
        "n.npy": "lengths.npy",
    }  # so that help lines fit 80 columns
    for short, name in shorter.items():
        shutil.copy(tmp_path / name, tmp_path / short)
    for line in of_lengths if device == "emulated" else (*of_lengths, plain):
        ran = cli(*shlex.split(line)[1:], "--device", "cpu" if device == "cpu" else "cuda", "--batch", 20)
        assert ran.code == 0, ran.err
        answers = np.fromfile(tmp_path / shlex.split(line)[-1], "<f4").reshape(34, 2)
        truth = reference.forward(net, tuple(given))
        if line == plain:
            assert not np.allclose(answers, truth, atol=1e-3)
        else:
            assert_error_within(answers, truth, reference.forward(net, tuple(given), "float32"))
    assert len(of_lengths) == 2


@pytest.mark.usefixtures("words")
def test_a_negative_length_in_a_file_is_named_by_its_row(cli, tmp_path):
    lengths = np.load(tmp_path / "lengths.npy")
    lengths[29] = -1
    np.save(tmp_path / "bad.npy", lengths)
    job = ["run", "sentiment", "--weights", "params.bin", "inputs.bin", "--input", "lengths=bad.npy"]
    ran = cli(*job, "--batch", 8, "--device", "cpu", "-o", "y.npy")
    assert (ran.code, ran.out) == (2, "")
    assert "row 29: a negative length\n  got:      -1" in ran.err
    assert not (tmp_path / "y.npy").exists()


@pytest.fixture
def pair(tmp_path):
    """m.onnx, which adds a (B, 3) and b (B, 1), and files for it."""
    types = {"a": TensorType(("B", 3)), "b": TensorType(("B", 1))}
    save(Network(types, (Node("y", Add(), ("a", "b")),), ("y",), {}, "pair"), tmp_path / "m.onnx")
    np.save(tmp_path / "a.npy", rows(50, 3))
    np.save(tmp_path / "b.npy", rows(50, 1, seed=2))
    np.save(tmp_path / "ints.npy", np.arange(50, dtype=np.int64))
    np.save(tmp_path / "short.npy", rows(49, 1))


@pytest.mark.parametrize(
    "files",
    [["a.npy", "--input", "b=b.npy"], ["--input", "b=b.npy", "--input", "a=a.npy"]],
    ids=["the first is INPUT", "all by name"],
)
@pytest.mark.usefixtures("pair")
def test_files_by_name(cli, tmp_path, files):
    ran = cli("run", "m.onnx", *files, "-o", "y.npy", "--batch", 7, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["inputs"] == dict(name.split("=") for name in files if "=" in name)
    assert np.array_equal(np.load(tmp_path / "y.npy"), rows(50, 3) + rows(50, 1, seed=2))


@pytest.mark.usefixtures("pair")
def test_random_rows_of_every_input(cli, tmp_path):
    assert cli("run", "m.onnx", "--count", 9, "--seed", 5, "-o", "y.npy").code == 0
    assert np.array_equal(np.load(tmp_path / "y.npy"), rows(9, 3, seed=5) + rows(9, 1, seed=6))


@pytest.mark.parametrize(
    ("args", "words_"),
    [
        (["a.npy"], ["no rows for the input 'b'", "--input b=b.npy", "float32[B, 1]"]),
        (["--input", "b=b.npy"], ["no rows for the input 'a'"]),
        (["a.npy", "--input", "c=b.npy"], ["no such input", "c=b.npy", "a, b"]),
        (["a.npy", "--input", "a=a.npy", "--input", "b=b.npy"], ["two sources for the input 'a'"]),
        (["a.npy", "--input", "b"], ["bad --input", "NAME=FILE"]),
        (["a.npy", "--input", "b=b.npy", "--input", "b=a.npy"], ["bad --input", "each name once"]),
        (["a.npy", "--input", "b=short.npy"], ["different numbers of rows", "a: 50 rows, b: 49 rows"]),
        (["a.npy", "--input", "b=a.npy"], ["wrong shape"]),
        (["a.npy", "--input", "b=ints.npy"], ["int64", "float32"]),
        (["a.npy", "--input", "b=none.npy"], ["none.npy"]),
        (["--count", "3", "--input", "b=b.npy"], ["INPUT or --count"]),
        (["--count", "3", "--padding", "0"], ["--padding is for rows of a file"]),
        (["a.npy", "--padding", "0"], ["no lengths to count from padding"]),
    ],
)
@pytest.mark.usefixtures("pair")
def test_bad_requests(cli, tmp_path, args, words_):
    assert_refused(cli("run", "m.onnx", *args, "-o", "y.npy"), tmp_path, *words_)


def test_lengths_are_given_or_counted_not_both(cli, tmp_path, words):
    ran = cli("run", "sentiment", "inputs.bin", "--input", "lengths=lengths.npy", "--padding", 0, "-o", "y.npy")
    assert_refused(ran, tmp_path, "two sources for the input 'lengths'")


@pytest.mark.usefixtures("pair")
def test_an_output_over_an_input(cli):
    ran = cli("run", "m.onnx", "a.npy", "--input", "b=b.npy", "-o", "b.npy")
    assert ran.code == 2
    assert "--output would overwrite --input b" in ran.err


def test_rows_that_are_truncated_during_the_run_end_it_with_a_message(tmp_path):
    """In a separate process, which a memory-mapped file would end silently."""
    np.save(tmp_path / "x.npy", rows(4000, 72))
    code = (
        "import os, sys; from onchip.cli.main import main; from onchip.runtime.io.output import PartialOutput\n"
        "PartialOutput.record = lambda *_: os.truncate('x.npy', 100)\n"
        "sys.exit(main(['run', 'decode', 'x.npy', '-o', 'y.npy', '--batch', '100', '--device', 'cpu']))"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "x.npy: the file was truncated" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
