"""--shape: the same option on every command that reads a network file."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest

from onnx_models import model, op

COMMANDS = (
    ("plan", "--device", "cpu"), ("check", "--rows", "2"), ("run", "--count", "3"),
    ("bench", "--device", "cpu", "--rows", "2", "--quick"),
)  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "open.onnx"
    path.write_bytes(model([op("Relu", "x")], x=("N", "H", "W")).SerializeToString())
    return path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_with_a_model(cli, file, command):
    name, *options = command
    refused = cli(name, file, *options)
    assert refused.code == 2
    assert "input 'x': axis 1 ('H'), axis 2 ('W')" in refused.err
    (line,) = (line for line in refused.err.splitlines() if line.startswith("  try:"))
    pasted = shlex.split(line[line.index("--shape") :].removesuffix(", with your sizes"))
    assert pasted == ["--shape", "x=B,128,128"]
    ran = cli(name, file, *options, *pasted)
    assert ran.code == 0, ran.err
    other = cli(name, "decode" if name != "bench" else "product", *options, *pasted)
    assert other.code == 2
    assert "dynamic axes of an ONNX file" in other.err


def test_sizes_are_the_given_ones(cli, file, tmp_path):
    np.save(tmp_path / "x.npy", np.full((4, 2, 3), -1, "f4"))
    ran = cli("run", file, tmp_path / "x.npy", "--shape", "B,2,3", "-o", tmp_path / "y.npy", "--device", "cpu")
    assert ran.code == 0, ran.err
    assert np.load(tmp_path / "y.npy").shape == (4, 2, 3)
    ran = cli("plan", file, "--shape", "x=B,2,3", "--json", "--device", "cpu")
    assert json.loads(ran.out)["groups"]


@pytest.mark.parametrize("text", ["x=B,,3", "x=", "x=B,W,3", "x=B,-1,3", "x=B,0,3", "", "x=B,2.5"])
def test_shapes_that_are_none(cli, file, text):
    ran = cli("plan", file, "--shape", text)
    assert ran.code == 2
    assert "bad --shape" in ran.err
    assert "--shape x=B,3,640,640" in ran.err


def test_each_name_once(cli, file):
    ran = cli("plan", file, "--shape", "x=B,2,3", "--shape", "x=B,2,4")
    assert ran.code == 2
    assert "each name once" in ran.err
