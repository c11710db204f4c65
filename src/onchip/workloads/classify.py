"""Train a classifier on a data set, then test what will really run: the compiled network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onchip.errors import InputError, KernelError, ShapeError
from onchip.files import check_writable
from onchip.runtime.engine import compile
from onchip.spec.load import SUFFIXES
from onchip.spec.network import Network
from onchip.spec.recipe import Array
from onchip.train.loop import FitResult, Progress, fit
from onchip.workloads.digits import Dataset


@dataclass(frozen=True, eq=False)
class Trained:
    fit: FitResult
    predictions: Array  # (n,) int64, the class of every test row
    accuracy: float  # of the test rows

    @property
    def network(self) -> Network:
        return self.fit.network

    @property
    def ms_per_epoch(self) -> float:
        return 1e3 * self.fit.seconds / len(self.fit.epoch_losses)


def train_and_test(
    net: Network,
    data: Dataset,
    *,
    lr: float,
    momentum: float,
    batch_size: int,
    epochs: int,
    seed: int,
    device: str = "auto",
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Trained:
    """Train on the data's training rows, then classify its test rows with the compiled result."""
    x_train, x_test = fit_images(data.x_train, net, data), fit_images(data.x_test, net, data)
    result = fit(
        net, x_train, data.y_train, lr=lr, momentum=momentum, batch_size=batch_size, epochs=epochs, seed=seed,
        device=device, threads=threads, on_progress=on_progress,
    )  # fmt: skip
    if not math.isfinite(result.epoch_losses[-1]):
        got = f"loss {result.epoch_losses[-1]} after {epochs} epochs"
        raise KernelError("training diverged", got=got, expected="a finite loss", hint="a smaller --lr")
    predictions = compile(result.network, device, threads=threads)(x_test).argmax(axis=1)
    return Trained(result, predictions, float((predictions == data.y_test).mean()))


def fit_images(x: Array, net: Network, data: Dataset) -> Array:
    """The data's rows in the shape that the network reads."""
    if x[0].size != net.input.row_size:
        other = "sklearn" if data.name == "mnist" else "mnist"
        raise ShapeError(
            f"the {data.name} images do not fit network '{net.name}'", got=f"{data.side}x{data.side} pixels",
            expected=str(net.input), hint=f"--data {other}, or a network for {x[0].size} inputs",
        )  # fmt: skip
    return x.reshape(len(x), *net.input.row_shape)


def check_model_path(path: Path) -> None:
    """Raise now what saving a network to `path` would raise after the training."""
    if path.suffix.lower() not in SUFFIXES:
        got = f"suffix '{path.suffix}'" if path.suffix else "no suffix"
        expected, hint = f"one of {', '.join(SUFFIXES)}", f"-o {path.with_suffix('.onnx')}"
        raise InputError(f"cannot write {path}: unknown format", got=got, expected=expected, hint=hint)
    check_writable(path)
