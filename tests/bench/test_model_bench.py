"""A user's network file as a benchmark."""

import json

import pytest

import onchip
from gpu_networks import two_towers
from onchip.bench.cases.model import is_model, model_cases
from onchip.bench.options import Options
from onchip.errors import InputError


@pytest.mark.parametrize(("name", "expected"), [("net.onnx", True), ("a/b.ONNX", True), ("decode", False)])
def test_a_file_is_distinguished_from_a_name(name, expected):
    assert is_model(name) == expected


def test_it_is_timed_and_compared_with_its_floor(cli, tmp_path):
    onchip.save(onchip.mlp(6, 8, 3), tmp_path / "net.onnx")
    args = ["--rows", "1,50", "--quick", "--device", "cpu", "--threads", "1", "--json"]
    result = cli("bench", tmp_path / "net.onnx", *args)
    assert result.code == 0, result.err
    rows = json.loads(result.out)["net"]["rows"]
    assert [row["case"] for row in rows] == ["1 row", "50 rows"]
    assert all(row["checked"] and row["median_ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert not (tmp_path / "benchmarks").exists()


def test_several_inputs_are_refused(tmp_path):
    onchip.save(two_towers(), tmp_path / "two.safetensors")
    with pytest.raises(InputError, match="cannot be timed"):
        model_cases(str(tmp_path / "two.safetensors"), Options())
