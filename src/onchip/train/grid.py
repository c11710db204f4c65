"""fit_many: train a parameter grid, k folds or both in parallel on one copy of the data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.model_selection import ParameterGrid, check_cv
from sklearn.utils import _safe_indexing

from onchip.errors import InputError, KernelError
from onchip.network.recipe import Array
from onchip.network.text import columns, escaped, html_table, plural
from onchip.train.estimators import Estimator, shape_data
from onchip.train.many import Run, fit_runs
from onchip.train.options import check_name
from onchip.train.row_weights import check_sample_weight
from onchip.train.standardise import Standard
from onchip.train.training_run import FitResult

_SCORE_COLUMNS = ("loss", "mean score", "spread", "folds")  # columns after those of the parameters


@dataclass(frozen=True, eq=False)
class Setting:
    """One point of the grid: its parameters, estimators and scores."""

    params: Mapping[str, Any]
    estimators: tuple[Any, ...]  # one per fold, or one on all rows; fitted, unless training diverged
    scores: tuple[float, ...] = ()  # per fold, on the rows held out; NaN if training diverged

    @property
    def mean(self) -> float:
        return float(np.mean(self.scores)) if self.scores else float("nan")

    @property
    def spread(self) -> float:
        """The standard deviation of the scores, as in GridSearchCV's results."""
        return float(np.std(self.scores)) if self.scores else float("nan")


@dataclass(frozen=True, eq=False)
class ManyResult:
    """All settings with their scores; prints as a table."""

    settings: tuple[Setting, ...]  # in the order of scikit-learn's ParameterGrid
    best: Any = None  # with folds: the first setting with the highest mean score, refitted on all rows
    best_params: Mapping[str, Any] | None = None

    @property
    def estimators(self) -> tuple[Any, ...]:
        """All fitted estimators, by setting, then by fold."""
        return tuple(estimator for setting in self.settings for estimator in setting.estimators)

    def __str__(self) -> str:
        head, rows = self._table()
        return columns(head, rows, right=[c for c, name in enumerate(head) if name in _SCORE_COLUMNS])

    def __repr__(self) -> str:
        best = "" if self.best_params is None else f", best {dict(self.best_params)}"
        return f"ManyResult({plural(len(self.settings), 'setting')}{best})"

    def _repr_html_(self) -> str:
        return f"<p>{escaped(repr(self))}</p>{html_table(*self._table())}"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        names = list(dict.fromkeys(name for setting in self.settings for name in setting.params))
        head = [*names, _SCORE_COLUMNS[0], *([*_SCORE_COLUMNS[1:], ""] if self.best_params is not None else [])]
        rows = []
        for setting in self.settings:
            row = [str(setting.params.get(name, "")) for name in names]
            losses = [e.loss_curve_[-1] if hasattr(e, "loss_curve_") else np.nan for e in setting.estimators]
            row.append(f"{np.mean(losses):.4g}")
            if self.best_params is not None:
                mark = "best" if setting.params is self.best_params else ""
                row += [f"{setting.mean:.4f}", f"{setting.spread:.4f}", str(len(setting.scores)), mark]
            rows.append(row)
        return head, rows


