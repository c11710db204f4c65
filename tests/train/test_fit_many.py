"""fit_many: the bits and scores of GridSearchCV and cross_val_score, on one copy of the data."""

import numpy as np
import pytest
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import onchip
from checks import rows
from onchip.errors import InputError, KernelError
from onchip.train import grid as grid_module


def classes(n: int = 151, D: int = 7):
    x = rows(n, D)
    return x, np.array(["ash", "beech", "elm"])[x[:, :3].argmax(axis=1)]


def numbers(n: int = 151, D: int = 5):
    x = rows(n, D).astype(np.float64)
    return x, x.sum(axis=1) + np.random.default_rng(3).standard_normal(n)


CASES = {
    "classes": (
        onchip.Classifier(hidden=(12,), epochs=6, threads=1),
        classes,
        {"lr": [0.01, 0.1], "hidden": [(), (9, 5)]},
    ),
    "numbers": (
        onchip.Regressor(epochs=6, hidden=(12,), threads=1),
        numbers,
        [{"activation": ["Tanh"], "seed": np.arange(2)}, {"optimiser": ["sgd"], "batch_size": [16, 500], "lr": [1e-3]}],
    ),
    "scales": (  # each fold by its training rows
        onchip.Regressor(hidden=(12,), epochs=6, validation=0.1, threads=1),
        numbers,
        {"scale": [True, False], "lr": [0.01, 0.03]},
    ),
    "held back rows": (
        onchip.Classifier(hidden=(12,), epochs=9, validation=0.2, patience=1, threads=1),
        classes,
        {"shuffle": [True, False], "momentum": [0.5], "class_weight": ["balanced"]},
    ),
}


def assert_same_fit(a, b, x):
    for name, w in a.network_.weights.items():
        assert np.array_equal(w, b.network_.weights[name]), name
    assert a.loss_curve_ == b.loss_curve_
    assert np.array_equal(a.predict(x), b.predict(x))
    assert a.get_params() == b.get_params()


@pytest.mark.parametrize("case", CASES)
def test_a_grid_on_folds_is_grid_search(case):
    estimator, data, grid = CASES[case]
    x, y = data()
    weights = {} if case == "numbers" else {"sample_weight": np.arange(len(x)) / 64}
    many = onchip.fit_many(estimator, x, y, grid=grid, folds=3, **weights)
    search = GridSearchCV(estimator, grid, cv=3).fit(x, y, **weights)
    assert [setting.params for setting in many.settings] == search.cv_results_["params"]
    scores = np.array([search.cv_results_[f"split{f}_test_score"] for f in range(3)]).T
    assert np.array_equal([setting.scores for setting in many.settings], scores)
    assert np.allclose([setting.mean for setting in many.settings], search.cv_results_["mean_test_score"], rtol=1e-12)
    assert np.allclose([setting.spread for setting in many.settings], search.cv_results_["std_test_score"], rtol=1e-9)
    assert many.best_params == search.best_params_
    assert_same_fit(many.best, search.best_estimator_, x)
    assert len(many.estimators) == 3 * len(many.settings)


@pytest.mark.parametrize("folds", [4, KFold(3, shuffle=True, random_state=5)], ids=["4", "a splitter"])
def test_folds_alone_are_cross_val_score(folds):
    x, y = numbers()
    reg = onchip.Regressor(hidden=(8,), epochs=5, threads=1)
    (setting,) = onchip.fit_many(reg, x, y, folds=folds).settings
    assert list(setting.scores) == list(cross_val_score(reg, x, y, cv=folds))
    assert not hasattr(reg, "network_")  # the given estimator is unchanged


def test_a_grid_alone_fits_each_setting_on_all_rows():
    x, y = classes()
    clf = onchip.Classifier(hidden=(12,), threads=1)
    many = onchip.fit_many(clf, x, y, grid={"epochs": [2, 5], "seed": [0, 1]})
    assert many.best is None
    assert len(many.estimators) == 4
    for setting, estimator in zip(many.settings, many.estimators, strict=True):
        assert setting.scores == ()
        assert_same_fit(estimator, onchip.Classifier(hidden=(12,), threads=1, **setting.params).fit(x, y), x)


def test_several_outputs_and_several_threads():
    x, y = numbers()
    y = np.stack([y, -y, y**2], axis=1)
    reg = onchip.Regressor(hidden=(8,), epochs=5)
    many = onchip.fit_many(reg, x, y, grid={"seed": list(range(5))}, folds=2)
    for setting in many.settings:
        assert list(setting.scores) == list(cross_val_score(reg.set_params(**setting.params), x, y, cv=2))


