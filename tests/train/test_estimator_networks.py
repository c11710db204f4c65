"""Classifier and Regressor with `network=`: any network, from its weights, by scikit-learn's conventions."""

import copy
import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import onchip
from checks import rows
from onchip.errors import FormatError, InputError, ShapeError
from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Linear, ReLU
from onchip.network.types import TensorType
from row_steps import images, sentences, weight

N = 48
NAMES = np.array(["ash", "beech", "elm"])
OPTIONS = {"lr": 0.05, "epochs": 3, "batch_size": 16, "threads": 1, "device": "cpu"}


def pictures():
    x = rows(N, 3 * 8 * 8).reshape(N, 3, 8, 8)
    return x, NAMES[np.arange(N) % 3]


def classifier(network=None, **options) -> onchip.Classifier:
    return onchip.Classifier(network=images() if network is None else network, **OPTIONS | options)


def regressor(network=None, **options) -> onchip.Regressor:
    return onchip.Regressor(network=images() if network is None else network, **OPTIONS | options)


def assert_same_network(a, b):
    assert a.weights.keys() == b.weights.keys()
    for name, w in a.weights.items():
        assert np.array_equal(w, b.weights[name]), name


def test_a_classifier_trains_the_network_from_its_weights():
    x, y = pictures()
    net = images()
    before = {name: w.copy() for name, w in net.weights.items()}
    clf = classifier(net).fit(x, y)
    result = onchip.fit(net, x, np.searchsorted(NAMES, y), **OPTIONS)
    assert_same_network(clf.network_, result.network)
    assert clf.loss_curve_ == list(result.epoch_losses)
    assert all(np.array_equal(w, net.weights[name]) for name, w in before.items())  # the given one does not change
    logits = onchip.compile(clf.network_, "cpu")(x)
    assert np.array_equal(clf.predict(x), NAMES[logits.argmax(axis=1)])
    assert clf.predict_proba(x).shape == (N, 3)
    again = clf.fit(x, y).network_
    assert_same_network(again, result.network)  # fit starts over


def test_rows_are_flat_or_of_the_shape_of_the_input():
    x, y = pictures()
    clf = classifier().fit(x, y)
    flat = classifier().fit(x.reshape(N, -1), y)
    assert_same_network(clf.network_, flat.network_)
    assert clf.n_features_in_ == flat.n_features_in_ == 192
    for given in (x, x.reshape(N, -1), x.tolist(), x.astype(np.float64)):
        assert np.array_equal(flat.predict_proba(given), clf.predict_proba(x))
    wrong = np.moveaxis(x, 1, 3)
    for call in (lambda: clf.predict(wrong), lambda: classifier().fit(wrong, y)):
        with pytest.raises(ShapeError, match=r"got: +\[48, 8, 8, 3\]\n.*\[n, 3, 8, 8\] or \[n, 192\]"):
            call()
    with pytest.raises(ShapeError, match=r"5 values per row\n.*192: it reads float32\[B, 3, 8, 8\]"):
        classifier().fit(x.reshape(N, -1)[:, :5], y)
    with pytest.raises(ValueError, match="expecting 192 features"):
        clf.predict(x.reshape(N, -1)[:, :5])


def test_ids():
    x, y = np.arange(5 * N).reshape(N, 5) % 11, NAMES[np.arange(N) % 3]
    clf = classifier(sentences()).fit(x, y)
    truth = onchip.fit(sentences(), x, np.arange(N) % 3, **OPTIONS)
    assert_same_network(clf.network_, truth.network)
    for other in (x.astype(np.int32), x.astype(np.uint8), x.astype(np.float64)):
        assert_same_network(classifier(sentences()).fit(other, y).network_, truth.network)
        assert np.array_equal(clf.predict_proba(other), clf.predict_proba(x))
    with pytest.raises(InputError, match=r"the rows are not ids\n +got: +0.5 in row 0"):
        clf.predict(x + 0.5)
    with pytest.raises(InputError, match="id 11"):
        classifier(sentences()).fit(x + 1, y)
    passes = classifier(sentences()).partial_fit(x, y, classes=NAMES).partial_fit(x, y)
    assert_same_network(passes.network_, classifier(sentences(), epochs=2).fit(x, y).network_)


