"""Classifier and Regressor: scikit-learn's own checks, its tools, and onchip's own guarantees."""

import copy
import pickle

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import onchip
from checks import rows
from onchip.errors import InputError, KernelError, ShapeError

# Checks of scikit-learn's that are expected to fail, with the reason, as its own MLPs have it. Two are skipped by
# scikit-learn itself: array API input (unless SCIPY_ARRAY_API is set) and data frames (where pandas is not installed).
EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "rows that are repeated fall into other batches; float32 rounds"
}


@parametrize_with_checks(
    [
        onchip.Classifier(hidden=(16,), epochs=20, threads=1),
        onchip.Regressor(hidden=(16,), epochs=20, threads=1),
        onchip.Regressor(hidden=(16,), epochs=20, threads=1, scale=True),
    ],
    expected_failed_checks=lambda estimator: EXPECTED_FAILURES,
)
def test_scikit_learn_conventions(estimator, check):
    check(estimator)


def classes(n: int = 300, D: int = 7, seed: int = 1):
    """Rows and separable labels: the index of the largest of the first three values."""
    x = rows(n, D, seed=seed)
    return x, np.array(["ash", "beech", "elm"])[x[:, :3].argmax(axis=1)]


def numbers(n: int = 300, D: int = 5, seed: int = 1):
    x = rows(n, D, seed=seed)
    return x, x @ np.array([1.0, -2.0, 0.5, 0.0, 1.0]) + np.maximum(x[:, 0], 0)


def classifier(**options) -> onchip.Classifier:
    return onchip.Classifier(**{"hidden": (24,), "lr": 0.1, "epochs": 30, "batch_size": 32, "threads": 1} | options)


def regressor(**options) -> onchip.Regressor:
    return onchip.Regressor(**{"hidden": (24,), "epochs": 40, "batch_size": 32, "threads": 1} | options)


def assert_same_network(a, b):
    assert a.weights.keys() == b.weights.keys()
    for name, w in a.weights.items():
        assert np.array_equal(w, b.weights[name]), name


# -- what they learn ---------------------------------------------------------------------------------------


def test_a_classifier_learns_labels_of_any_type():
    (x, y), (x_test, y_test) = classes(), classes(seed=2)
    clf = classifier().fit(x, y)
    assert clf.score(x_test, y_test) > 0.85
    assert list(clf.classes_) == ["ash", "beech", "elm"]
    assert set(clf.predict(x_test)) == set(clf.classes_)
    numbered = classifier().fit(x, np.searchsorted(clf.classes_, y) * 10 - 3)
    assert_same_network(clf.network_, numbered.network_)
    assert set(numbered.predict(x)) == {-3, 7, 17}


def test_probabilities_are_the_softmax_of_the_network():
    x, y = classes()
    clf = classifier().fit(x, y)
    logits = onchip.compile(clf.network_, device="cpu")(x).astype(np.float64)
    shares = clf.predict_proba(x)
    assert np.allclose(shares, np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), rtol=1e-12)
    assert np.array_equal(clf.classes_[shares.argmax(axis=1)], clf.predict(x))
    assert np.array_equal(clf.predict_proba(x[5:6]), shares[5:6])  # a row's bits do not depend on its batch


def test_one_class_is_always_predicted():
    x, _ = classes(20)
    clf = classifier(epochs=2).fit(x, ["only"] * 20)
    assert set(clf.predict(rows(9, 7, seed=5))) == {"only"}
    assert np.array_equal(clf.predict_proba(x), np.ones((20, 1)))


@pytest.mark.parametrize("loss", ["mse", "half_sse", "mae", "huber"])
def test_a_regressor_learns(loss):
    (x, y), (x_test, y_test) = numbers(), numbers(seed=2)
    options = {"optimiser": "sgd", "lr": 1e-3} if loss == "half_sse" else {}
    reg = regressor(loss=loss, **options).fit(x, y)
    assert reg.score(x_test, y_test) > 0.95
    assert reg.loss_curve_[-1] < (0.1 if loss in ("mse", "half_sse") else 0.3) * reg.loss_curve_[0]


