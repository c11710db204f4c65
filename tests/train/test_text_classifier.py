"""TextClassifier: strings in, labels out, by scikit-learn's conventions; its files keep vocabulary and labels."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import onchip
from onchip.errors import InputError, ShapeError
from onchip.network.build import mlp
from onchip.text.vocabulary import Vocabulary
from text_data import labelled

TEXTS, LABELS = labelled(120)
SMALL = {"embedding": 8, "channels": 6, "epochs": 8, "lr": 0.03, "validation": 0, "patience": 0, "device": "cpu"}


def classifier(**options):
    return onchip.TextClassifier(**{**SMALL, **options})


@pytest.fixture(scope="module")
def fitted():
    return classifier().fit(TEXTS, LABELS)


def test_it_learns(fitted):
    texts, labels = labelled(40, seed=5)
    assert fitted.score(texts, labels) == 1
    shares = fitted.predict_proba(texts)
    assert shares.shape == (40, 2)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert fitted.classes_.tolist() == ["negative", "positive"]
    assert fitted.n_iter_ == len(fitted.history_) == 8
    assert fitted.network_.meaning.words == Vocabulary.of(TEXTS, 50_000, 2).words


def test_a_file_predicts_strings(fitted, tmp_path):
    onchip.save(fitted.network_, tmp_path / "texts.onnx")
    loaded = onchip.TextClassifier.load(tmp_path / "texts.onnx", device="cpu")
    np.testing.assert_array_equal(loaded.predict(TEXTS), fitted.predict(TEXTS))
    np.testing.assert_array_equal(loaded.predict_proba(TEXTS), fitted.predict_proba(TEXTS))
    np.testing.assert_array_equal(
        onchip.TextClassifier.load(fitted.network_).predict(TEXTS[:3]), fitted.predict(TEXTS[:3])
    )
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(TEXTS), fitted.predict_proba(TEXTS))


def test_the_shipped_model():
    clf = onchip.TextClassifier.load("sentiment", device="cpu")
    assert clf.predict(["a waste of time", "a moving and wonderful film"]).tolist() == ["negative", "positive"]


def test_texts_in_other_containers(fitted):
    expected = fitted.predict_proba(TEXTS)
    for given in (tuple(TEXTS), np.array(TEXTS), np.array(TEXTS, object), np.array(TEXTS).reshape(-1, 1)):
        np.testing.assert_array_equal(fitted.predict_proba(given), expected)
    pandas = pytest.importorskip("pandas")
    np.testing.assert_array_equal(fitted.predict_proba(pandas.Series(TEXTS)), expected)
    assert fitted.predict([]).shape == (0,)
    assert fitted.predict([""]).shape == (1,)


def test_scikit_learn_conventions(fitted):
    clf = classifier(channels=3, length=9)
    assert clone(clf).get_params() == clf.get_params()
    assert not {"hidden", "activation", "network", "scale"} & set(clf.get_params())
    with pytest.raises(NotFittedError):
        clf.predict(TEXTS)
    assert not hasattr(clf, "partial_fit")
    assert clf.fit(TEXTS, LABELS).network_.input.row_size == 9
    same = classifier().fit(TEXTS, LABELS).network_
    assert all(np.array_equal(w, fitted.network_.weights[name]) for name, w in same.weights.items())
    assert cross_val_score(classifier(), TEXTS, LABELS, cv=3).mean() > 0.9
    pipeline = make_pipeline(FunctionTransformer(lambda texts: [text.upper() for text in texts]), classifier())
    assert pipeline.fit(TEXTS, LABELS).score(TEXTS, LABELS) == 1
    search = GridSearchCV(classifier(), {"channels": [2, 6]}, cv=2).fit(TEXTS, LABELS)
    assert search.best_score_ > 0.8


def test_labels_of_any_type():
    numbers = np.array([7 if label == "negative" else -1 for label in LABELS])
    clf = classifier(class_weight={7: 2.0}).fit(TEXTS, numbers)
    assert clf.score(TEXTS, numbers) == 1
    assert clf.network_.meaning.classes == ("-1", "7")
    assert set(classifier(epochs=1).fit(TEXTS[:5], ["one"] * 5).predict(TEXTS)) == {"one"}


@pytest.mark.parametrize("X", ["a text", 3, None])
def test_what_is_no_list_of_texts(X):
    with pytest.raises(ShapeError, match="not a list of texts"):
        classifier().fit(X, ["a"])


def test_bad_input(fitted):
    with pytest.raises(InputError, match="not a text"):
        classifier().fit(["a", 3], [0, 1])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        classifier().fit(TEXTS, LABELS[:-1])
    with pytest.raises(ValueError, match="minimum of 1"):
        classifier().fit([], [])
    with pytest.raises(InputError, match="bad length"):
        classifier(length=2).fit(TEXTS, LABELS)
    with pytest.raises(InputError, match="bad kernels"):
        classifier(kernels=()).fit(TEXTS, LABELS)
    with pytest.raises(InputError, match="reads no texts"):
        onchip.TextClassifier.load(mlp(3, 2))
    unlabelled = fitted.network_.replace(meaning=replace(fitted.network_.meaning, classes=()))
    with pytest.raises(InputError, match="no labels"):
        onchip.TextClassifier.load(unlabelled)
