"""--io: the dtype in files and in memory, independent of the precision; --debug."""

import json

import numpy as np
import pytest

from checks import rows
from onchip.kernels import reference
from onchip.workloads import load


@pytest.mark.parametrize(("io", "dtype"), [("fp16", "float16"), ("fp32", "float32")])
def test_rows_of_another_type(cli, tmp_path, io, dtype):
    x = rows(9, 72).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    ran = cli("run", "decode", "x.npy", "-o", "y.npy", "--io", io, "--device", "cpu", "--debug", "--json")
    assert ran.code == 0, ran.err
    y, told = np.load(tmp_path / "y.npy"), json.loads(ran.out)
    assert (y.dtype, told["dtype"], told["io"]) == (dtype, dtype, io)
    truth = reference.forward(load("decode"), x.astype(np.float64), "float64")
    assert np.abs(y - truth).max() <= 2 * np.finfo(dtype).eps * np.abs(truth).max()


def test_rows_of_the_networks_own_type_do_not_fit_then(cli, tmp_path):
    np.save(tmp_path / "x.npy", rows(9, 72))
    ran = cli("run", "decode", "x.npy", "--io", "fp16", "--device", "cpu")
    assert ran.code == 2
    assert "float32" in ran.err
    assert "float16" in ran.err


def test_plan(cli):
    plain, half = (
        json.loads(cli("plan", "decode", "--device", "h200", "--json", *io).out) for io in ((), ("--io", "fp16"))
    )
    assert 2 * half["groups"][0]["row_bytes"] == plain["groups"][0]["row_bytes"] == (72 + 4) * 4


def test_an_unknown_one(cli):
    ran = cli("plan", "decode", "--io", "int8")
    assert ran.code == 2
    assert "unknown io" in ran.err
    assert "fp32, fp16, bf16" in ran.err