@pytest.mark.parametrize("suffix", [".onnx", ".safetensors"])
def test_the_path_of_a_file(tmp_path, suffix):
    x, y = pictures()
    onchip.save(images(), tmp_path / f"net{suffix}")
    for path in (tmp_path / f"net{suffix}", str(tmp_path / f"net{suffix}")):
        clf = clone(classifier(path))
        assert clf.get_params()["network"] == path
        assert clf.fit(x, y).loss_curve_ == classifier().fit(x, y).loss_curve_


def test_a_regressor():
    x, _ = pictures()
    y = x.reshape(N, -1)[:, :3].astype(np.float64)
    reg = regressor(optimiser="adam", lr=0.01).fit(x, y)
    result = onchip.fit(images(), x, y.astype("f4"), loss="mse", optimiser="adam", **OPTIONS | {"lr": 0.01})
    assert_same_network(reg.network_, result.network)
    assert reg.predict(x).shape == (N, 3)
    one = regressor(mlp(6, 4, 1)).fit(rows(N, 6), rows(N, 1)[:, 0])
    assert one.predict(rows(N, 6)).shape == (N,)
    with pytest.raises(ShapeError, match=r"do not fit y\n +got: +3: float32\[B, 3\]\n +expected: +1: one per target"):
        regressor().fit(x, y[:, 0])


# -- conventions -----------------------------------------------------------------------------------------------


def test_parameters_clones_and_pickles():
    x, y = pictures()
    net, other = images(), images()
    clf = classifier(net)
    assert clf.get_params()["network"] is net
    assert clf.set_params(network=other).network is other
    copied = clone(clf)
    assert_same_network(copied.network, net)
    with pytest.raises(NotFittedError):
        copied.predict(x)
    clf.fit(x, y)
    for made in (copy.deepcopy(clf), pickle.loads(pickle.dumps(clf))):
        assert np.array_equal(made.predict_proba(x), clf.predict_proba(x))
        assert_same_network(made.fit(x, y).network_, clf.network_)


def test_in_a_grid_search_a_cross_validation_and_a_pipeline():
    x, y = pictures()
    search = GridSearchCV(classifier(epochs=1), {"lr": [1e-4, 0.1]}, cv=2).fit(x, y)
    assert search.best_estimator_.network_.output == images().output
    assert cross_val_score(classifier(epochs=1), x, y, cv=2).shape == (2,)
    pipe = make_pipeline(StandardScaler(), classifier(epochs=1)).fit(x.reshape(N, -1), y)
    assert pipe.predict(x.reshape(N, -1)).shape == (N,)


@pytest.mark.parametrize("options", [{}, {"optimiser": "adam", "lr": 0.01}], ids=str)
def test_passes_over_the_same_rows_are_the_epochs_of_fit(options):
    """Also with running statistics and dropouts."""
    x, y = pictures()
    whole = classifier(epochs=3, **options).fit(x, y)
    parts = classifier(**options)
    for _ in range(3):
        parts = pickle.loads(pickle.dumps(parts.partial_fit(x, y, classes=NAMES)))
    assert_same_network(parts.network_, whole.network_)
    assert parts.loss_curve_ == whole.loss_curve_
    assert_same_network(whole.partial_fit(x, y).network_, classifier(epochs=4, **options).fit(x, y).network_)


