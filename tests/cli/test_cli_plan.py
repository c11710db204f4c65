"""onchip plan: needs no GPU, computes no weight."""

import json

import pytest


def test_text_is_the_plan_and_nothing_else(cli):
    ran = cli("plan", "decode", "--device", "h200", "--batch", 2097152)
    assert ran.code == 0
    assert ran.err == ""
    assert ran.out.splitlines()[0] == "decode on NVIDIA H200, fp32, infer, 2,097,152 rows"
    assert "mlp_tensor_core<" in ran.out


@pytest.mark.parametrize("device", ["h200", "a100", "rtx4060", "cpu", "auto"])
def test_json(cli, device):
    ran = cli("plan", "digits", "--device", device, "--json")
    assert ran.code == 0, ran.err
    plan = json.loads(ran.out)
    assert plan["groups"][0]["layers"][0] == "fc1"
    assert plan["floor_us"] > 0


def test_training(cli):
    ran = cli("plan", "digits", "--device", "cpu", "--train", "cross_entropy", "--optimiser", "momentum", "--batch", 64)
    assert ran.code == 0, ran.err
    assert "train, cross_entropy, 64 rows" in ran.out


def test_no_weight_is_computed(cli, monkeypatch):
    def never(recipe, arrays):
        pytest.fail(f"a plan computed a weight: {recipe.op}")

    monkeypatch.setattr("onchip.network.recipe.evaluate", never)
    assert cli("plan", "digits", "--device", "h200").code == 0
    assert cli("plan", "digits", "--device", "cpu").code == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing"], ["unknown model", "nothing"]),
        (["nothing.safetensors"], ["nothing.safetensors", "No such file"]),
        (["decode", "--device", "h300"], ["unknown device", "h300", "did you mean h200?"]),
        (["decode", "--device", "tpu"], ["unknown device", "tpu", "rtx3080ti"]),
        (["sentimnt"], ["unknown model", "did you mean sentiment?"]),
        (["decode", "--batch", "0"], ["got:      0", "at least 1"]),
        (["decode", "--train", "hinge"], ["unknown loss", "hinge", "cross_entropy, half_sse, mse, bce_with_logits"]),
        (["decode", "--optimiser", "adam"], ["--optimiser without --train", "--train cross_entropy"]),
        (["decode", "--precision", "fp7"], ["fp7", "fp32, tf32, bf16, fp16, fp8"]),
        (["decode", "--device", "a100", "--precision", "fp8"], ["does not compute in fp8"]),
        (["decode", "--device", "h200", "--precision", "fp8"], ["no kernel of NVIDIA H200 computes in fp8"]),
        (["decode", "--nodes", "0"], ["bad number of nodes", "1 to 65,536"]),
    ],
)
def test_bad_requests(cli, args, words):
    ran = cli("plan", *args)
    assert ran.code == 2
    assert ran.out == ""
    assert all(label in ran.err for label in ("got:", "expected:", "try:")), ran.err
    for word in words:
        assert word in ran.err


def test_pictures(cli, tmp_path):
    ran = cli("plan", "faces", "--device", "h200", "--html", "plan.html", "--svg", "plan.svg", "--json")
    assert ran.code == 0, ran.err
    plan = json.loads(ran.out)
    page, picture = ((tmp_path / name).read_text() for name in ("plan.html", "plan.svg"))
    assert page.startswith("<!DOCTYPE html>")
    assert picture.startswith("<svg")
    for group in plan["groups"]:
        label = group["kernel"].replace("<", "&lt;").replace(">", "&gt;")
        assert label in page
        assert label in picture
    assert ran.err == "wrote plan.html\nwrote plan.svg\n"


@pytest.mark.parametrize(
    "paths", [("same.svg", "same.svg"), ("no/plan.html", "plan.svg"), ("plan.html", "no/plan.svg")]
)
def test_pictures_that_cannot_be_written(cli, tmp_path, paths):
    assert cli("plan", "faces", "--device", "h200", "--html", paths[0], "--svg", paths[1]).code == 2
    assert not list(tmp_path.iterdir())
