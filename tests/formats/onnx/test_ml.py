"""Operators of ai.onnx.ml: scikit-learn's pipelines, as skl2onnx exports them, match scikit-learn's predictions."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import helper

import onchip
from onchip.formats.onnx.ops.base import READERS
from onchip.formats.onnx.reader import read_model
from onchip.kernels import reference
from onnx_models import check_meaning, model, numbers, op, refused

ML = "ai.onnx.ml"
needs_argmax = pytest.mark.skipif("ArgMax" not in READERS, reason="labels are an ArgMax, which nothing reads")
needs_norms = pytest.mark.skipif("ReduceL2" not in READERS, reason="norms are reductions, which nothing reads")


def ml(kind, inputs, outputs="y", **attributes):
    return helper.make_node(kind, inputs.split(), outputs.split(), domain=ML, **attributes)


def ml_model(nodes, weights=None, outputs=("y",), x=("N", 4), opset=17):
    proto = model(nodes, weights, x, opset, outputs)
    proto.opset_import.append(helper.make_opsetid(ML, 1))
    return proto


def floats(*shape, seed=0):
    return numbers(*shape, seed=seed).reshape(-1).tolist()


SCALER = ml("Scaler", "x", "scaled", offset=[0.5, -1.0, 2000.0, 0.0], scale=[1.0, 2.0, 0.01, 3.0])
SAME = {
    "scaler": [ml("Scaler", "x", offset=[0.5, -1.0, 2.0, 0.0], scale=[1.0, 2.0, 0.5, 3.0])],
    "scaler of one": [ml("Scaler", "x", offset=[0.25], scale=[2.0])],
    "regressor": [SCALER, ml("LinearRegressor", "scaled", coefficients=floats(4), intercepts=[0.5])],
    "two targets": [ml("LinearRegressor", "x", coefficients=floats(2, 4), targets=2)],
    "vectorizer": [ml("FeatureVectorizer", "x x", inputdimensions=[4, 4])],
    "norm L1": pytest.param([ml("Normalizer", "x", norm="L1")], marks=needs_norms),
    "norm L2": pytest.param([ml("Normalizer", "x", norm="L2")], marks=needs_norms),
    "norm MAX": pytest.param([ml("Normalizer", "x", norm="MAX")], marks=needs_norms),
}


@pytest.mark.parametrize("nodes", SAME.values(), ids=SAME)
@pytest.mark.parametrize("opset", [11, 18])
def test_computes_what_onnx_runtime_computes(tmp_path, nodes, opset):
    check_meaning(tmp_path, ml_model(nodes, opset=opset))


LABELS = {"ints": {"classlabels_ints": [5, 7, 9]}, "texts": {"classlabels_strings": ["cat", "dog", "eel"]}}
ZIP = {"ints": {"classlabels_int64s": [5, 7, 9]}, "texts": {"classlabels_strings": ["cat", "dog", "eel"]}}


def classifier(labels, transform):
    coefficients = {"coefficients": floats(3, 4), "intercepts": floats(3, seed=1)}
    nodes = [
        ml("LinearClassifier", "x", "label scores", **coefficients, **LABELS[labels], post_transform=transform),
        ml("Normalizer", "scores", "shares", norm="L1"), ml("ZipMap", "shares", "probabilities", **ZIP[labels]),
    ]  # fmt: skip
    return ml_model(nodes, outputs=("label", "probabilities"))


@needs_argmax
@pytest.mark.parametrize("transform", ["SOFTMAX", "LOGISTIC"])
@pytest.mark.parametrize("labels", LABELS)
def test_a_classifier_returns_labels_and_an_array_of_probabilities(labels, transform):
    proto, x = classifier(labels, transform), numbers(9, 4)
    net = read_model(proto)
    assert [net.types[name].dtype for name in net.outputs] == ["int64", "float32"]
    label, probabilities = onchip.compile(net, device="cpu")(x)
    weight, bias = (np.array(floats(*shape, seed=seed)) for shape, seed in (((3, 4), 0), ((3,), 1)))
    scores = x @ weight.reshape(3, 4).T + bias
    shares = np.exp(scores) if transform == "SOFTMAX" else 1 / (1 + np.exp(-scores))
    places = scores.argmax(axis=1)
    np.testing.assert_array_equal(label, np.array([5, 7, 9])[places] if labels == "ints" else places)
    np.testing.assert_allclose(probabilities, shares / shares.sum(axis=1, keepdims=True), rtol=1e-5)


def test_softmax_outputs_are_not_normalised_again():
    proto = classifier("ints", "SOFTMAX")
    del proto.graph.output[0]
    assert [node.layer.kind for node in read_model(proto).nodes] == ["Linear", "Softmax"]


@needs_argmax
@pytest.mark.parametrize("classes", [np.array([0, 1, 2]), np.array([3, 1, 8]), np.array(["cat", "dog", "eel"])])
def test_labels_of_an_mlp_classifier(classes):
    """skl2onnx: the index of the largest, looked up in the classes, (1, B), then (B,)."""
    nodes = [
        op("ArgMax", "x", "place", axis=1), ml("ArrayFeatureExtractor", "classes place", "found"),
        op("Reshape", "found shape", "label"), op("Identity", "label"),
    ]  # fmt: skip
    proto = ml_model(nodes, {"shape": np.array([-1])}, x=("N", 3))
    is_text = classes.dtype.kind == "U"
    tensor = onnx.numpy_helper.from_array(classes.astype(object if is_text else np.int64), "classes")
    proto.graph.initializer.append(tensor)
    x = numbers(6, 3)
    places = x.argmax(axis=1)
    got = onchip.compile(read_model(proto), device="cpu")(x)
    np.testing.assert_array_equal(got, places if is_text else classes[places])


REFUSED = {
    "coefficients": ([ml("LinearRegressor", "x", coefficients=floats(5))], "wrong number of coefficients"),
    "offset": ([ml("Scaler", "x", offset=[1.0, 2.0], scale=[1.0])], "wrong number of offset"),
    "post": ([ml("LinearRegressor", "x", coefficients=floats(4), post_transform="PROBIT")], "no such post_transform"),
    "norm": ([ml("Normalizer", "x", norm="L3")], "no such norm"),
    "tree": ([ml("TreeEnsembleRegressor", "x")], "ONNX Runtime: trees"),
    "attribute": ([ml("Scaler", "x", ofset=[1.0], scale=[1.0])], "unknown attribute 'ofset'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    nodes, word = REFUSED[case]
    refused(tmp_path, ml_model(nodes), word)


@needs_argmax
def test_pipelines_of_scikit_learn():
    """As skl2onnx converts them."""
    skl2onnx = pytest.importorskip("skl2onnx", reason="no skl2onnx: the same graphs, made by hand, are tested above")
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, Normalizer, StandardScaler

    rng = np.random.default_rng(0)
    X, kinds = rng.standard_normal((50, 5)).astype(np.float32), rng.integers(0, 3, 50)
    hidden = {"hidden_layer_sizes": (7,), "max_iter": 10, "random_state": 0}
    estimators = [
        (make_pipeline(StandardScaler(), MLPClassifier(**hidden)), kinds),
        (make_pipeline(MinMaxScaler(), MLPRegressor(**hidden)), X[:, 0]),
        (make_pipeline(StandardScaler(), LogisticRegression()), np.array(["a", "b", "c"])[kinds]),
        (make_pipeline(Normalizer(), LogisticRegression()), kinds % 2 + 5), (LinearRegression(), X[:, :2]),
    ]  # fmt: skip
    for estimator, y in estimators:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            proto = skl2onnx.to_onnx(estimator.fit(X, y), X[:1])
        got = reference.forward(read_model(proto), X)
        if not hasattr(estimator, "predict_proba"):
            np.testing.assert_allclose(got.reshape(y.shape), estimator.predict(X), rtol=1e-4, atol=1e-5)
            continue
        labels = got[0] if y.dtype.kind == "i" else estimator.classes_[got[0]]
        np.testing.assert_array_equal(labels, estimator.predict(X))
        np.testing.assert_allclose(got[1], estimator.predict_proba(X), rtol=1e-4, atol=1e-6)
