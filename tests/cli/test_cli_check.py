"""onchip check: a table, a JSON document, and exit code 1 when something is wrong."""

import json

import numpy as np
import pytest

from onchip.plan.kernel import PRECISIONS
from onchip.runtime.engine import Engine


def test_table(cli):
    ran = cli("check", "decode", "--rows", 50)
    assert ran.code == 0, ran.err
    head, *lines = ran.out.splitlines()
    assert head.split()[:3] == ["device", "precision", "kernels"]
    cpu = [line.split() for line in lines if line.startswith("cpu")]
    assert [cells[1] for cells in cpu] == list(PRECISIONS)
    assert cpu[0][-1] == "ok"
    assert "max |y - truth| / max |truth|" in ran.err


def test_json(cli):
    ran = cli("check", "decode", "--rows", 50, "--seed", 3, "--json")
    document = json.loads(ran.out)
    assert document["passed"] is True
    assert (document["rows"], document["seed"]) == (50, 3)
    fp32 = document["checks"][0]
    assert fp32["error"] <= fp32["allowed"]
    assert fp32["verdict"] == "ok"
    bf16 = next(row for row in document["checks"] if row["device"] == "cpu" and row["precision"] == "bf16")
    assert (bf16["verdict"], bf16["error"]) == ("not available", None)
    assert bf16["naive_error"] > 1e-4
    assert bf16["reason"] == "the device computes in fp32"


def test_a_wrong_engine_fails(cli, monkeypatch):
    right = Engine.__call__
    monkeypatch.setattr(Engine, "__call__", lambda self, x, out=None: right(self, x, out=out) * np.float32(1.001))
    ran = cli("check", "decode", "--rows", 20)
    assert ran.code == 1
    assert "FAIL" in ran.out


@pytest.mark.parametrize("args", [["decode", "--rows", 0], ["decode", "--seed", -1], ["nothing"]])
def test_bad_requests(cli, args):
    ran = cli("check", *args)
    assert ran.code == 2
    assert ran.out == ""
    assert "expected:" in ran.err
