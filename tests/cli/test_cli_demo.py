"""onchip demo: the whole way, quickly; with and without matplotlib."""

import json
import sys

import pytest

from onchip.formats.load import load_file

QUICK = ["--epochs", "3", "--rows", "700"]


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setattr("onchip.workloads.demo.torch_layers", lambda net, wanted: None)  # importing it takes seconds


@pytest.mark.usefixtures("no_torch")
def test_the_whole_way(cli, tmp_path):
    pytest.importorskip("matplotlib")
    ran = cli("demo", *QUICK, "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["accuracy"] > 0.85
    ours, numpy = document["timings"]
    assert (ours["engine"], numpy["engine"]) == ("onchip", "NumPy, layer by layer")
    assert numpy["device"] == "cpu"
    assert f"onchip on {ours['device']}, NumPy on cpu\n" in ran.err
    assert ours["median_ms"] > 0
    assert ours["error"] < 1e-5
    folder = tmp_path / "onchip-demo"
    assert sorted(path.name for path in folder.iterdir()) == ["digits.onnx", "digits.png", "digits.safetensors"]
    assert (folder / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert load_file(folder / "digits.onnx").input.row_shape == (64,)
    assert "mlp_fused<64,320,160,10,ReLU>" in ran.err


@pytest.mark.usefixtures("no_torch")
def test_without_matplotlib_it_says_how_to_get_it(cli, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = cli("demo", *QUICK, "--out", "here")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("accuracy ")
    assert "NumPy, layer by layer" in ran.out
    assert "pip install 'onchip[plot]'" in ran.err
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["digits.onnx", "digits.safetensors"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--out", "/dev/null/x"], ["cannot make the folder", "--out DIR"]),
        (["--epochs", "0"], ["epochs", "at least 1"]),
        (["--rows", "0", "--epochs", "1"], ["rows", "at least 1", "--rows 20000"]),
        (["--rows", str(10**30)], ["does not fit into memory", "which are free"]),
    ],
)
def test_bad_requests(cli, args, words):
    ran = cli("demo", *args)
    assert ran.code == 2
    assert ran.out == ""
    assert "expected:" in ran.err
    for word in words:
        assert word in ran.err
