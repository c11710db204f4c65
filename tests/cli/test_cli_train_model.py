"""onchip train MODEL.onnx: any network with one input and one output, from the weights of its file."""

import json

import numpy as np
import pytest

import onchip
from onchip.errors import OutputError
from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, ArgMax, Conv2d, Floor, LayerNorm, Linear, ReLU
from onchip.network.meaning import Meaning
from onchip.network.types import TensorType
from onchip.train.checkpoint import Checkpoints
from onchip.train.order import hold_out
from row_steps import images, sentences, weight

N = 60
QUICK = ["--epochs", 3, "--lr", 0.05, "--batch-size", 16, "--device", "cpu"]
OPTIONS = {"epochs": 3, "lr": 0.05, "batch_size": 16, "device": "cpu"}
IMAGES = ["train", "images.onnx", "--data", "x.npy", "--labels", "y.npy", *QUICK]


@pytest.fixture(autouse=True)
def files(tmp_path, tmp_path_factory, monkeypatch):
    folder, rng = tmp_path_factory.mktemp("cache"), np.random.default_rng(0)
    monkeypatch.setattr("onchip.workloads.table_cache.private_folder", lambda name: folder)
    onchip.save(images(), tmp_path / "images.onnx")
    onchip.save(sentences(), tmp_path / "sentences.safetensors")
    arrays = {
        "x": rng.standard_normal((N, 3, 8, 8)).astype(np.float32), "y": rng.integers(0, 3, N),
        "ids": rng.integers(0, 11, (N, 5)), "nine": np.arange(N) % 9, "t": rng.random((N, 3), np.float32),
        "table": rng.random((N, 4), np.float32) * 30 + 7,
    }  # fmt: skip
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    return arrays


def told_by(cli, *args):
    ran = cli(*args, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out), ran.err


def alone(net, x, y, **options):
    """The same run by onchip.fit, and its outputs for the test rows."""
    rows, held = hold_out(N, 0.2, 0)
    result = onchip.fit(net, x[rows], y[rows], **OPTIONS | options)
    return result, onchip.compile(result.network, "cpu")(x[held]), y[held]


def test_a_convolutional_network(cli, tmp_path, files):
    told, err = told_by(cli, *IMAGES, "-o", "trained.onnx", "--validation", 0.1, "--log", "log.jsonl")
    assert "initial weights: those of images.onnx" in err
    assert "columns are not scaled" in err
    assert "the first layer is 'c' (Conv2d)" in err
    result, y, truth = alone(onchip.load("images.onnx"), files["x"], files["y"], validation=0.1)
    assert [epoch["loss"] for epoch in told["history"]] == [epoch.loss for epoch in result.history]
    assert told["accuracy"] == pytest.approx(np.mean(y.argmax(axis=1) == truth))
    assert (told["layers"], told["gpu_bytes"], told["scale"], told["test_rows"]) == (None, 0, False, 12)
    trained = onchip.load(tmp_path / "trained.onnx")
    assert all(np.array_equal(w, trained.weights[name]) for name, w in result.network.weights.items())
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4
    text = cli(*IMAGES, "-v")
    assert text.out.startswith("accuracy ")
    assert "3 epochs, " in text.out
    assert "conv_weight_grad" in text.err
    assert "refused: mlp_train at step.ids" in text.err


def test_a_missing_value_is_named_by_its_row_in_the_file(cli, tmp_path, files):
    files["x"][41, 2, 7, 7] = np.nan
    np.save(tmp_path / "x.npy", files["x"])
    ran = cli(*IMAGES)
    assert ran.code == 2
    assert "rows of x.npy are not finite\n  got:      nan in row 41, position 191\n" in ran.err


def test_a_network_with_several_outputs_is_refused(cli, tmp_path):
    onchip.save(images().replace(outputs=("b", "a")), tmp_path / "images.onnx")
    ran = cli(*IMAGES)
    assert ran.code == 2
    assert "has 2 outputs" in ran.err
    assert "onchip.fit, which trains several" in ran.err


