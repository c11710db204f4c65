"""Estimators and pipelines in one file, loaded again; parameters as other libraries spell them; skl2onnx."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, PolynomialFeatures, RobustScaler, StandardScaler

import onchip
from onchip.errors import FormatError, InputError

X = np.random.default_rng(0).normal([0, 50, -3], [1, 20, 0.1], (60, 3)).astype("f4")
SUM = ((X - X.mean(0)) / X.std(0)).sum(1)


def classifier(labels=("low", "high"), **options):
    y = np.array(labels)[(SUM > 0).astype(int)]
    return onchip.Classifier(hidden=(6,), epochs=3, threads=1, scale=True, **options).fit(X, y), y


@pytest.mark.parametrize("labels", [("low", "high"), (3, 7), (False, True), (2.0, 5.0)])
@pytest.mark.parametrize("name", ["m.onnx"])
def test_a_classifier(tmp_path, labels, name):
    clf, y = classifier(labels)
    onchip.save(clf, tmp_path / name)
    loaded = onchip.load_estimator(tmp_path / name, device="cpu")
    assert loaded.get_params() == {**clf.get_params(), "device": "cpu"}
    assert loaded.classes_.tolist() == clf.classes_.tolist()
    assert type(loaded.classes_.tolist()[0]) is type(clf.classes_.tolist()[0])
    np.testing.assert_array_equal(loaded.predict(X), clf.predict(X))
    np.testing.assert_array_equal(loaded.predict_proba(X), clf.predict_proba(X))
    assert loaded.loss_curve_ == pytest.approx(clf.loss_curve_)
    assert loaded.score(X, y) == clf.score(X, y)
    assert onchip.load(tmp_path / name).meaning.classes == tuple(map(str, clf.classes_.tolist()))


def test_partial_fit_continues_from_the_loaded_weights(tmp_path):
    clf, y = classifier()
    onchip.save(clf, tmp_path / "m.onnx")
    loaded = onchip.load_estimator(tmp_path / "m.onnx", lr=1e-6).partial_fit(X, y)
    np.testing.assert_allclose(loaded.predict_proba(X), clf.predict_proba(X), atol=1e-3)
    assert loaded.n_iter_ == clf.n_iter_ + 1
    assert loaded.fit(X, y).n_iter_ == 3  # anew


@pytest.mark.parametrize("width", [1, 2])
def test_a_regressor(tmp_path, width):
    y = SUM if width == 1 else np.stack([SUM, -SUM], 1)
    model = onchip.Regressor(hidden=(6,), epochs=3, threads=1, scale=True).fit(X, y)
    onchip.save(model, tmp_path / "m.onnx")
    loaded = onchip.load_estimator(tmp_path / "m.onnx")
    assert isinstance(loaded, onchip.Regressor)
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    assert loaded.predict(X).shape == y.shape


@pytest.mark.parametrize("scaler", [
    StandardScaler(), StandardScaler(with_mean=False), StandardScaler(with_std=False), MinMaxScaler((-1, 1)),
    MaxAbsScaler(), RobustScaler(), RobustScaler(with_centering=False, with_scaling=False), "passthrough", None,
], ids=str)  # fmt: skip
@pytest.mark.parametrize("scale", [False, True])
def test_the_scaler_of_a_pipeline_becomes_part_of_the_network(tmp_path, scaler, scale):
    far = X + np.float32([0, 30_000, 0])  # its mean is subtracted by a layer of its own
    y = SUM > 0
    steps = [
        ("a", scaler),
        ("b", MinMaxScaler()),
        ("c", onchip.Classifier(hidden=(6,), epochs=2, threads=1, scale=scale)),
    ]
    from sklearn.pipeline import Pipeline

    pipeline = Pipeline(steps).fit(far, y)
    onchip.save(pipeline, tmp_path / "m.onnx")
    loaded = onchip.load_estimator(tmp_path / "m.onnx")
    np.testing.assert_allclose(loaded.predict_proba(far), pipeline.predict_proba(far), atol=2e-3)
    assert loaded.classes_.tolist() == [False, True]


def test_a_pipeline_before_a_network_that_scales_itself(tmp_path):
    """The network has an Add before its first Linear: the scaler cannot be folded into that."""
    far = X + np.float32([0, 300_000, 0])
    pipeline = make_pipeline(MaxAbsScaler(), onchip.Classifier(hidden=(6,), epochs=2, threads=1, scale=True)).fit(
        far, SUM > 0
    )
    onchip.save(pipeline, tmp_path / "m.onnx")
    loaded = onchip.load_estimator(tmp_path / "m.onnx")
    np.testing.assert_allclose(loaded.predict_proba(far), pipeline.predict_proba(far), atol=1e-2)


def test_columns_of_a_data_frame(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    pipeline = make_pipeline(StandardScaler(), onchip.Classifier(hidden=(6,), epochs=2, threads=1)).fit(frame, SUM > 0)
    onchip.save(pipeline, tmp_path / "m.onnx")
    assert onchip.load(tmp_path / "m.onnx").meaning.columns == ("a", "b", "c")
    loaded = onchip.load_estimator(tmp_path / "m.onnx")
    np.testing.assert_allclose(loaded.predict_proba(frame), pipeline.predict_proba(frame), atol=1e-4)


def test_files_of_onchip_train(cli, tmp_path):
    cities = ["x", "y"] * 30
    lines = [f"{city},{a},{'up' if s > 0 else 'down'}" for city, a, s in zip(cities, X[:, 1], SUM, strict=True)]
    (tmp_path / "t.csv").write_text("city,a,kind\n" + "\n".join(lines))
    assert cli("train", "mlp", "--data", "t.csv", "--labels", "kind", "--epochs", "1", "-o", "m.onnx").code == 0
    loaded = onchip.load_estimator(tmp_path / "m.onnx")
    assert loaded.classes_.tolist() == ["down", "up"]
    pandas = pytest.importorskip("pandas")
    assert set(loaded.predict(pandas.read_csv(tmp_path / "t.csv"))) <= {"down", "up"}


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(InputError, match="only onchip's estimators"):
        onchip.save(make_pipeline(StandardScaler(), LogisticRegression()).fit(X, SUM > 0), tmp_path / "m.onnx")
    pipeline = make_pipeline(PolynomialFeatures(), onchip.Classifier(hidden=(4,), epochs=1, scale=True)).fit(X, SUM > 0)
    with pytest.raises(InputError, match="PolynomialFeatures"):
        onchip.save(pipeline, tmp_path / "m.onnx")
    with pytest.raises(Exception, match="not fitted"):
        onchip.save(onchip.Classifier(), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", [
    {"estimator": "{"}, {"estimator": "[]"}, {"estimator": '{"parameters": 3}'}, {"estimator": '{"loss_curve": ["x"]}'},
    {"estimator": '{"labels": "int64"}'}, {"estimator": '{"labels": "nonsense"}'},
    {"estimator": '{"kind": "Classifier"}', "classes": ()},
])  # fmt: skip
def test_damaged_descriptions(tmp_path, change):
    net = classifier()[0].network_
    onchip.save(
        net.replace(meaning=replace(net.meaning, **{"classes": ("low", "high"), **change})), tmp_path / "m.onnx"
    )
    with pytest.raises(FormatError):
        onchip.load_estimator(tmp_path / "m.onnx")


def test_unknown_parameters_in_a_file_are_ignored(tmp_path):
    net = classifier()[0].network_
    estimator = json.dumps({"kind": "Classifier", "parameters": {"hidden": [6], "device": "cpu", "colour": "red"}})
    onchip.save(net.replace(meaning=replace(net.meaning, classes=("a", "b"), estimator=estimator)), tmp_path / "m.onnx")
    assert onchip.load_estimator(tmp_path / "m.onnx").hidden == (6,)


# -- spellings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "hint"), [
    ({"random_state": 3}, "seed=3"), ({"hidden_layer_sizes": (10,)}, "hidden=(10,)"), ({"max_iter": 9}, "epochs=9"),
    ({"verbose": True}, "history_"), ({"alpha": 0.1}, "weight_decay=0.1"), ({"epoch": 3}, "did you mean epochs?"),
    ({"learning_rate_init": 0.1}, "lr=0.1"), ({"zzzzz": 1}, "leave it out"),
])  # fmt: skip
def test_other_spellings_are_answered(given, hint):
    (name,) = given
    for call in (lambda: onchip.Classifier(**given), lambda: onchip.Regressor().set_params(**given)):
        with pytest.raises(InputError, match=f"has no parameter '{name}'") as caught:
            call()
        assert hint in caught.value.hint
    with pytest.raises(InputError, match=f"no parameter '{name}'"):
        GridSearchCV(onchip.Classifier(), {name: list(given.values())}, error_score="raise").fit(X, SUM > 0)


# -- skl2onnx ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [("low", "high"), (3, 7)])
def test_a_pipeline_through_skl2onnx(labels):
    skl2onnx = pytest.importorskip("skl2onnx")
    ort = pytest.importorskip("onnxruntime")
    from onchip.train.skl2onnx_converter import register

    register()
    y = np.array(labels)[(SUM > 0).astype(int)]
    pipeline = make_pipeline(PolynomialFeatures(), StandardScaler(), onchip.Classifier(hidden=(6,), epochs=2)).fit(X, y)
    model = skl2onnx.to_onnx(pipeline, X[:1], options={"zipmap": False})
    found, shares = ort.InferenceSession(model.SerializeToString()).run(None, {"X": X})
    np.testing.assert_array_equal(found, pipeline.predict(X))
    np.testing.assert_allclose(shares, pipeline.predict_proba(X), atol=1e-4)
    regressor = onchip.Regressor(hidden=(6,), epochs=2, scale=True).fit(X, SUM)
    model = skl2onnx.to_onnx(regressor, X[:1])
    (values,) = ort.InferenceSession(model.SerializeToString()).run(None, {"X": X})
    np.testing.assert_allclose(values.ravel(), regressor.predict(X), atol=1e-3)
