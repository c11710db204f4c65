"""onchip train --config: every key is checked, the command line overrides the file, and the file the defaults."""

import json
from dataclasses import fields

import pytest

from onchip.cli.train_config import known_keys, read_config, settings
from onchip.cli.train_faces import ONLY_HERE
from onchip.errors import InputError
from onchip.train.options import TrainOptions
from onchip.workloads.digits import TRAIN


@pytest.fixture
def config(tmp_path):
    def write(text: str):
        (tmp_path / "run.toml").write_text(text)
        return tmp_path / "run.toml"

    return write


BASE = 'model = "digits"\ndata = "sklearn"\nhidden = [16]\nepochs = 2\nlr = 0.2\n'


def test_the_command_line_goes_before_the_file_and_the_file_before_the_defaults(cli, config):
    config(BASE)
    told = json.loads(cli("train", "--config", "run.toml", "--json").out)
    assert (told["model"], told["lr"], told["epochs"], told["batch_size"]) == ("digits", 0.2, 2, TRAIN.batch_size)
    assert told["layers"] == [64, 16, 10]
    told = json.loads(cli("train", "digits", "--config", "run.toml", "--lr", 0.1, "--hidden", "8", "--json").out)
    assert (told["lr"], told["epochs"], told["layers"]) == (0.1, 2, [64, 8, 10])
    assert len(told["epoch_losses"]) == 2


def test_the_command_line_may_undo_the_file(cli, config):
    config(BASE + "shuffle = false\n")
    assert json.loads(cli("train", "--config", "run.toml", "--json").out)["shuffle"] is False
    assert json.loads(cli("train", "--config", "run.toml", "--shuffle", "--json").out)["shuffle"] is True


def test_every_option_is_a_key():
    from typer.main import get_command

    from onchip.cli.main import build_app

    command = get_command(build_app()).commands["train"]
    excluded = {
        "config",
        "profile",
        "trace",
        "as_json",
        "verbose",
        "help",
        "ranks",
    }  # ranks: how the command is started
    assert {param.name for param in command.params} - excluded - {*ONLY_HERE} == set(known_keys())
    assert {field.name for field in fields(TrainOptions)} - {"loss_weights"} < set(known_keys())


def test_names_of_other_libraries_are_keys(config):
    text = 'model = "digits"\nlearning_rate = 0.5\noptimizer = "adam"\n'
    assert settings(config(text), {})[1] == {"lr": 0.5, "optimiser": "adam"}


def test_types_are_the_options_types(config):
    path = config('lr = 1\nhidden = "32, 16"\nresume = true\nthreads = 2\nlog = "a/b.jsonl"\ntest_share = 0\n')
    found = read_config(path)
    assert found == {"lr": 1.0, "hidden": (32, 16), "resume": True, "threads": 2, "log": path.parent / "a/b.jsonl",
                     "test_share": 0.0}  # fmt: skip
    assert isinstance(found["lr"], float)


@pytest.mark.parametrize("text", ['"fc1.*,fc2.bias"', '["fc1.*", "fc2.bias"]'])
def test_frozen_weights_are_a_text_or_a_list(config, text):
    options = settings(config(f'model = "digits"\nfrozen = {text}\n'), {})[1]
    assert TrainOptions.of(options).frozen == ("fc1.*", "fc2.bias")


@pytest.mark.parametrize("text", ['"*.bias=0,*=0.1"', '{"*.bias" = 0, "*" = 0.1}'])
def test_weight_decays_by_name_are_a_text_or_a_table(config, text):
    options = settings(config(f'model = "digits"\nweight_decay = {text}\n'), {})[1]
    assert TrainOptions.of(options).weight_decay == (("*.bias", 0.0), ("*", 0.1))


def test_paths_are_relative_to_the_file(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "digits").mkdir()  # a folder with the name of a workload
    (tmp_path / "sub" / "train-idx1").write_bytes(b"")
    (tmp_path / "sub" / "run.toml").write_text(
        'model = "digits"\ndata = "train-idx1"\nlabels = "last"\ntest_data = "t.csv"\noutput = "o.onnx"\n'
    )
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    chosen, options = settings(Path("sub/run.toml"), {"log": Path("run.jsonl"), "lr": None})
    assert (chosen.model, chosen.data, chosen.labels) == ("digits", "sub/train-idx1", "last")
    assert (chosen.test_data, chosen.output, chosen.log) == ("sub/t.csv", Path("sub/o.onnx"), Path("run.jsonl"))
    assert options == {}


