"""Train a network on a data set, then test the compiled network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onchip.errors import InputError, OutputError, ShapeError
from onchip.files import check_writable
from onchip.formats.load import SUFFIXES
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.runtime.engine import compile
from onchip.train.given_network import shape_targets
from onchip.train.loop import fit
from onchip.train.options import TrainOptions
from onchip.train.standardise import Standard
from onchip.train.training_run import FitResult, Progress
from onchip.workloads.dataset import Dataset
from onchip.workloads.table_data import flat


@dataclass(frozen=True, eq=False)
class Trained:
    fit: FitResult
    predictions: Array  # per test row: (n,) int64 classes; (n, D_out) float32 for regression
    accuracy: float | None = None  # on the test rows; None without classes or test rows
    test_mse: float | None = None  # on the test rows; None for classes
    f1: float | None = None  # macro average, if there is an accuracy
    r2: float | None = None  # if there is a test_mse and at least two rows; mean over the outputs
    # Scores of a constant prediction: the training rows' most common class, or their mean target.
    baseline_accuracy: float | None = None
    baseline_mse: float | None = None

    @property
    def beats_baseline(self) -> bool | None:
        """Whether the network beats the baseline or is perfect; None without test rows."""
        if self.accuracy is not None and self.baseline_accuracy is not None:
            return self.accuracy > self.baseline_accuracy or self.accuracy == 1
        if self.test_mse is not None and self.baseline_mse is not None:
            return self.test_mse < self.baseline_mse or self.test_mse == 0
        return None

    @property
    def network(self) -> Network:
        return self.fit.network

    @property
    def ms_per_epoch(self) -> float:
        return 1e3 * self.fit.seconds / len(self.fit.history)


def train_and_test(
    net: Network,
    data: Dataset,
    options: TrainOptions,
    *,
    device: str = "auto",
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    standard: Standard = Standard(),  # noqa: B008 - frozen
    **how: Any,
) -> Trained:
    """Train on the data's training rows, then run its test rows through the compiled result.

    standard  the scaling of rows and targets during training; the resulting network reads raw rows
    how       other arguments of `fit`: checkpoint, resume, debug, ...
    """
    x_train, y_train = standard.apply(data.x_train, data.y_train)
    x_train, x_test = fit_rows(x_train, net, data), fit_rows(data.x_test, net, data)
    chosen = asdict(options)
    if how.get("validation_data") is not None:  # in place of a share of the training rows
        chosen["validation"] = 0.0
    result = fit(
        net,
        x_train,
        shape_targets(y_train, net),
        device=device,
        threads=threads,
        on_progress=on_progress,
        **how,
        **chosen,
    )
    result = replace(result, network=standard.fold(result.network))
    y = compile(result.network, device, threads=threads)(x_test)
    return score_outputs(result, y, data.y_test, data.y_train, options.loss)


def score_outputs(
    result: FitResult, y: Array, truth: Array, training_targets: Array, loss: str = TrainOptions.loss
) -> Trained:
    """Score outputs y of the test rows against the truth: classes (n,), or values (n, D_out), which may be one-hot.

    training_targets  of the same kind, for the baseline
    loss              "bce_with_logits": the scores are of the probabilities, not of the logits y
    """
    y = flat(y)
    if loss == "bce_with_logits":
        y = 0.5 + 0.5 * np.tanh(0.5 * y)
    if not len(y):
        return Trained(result, y.argmax(axis=1) if truth.ndim == 1 else y)
    if truth.ndim == 1:
        predictions = y.argmax(axis=1)
        return Trained(result, predictions, **_class_scores(predictions, truth, training_targets))
    targets = truth.astype(np.float64)
    mean = training_targets.mean(axis=0, dtype=np.float64)
    trained = Trained(result, y, test_mse=_mse(y, targets), r2=_r2(y, targets), baseline_mse=_mse(mean, targets))
    if not _is_one_hot(truth):
        return trained
    return replace(trained, **_class_scores(*(each.argmax(axis=1) for each in (y, truth, training_targets))))


def _class_scores(predictions: Array, truth: Array, training_targets: Array) -> dict[str, Any]:
    is_right = predictions == truth
    count = int(max(predictions.max(), truth.max())) + 1
    correct, counts = (np.bincount(each, minlength=count) for each in (truth[is_right], np.append(predictions, truth)))
    return {
        "accuracy": float(is_right.mean()), "f1": float((2 * correct[counts > 0] / counts[counts > 0]).mean()),
        "baseline_accuracy": float((truth == np.bincount(training_targets).argmax()).mean()),
    }  # fmt: skip


def _mse(y: Array, truth: Array) -> float:
    return float(np.square(y - truth).mean())


def _r2(y: Array, truth: Array) -> float | None:
    """As scikit-learn's r2_score: an output with constant truth scores 1 if it is exact, else 0."""
    if len(truth) < 2:
        return None
    errors, squares = np.square(y - truth).sum(axis=0), np.square(truth - truth.mean(axis=0)).sum(axis=0)
    varies = squares > 0
    return float(np.where(varies, 1 - errors / np.where(varies, squares, 1), errors == 0).mean())


def _is_one_hot(truth: Array) -> bool:
    return truth.shape[1] > 1 and bool(((truth == 0) | (truth == 1)).all() and (truth.sum(axis=1) == 1).all())


def fit_rows(x: Array, net: Network, data: Dataset) -> Array:
    """Reshape the data's rows to the network's input."""
    if x.shape[1] != net.input.row_size:
        got, other = f"{x.shape[1]} values per row", "other data"
        if data.side is not None:
            got = f"{data.side}x{data.side} pixels"
            other = f"--data {'sklearn' if data.name == 'mnist' else 'mnist'}, your own --data"
        raise ShapeError(
            f"the rows of {data.name} do not fit network '{net.name}'", got=got, expected=str(net.input),
            hint=f"{other}, or a network for {x.shape[1]} inputs",
        )  # fmt: skip
    return x.reshape(len(x), *net.input.row_shape)


def with_meaning(net: Network, data: Dataset) -> Network:
    """Attach the data's column and class names to the network, if they fit its input and output. Classes that the data
    only numbers keep the network's names; a vocabulary stays."""
    known = net.meaning.classes
    meaning = replace(data.meaning, words=net.meaning.words, tokeniser=net.meaning.tokeniser)
    classes = known if meaning.classes and known and not data.words else meaning.classes
    return net.replace(meaning=replace(meaning, classes=classes if len(classes) == net.output.row_size else ()))


def check_model_path(path: Path) -> None:
    """Raise now the error that saving to `path` would raise after training."""
    if path.suffix.lower() not in SUFFIXES and not path.is_dir():
        got = f"suffix '{path.suffix}'" if path.suffix else "no suffix"
        expected, hint = f"one of {', '.join(SUFFIXES)}", f"-o {path.with_suffix('.onnx')}"
        raise InputError(f"cannot write {path}: unknown format", got=got, expected=expected, hint=hint)
    check_writable(path)


def check_folder(folder: Path) -> None:
    """Raise OutputError if files cannot be written into `folder`, which need not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if existing.is_dir():
        check_writable(existing / "file")
    else:
        got, hint = f"{existing} is a file", "another folder"
        raise OutputError(f"cannot write into {folder}", got=got, expected="a folder", hint=hint)
