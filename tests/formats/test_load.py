"""The suffix selects the format; unsupported ones are errors."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest

import onchip
from onchip.errors import FormatError, InputError
from onchip.formats.load import SUFFIXES, load_file, save
from onchip.network.build import mlp

POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""


@pytest.mark.parametrize("name", ["net.onnx", "net.safetensors", "NET.ONNX", "net.SafeTensors"])
def test_save_and_load(tmp_path, name):
    net = mlp(3, 5, 2, output="Softmax", seed=1)
    save(net, tmp_path / name)
    back = load_file(str(tmp_path / name))
    assert back.nodes == net.nodes
    for key, array in net.weights.items():
        np.testing.assert_array_equal(back.weights[key], array)


@pytest.mark.parametrize("name", ["net.pt", "net", "net.onnx.zip"])
def test_unknown_suffix_lists_the_known(tmp_path, name):
    with pytest.raises(InputError) as reading:
        load_file(tmp_path / name)
    with pytest.raises(InputError) as writing:
        save(mlp(2, 2), tmp_path / name)
    for suffix in SUFFIXES:
        assert suffix in str(reading.value)
        assert suffix in str(writing.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("net.pt", ["torch.load('net.pt')", "onchip.load(module.eval(), example)", "onchip.save(net, 'net.onnx')"]),
        ("a/net.PTH", ["torch.load('a/net.PTH')", "onchip.save(net, 'a/net.onnx')"]),
        ("net.keras", ["load_model('net.keras').export('net.onnx', format='onnx')", "tf2onnx.convert --keras"]),
        ("net.h5", ["load_model('net.h5')", "tf2onnx.convert --keras 'net.h5' --output 'net.onnx'"]),
        ("net{0}.tflite", ["tf2onnx.convert --tflite 'net{0}.tflite' --output 'net{0}.onnx'", "format='onnx'"]),
    ],
)
def test_files_of_other_tools_get_conversion_hints(name, words):
    with pytest.raises(InputError, match="another tool's format") as caught:
        onchip.load(name)
    assert len(caught.value.hint) == 2
    assert ", ".join(SUFFIXES) in caught.value.expected
    for word in words:
        assert word in str(caught.value)


def test_a_torchscript_file_is_not_taken_for_weights(tmp_path):
    for name, inside, word in (("a.pt", "constants.pkl", "torch.jit.load"), ("b.pt", "data.pkl", "load_state_dict")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"net/{inside}", b"")
        with pytest.raises(InputError) as caught:
            load_file(tmp_path / name)
        assert word in str(caught.value)


@pytest.mark.parametrize("command", ["run", "plan", "check", "bench"])
@pytest.mark.parametrize("name", ["net.pt", "net.tflite", "net.onnx", "net.safetensors"])
def test_every_command_prints_the_hint(cli, tmp_path, command, name):
    (tmp_path / name).write_text(POINTER)
    ran = cli(command, name, *(["--count", 3] if command == "run" else []))
    assert (ran.code, ran.out) == (2, "")
    first, second = ran.err.splitlines()[-2:]
    assert first.startswith("  try:      ")
    assert second.startswith("            ")
    assert ("git lfs pull" in first) == (name in ("net.onnx", "net.safetensors"))
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_only_networks_are_saved_and_only_to_paths(tmp_path, suffix):
    class Fitted:
        network_ = mlp(2, 2)

    for odd, hint in ((Fitted(), r"its \.network_"), (None, r"onchip\.load"), ("net", r"onchip\.load")):
        with pytest.raises(InputError, match=rf"not a network[\s\S]*{hint}"):
            save(odd, tmp_path / f"net{suffix}")
    with pytest.raises(InputError, match="not a path"):
        save(mlp(2, 2), 5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_file_and_folder(tmp_path, suffix):
    with pytest.raises(FormatError, match="cannot read"):
        load_file(tmp_path / f"none{suffix}")
    (tmp_path / f"folder{suffix}").mkdir()
    with pytest.raises(FormatError, match="a folder"):
        load_file(tmp_path / f"folder{suffix}")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_one_format_under_the_suffix_of_another(tmp_path, suffix):
    net, other = mlp(2, 2), {".onnx": ".safetensors", ".safetensors": ".onnx"}[suffix]
    save(net, tmp_path / f"net{other}")
    (tmp_path / f"net{other}").rename(tmp_path / f"net{suffix}")
    with pytest.raises(FormatError, match="net"):
        load_file(tmp_path / f"net{suffix}")


def test_onnx_and_safetensors_hold_the_same_network(tmp_path):
    save(mlp(4, 6, 3), tmp_path / "a.onnx")
    save(load_file(tmp_path / "a.onnx"), tmp_path / "b.safetensors")
    save(load_file(tmp_path / "b.safetensors"), tmp_path / "c.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "c.onnx").read_bytes()
