"""The weight of each row in the loss: sample weight times class weight."""

from __future__ import annotations

from typing import Any

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.network.reading import show
from onchip.network.recipe import Array
from onchip.train.rows import as_array


def check_sample_weight(sample_weight: Any, n: int) -> Array | None:
    """Check a user's sample weights for n rows and return them as (n,) float32; None stays None."""
    if sample_weight is None:
        return None
    array = np.asarray(as_array(sample_weight))
    if array.shape != (n,) or array.dtype.kind not in "fiub":
        got = f"{array.dtype.name}{list(array.shape)}"
        raise ShapeError("sample weights do not fit", got=got, expected=f"numbers [{n}]", hint="one weight per row")
    with np.errstate(over="ignore"):
        weights: Array = array.astype(np.float32)  # a copy: the kernels read it throughout the run
    bad = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
    if bad.size:
        got = f"{array[bad[0]]} in row {bad[0]}"
        raise InputError("a sample weight is negative or not finite", got=got, expected="finite, at least 0")
    return weights


def weights_of_rows(
    class_weight: str | tuple[float, ...] | dict[int, float] | None,
    y: Array,
    sample_weight: Array | None,
    rows: Array,
    D_out: int,
) -> Array | None:
    """(n,) float32: the weight of each of n rows; None: 1 each.

    class_weight   as in TrainOptions; "balanced" as in scikit-learn: rows / (classes present * rows of the class)
    y              (n,) classes, if class_weight is set
    sample_weight  (n,) float32
    rows           indices of this run's rows; "balanced" counts only these
    """
    if class_weight is None:
        return sample_weight
    of_class = np.ones(D_out)
    if class_weight == "balanced":
        counts = np.bincount(y[rows], minlength=D_out)
        of_class = len(rows) / (np.count_nonzero(counts) * np.maximum(counts, 1))
    elif isinstance(class_weight, dict):
        unknown = [label for label in class_weight if not 0 <= label < D_out]
        if unknown:
            raise InputError("class_weight names an unknown class", got=show(unknown[0]), expected=f"0 to {D_out - 1}",
                             hint="{class: weight}, of classes counted from 0")  # fmt: skip
        of_class[list(class_weight)] = list(class_weight.values())
    elif len(class_weight) != D_out:
        got, hint = f"{len(class_weight)} class weights", "{class: weight} for some classes"
        raise InputError("class weights do not fit", got=got, expected=f"{D_out}, one per class", hint=hint)
    else:
        of_class[:] = class_weight
    weights = of_class[y] if sample_weight is None else of_class[y] * sample_weight
    return weights.astype(np.float32)
