"""onchip.predictor on every kind of batch, in this process and in others."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

import onchip
from onchip.errors import InputError
from onchip.network.meaning import Column, Meaning

CLASSES = ("no", "yes")
X = np.random.default_rng(0).standard_normal((9, 3), np.float32)


@pytest.fixture
def model(tmp_path):
    net = onchip.mlp(3, 8, 2).replace(meaning=Meaning(("a", "b", "c"), CLASSES))
    onchip.save(net, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def columns(**more):
    return {**more, **{name: X[:, i] for i, name in enumerate("abc")}}


def labels(net):
    return [CLASSES[i] for i in onchip.compile(net, device="cpu")(X).argmax(axis=1)]


def test_arrays_and_columns(model):
    predict = onchip.predictor(model, device="cpu", threads=1, keep=["id"])
    np.testing.assert_array_equal(predict(X), onchip.compile(model, device="cpu")(X))
    found = predict(columns(id=np.arange(9), other=["x"] * 9))
    assert list(found) == ["id", "label", "probability"]
    assert found["label"].tolist() == labels(model)
    assert (found["probability"] >= 0.5).all()
    (again,) = predict(iter([columns(id=np.arange(9))]))
    assert again["label"].tolist() == labels(model)


def test_data_frames(model):
    pandas = pytest.importorskip("pandas")
    predict = onchip.predictor(model, device="cpu", keep=["id"])
    frame = pandas.DataFrame(columns(id=list("abcdefghi")), index=range(10, 19))
    found = predict(frame[["c", "id", "b", "a"]])
    assert list(found.columns) == ["id", "label", "probability"]
    assert found["label"].tolist() == labels(model)
    assert found["id"].tolist() == list("abcdefghi")
    assert len(predict(frame[:0])) == 0


def test_arrow_tables(model):
    pa = pytest.importorskip("pyarrow")
    found = onchip.predictor(model, device="cpu", keep=["id"])(pa.table(columns(id=pa.array(range(9), pa.int64()))))
    assert isinstance(found, pa.Table)
    assert found.column("label").to_pylist() == labels(model)
    assert found.column("id").to_pylist() == list(range(9))


def test_text_columns(tmp_path):
    table = (Column("city", ("Oslo", "Rome"), "Rome"), Column("a", (), 3.0))
    net = onchip.mlp(3, 4, 2).replace(meaning=Meaning(("city=Oslo", "city=Rome", "a"), (), 0.0, table=table))
    onchip.save(net, tmp_path / "m.onnx")
    predict = onchip.predictor(tmp_path / "m.onnx", device="cpu")
    found = predict({"a": np.array([1.0, np.nan]), "city": np.array(["Oslo", None], object), "z": np.zeros(2)})
    truth = onchip.compile(net, device="cpu")(np.array([[1, 0, 1], [0, 1, 3]], "f4"))
    np.testing.assert_array_equal(np.stack([found["y0"], found["y1"]], 1), truth)


def test_a_column_of_vectors(tmp_path):
    onchip.save(onchip.mlp(3, 4, 1), tmp_path / "m.onnx")
    predict = onchip.predictor(tmp_path / "m.onnx", device="cpu", keep=["id"])
    found = predict({"id": np.arange(9), "data": X})
    np.testing.assert_array_equal(found["y0"], onchip.compile(tmp_path / "m.onnx", device="cpu")(X)[:, 0])


def test_other_processes(model):
    predict = onchip.predictor(model, device="cpu", threads=1)
    here = predict(X)
    assert b"Engine" not in pickle.dumps(predict)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        np.testing.assert_array_equal(pool.submit(predict, X).result(), here)


def test_messages(model, tmp_path):
    predict = onchip.predictor(model, device="cpu", keep=["id"])
    with pytest.raises(InputError, match="no column 'id' to keep"):
        predict(columns())
    with pytest.raises(InputError, match=r"no column 'b'"):
        predict({"id": X[:, 0], "a": X[:, 0]})
    with pytest.raises(InputError, match="not a batch of rows"):
        predict(3)
    with pytest.raises(InputError, match="No such file"):
        onchip.predictor(tmp_path / "none.onnx")
