"""onchip train: learns, writes complete files, reports errors before training, and leaves no temporary files."""

import json
import os
import re
import signal
import time

import numpy as np
import pytest

from onchip.formats.load import load_file, save
from onchip.network.build import mlp
from onchip.runtime.engine import compile
from onchip.train.loop import fit
from onchip.workloads.digits import load_data
from onchip.workloads.digits import network as digits_network

QUICK = ["--data", "sklearn", "--hidden", "32", "--epochs", "3", "--lr", "0.1"]


def test_it_learns_and_the_file_is_the_network(cli, tmp_path):
    ran = cli("train", "digits", *QUICK, "-o", "d.onnx", "--json", "--device", "cpu")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["accuracy"] > 0.7
    assert document["epoch_losses"][0] > document["epoch_losses"][-1]
    assert document["ms_per_epoch"] > 0
    assert (document["gpu_bytes"], document["gpu_busy"]) == (0, None)
    assert document["process_bytes"] > 2**24
    assert "wrote d.onnx" in ran.err
    data = load_data("sklearn")
    y = compile(load_file(tmp_path / "d.onnx"), device="cpu")(data.x_test)
    assert (y.argmax(axis=1) == data.y_test).mean() == pytest.approx(document["accuracy"])


def test_text_and_plan(cli, tmp_path):
    before = sorted(os.listdir(tmp_path))
    ran = cli("train", "digits", *QUICK, "-v")
    assert ran.out.startswith("accuracy ")
    assert "ms/epoch" in ran.out
    assert re.search(r"\nmemory: [\d,.]+ [MG]iB at most in this process, libraries and data included\n$", ran.out)
    assert "mlp_train<64,32,10" in ran.err
    assert sorted(os.listdir(tmp_path)) == before


def test_same_seed_same_bits_and_training_continues_from_a_file(cli, tmp_path):
    for name in ("a", "b"):
        assert cli("train", "digits", *QUICK, "-o", f"{name}.safetensors").code == 0
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    first = json.loads(cli("train", "digits", *QUICK, "--json").out)
    ran = cli("train", "a.safetensors", "--data", "sklearn", "--epochs", 2, "--lr", 0.1, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["epoch_losses"][-1] < first["epoch_losses"][-1]


def test_seeds_are_trained_side_by_side_and_the_best_is_written(cli, tmp_path):
    how = ["--device", "cpu", "--seed", 3]
    ran = cli("train", "digits", *QUICK, *how, "--seeds", 2, "-o", "best.safetensors", "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    alone = [
        json.loads(cli("train", "digits", *QUICK, "--device", "cpu", "--seed", seed, "--json").out) for seed in (3, 4)
    ]
    assert [each["seed"] for each in document["results"]] == [3, 4]
    for each, one in zip(document["results"], alone, strict=True):
        assert each["epoch_losses"] == one["epoch_losses"]
        assert each["accuracy"] == one["accuracy"]
    losses = [each["epoch_losses"][-1] for each in document["results"]]
    assert document["best_seed"] == 3 + int(np.argmin(losses))
    assert (tmp_path / "best.safetensors").exists()
    text = cli("train", "digits", *QUICK, *how, "--seeds", 2).out
    assert text.startswith("seed    loss  accuracy\n")
    assert "over 2 seeds" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["digits", "--lr", "0"], ["learning rate", "try:"]),
        (["digits", "--seeds", "0"], ["number of seeds", "--seeds 8"]),
        (["digits", "--seeds", "2", "--log", "run.jsonl"], ["--log and --seeds 2", "--seed N"]),
        (["digits", "--lr", "inf"], ["learning rate"]),
        (["digits", "--epochs", "0"], ["epochs", "at least 1"]),
        (["digits", "--batch-size", "0"], ["batch size"]),
        (["digits", "--momentum", "1"], ["momentum"]),
        (["digits", "--seed", "-1"], ["seed"]),
        (["digits", "--threads", "0"], ["threads"]),
        (["digits", "--data", "cats"], ["unknown data set", "cats", "mnist"]),
        (["digits", "--hidden", "32,x"], ["32,x", "--hidden 320,160"]),
        (["digits", "--hidden", "0"], ["hidden"]),
        (["m.onnx", "--hidden", "32"], ["--hidden is for a new network", "onchip train mlp --hidden"]),
        (["nothing.onnx"], ["nothing.onnx", "No such file"]),
        (["nothing"], ["unknown model", "nothing", "(digits, backprop, mlp, decode, faces, "]),
        (["m.onnx"], ["8x8 pixels", "float32[B, 20]", "--data mnist"]),
        (["digits", "-o", "d.txt"], ["unknown format", "-o d.onnx"]),
        (["digits", "-o", "no/d.onnx"], ["No such file or directory", "mkdir -p no"]),
        (["digits", "-o", "/dev/null/d.onnx"], ["Not a directory"]),
        (["digits", "--log", "no/run.jsonl"], ["No such file or directory", "mkdir -p no"]),
        (["digits", "--log", "/"], ["a folder"]),
        (["digits", "-o", "."], ["a folder"]),
        (["digits", "-o", "/"], ["a folder"]),
        (["digits", "--plot", "."], ["a folder"]),
        (["digits", "--checkpoint-every", "3"], ["--checkpoint-every", "--checkpoint FOLDER"]),
        (["digits", "--plot", "no/curve.png"], ["No such file or directory", "mkdir -p no"]),
        (["digits", "--plot", "curve.bmp"], ["unknown format", ".png, .svg, .pdf", "--plot curve.png"]),
        (["digits", "--checkpoint", "m.onnx"], ["m.onnx is a file"]),
        (["digits", "--checkpoint", "m.onnx/deep/er"], ["m.onnx is a file"]),
        (["digits", "--resume"], ["nothing to resume from", "--checkpoint"]),
        (["digits", "--loss", "hinge"], ["unknown loss", "cross_entropy"]),
        (["digits", "--optimiser", "adan"], ["unknown optimiser", "adam"]),
        (["digits", "--schedule", "cos"], ["unknown schedule", "cosine"]),
        (["digits", "--activation", "GELU"], ["unknown activation"]),
        (["digits", "--patience", "3"], ["patience needs validation rows"]),
        (["digits", "--weight-decay", "-1"], ["weight decay"]),
        (["mlp"], ["no data to train on", "--data sklearn: there is no such file"]),
    ],
)
def test_bad_requests(cli, tmp_path, args, words):
    save(mlp(20, 8, 10), tmp_path / "m.onnx")
    before = sorted(os.listdir(tmp_path))
    ran = cli("train", "--data", "sklearn", *args)
    assert ran.code == 2
    assert ran.out == ""
    assert all(label in ran.err for label in ("got:", "expected:", "try:")), ran.err
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err
    assert sorted(os.listdir(tmp_path)) == before