def test_rows_are_reshaped_to_the_input(cli, tmp_path, files):
    told, _ = told_by(cli, *IMAGES)
    np.save(tmp_path / "x.npy", files["x"].reshape(N, -1))
    flat, err = told_by(cli, *IMAGES)
    assert flat["epoch_losses"] == told["epoch_losses"]
    assert "not transposed" not in err
    np.save(tmp_path / "x.npy", np.moveaxis(files["x"], 1, 3))
    assert "rows (8, 8, 3) are reshaped to (3, 8, 8), not transposed" in cli(*IMAGES).err


def test_ids_stay_integers(cli, tmp_path, files):
    ids, y = files["ids"], files["y"]
    np.save(tmp_path / "bytes.npy", ids.astype(np.uint8))
    np.save(tmp_path / "floats.npy", ids.astype(np.float64))
    lines = [",".join(map(str, row)) for row in np.column_stack([ids, y])]
    (tmp_path / "ids.csv").write_text("\n".join(["a,b,c,d,e,kind", *lines]))
    result, _, _ = alone(sentences(), ids, y)
    sources = [("ids.npy", "y.npy"), ("bytes.npy", "y.npy"), ("floats.npy", "y.npy"), ("ids.csv", "kind")]
    for data, labels in sources:
        told, err = told_by(
            cli, "train", "sentences.safetensors", "--data", data, "--labels", labels, *QUICK, "-o", "trained.onnx"
        )
        assert told["epoch_losses"] == list(result.epoch_losses), data
        assert "the rows are int64" in err
    meaning = onchip.load(tmp_path / "trained.onnx").meaning
    assert (meaning.columns, meaning.scale) == (("a", "b", "c", "d", "e"), 0)


