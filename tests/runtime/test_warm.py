"""Kernels compiled ahead; the memory of an engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import onchip
from onchip.plan.kernel import Job
from onchip.runtime import warm
from onchip.runtime.placement import plan_and_reason


def test_kernels_are_in_the_cache_before_the_first_use(spawn, tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(0o700)
    onchip.save(onchip.mlp(5, 7, 3), tmp_path / "m.onnx")
    out, err = spawn("cache", "--warm", "m.onnx", "--device", "cpu", "--batch", "3", "--json").communicate()
    assert out, err
    assert json.loads(out)["device"].startswith("cpu")
    before = {path.name for path in (tmp_path / "cache" / "numba").iterdir()}
    assert before
    code = ("import onchip, numpy as np; e = onchip.compile('m.onnx', device='cpu', batch_hint=3);"
            "e(np.zeros((1, 5), 'f4')); e(np.zeros((3, 5), 'f4'))")  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(Path(onchip.__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)
    assert {path.name for path in (tmp_path / "cache" / "numba").iterdir()} == before


def test_kernels_of_a_gpu_that_is_not_here(monkeypatch):
    compiled = []
    monkeypatch.setattr(warm, "compile_program", lambda program, arch: compiled.append(arch))
    net = onchip.mlp(5, 7, 3)
    assert warm.warm(net, "h200", batch=64) == "h200"
    assert compiled
    assert set(compiled) == {plan_and_reason(net, "h200", Job("fp32", 64))[0].device.arch}


@pytest.mark.parametrize(("args", "words"), [
    (("--warm", "none.onnx"), ["No such file"]),
    (("--warm", "decode", "--clear"), ["one thing at a time"]),
    (("--warm", "decode", "--batch", "0"), ["bad number of rows"]),
    (("--warm", "decode", "--device", "h300"), ["unknown device"]),
])  # fmt: skip
def test_messages(cli, args, words):
    ran = cli("cache", *args)
    assert ran.code == 2
    for word in words:
        assert word in ran.err


def test_the_memory_of_an_engine():
    net = onchip.mlp(5, 7, 3)
    memory = onchip.compile(net, device="cpu").memory
    assert memory.weight_bytes >= 4 * net.parameters
    assert memory.row_bytes >= 4 * (5 + 3)
    assert memory.at(10) == memory.weight_bytes + 10 * memory.row_bytes
    assert np.isscalar(memory.at(1))
