"""Train a network on a data set, then test what will really run: the compiled network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onchip.errors import InputError, OutputError, ShapeError
from onchip.files import check_writable
from onchip.formats.load import SUFFIXES
from onchip.runtime.engine import compile
from onchip.spec.network import Network
from onchip.spec.recipe import Array
from onchip.train.loop import fit
from onchip.train.options import TrainOptions
from onchip.train.training_run import FitResult, Progress
from onchip.workloads.dataset import Dataset
from onchip.workloads.table_data import flat


@dataclass(frozen=True, eq=False)
class Trained:
    fit: FitResult
    predictions: Array  # for every test row: (n,) int64, its class; (n, D_out) float32 where numbers were learnt
    accuracy: float | None  # share of the test rows whose class is right; None without classes or test rows
    test_mse: float | None  # mean of the squared errors of the test rows' numbers; None for classes

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
    **how: Any,
) -> Trained:
    """Train on the data's training rows, then run its test rows through the compiled result.

    how  what else `fit` takes: checkpoint, resume, debug, ...
    """
    x_train, x_test = fit_rows(data.x_train, net, data), fit_rows(data.x_test, net, data)
    result = fit(
        net, x_train, data.y_train, device=device, threads=threads, on_progress=on_progress, **how, **asdict(options)
    )
    y = compile(result.network, device, threads=threads)(x_test)
    return judge(result, y, data.y_test)


def judge(result: FitResult, y: Array, truth: Array) -> Trained:
    """y of the test rows beside the truth: classes (n,), or numbers (n, D_out), perhaps classes as 0s and one 1."""
    y = flat(y)
    if truth.ndim == 1:
        predictions = y.argmax(axis=1)
        return Trained(result, predictions, _share(predictions == truth), None)
    accuracy = _share(y.argmax(axis=1) == truth.argmax(axis=1)) if _is_one_hot(truth) else None
    mse = float(np.square(y.astype(np.float64) - truth).mean()) if len(y) else None
    return Trained(result, y, accuracy, mse)


def _share(right: Array) -> float | None:
    return float(right.mean()) if len(right) else None


def _is_one_hot(truth: Array) -> bool:
    return truth.shape[1] > 1 and bool(((truth == 0) | (truth == 1)).all() and (truth.sum(axis=1) == 1).all())


def fit_rows(x: Array, net: Network, data: Dataset) -> Array:
    """The data's rows in the shape that the network reads."""
    if x.shape[1] != net.input.row_size:
        got, other = f"{x.shape[1]} numbers a row", "other data"
        if data.side is not None:
            got, other = f"{data.side}x{data.side} pixels", f"--data {'sklearn' if data.name == 'mnist' else 'mnist'}"
        raise ShapeError(
            f"the rows of {data.name} do not fit network '{net.name}'", got=got, expected=str(net.input),
            hint=f"{other}, or a network for {x.shape[1]} inputs",
        )  # fmt: skip
    return x.reshape(len(x), *net.input.row_shape)


def with_meaning(net: Network, data: Dataset) -> Network:
    """The network with what the data says of its rows and results, where it is of such rows and results."""
    meaning = data.meaning
    has_classes = len(meaning.classes) == net.output.row_size
    return net.replace(meaning=replace(meaning, classes=meaning.classes if has_classes else ()))


def check_model_path(path: Path) -> None:
    """Raise now what saving a network to `path` would raise after the training."""
    if path.suffix.lower() not in SUFFIXES and not path.is_dir():
        got = f"suffix '{path.suffix}'" if path.suffix else "no suffix"
        expected, hint = f"one of {', '.join(SUFFIXES)}", f"-o {path.with_suffix('.onnx')}"
        raise InputError(f"cannot write {path}: unknown format", got=got, expected=expected, hint=hint)
    check_writable(path)


def check_folder(folder: Path) -> None:
    """Raise OutputError now if nothing can be written into `folder`, which need not be there yet."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if there.is_dir():
        check_writable(there / "file")
    else:
        got, hint = f"{there} is a file", "another folder"
        raise OutputError(f"cannot write into {folder}", got=got, expected="a folder", hint=hint)