def test_a_run_that_was_cut_short_resumes_with_the_same_bits(cli, tmp_path, monkeypatch):
    whole, _ = told_by(cli, *IMAGES, "-o", "whole.onnx")
    save = Checkpoints.save

    def save_and_stop(self, at):
        save(self, at)
        raise OutputError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", save_and_stop)
        assert cli(*IMAGES, "--checkpoint", "run", "--checkpoint-every", 0).code == 2
    onchip.save(images().replace(name="other"), tmp_path / "images.onnx")
    other = cli(*IMAGES, "--checkpoint", "run", "--resume", "--lr", 0.1)
    assert other.code == 2
    assert "belongs to another run" in other.err
    onchip.save(images(), tmp_path / "images.onnx")
    resumed, _ = told_by(cli, *IMAGES, "--checkpoint", "run", "--resume", "-o", "resumed.onnx")
    assert resumed["epoch_losses"] == whole["epoch_losses"]
    assert (tmp_path / "resumed.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()


def test_targets_are_reshaped_to_the_output(cli, tmp_path, files):
    layers = [("c", Conv2d((1, 1), (1, 1, 1, 1)))]
    net = sequential(TensorType(("B", 3, 8, 8)), layers, {"c.weight": weight(3, 3, 3, 3)})
    onchip.save(net, tmp_path / "auto.onnx")
    args = ["train", "auto.onnx", "--data", "x.npy", "--labels", "x.npy", "--loss", "mse", *QUICK]
    told, err = told_by(cli, *args)
    assert "targets are not scaled, as that cannot be folded into the network: the last layer is 'c' (Conv2d)" in err
    result, y, truth = alone(net, files["x"], files["x"], loss="mse")
    assert told["epoch_losses"] == list(result.epoch_losses)
    assert told["test_mse"] == pytest.approx(np.square(y - truth).mean())
    assert told_by(cli, *args, "--seeds", 2)[0]["results"][0]["test_mse"] == told["test_mse"]


def test_seeds_begin_with_the_same_weights(cli):
    told, err = told_by(cli, *IMAGES, "--seeds", 2, "-o", "best.onnx")
    assert "initial weights: those of images.onnx" in err
    first, second = (each["epoch_losses"] for each in told["results"])
    assert first == told_by(cli, *IMAGES)[0]["epoch_losses"]
    assert first != second


def test_the_profile_names_the_network_and_counts_its_groups(cli):
    ran = cli(*IMAGES, "--profile")
    assert ran.code == 0, ran.err
    (head,) = (line for line in ran.err.splitlines() if line.startswith("training "))
    assert head.startswith("training network on cpu: 1 network, 3 epochs, 9 steps, batch 16, ")
    assert head.endswith(" groups of layers")
    assert max(map(len, ran.err.splitlines())) < 120


def test_the_curve_of_a_network_that_is_no_mlp(cli, tmp_path):
    pytest.importorskip("matplotlib")
    ran = cli(*IMAGES, "--plot", "c.svg")
    assert ran.code == 0, ran.err
    assert (tmp_path / "c.svg").is_file()


# -- scaling -------------------------------------------------------------------------------------------------


def normed(outputs=3):
    layers = [("a", Linear()), ("n", LayerNorm()), ("r", ReLU()), ("b", Linear())]
    weights = {"a.weight": weight(6, 4), "a.bias": weight(6), "b.weight": weight(outputs, 6), "b.bias": weight(outputs)}
    return sequential(TensorType(("B", 4)), layers, weights | {"n.weight": np.ones(6, "f4"), "n.bias": weight(6)})


def test_columns_are_scaled_if_a_linear_reads_them(cli, tmp_path, files):
    onchip.save(normed(), tmp_path / "net.onnx")
    args = ["train", "net.onnx", "--data", "table.npy", *QUICK]
    told, err = told_by(cli, *args, "--labels", "y.npy", "-o", "trained.onnx")
    assert "columns standardised; folded into the first layer" in err
    held = hold_out(N, 0.2, 0)[1]
    y = onchip.compile(onchip.load(tmp_path / "trained.onnx"), "cpu")(files["table"][held])
    assert told["accuracy"] == pytest.approx(np.mean(y.argmax(axis=1) == files["y"][held]))
    assert told["epoch_losses"] != told_by(cli, *args, "--labels", "y.npy", "--no-scale")[0]["epoch_losses"]
    told, err = told_by(cli, *args, "--labels", "t.npy", "--loss", "mse")
    assert "targets standardised" in err
    assert (told["scale"], told["scale_targets"]) == (True, True)


def test_targets_alone_are_scaled_if_only_the_last_layer_can_be(cli, files):
    args = ["train", "images.onnx", "--data", "x.npy", "--labels", "t.npy", "--loss", "mse", *QUICK]
    told, err = told_by(cli, *args)
    assert "targets are not scaled, as that cannot be folded into the network: layer 'b' has no bias" in err
    assert (told["scale"], told["scale_targets"], told["accuracy"]) == (False, False, None)
    refused = cli(*args, "--scale")
    assert refused.code == 2
    assert "columns cannot be scaled" in refused.err


# -- classes -------------------------------------------------------------------------------------------------


def test_classes_have_the_numbers_of_the_network(cli, tmp_path):
    net = mlp(2, 3).replace(meaning=Meaning(classes=("ant", "bee", "cat")))
    onchip.save(net, tmp_path / "net.onnx")
    rows = [f"{i % 2},{i % 7},{('cat', 'ant')[i % 2]}" for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["u,v,kind", *rows]))
    args = ["train", "net.onnx", "--data", "t.csv", "--labels", "kind", "--epochs", 20, "--lr", 0.5, "--device", "cpu"]
    told, err = told_by(cli, *args, "-o", "trained.onnx")
    assert "classes are numbered as in net.onnx" in err
    assert told["accuracy"] == 1
    trained = onchip.load(tmp_path / "trained.onnx")
    assert trained.meaning.classes == ("ant", "bee", "cat")
    y = onchip.compile(trained, "cpu")(np.array([[0, 0], [1, 1]], np.float32))
    assert y.argmax(axis=1).tolist() == [2, 0]
    np.save(tmp_path / "u.npy", np.random.default_rng(0).random((20, 2), np.float32))
    np.save(tmp_path / "k.npy", np.arange(20) % 3)
    told_by(cli, "train", "net.onnx", "--data", "u.npy", "--labels", "k.npy", "--epochs", 1, "-o", "trained.onnx")
    assert onchip.load(tmp_path / "trained.onnx").meaning.classes == ("ant", "bee", "cat")


