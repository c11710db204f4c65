"""onchip demo: end to end, quickly, without any extra."""

import json
import sys
from xml.etree import ElementTree

import pytest

from onchip.formats.load import load_file
from onchip.network.build import mlp
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cpu import backend as cpu
from onchip.runtime.placement import kernels_for
from onchip.workloads.demo import plan_with_floor

QUICK = ["--epochs", "3", "--rows", "700"]


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setattr("onchip.workloads.demo.torch_layers", lambda net, wanted: None)  # importing it takes seconds


@pytest.mark.usefixtures("no_torch")
def test_end_to_end(cli, tmp_path, monkeypatch):
    for name in ("sklearn", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)  # the demo needs no extra
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
    assert sorted(path.name for path in folder.iterdir()) == [
        "digits.onnx",
        "digits.safetensors",
        "digits.svg",
        "faces.png",
    ]
    assert (folder / "faces.png").read_bytes().startswith(b"\x89PNG")
    wrong = round((1 - document["accuracy"]) * document["test_rows"])
    texts = [element.text for element in ElementTree.parse(folder / "digits.svg").iter() if element.text]
    assert sum(", is " in text for text in texts) == min(wrong, 50)
    assert load_file(folder / "digits.onnx").input.row_shape == (64,)
    assert "mlp_fused<64,320,160,10,ReLU>" in ran.err
    sentence = document["sentence"]
    assert (sentence["text"], sentence["label"]) == ("a waste of time", "negative")
    assert 0.5 < sentence["probability"] < 1


@pytest.mark.parametrize("helps", [True, False])
def test_a_floor_that_a_run_beats_is_measured_again(monkeypatch, tmp_path, helps):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    rates = [1e9]  # flop/s, on a busy machine
    monkeypatch.setattr(cpu, "measure_flops", lambda: rates[0])
    plan = make_plan(mlp(64, 8, 10), cpu.this_cpu(), kernels_for(cpu.this_cpu()), Job(batch=20_000))
    floor_ms = plan.floor_us / 1e3
    rates[0] = 4e9 if helps else 1e9
    shown, too_low = plan_with_floor(plan, floor_ms / 2)
    assert shown.floor_us / 1e3 == pytest.approx(floor_ms / 4 if helps else floor_ms)
    assert bool(too_low) != helps


def test_the_floor_of_a_gpu_is_not_measured(monkeypatch):
    monkeypatch.setattr("onchip.workloads.demo.this_cpu", None)  # unused
    plan = make_plan(mlp(64, 8, 10), H200, kernels_for(H200), Job(batch=20_000))
    assert plan_with_floor(plan, 1e-6) == (plan, "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--out", "/dev/null/x"], ["cannot create folder", "--out DIR"]),
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