def fit_many(
    estimator: Any,
    X: Any,
    y: Any,
    *,
    sample_weight: Any = None,
    grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]] | None = None,
    folds: Any = None,
    spread: bool = False,
) -> ManyResult:
    """Fit an onchip estimator with every setting of a grid, on every fold, in one call that shares the data.

    sample_weight  as in fit; also weights the rows in the scores
    grid   as in GridSearchCV: {"lr": [0.01, 0.1], "hidden": [(64,), (64, 64)]}, or a list of such; None: one setting
    folds  k, or any scikit-learn cv (k is stratified for classes); None: each setting on all rows, without scores
    spread under mpiexec: every rank makes this call, trains some of the runs and receives all results

    Splits, bits and scores equal those of GridSearchCV and cross_val_score with cv=folds if every fold trains on all
    classes: here a class missing from a fold still has an output. `estimator` itself is not changed.
    """
    if not isinstance(estimator, Estimator):
        raise InputError(
            "fit_many fits onchip's estimators", got=type(estimator).__name__, expected="Classifier or Regressor",
            hint="transform X first, or use GridSearchCV for a Pipeline",
        )  # fmt: skip
    base = clone(estimator)
    settings = list(ParameterGrid({} if grid is None else grid))
    _check_settings(settings, base)
    first = copy.copy(base).set_params(**settings[0])  # a grid over `network` decides how rows are read
    x, targets = first._prepare(X, y)
    splits: list[tuple[Any, Any]] = [(None, None)]
    if folds is not None:
        splits = list(check_cv(folds, targets, classifier=is_classifier(base)).split(x, targets))
    defaults = base.get_params(deep=False)
    estimators = [copy.copy(first).set_params(**defaults | params) for params in settings for _ in splits]
    weights = check_sample_weight(sample_weight, len(x))
    for unscaled in [one for one in estimators if not one.scale][:1]:
        unscaled._warn_of_scales(x, targets)
    results, standards = _fit_all(estimators, [rows for rows, _ in splits], x, targets, weights, spread)
    diverged = {id(one) for one, result in zip(estimators, results, strict=True) if isinstance(result, KernelError)}
    for one, result, standard in zip(estimators, results, standards, strict=True):
        if isinstance(result, FitResult):
            one._keep(result, standard)
    if len(diverged) == len(estimators):
        raise next(result for result in results if isinstance(result, KernelError))
    by_setting = [tuple(estimators[i : i + len(splits)]) for i in range(0, len(estimators), len(splits))]
    if folds is None:
        return ManyResult(tuple(Setting(p, fitted) for p, fitted in zip(settings, by_setting, strict=True)))

    truth = np.asarray(y)
    scores = np.empty((len(settings), len(splits)))
    for f, (_, test) in enumerate(splits):
        x_test, y_test = _safe_indexing(X, test), truth[test]  # once per fold; data frames stay data frames
        for s, fitted in enumerate(by_setting):
            of_rows = None if weights is None else weights[test]
            scores[s, f] = np.nan if id(fitted[f]) in diverged else fitted[f].score(x_test, y_test, of_rows)
    done = tuple(
        Setting(p, fitted, tuple(map(float, row))) for p, fitted, row in zip(settings, by_setting, scores, strict=True)
    )
    means = np.array([setting.mean for setting in done])
    if np.isnan(means).all():
        raise next(result for result in results if isinstance(result, KernelError))
    best = settings[int(np.where(np.isnan(means), -np.inf, means).argmax())]
    refitted = copy.copy(first).set_params(**defaults | best)._train(x, targets, sample_weight)
    return ManyResult(done, refitted, best)


def _fit_all(
    estimators: Sequence[Estimator], folds: Sequence[Any], x: Array, targets: Array, weights: Array | None, spread: bool
) -> tuple[list[FitResult | KernelError], list[Standard]]:
    """Train each estimator on its fold; return the results and the scaling of each.

    estimators  for every setting, one per fold
    folds       row indices or a mask; None: all rows
    """
    runs = [Run(m._new_network(targets), m._options(), folds[i % len(folds)]) for i, m in enumerate(estimators)]
    where: dict[str, Any] = {"device": estimators[0].device, "threads": estimators[0].threads, "spread": spread}
    standards = [Standard()] * len(estimators)
    plain = [i for i, one in enumerate(estimators) if not one.scale]
    done = fit_runs([runs[i] for i in plain], *shape_data(x, targets, runs[0].net), sample_weight=weights, **where)
    results = dict(zip(plain, done, strict=True))
    if scaled := [i for i, one in enumerate(estimators) if one.scale]:
        # Each fold has its own mean and deviation, so its scaled rows are stored separately in the shared array.
        rows = [np.arange(len(x))[... if fold is None else fold] for fold in folds]
        of_fold = [estimators[scaled[0]]._new_standard(x[some], targets[some]) for some in rows]
        parts = [standard.apply(x[some], targets[some]) for standard, some in zip(of_fold, rows, strict=True)]
        ends = np.cumsum([len(some) for some in rows])
        for i in scaled:
            f = i % len(folds)
            standards[i] = replace(of_fold[f], raw=estimators[i]._given())
            net = runs[i].net if standards[i].raw is None else standards[i].unfold()
            runs[i] = replace(runs[i], net=net, rows=np.arange(ends[f] - len(rows[f]), ends[f]))
        x, targets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        weights = None if weights is None else np.concatenate([weights[some] for some in rows])
        x, targets = shape_data(x, targets, runs[scaled[0]].net)
        done = fit_runs([runs[i] for i in scaled], x, targets, sample_weight=weights, **where)
        results |= zip(scaled, done, strict=True)
    return [results[i] for i in range(len(estimators))], standards


def _check_settings(settings: list[dict[str, Any]], base: Estimator) -> None:
    if not settings:
        raise InputError("the grid is empty", expected="at least one setting", hint="grid={'lr': [0.01, 0.1]}")
    known = sorted(base.get_params())
    for name in dict.fromkeys(name for params in settings for name in params):
        check_name(name, known, "parameter")
        if name in ("device", "threads"):
            hint = f"{type(base).__name__}({name}=...)"
            raise InputError(f"{name} is the same for all runs", got=f"{name} in the grid", expected="none", hint=hint)