def test_probabilities_are_scored_not_logits(cli, tmp_path, files):
    np.save(tmp_path / "yes.npy", (files["t"] > 0.5).astype(np.float32))
    args = ["train", "images.onnx", "--data", "x.npy", "--labels", "yes.npy", "--loss", "bce_with_logits", *QUICK]
    told, _ = told_by(cli, *args)
    _, y, truth = alone(images(), files["x"], (files["t"] > 0.5).astype(np.float32), loss="bce_with_logits")
    assert told["test_mse"] == pytest.approx(np.square(1 / (1 + np.exp(-y)) - truth).mean())


# -- errors --------------------------------------------------------------------------------------------------


def network(*nodes, outputs, inputs=("x",)):
    return Network({name: TensorType(("B", 4)) for name in inputs}, nodes, outputs, {"w": weight(3, 4)})


LINEAR = Node("y", Linear(), ("x",), {"weight": "w"})
BAD = {
    "inputs": network(
        Node("s", Add(), ("x", "z")), Node("y", Linear(), ("s",), {"weight": "w"}), outputs=("y",), inputs=("x", "z")
    ),
    "outputs": network(LINEAR, Node("r", ReLU(), ("y",)), outputs=("y", "r")),
    "floor": network(LINEAR, Node("f", Floor(), ("y",)), outputs=("f",)),
    "best": network(LINEAR, Node("b", ArgMax(), ("y",)), outputs=("b",)),
    "empty": Network({"x": TensorType(("B", 4))}, (Node("r", ReLU(), ("x",)),), ("r",), {}),
}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["images.onnx", "--data", "ids.npy"], ["rows of ids.npy do not fit", "5 values", "float32[B, 3, 8, 8]"]),
        (["images.onnx", "--data", "x.npy", "--labels", "nine.npy"], ["classes 0 to 8", "0 to 2", "9 outputs"]),
        (["images.onnx", "--data", "x.npy", "--labels", "x.npy", "--loss", "mse"], ["targets do not fit", "[48, 3]"]),
        (["sentences.safetensors", "--data", "x.npy"], ["x.npy: the rows are not ids", "in row 0", "int64"]),
        (["sentences.safetensors", "--data", "far.npy"], ["id 11"]),
        (["missing.onnx", "--data", "x.npy"], ["missing.onnx", "No such file"]),
        (["images.onnx", "--data", "none.npy"], ["none.npy", "No such file"]),
        (["images.onnx", "--data", "sklearn"], ["8x8 pixels", "float32[B, 3, 8, 8]", "your own --data"]),
        (["images.onnx", "--labels", "y.npy"], ["no data to train on", "no --data"]),
        (["images.onnx", "--data", "x.npy", "--hidden", "8"], ["--hidden is for a new network"]),
        (["inputs.safetensors", "--data", "table.npy"], ["has 2 inputs", "x, z", "one input"]),
        (["outputs.safetensors", "--data", "table.npy"], ["has 2 outputs", "y, r", "one output"]),
        (["floor.safetensors", "--data", "table.npy"], ["no gradient reaches"]),
        (["best.safetensors", "--data", "table.npy", "--labels", "t.npy", "--loss", "mse"], ["best"]),
        (["empty.safetensors", "--data", "table.npy"], ["nothing to train"]),
        (["bare.safetensors", "--data", "x.npy"], ["bare.safetensors"]),
    ],
)
def test_bad_requests(cli, tmp_path, args, words):
    for name, net in BAD.items():
        onchip.save(net, tmp_path / f"{name}.safetensors")
    (tmp_path / "bare.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # weights without a graph
    np.save(tmp_path / "far.npy", np.full((N, 5), 11))
    labels = [] if "--labels" in args or "sklearn" in args else ["--labels", "y.npy"]
    ran = cli("train", *args, *labels, "--device", "cpu", "-o", "out.onnx")
    assert ran.code == 2, ran.err
    assert ran.out == ""
    assert all(label in ran.err for label in ("got:", "expected:", "try:")), ran.err
    for word in words:
        assert word in ran.err
    assert not (tmp_path / "out.onnx").exists()