def test_predictions_have_the_shape_of_y():
    x, y = numbers(60)
    flat, column = regressor().fit(x, y), regressor().fit(x, y[:, None])
    assert flat.predict(x).shape == (60,)
    assert column.predict(x).shape == (60, 1)
    assert np.array_equal(flat.predict(x), column.predict(x)[:, 0])
    both = regressor(epochs=60).fit(x, np.stack([y, -y], axis=1))
    assert both.predict(x).shape == (60, 2)
    assert both.score(x, np.stack([y, -y], axis=1)) > 0.9


def test_fitted_attributes():
    x, y = classes()
    clf = classifier(validation=0.2, patience=3, epochs=50, optimiser="adam", lr=0.05).fit(x, y)
    assert clf.n_features_in_ == 7
    assert clf.n_iter_ == len(clf.history_) == len(clf.loss_curve_) <= 50
    assert clf.loss_curve_ == [epoch.loss for epoch in clf.history_]
    assert all(epoch.validation_accuracy is not None for epoch in clf.history_)
    assert not hasattr(clf, "feature_names_in_")


def test_the_same_bits_whatever_the_dtype_and_the_layout():
    x, y = classes()
    truth = classifier(epochs=3).fit(x, y)
    for other in (x.astype(np.float64), np.asfortranarray(x), x.tolist(), np.repeat(x, 2, axis=1)[:, ::2]):
        assert_same_network(classifier(epochs=3).fit(other, y).network_, truth.network_)
        assert np.array_equal(truth.predict_proba(other), truth.predict_proba(x))


def test_fit_is_train_fit():
    """The estimator adds nothing to the run: mlp's first weights, fit's options."""
    x, y = numbers()
    reg = regressor(optimiser="sgd", lr=0.01, momentum=0.5, schedule="cosine", weight_decay=1e-3, seed=4).fit(x, y)
    result = onchip.fit(
        onchip.mlp(5, 24, 1, seed=4), x, y.astype(np.float32)[:, None], loss="mse", lr=0.01, momentum=0.5,
        schedule="cosine", weight_decay=1e-3, seed=4, epochs=40, batch_size=32, device="cpu", threads=1,
    )  # fmt: skip
    assert_same_network(reg.network_, result.network)
    assert reg.loss_curve_ == list(result.epoch_losses)


def test_weights_of_rows_are_those_of_train_fit():
    x, y = classes()
    weights = np.linspace(0, 2, len(x))
    clf = classifier(epochs=3, class_weight={"elm": 4}, label_smoothing=0.1, clip_norm=0.5).fit(x, y, weights)
    of_class = np.where(y == "elm", 4, 1)
    alone = classifier(epochs=3, label_smoothing=0.1, clip_norm=0.5).fit(x, y, sample_weight=weights * of_class)
    assert_same_network(clf.network_, alone.network_)
    passes = classifier(class_weight=[1, 1, 4], label_smoothing=0.1, clip_norm=0.5)
    for _ in range(3):
        passes.partial_fit(x, y, classes=clf.classes_, sample_weight=weights)
    assert_same_network(clf.network_, passes.network_)
    with pytest.raises(InputError, match="unknown class"):
        classifier(class_weight={"oak": 1}).fit(x, y)


def test_balanced_classes_find_the_rare_one():
    x = rows(400, 5)
    y = (x[:, 0] > 1.6).astype(int)  # one row in twenty
    plain, balanced = (classifier(epochs=6, class_weight=weight).fit(x, y) for weight in (None, "balanced"))
    assert balanced.predict(x)[y == 1].mean() > plain.predict(x)[y == 1].mean()


def test_early_stopping_holds_rows_back():
    x, y = classes()
    clf = classifier(early_stopping=True, epochs=200, lr=0.5).fit(x, y)
    assert clf.history_[0].validation_loss is not None
    assert clf.n_iter_ < 200
    same = classifier(validation=0.1, patience=10, epochs=200, lr=0.5).fit(x, y)
    assert_same_network(clf.network_, same.network_)


def test_numpy_scalars_are_numbers():
    x, y = classes(50)
    given = classifier(
        lr=np.float32(0.25), epochs=np.int64(2), seed=np.int32(3), shuffle=np.bool_(True), hidden=np.array([8, 8])
    )
    assert_same_network(
        given.fit(x, y).network_, classifier(lr=0.25, epochs=2, seed=3, hidden=(8, 8)).fit(x, y).network_
    )