def test_fit_many_is_each_alone():
    x, y = pictures()
    grid = {"lr": [0.01, 0.1]}
    many = onchip.fit_many(classifier(), x, y, grid=grid, folds=KFold(2))
    search = GridSearchCV(classifier(), grid, cv=KFold(2)).fit(x, y)
    assert many.best_params == search.best_params_
    assert [setting.mean for setting in many.settings] == list(search.cv_results_["mean_test_score"])
    assert_same_network(many.best.network_, search.best_estimator_.network_)
    alone = classifier(lr=0.1).fit(x[N // 2 :], y[N // 2 :])
    assert_same_network(many.settings[1].estimators[0].network_, alone.network_)


def test_fit_many_over_networks():
    x, y = rows(N, 6), NAMES[np.arange(N) % 3]
    nets = [mlp(6, 3), mlp(6, 5, 3)]
    many = onchip.fit_many(onchip.Classifier(**OPTIONS), x, y, grid={"network": nets, "scale": [False, True]})
    for setting in many.settings:
        alone = onchip.Classifier(**OPTIONS, **setting.params).fit(x, y)
        assert_same_network(setting.estimators[0].network_, alone.network_)
    with pytest.raises(ShapeError, match="need different data"):
        onchip.fit_many(onchip.Classifier(**OPTIONS), x, y, grid={"network": [mlp(6, 3), images()]})


# -- scales ----------------------------------------------------------------------------------------------------


def test_scale_is_folded_if_linears_are_at_the_ends(tmp_path):
    x, y = rows(N, 6) * np.float32([1, 100, 1, 1, 1e4, 1]) + 7, NAMES[np.arange(N) % 3]
    net = mlp(6, 8, 3, seed=4)
    clf = classifier(net, scale=True).fit(x, y)
    onchip.save(clf.network_, tmp_path / "net.onnx")
    logits = onchip.compile(tmp_path / "net.onnx", "cpu")(x)  # raw rows
    assert np.array_equal(NAMES[logits.argmax(axis=1)], clf.predict(x))
    further = classifier(tmp_path / "net.onnx", scale=True, lr=1e-9).fit(x, y)
    assert further.loss_curve_[0] == pytest.approx(further.loss_curve_[-1], rel=1e-4)
    assert further.loss_curve_[0] < clf.loss_curve_[0]
    reg = regressor(mlp(6, 8, 1), scale=True).fit(x, x[:, 0] * 1e6)
    assert reg.predict(x).std() > 1e4
    passes = classifier(net, scale=True)
    for _ in range(3):
        passes.partial_fit(x, y, classes=NAMES)
    assert_same_network(passes.network_, clf.network_)
    with pytest.warns(UserWarning, match="range from"):
        classifier(net, lr=1e-9).fit(x, y)
    pixels = pictures()[0] * np.float32(10) ** np.arange(-4, 4)
    classifier().fit(pixels, y)  # no warning where scale=True would be refused
    with pytest.raises(InputError, match=r"cannot be scaled\n.*the first layer is 'c' \(Conv2d\)"):
        classifier(scale=True).fit(pixels, y)


# -- errors ----------------------------------------------------------------------------------------------------

TWO = Network(
    {"x": TensorType(("B", 6)), "z": TensorType(("B", 6))},
    (Node("s", Add(), ("x", "z")), Node("y", Linear(), ("s",), {"weight": "w"})), ("y",), {"w": weight(3, 6)},
)  # fmt: skip


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"network": mlp(6, 4)}, ShapeError, r"got: +4: float32\[B, 4\]\n +expected: +3: one per class, ash, beech, elm"),
    ({"network": mlp(6, 3), "hidden": (8,)}, InputError, r"network and hidden\n(.|\n)*omit hidden"),
    ({"network": mlp(6, 3), "activation": "Tanh"}, InputError, "network and activation"),
    ({"network": TWO}, InputError, r"has 2 inputs\n +got: +x, z"),
    ({"network": sequential(TensorType(("B", 6)), [("r", ReLU())], {})}, InputError, "nothing to train"),
    ({"network": "none.onnx"}, FormatError, "No such file"),
    ({"network": "digits"}, InputError, "unknown format"),
    ({"network": 7}, InputError, r"not a network\n +got: +int"),
    ({"network": mlp(6, 3, output="Softmax")}, InputError, "expects logits"),
])  # fmt: skip
def test_bad_networks_are_refused_by_fit(options, error, words):
    x, y = rows(N, 6), NAMES[np.arange(N) % 3]
    with pytest.raises(error, match=words):
        onchip.Classifier(**options).fit(x, y)