def test_mnist_that_is_not_there(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_DATA", str(tmp_path))
    monkeypatch.setattr("onchip.workloads.digits.cache_dir", lambda: tmp_path)
    ran = cli("train", "digits", "--data", "mnist")
    assert ran.code == 2
    assert "ONCHIP_DATA" in ran.err


def test_divergence_is_a_failure_and_writes_nothing(cli, tmp_path):
    with np.errstate(all="ignore"):
        ran = cli("train", "digits", *QUICK[:-1], "1e20", "-o", "d.onnx", "--plot", "c.png")
    assert ran.code == 1
    assert "diverged" in ran.err
    assert os.listdir(tmp_path) == []


def test_debug_names_layer_and_row(cli, tmp_path):
    with np.errstate(all="ignore"):
        ran = cli("train", "digits", *QUICK[:-1], "1e20", "--debug", "-o", "d.onnx")
    assert ran.code == 1
    assert "not finite in epoch 1, step " in ran.err
    assert "fc" in ran.err
    assert os.listdir(tmp_path) == []


def test_every_option_reaches_the_training(cli):
    options = {
        "loss": "cross_entropy", "optimiser": "sgd", "lr": 0.05, "momentum": 0.5, "weight_decay": 0.01,
        "clip_norm": 0.5, "label_smoothing": 0.1, "class_weight": "balanced",
        "schedule": "step", "warmup": 1, "step_every": 2, "step_factor": 0.5, "batch_size": 100, "epochs": 5,
        "validation": 0.2, "patience": 4, "seed": 7, "precision": "fp32",
    }  # fmt: skip
    args = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    ran = cli("train", "digits", "--data", "sklearn", "--hidden", "16, 8", "--activation", "Tanh", "--no-shuffle",
              "--threads", 1, "--json", "-v", *args)  # fmt: skip
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert {name: document[name] for name in options} == options
    assert document["shuffle"] is False
    assert (document["layers"], document["hidden"], document["activation"]) == ([64, 16, 8, 10], [16, 8], "Tanh")
    assert [epoch["lr"] for epoch in document["history"]] == pytest.approx([0.05, 0.05, 0.05, 0.025, 0.025])
    assert "mlp_train<64,16,8,10,Tanh" in ran.err
    data = load_data("sklearn")
    alone = fit(digits_network(64, (16, 8), 7, "Tanh"), data.x_train, data.y_train, shuffle=False, **options)
    assert [epoch["loss"] for epoch in document["history"]] == [epoch.loss for epoch in alone.history]
    assert document["best_epoch"] == alone.best_epoch


def test_options_by_name_reach_the_training(cli):
    options = {"momentum": 0.9, "weight_decay": "*.bias=0,fc2.*=0.01", "frozen": "fc1.*,fc2.bias", "ema": 0.9}
    args = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    ran = cli("train", "digits", *QUICK, "--nesterov", "--threads", 1, "--json", *args)
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["weight_decay"] == [["*.bias", 0.0], ["fc2.*", 0.01]]
    assert (document["frozen"], document["nesterov"], document["ema"]) == (["fc1.*", "fc2.bias"], True, 0.9)
    data, kept = load_data("sklearn"), {name: document[name] for name in ("lr", "batch_size", "epochs", "seed")}
    net = digits_network(64, (32,))
    alone = fit(net, data.x_train, data.y_train, nesterov=True, threads=1, **options, **kept)
    assert document["epoch_losses"] == list(alone.epoch_losses)
    assert np.array_equal(alone.network.weights["fc1.weight"], net.weights["fc1.weight"])


def test_a_pattern_that_matches_nothing_is_misuse(cli):
    ran = cli("train", "digits", *QUICK, "--frozen", "fc4.*")
    assert ran.code == 2
    assert "frozen matches no weight" in ran.err
    assert "fc1.weight" in ran.err


def test_the_text_tells_of_validation(cli):
    ran = cli("train", "digits", *QUICK, "--validation", 0.2)
    assert "validation loss" in ran.out
    assert "in epoch 3" in ran.out


def test_ctrl_c_leaves_nothing(spawn, tmp_path):
    process = spawn("train", "digits", "--data", "sklearn", "--epochs", 1000000, "-o", "d.onnx")
    assert "data: sklearn digits" in process.stderr.readline()
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 2
    assert out == ""
    assert err == "stopped: no file is half-written\n"
    assert os.listdir(tmp_path) == []