def test_the_data_is_shared(monkeypatch):
    seen = []

    def fit_runs(runs, x, y, **options):
        seen.append((runs, x, y))
        return real(runs, x, y, **options)

    real = grid_module.fit_runs
    monkeypatch.setattr(grid_module, "fit_runs", fit_runs)
    x, y = classes()
    onchip.fit_many(onchip.Classifier(epochs=1, threads=1), x, y, grid={"lr": [0.1, 0.2, 0.3]}, folds=4)
    ((runs, given, targets),) = seen  # one call for all of them
    assert np.shares_memory(given, x)  # float32 rows are not even converted
    assert len(runs) == 12
    assert all(run.rows is runs[i % 4].rows for i, run in enumerate(runs))
    assert targets.shape == (151,)


def test_a_class_that_a_fold_does_not_see_has_its_output_all_the_same():
    x, y = classes()
    in_order = np.argsort(y)
    many = onchip.fit_many(onchip.Classifier(epochs=2, threads=1), x[in_order], y[in_order], folds=KFold(3))
    for estimator in many.estimators:
        assert list(estimator.classes_) == ["ash", "beech", "elm"]
        assert estimator.predict_proba(x).shape == (151, 3)


def test_it_prints_a_table():
    x, y = classes()
    clf = onchip.Classifier(hidden=(12,), epochs=10, threads=1)
    many = onchip.fit_many(clf, x, y, grid=[{"lr": [1e-5, 0.2]}, {"momentum": [0.5]}], folds=3)
    head, *lines = str(many).splitlines()
    assert head.split() == ["lr", "momentum", "loss", "mean", "score", "spread", "folds"]
    assert [line.split()[0] for line in lines] == ["1e-05", "0.2", "0.5"]
    (best,) = [line for line in lines if line.endswith("best")]
    assert f"{max(setting.mean for setting in many.settings):.4f}" in best
    assert repr(many) == f"ManyResult(3 settings, best {many.best_params})"
    assert "<th>mean score</th>" in many._repr_html_()
    head, line = str(onchip.fit_many(clf, x, y)).splitlines()
    assert head.split() == ["loss"]
    assert float(line) > 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grid": {"momentun": [0.5]}}, InputError, "unknown parameter(.|\n)*did you mean momentum"),
        ({"grid": [{"lr": [0.1]}, {"learning_rate": [0.1]}]}, InputError, "learning_rate"),
        ({"grid": {"device": ["cpu"]}}, InputError, "device is the same for all runs"),
        ({"grid": []}, InputError, "the grid is empty"),
        ({"grid": {"lr": [0.1, -1.0]}}, InputError, "learning rate"),
        ({"grid": {"lr": 0.1}}, TypeError, "needs to be a list"),
        ({"folds": 1}, ValueError, "n_splits=2"),
        ({"estimator": make_pipeline(StandardScaler(), onchip.Classifier())}, InputError, "got: +Pipeline"),
        ({"y": np.zeros(5)}, ValueError, "inconsistent numbers of samples"),
    ],
    ids=str,
)
def test_bad_input_is_refused(change, error, message):
    x, y = classes(30)
    given = {"estimator": onchip.Classifier(epochs=1, threads=1), "X": x, "y": y} | change
    with pytest.raises(error, match=message):
        onchip.fit_many(given.pop("estimator"), given.pop("X"), given.pop("y"), **given)


def test_a_setting_that_diverges_scores_nan_and_is_not_the_best():
    x, y = classes()
    many = onchip.fit_many(onchip.Classifier(hidden=(8,), epochs=3), x, y, grid={"lr": [1e30, 0.1]}, folds=3)
    assert np.isnan(many.settings[0].scores).all()
    assert many.best_params == {"lr": 0.1}
    assert "nan" in str(many)
    with pytest.raises(KernelError, match="diverged"):
        onchip.fit_many(onchip.Classifier(hidden=(8,), epochs=3), x, y, grid={"lr": [1e30]}, folds=3)


def test_regression_losses_may_be_a_setting():
    x, y = numbers()
    losses = {"loss": ["mse", "half_sse"], "lr": [1e-3]}
    many = onchip.fit_many(onchip.Regressor(hidden=(8,), epochs=3), x, y, grid=losses)
    for setting in many.settings:
        alone = onchip.Regressor(hidden=(8,), epochs=3, **setting.params).fit(x, y)
        assert_same_fit(setting.estimators[0], alone, x)


def test_a_data_frame_is_scored_without_a_warning():
    pandas = pytest.importorskip("pandas")
    x, y = classes()
    frame = pandas.DataFrame(x, columns=[f"f{i}" for i in range(x.shape[1])])
    estimator = onchip.Classifier(hidden=(8,), epochs=2)
    many = onchip.fit_many(estimator, frame, y, grid={"lr": [0.01, 0.1]}, folds=3)  # warnings are errors here
    plain = onchip.fit_many(estimator, x, y, grid={"lr": [0.01, 0.1]}, folds=3)
    assert [s.scores for s in many.settings] == [s.scores for s in plain.settings]