# -- scales ------------------------------------------------------------------------------------------------


def raw(x):
    """Columns of very different units, one of them far from 0, one constant."""
    return np.column_stack([x * np.float32(10) ** np.arange(-3, x.shape[1] - 3), x[:, 0] + 2e4, np.full(len(x), 7)])


def test_columns_that_are_far_apart_are_warned_of():
    x, y = classes(60)
    with pytest.warns(UserWarning, match=r"Classifier\(scale=True\)") as caught:
        classifier(epochs=1).fit(raw(x), y)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="range from") as caught:
        classifier(epochs=1).partial_fit(raw(x), y, classes=["ash", "beech", "elm"])
    assert caught[0].filename == __file__
    x, y = numbers(60)
    with pytest.warns(UserWarning, match="columns and targets range from"):
        regressor(epochs=1).fit(x, y * 1e5)
    regressor(epochs=1).fit(np.column_stack([x * 100, np.zeros(60)]), y)  # a column of zeros has no scale
    classifier(epochs=1, scale=True).fit(raw(x), np.arange(60) % 2)  # no warning with scale=True


def test_scaled_networks_read_raw_rows():
    (x, y), (x_test, y_test) = classes(), classes(seed=2)
    clf = classifier(scale=True, epochs=60).fit(raw(x), y)
    assert clf.score(raw(x_test), y_test) > 0.8
    logits = onchip.compile(clf.network_, "cpu")(raw(x_test).astype(np.float32))
    assert np.array_equal(clf.classes_[logits.argmax(axis=1)], clf.predict(raw(x_test)))
    assert np.array_equal(pickle.loads(pickle.dumps(clf)).predict_proba(raw(x)), clf.predict_proba(raw(x)))
    (x, y), (x_test, y_test) = numbers(), numbers(seed=2)
    reg = regressor(scale=True).fit(raw(x), y * 1e6 - 3e6)
    assert reg.score(raw(x_test), y_test * 1e6 - 3e6) > 0.9
    both = regressor(scale=True).fit(raw(x), np.stack([y * 1e6, y + 1e3], axis=1))
    assert both.score(raw(x_test), np.stack([y_test * 1e6, y_test + 1e3], axis=1)) > 0.9


def test_scale_is_a_standard_scaler_before_it():
    (x, y), (x_test, _) = classes(), classes(seed=2)
    inside, outside = classifier(scale=True), make_pipeline(StandardScaler(), classifier())
    shares = (model.fit(raw(x).astype(np.float32), y).predict_proba(raw(x_test)) for model in (inside, outside))
    np.testing.assert_allclose(*shares, atol=1e-3)


def test_scale_in_a_pipeline_a_grid_search_and_clones():
    x, y = classes(150)
    assert clone(classifier(scale=True)).get_params()["scale"] is True
    assert classifier().get_params()["scale"] is False
    pipe = make_pipeline("passthrough", classifier(epochs=15))
    with pytest.warns(UserWarning, match="range from"):
        search = GridSearchCV(pipe, {"classifier__scale": [False, True]}, cv=3).fit(raw(x), y)
    assert search.best_params_ == {"classifier__scale": True}
    with pytest.raises(InputError, match="bad scale"):
        classifier(scale="yes").fit(x, y)


def test_passes_share_the_scale_of_the_first():
    x, y = numbers(101)
    whole, parts = regressor(scale=True, epochs=3).fit(raw(x), y * 1e4), regressor(scale=True)
    for _ in range(3):
        parts = pickle.loads(pickle.dumps(parts.partial_fit(raw(x), y * 1e4)))
    assert_same_network(parts.network_, whole.network_)
    assert parts.loss_curve_ == whole.loss_curve_


# -- partial_fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "lr": 0.01}, {"optimiser": "adam", "lr": 0.01}], ids=str)
def test_passes_over_the_same_rows_are_the_epochs_of_fit(options):
    x, y = classes(101)
    whole = classifier(epochs=4, **options).fit(x, y)
    parts = classifier(schedule="cosine", warmup=2, ema=0.9, **options)  # these are for fit
    for _ in range(4):
        parts.partial_fit(x, y, classes=["elm", "ash", "beech"])
        parts = pickle.loads(pickle.dumps(parts))  # the optimiser's state is pickled too
    assert_same_network(parts.network_, whole.network_)
    assert parts.loss_curve_ == whole.loss_curve_
    assert parts.n_iter_ == 4
    assert [epoch.epoch for epoch in parts.history_] == [1, 2, 3, 4]