@pytest.mark.parametrize(("text", "words"), [
    ('model = "digits"\nbatchsize = 3\n', ["run.toml", "line 2: unknown key", "batchsize", "did you mean batch_size?"]),
    ("learning_rate = 1\nlr = 2\n", ["two values of lr", "only lr"]),
    ("nonsense = 1\n", ["unknown key", "leave 'nonsense' out"]),
    ("\n\n[train]\nlr = 1\n", ["line 3: unknown key", "train"]),
    ("lr = \n", ["not TOML", "line 1"]),
    ("lr = 1\nlr = 2\n", ["not TOML", "lr"]),
    ('lr = "fast"\n', ["line 1: bad lr", "'fast'", "a number"]),
    ("lr = true\n", ["bad lr", "True", "a number"]),
    ("epochs = 2.5\n", ["bad epochs", "a whole number"]),
    ("hidden = [32, 0]\n", ["bad hidden", "[320, 160]"]),
    ('hidden = [32, "16"]\n', ["bad hidden"]),
    ('hidden = "32,x"\n', ["bad hidden widths"]),
    ("frozen = 1\n", ["bad frozen", '["conv1.*", "conv2.*"]']),
    ("shuffle = 1\n", ["bad shuffle", "true or false"]),
    ("output = 3\n", ["bad output", "a path"]),
    ('[lr]\nvalue = 3\n', ["line 1: bad lr"]),
    ("epochs = 0\n", ["number of epochs", "at least 1"]),
    ("x = " + "[" * 5000, ["not TOML"]),
    ("# " + "x" * (1 << 20), ["too long"]),
    ("lr = " + "9" * 5000, ["not TOML", "4300"]),
    ("lr = -" + "9" * 400, ["line 1: bad lr", "a number"]),
    ("epochs = " + "9" * 400, ["number of epochs", "at most"]),
    ("seed = 0x" + "f" * 5000, ["bad seed", "too large to show"]),
    ("test_share = 0x" + "f" * 5000, ["bad test_share"]),
    ("lr" + ".a" * 3000 + " = 1", ["line 1: bad lr", "too large to show"]),
    ('data = "a\\u0000.csv"', ["line 1: bad data", "zero bytes"]),
    ('output = "a\\u0000.onnx"', ["line 1: bad output", "zero bytes"]),
    ('"\\u001b[31mlr" = 1', ["unknown key", r"\x1b[31mlr"]),
    ("hidden = [20000000]", ["the network is too large", "20000000", "at most 262,144"]),
    ("hidden = [20000, 20000]", ["the network is too large", "134,217,728 parameters"]),
    ("hidden = [" + "9" * 4000 + "]", ["the network is too large"]),
    ('hidden = "' + "9" * 5000 + '"', ["bad hidden widths"]),
    ("hidden = [" + "1," * 5000 + "]", ["the network is too deep", "1,024"]),
])  # fmt: skip
def test_bad_files(cli, config, text, words):
    config(text)
    ran = cli("train", "digits", "--data", "sklearn", "--config", "run.toml")
    assert ran.code == 2
    assert "Traceback" not in ran.err
    for word in [*words, "got:", "expected:", "try:"]:
        assert word in ran.err
    assert len(ran.err) < 2000
    assert ran.err.replace("\n", "").isprintable()


@pytest.mark.parametrize(("hidden", "words"), [
    ("20000000", "the network is too large"), ("9" * 400, "bad hidden widths"), ("9" * 5000, "bad hidden widths"),
    (",".join(["1"] * 5000), "the network is too deep"), ("1,,2", "bad hidden widths"), ("", "bad hidden widths"),
])  # fmt: skip
def test_hidden_widths_on_the_command_line(cli, hidden, words):
    ran = cli("train", "digits", "--data", "sklearn", "--epochs", 1, "--hidden", hidden)
    assert ran.code == 2
    assert words in ran.err
    assert len(ran.err) < 2000


def test_no_model_and_no_file(cli, config):
    ran = cli("train")
    assert (ran.code, ran.out) == (2, "")
    assert "nothing to train" in ran.err
    assert "onchip train digits" in ran.err
    ran = cli("train", "--config", "none.toml")
    assert ran.code == 2
    assert "No such file" in ran.err
    with pytest.raises(InputError, match="nothing to train"):
        settings(config("lr = 1\n"), {"model": None})
