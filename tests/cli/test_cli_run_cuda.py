"""onchip run faces and sentiment on a GPU: the same bytes in one chunk or in many; also on an emulated GPU."""

import json

import numpy as np
import pytest

from checks import assert_error_within
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.kernels import reference
from onchip.runtime.check import NAIVE_DTYPE, ULP
from onchip.workloads import faces, sentiment
from small_reports import WORDS, make_small

EPS = float(np.finfo(np.float32).eps)


@pytest.fixture(params=[pytest.param("emulated", marks=needs_gxx), pytest.param("gpu", marks=pytest.mark.gpu)])
def rows(request, monkeypatch):
    """Rows for device "cuda", with small versions of the two workloads."""
    make_small(monkeypatch)
    if request.param == "emulated":
        emulate_device(monkeypatch)
        return 23
    return 5001


def outputs(cli, tmp_path, workload, rows, *flags):
    """The outputs of runs in one chunk and in several."""
    made = []
    for i, batch in enumerate((rows, 16, 7)):
        if rows // batch > 1000:
            continue
        target = tmp_path / f"{i}.npy"
        given = ["--count", rows, "--seed", 1, "--batch", batch, "--device", "cuda", "-o", target, "--json", *flags]
        ran = cli("run", workload, *given)
        assert ran.code == 0, ran.err
        assert json.loads(ran.out)["plan"]["batch"] == rows
        made.append(target.read_bytes())
    return made, np.load(tmp_path / "0.npy")


def assert_right(net, x, got, precision="fp32"):
    naive = reference.forward(net, x, NAIVE_DTYPE[precision])
    assert_error_within(got, reference.forward(net, x), naive, ulps=4 * ULP[precision] / EPS)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_faces(cli, tmp_path, rows, precision):
    made, y = outputs(cli, tmp_path, "faces", rows, "--precision", precision)
    assert len(made) > 1
    assert len(set(made)) == 1
    assert y.shape == (rows, 24, 24, 3)
    z = np.random.default_rng(1).standard_normal((rows, 100), dtype=np.float32)
    assert_right(faces.network(), z[:200], y[:200], precision)


@pytest.mark.parametrize("flags", [(), ("--without", "fold"), ("--precision", "fp16")], ids=["fp32", "no fold", "fp16"])
def test_sentiment(cli, tmp_path, rows, flags):
    made, y = outputs(cli, tmp_path, "sentiment", rows, *flags)
    assert len(made) > 1
    assert len(set(made)) == 1
    ids = np.random.default_rng(1).integers(0, WORDS["vocabulary"], (rows, 16), dtype=np.int32)
    assert_right(sentiment.network(), ids, y, "fp16" if "fp16" in flags else "fp32")


def test_pictures(cli, tmp_path, rows):
    pytest.importorskip("PIL")
    for name, batch in (("one.png", rows), ("many.png", 5)):
        ran = cli("run", "faces", "--count", 23, "--device", "cuda", "-o", name, "--batch", batch)
        assert ran.code == 0, ran.err
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "many.png").read_bytes()


def test_an_id_that_is_no_token(cli, tmp_path, rows):
    ids = np.random.default_rng(1).integers(0, 50, (rows, 16), dtype=np.int32)
    ids[17, 3] = 50
    np.save(tmp_path / "ids.npy", ids)
    ran = cli("run", "sentiment", "ids.npy", "--device", "cuda", "-o", "y.npy", "--batch", 8)
    assert ran.code == 2
    assert "row 17, position 3: id 50, expected 0 to 49" in ran.err
    assert not (tmp_path / "y.npy").exists()


@pytest.mark.gpu
def test_faces_at_full_size(cli, tmp_path):
    made, y = outputs(cli, tmp_path, "faces", 300, "--precision", "fp16")
    assert len(set(made)) == 1
    z = np.random.default_rng(1).standard_normal((300, 100), dtype=np.float32)
    assert_right(faces.shipped(), z[:4], y[:4], "fp16")