def test_a_pass_after_a_fit_with_averages_continues_from_them():
    x, y = classes(101)
    clf = classifier(ema=0.5, momentum=0.5, epochs=2).fit(x, y)
    averages = clf.network_
    clf.set_params(lr=1e-30).partial_fit(x, y)  # changes no bit
    assert_same_network(clf.network_, averages)


def test_partial_fit_learns_from_rows_that_come_bit_by_bit():
    clf, reg = classifier(), regressor()
    for seed in range(1, 31):
        x, y = classes(97, seed=seed)
        clf.partial_fit(x, y, classes=["ash", "beech", "elm"] if seed == 1 else None)
        reg.partial_fit(*numbers(97, seed=seed))
    assert clf.score(*classes(seed=99)) > 0.85
    assert reg.score(*numbers(seed=99)) > 0.9


def test_partial_fit_continues_a_fit_and_fit_starts_over():
    x, y = numbers()
    reg = regressor(epochs=2).fit(x, y)
    first = reg.network_
    reg.partial_fit(x, y)
    assert_same_network(reg.network_, regressor(epochs=3).fit(x, y).network_)
    assert_same_network(reg.fit(x, y).network_, first)
    assert reg.n_iter_ == 2


def test_bad_partial_fits_are_refused():
    x, y = classes()
    with pytest.raises(InputError, match="first partial_fit needs classes"):
        classifier().partial_fit(x, y)
    with pytest.raises(InputError, match=r"not one of the classes(.|\n)*'ash'"):
        classifier().partial_fit(x, y, classes=["beech", "elm", "oak"])
    clf = classifier().partial_fit(x, y, classes=["ash", "beech", "elm"])
    with pytest.raises(InputError, match="classes have changed"):
        clf.partial_fit(x, y, classes=["ash", "beech"])
    with pytest.raises(InputError, match="zelkova"):  # sorts after the last class
        clf.partial_fit(x[:1], ["zelkova"])
    with pytest.raises(ValueError, match="expecting 7 features"):
        clf.partial_fit(x[:, :5], y)


# -- tools -------------------------------------------------------------------------------------------------


def test_in_a_pipeline_a_grid_search_and_a_cross_validation():
    x, y = classes(150)
    pipe = make_pipeline(StandardScaler(), classifier(epochs=15))
    search = GridSearchCV(pipe, {"classifier__hidden": [(), (16,)], "classifier__lr": [1e-4, 0.1]}, cv=3).fit(
        x * 100 + 50, y
    )
    assert search.best_params_["classifier__lr"] == 0.1
    assert search.score(x * 100 + 50, y) > 0.85
    x, y = numbers()
    scaled = TransformedTargetRegressor(regressor(), transformer=StandardScaler())
    assert cross_val_score(make_pipeline(StandardScaler(), scaled), x * 30 + 7, y * 1000 - 20, cv=3).min() > 0.9


def test_data_frames_bring_their_names():
    pandas = pytest.importorskip("pandas")
    x, y = classes()
    names = [f"length {i}" for i in range(7)]
    frame = pandas.DataFrame(x.astype(np.float64), columns=names)
    frame["length 6"] = frame["length 6"].round().astype("int64")
    clf = classifier(epochs=2).fit(frame, pandas.Series(y, name="tree"))
    assert list(clf.feature_names_in_) == names
    assert_same_network(clf.network_, classifier(epochs=2).fit(frame.to_numpy(), y).network_)
    with pytest.raises(ValueError, match="feature names should match"):
        clf.predict(frame.rename(columns={"length 0": "width"}))


