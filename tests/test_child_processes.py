"""Python processes that onchip starts run no code of the current folder, whatever modules lie there."""

import ast
import os
import shlex
import subprocess
import sys

import numpy as np
import onnx
import pytest

from checks import random_mlp, rows
from conftest import SRC
from onchip.errors import DeviceError
from onchip.formats.load import save
from onchip.formats.onnx.reader import read_onnx
from onchip.kernels.cpu.compiler import compile_ahead
from onchip.kernels.cpu.microkernels.dense import dense
from onchip.ladders import counters
from onnx_models import model, op
from real_ranks import needs_mpi

PLANTED = (
    "codecs", "encodings", "json", "mpi4py", "numba", "numpy", "onchip", "onnx", "random", "sitecustomize", "socket",
    "struct", "tempfile", "threading", "usercustomize",
)  # fmt: skip


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The current folder, full of modules that say it in `ran` when somebody imports them."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    return tmp_path


def imported(folder):
    return (folder / "ran").read_text() if (folder / "ran").exists() else ""


def test_what_is_planted_would_run(planted):
    subprocess.run([sys.executable, "-c", "import json"], check=True)
    assert imported(planted) == "json "


def test_the_opset_converter(planted):
    onnx.save(model([op("Relu", "x")], opset=5), planted / "old.onnx")
    net = read_onnx(planted / "old.onnx")
    assert [node.layer.kind for node in net.nodes] == ["ReLU"]
    assert imported(planted) == ""


@needs_mpi
def test_ranks(planted):
    save(random_mlp(20, 16, 3), planted / "m.onnx")
    np.save(planted / "x.npy", rows(8, 20))
    command = [sys.executable, "-P", "-m", "onchip", "run", "m.onnx", "x.npy", "-o", "y.npy", "--ranks", "2"]
    ran = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, check=False)
    assert (ran.returncode, imported(planted)) == (0, ""), ran.stderr
    assert np.load(planted / "y.npy").shape == (8, 3)


def test_the_profiled_ladder(planted, monkeypatch):
    ncu = planted / "bin" / "ncu"
    ncu.parent.mkdir()
    ncu.write_text(f'#!/bin/sh\nwhile [ "$1" != {shlex.quote(sys.executable)} ]; do shift; done\nexec "$@"\n')
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ncu.parent}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(DeviceError):  # no rung has such a name: it is asked after all imports
        counters.bank_conflicts("decode", 7, ["nothing"])
    assert imported(planted) == ""


def test_the_second_compiler(planted, monkeypatch):
    monkeypatch.setattr(compile_ahead, "started", [])
    monkeypatch.setattr(compile_ahead, "core_count", lambda: 2)
    monkeypatch.setattr(compile_ahead, "PROGRAM", compile_ahead.PROGRAM.rpartition("\n")[0])  # it compiles nothing
    assert compile_ahead.start_helper(dense.function, planted, count=9) == 2
    assert compile_ahead.started[0].wait() == 0
    assert imported(planted) == ""


def test_there_are_no_others():
    """Whoever starts a Python process says -P, and stands in a test above."""
    starts = {}
    for path in sorted((SRC / "onchip").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = [ast.unparse(part) for part in node.elts] if isinstance(node, ast.List) else []
            if "sys.executable" in parts:
                starts[path.stem] = parts[parts.index("sys.executable") + 1]
    assert starts == dict.fromkeys(("compile_ahead", "counters", "reader", "supervise"), "'-P'")
