"""Validation of a checkpoint's content before a run resumes from it.

A digest shows that a file is unchanged, not that a training run wrote it, so every value is checked. The position of
the run determines the number of losses and epochs. The run determines learning rates, row counts, when early stopping
would have ended it and which epoch is best. The trainer determines names, shapes and dtypes of weights and state.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from onchip.errors import FormatError
from onchip.network.reading import fields, name_of, real, show, whole
from onchip.network.recipe import Array
from onchip.train.training_run import TrainingRun

NAMES = (
    "version", "job", "epoch", "step", "epoch_correct", "epoch_rows", "epoch_seconds", "seconds", "history",
    "best_epoch",
)  # fmt: skip
_EPOCH_NAMES = (
    "epoch", "loss", "accuracy", "validation_loss", "validation_accuracy", "lr", "seconds", "samples_per_s",
    "output_losses", "validation_output_losses",
)  # fmt: skip


def check_content(header: Mapping[str, Any], arrays: Mapping[str, Array], run: TrainingRun) -> None:
    """Raise FormatError for the first value that a checkpoint of this run cannot have.

    header  the parsed JSON, an object with NAMES
    arrays  "losses", of several outputs "output_losses", and as "weight/<name>", "state/<name>", "best/<name>" others
    run     the run, before its first step
    """
    options, has_classes = run.options, run.options.has_classes
    epoch = whole(header["epoch"], "epoch", 0, options.epochs)
    history = header["history"]
    if not isinstance(history, list) or len(history) != epoch:
        got = f"{len(history)} epochs" if isinstance(history, list) else name_of(history)
        raise FormatError("'history' does not fit", got=got, expected=f"a list of {epoch}")
    best, best_loss, is_done = 0, math.inf, epoch == options.epochs
    for i, entry in enumerate(history):
        where = f"epoch {i + 1} of the history"
        fields(entry, _EPOCH_NAMES, where)
        whole(entry["epoch"], f"{where}: its number", i + 1, i + 1)
        real(entry["loss"], f"{where}: loss")
        _share(entry["accuracy"], f"{where}: accuracy", has_classes)
        _share(entry["validation_accuracy"], f"{where}: validation accuracy", has_classes and len(run.held) > 0)
        _near(entry["lr"], f"{where}: lr", run.last_lr(i), options.lr)
        real(entry["seconds"], f"{where}: seconds")
        real(entry["samples_per_s"], f"{where}: rows per second")
        _losses(entry["output_losses"], f"{where}: losses of outputs", options.several)
        held_several = options.several if len(run.held) else ()
        _losses(entry["validation_output_losses"], f"{where}: validation losses of outputs", held_several)
        held_loss = entry["validation_loss"]
        if held_several:  # in float32
            parts = sum(each.weight * entry["validation_output_losses"][each.output] for each in options.outputs)
            _near(held_loss, f"{where}: validation loss", parts, 1e5 * parts)
        if not len(run.held):
            _nothing(held_loss, f"{where}: validation loss")
        elif real(held_loss, f"{where}: validation loss") < best_loss and options.patience:
            best, best_loss = i + 1, held_loss
        if options.patience and i + 1 - best >= options.patience:
            is_done = True
            if i + 1 < epoch:
                got = f"{epoch} epochs, best epoch {best}"
                raise FormatError("the run would have stopped earlier", got=got, expected=f"{i + 1} epochs")
    whole(header["best_epoch"], "best_epoch", best, best)

    step = whole(header["step"], "step", 0, 0 if is_done else run.steps - 1)
    rows, total = step * run.batch, epoch * run.steps + step
    whole(header["epoch_rows"], "epoch_rows", rows, rows)
    whole(header["epoch_correct"], "epoch_correct", 0, rows if has_classes else 0)
    real(header["epoch_seconds"], "epoch_seconds", sys.float_info.max if step else 0)
    real(header["seconds"], "seconds")

    _check_arrays(arrays, total, bool(best), run)
    for i, entry in enumerate(history):
        where, steps = f"epoch {i + 1} of the history", slice(i * run.steps, (i + 1) * run.steps)
        mean = run.epoch_loss(arrays["losses"][steps], i)
        _near(entry["loss"], f"{where}: loss", mean, mean)
        for k, name in enumerate(options.several):
            mean = run.epoch_loss(arrays["output_losses"][steps, k], i)
            _near(entry["output_losses"][name], f"{where}: loss of '{name}'", mean, mean)


def _check_arrays(arrays: Mapping[str, Array], total: int, has_best: bool, run: TrainingRun) -> None:
    """Check the losses of `total` steps, the weights, the optimiser state, and the best weights if present."""
    weights, state = run.trainer.weights(), run.trainer.state()
    per_step = {"losses": np.empty(total)}
    if run.options.several and total:
        per_step["output_losses"] = np.empty((total, len(run.options.several)))
    expected = {**per_step, **_in_group("weight", weights), **_in_group("state", state)}
    if has_best:
        expected |= _in_group("best", weights)
    if missing := expected.keys() - arrays.keys():
        raise FormatError("an array is missing", got="no such array", expected=show(min(missing)))
    if unknown := arrays.keys() - expected.keys():
        raise FormatError("an array does not belong to this run", got=show(min(unknown)), expected="no other arrays")
    for name, like in expected.items():
        array = arrays[name]
        if array.shape != like.shape or array.dtype != like.dtype:
            got = f"{array.dtype.name}{list(array.shape)}"
            raise FormatError(f"array '{name}' does not fit", got=got, expected=f"{like.dtype.name}{list(like.shape)}")
        if not name.startswith("state/") and not np.isfinite(array).all():
            raise FormatError(f"array '{name}' does not fit", got="NaN or an infinity", expected="finite values")
    for name in per_step:
        if (arrays[name] < 0).any():
            got = f"{arrays[name].min():g}"
            raise FormatError(f"array '{name}' does not fit", got=got, expected="losses of at least 0")
    saved_state = {name: arrays[f"state/{name}"] for name in state}
    run.trainer.check(weights, saved_state)
    done = int(state["steps"][0]) + total
    whole(int(saved_state["steps"][0]), "steps of the optimiser", done, done)


def _in_group(group: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {f"{group}/{name}": array for name, array in arrays.items()}


# -- single JSON values --------------------------------------------------------------------------------------------


def _near(value: Any, where: str, expected: float, scale: float) -> None:
    """Compare with the expected value, up to rounding differences between machines."""
    if abs(real(value, where) - expected) > 1e-9 * scale:
        raise FormatError(f"{where} does not fit", got=name_of(value), expected=str(expected))


def _share(value: Any, where: str, is_known: bool) -> None:
    if not is_known:
        _nothing(value, where)
    elif real(value, where) > 1:
        raise FormatError(f"{where} does not fit", got=name_of(value), expected="0 to 1")


def _losses(value: Any, where: str, outputs: tuple[str, ...]) -> None:
    if not outputs:
        return _nothing(value, where)
    fields(value, outputs, where)
    for name in outputs:
        real(value[name], f"{where}: '{name}'")
    return None


def _nothing(value: Any, where: str) -> None:
    if value is not None:
        raise FormatError(f"{where} does not fit", got=name_of(value), expected="null")