def test_the_network_runs_in_onnxruntime_with_equal_predictions(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")

    def run(net, x):
        onchip.save(net, tmp_path / "net.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
        return session.run(None, {session.get_inputs()[0].name: x})[0]

    (x, y), (x_test, _) = classes(), classes(1000, seed=2)
    clf = classifier(hidden=(32, 16), activation="tanh").fit(x, y)
    assert np.array_equal(clf.classes_[run(clf.network_, x_test).argmax(axis=1)], clf.predict(x_test))
    (x, y), (x_test, _) = numbers(), numbers(1000, seed=2)
    reg = regressor().fit(x, y)
    assert np.allclose(run(reg.network_, x_test)[:, 0], reg.predict(x_test), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_copies_predict_the_same_and_carry_no_engine(copied):
    x, y = classes()
    clf = classifier().fit(x, y)
    other = copied(clf)
    assert "_compiled" not in vars(other)
    assert np.array_equal(other.predict_proba(x), clf.predict_proba(x))
    assert_same_network(other.network_, clf.network_)
    assert str(other.network_) == str(clf.network_)
    with pytest.raises(ValueError, match="read-only"):
        other.network_.weights["fc1.weight"][0, 0] = 1
    with pytest.raises(NotFittedError):
        clone(other).predict(x)


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (classifier, {"hidden": 64}, "bad hidden"),
        (classifier, {"hidden": (8, 1.5)}, "bad hidden"),
        (classifier, {"hidden": (8, 0)}, "bad widths"),
        (classifier, {"activation": "Tahn"}, "did you mean Tanh"),
        (classifier, {"optimiser": "lbfgs"}, "unknown optimiser"),
        (classifier, {"lr": 0}, "learning rate"),
        (classifier, {"epochs": 2.5}, "epochs"),
        (classifier, {"patience": 2}, "patience needs validation rows"),
        (classifier, {"validation": 0.999}, "no rows left to train on"),
        (regressor, {"loss": "cross_entropy"}, "loss of a regressor"),
        (regressor, {"momentum": 0.9}, "momentum is for sgd"),
        (regressor, {"device": "cpu", "threads": 10_000}, "threads"),
    ],
)
def test_bad_parameters_are_refused_by_fit(make, options, message):
    estimator = make(**options)
    with pytest.raises(InputError, match=message):
        estimator.fit(rows(20, 3), np.arange(20) % 2)
    with pytest.raises(NotFittedError):
        estimator.predict(rows(20, 3))


def test_bad_data_is_refused():
    x, y = numbers()
    with pytest.raises(TypeError, match="Sparse data was passed"):
        regressor().fit(csr_array(x), y)
    with pytest.raises(ValueError, match="Input X contains NaN"):
        regressor().fit(np.where(x > 2, np.nan, x), y)
    with pytest.raises(ValueError, match=r"y contains infinity or a value too large"), np.errstate(all="ignore"):
        regressor().fit(x, y * 1e300)
    with pytest.raises(ValueError, match="Unknown label type"):
        classifier().fit(x, y)
    reg = regressor(epochs=1).fit(x, y)
    with pytest.raises(ValueError, match="expecting 5 features"):
        reg.predict(x[:, :4])
    with pytest.raises(ShapeError, match="targets do not fit"):
        reg.partial_fit(x, np.stack([y, y], axis=1))


def test_a_run_that_diverges_is_an_error():
    x, y = numbers()
    with pytest.raises(KernelError, match="diverged"), np.errstate(all="ignore"):
        regressor(optimiser="sgd", lr=1e20).fit(x, y)


def test_a_fit_that_fails_leaves_nothing_to_predict_with():
    x = rows(60, 5)
    clf = onchip.Classifier(hidden=(), epochs=1).fit(x, np.arange(60) % 3)
    with pytest.raises(KernelError):
        clf.set_params(lr=1e30).fit(x * np.float32(1e18), np.arange(60) % 2)
    with pytest.raises(NotFittedError):
        clf.predict(x)


def test_another_optimiser_between_passes_is_refused():
    x, y = rows(30, 4), np.arange(30) % 2
    clf = onchip.Classifier(hidden=(5,)).partial_fit(x, y, classes=[0, 1])
    for change in ({"momentum": 0.9}, {"optimiser": "adam"}):
        with pytest.raises(InputError, match="optimiser has changed"):
            copy.deepcopy(clf).set_params(**change).partial_fit(x, y)
    clf.set_params(lr=0.1).partial_fit(x, y)
    assert clf.n_iter_ == 2
