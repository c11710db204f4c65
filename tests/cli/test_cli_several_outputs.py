"""onchip run and bench of networks with several outputs, and several files of one output."""

from __future__ import annotations

import json

import numpy as np
import pytest

import onchip
from onchip.network.graph import Network, Node
from onchip.network.layers import ArgMax, Softmax
from onchip.network.outputs import keep_outputs

X = np.random.default_rng(0).standard_normal((23, 5), np.float32)


@pytest.fixture
def classifier(tmp_path):
    """A classifier as skl2onnx writes them: the class and the probabilities."""
    net = onchip.mlp(5, 8, 3)
    last = net.outputs[0]
    nodes = (
        *net.nodes,
        Node("probabilities", Softmax(), (last,)),
        Node("label", ArgMax(), ("probabilities",)),
    )
    onchip.save(net.replace(nodes=nodes, outputs=("label", "probabilities")), tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", X)
    return onchip.load(tmp_path / "net.onnx")


def expected(net: Network):
    label, probabilities = onchip.compile(net, device="cpu")(X)
    assert probabilities.shape == (23, 3)
    return {"label": label, "probabilities": probabilities}


@pytest.mark.parametrize("batch", [None, 1, 7])
def test_every_output_in_files(cli, classifier, tmp_path, batch):
    more = [] if batch is None else ["--batch", batch]
    for files in (["all.npz"], ["label=label.npy", "probabilities=probabilities.npy"]):
        ran = cli("run", "net.onnx", "x.npy", *(word for file in files for word in ("-o", file)), *more)
        assert ran.code == 0, ran.err
        assert "label int64 [23], probabilities float32 [23, 3]" in ran.err
    with np.load(tmp_path / "all.npz") as archive:
        assert sorted(archive) == ["label", "probabilities"]
        for name, truth in expected(classifier).items():
            assert archive[name].dtype == truth.dtype
            np.testing.assert_array_equal(archive[name], truth)
            np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), truth)
    assert {path.name for path in tmp_path.iterdir()} <= {
        "net.onnx", "x.npy", "all.npz", "label.npy", "probabilities.npy"}  # fmt: skip


def test_one_output_runs_only_its_layers(cli, classifier, tmp_path):
    ran = cli("run", "net.onnx", "x.npy", "-o", "probabilities=p.csv", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert (found["shape"], found["output"]) == ([23, 3], "probabilities=p.csv")
    np.testing.assert_allclose(
        np.loadtxt(tmp_path / "p.csv", delimiter=",", skiprows=1), expected(classifier)["probabilities"], rtol=1e-6
    )
    kept = keep_outputs(classifier, ["probabilities"])
    assert "ArgMax" not in [node.layer.kind for node in kept.nodes]
    assert "ArgMax" in [node.layer.kind for node in classifier.nodes]


def test_without_a_file_some_rows_are_printed(cli, classifier):
    ran = cli("run", "net.onnx", "x.npy")
    assert ran.code == 0, ran.err
    first, row, *_ = ran.out.splitlines()
    assert first.startswith("label int64 [23], probabilities float32 [23, 3]: ")
    truth = expected(classifier)
    assert row.startswith(f"row 0: {truth['label'][0]}, {truth['probabilities'][0, 0]:.6g}  ")
    found = json.loads(cli("run", "net.onnx", "x.npy", "--json").out)
    assert found["shape"] == {"label": [23], "probabilities": [23, 3]}
    assert found["first_rows"]["label"][0] == truth["label"][0]


@pytest.mark.parametrize(("outputs", "words"), [
    (["y.npy"], ["has 2 outputs", "-o NAME=FILE", "-o probabilities=y.npy", "-o y.npz for all"]),
    (["labels=y.npy"], ["no such output", "label, probabilities", "label"]),
    (["all.npz", "labels=y.npy"], ["no such output"]),
    (["label=x.npy"], ["would overwrite INPUT"]),
    (["label=y.npy", "probabilities=y.npy"], ["would overwrite"]),
    (["label=y.bmp"], ["does not output images"]),
    (["label=y.jpg"], ["unknown format"]),
])  # fmt: skip
def test_messages(cli, classifier, tmp_path, outputs, words):
    ran = cli("run", "net.onnx", "x.npy", *(word for file in outputs for word in ("-o", file)))
    assert ran.code == 2
    for word in words:
        assert word in ran.err
    assert {path.name for path in tmp_path.iterdir()} == {"net.onnx", "x.npy"}


def test_pictures_and_text_of_one_run(cli, tmp_path):
    ran = cli("run", "faces", "--count", "1", "-o", "a.txt", "-o", "a.bmp", "-o", "a.npy")
    assert ran.code == 0, ran.err
    for file in ("b.txt", "b.npy"):
        assert cli("run", "faces", "--count", "1", "-o", file).code == 0
    for suffix in ("txt", "npy"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    pixels = ((np.load(tmp_path / "a.npy")[0, -1, 0] + np.float32(1)) / np.float32(2) * np.float32(255)).astype("u1")
    assert (tmp_path / "a.bmp").read_bytes()[54:57] == pixels[::-1].tobytes()  # first pixel of the bottom line: BGR


def test_resume_needs_the_same_outputs(cli, classifier, tmp_path, monkeypatch):
    from onchip.runtime.io import output

    def stop(self, record):
        before(self, record)
        raise KeyboardInterrupt

    before = output.PartialOutput.record
    monkeypatch.setattr(output, "KEEP_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(output.PartialOutput, "record", stop)
        assert cli("run", "net.onnx", "x.npy", "-o", "y.npz", "--batch", "5").code != 0
    ran = cli("run", "net.onnx", "x.npy", "-o", "y.npz", "--batch", "5", "--resume")
    assert ran.code == 0, ran.err
    assert "resumed: 1 of 5 chunks are done" in ran.err
    with np.load(tmp_path / "y.npz") as archive:
        np.testing.assert_array_equal(archive["probabilities"], expected(classifier)["probabilities"])


def test_bench_times_one_output(cli, classifier):
    ran = cli("bench", "net.onnx", "--quick", "--device", "cpu")
    assert (ran.code, "has 2 outputs" in ran.err, "--output probabilities" in ran.err) == (2, True, True)
    ran = cli("bench", "net.onnx", "--quick", "--rows", "8", "--output", "probabilities", "--device", "cpu", "--json")
    assert ran.code == 0, ran.err
    ran = cli("bench", "decode", "--output", "x")
    assert (ran.code, "--output is for a network file" in ran.err) == (2, True)
