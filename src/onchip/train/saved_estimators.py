"""Save a fitted estimator, or a pipeline that ends with one, as one file; load it as an estimator."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.formats.load import load_file
from onchip.formats.load import save as save_network
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Mul
from onchip.network.meaning import Meaning
from onchip.network.names import free_name
from onchip.network.reading import show
from onchip.network.recipe import Array
from onchip.train.standardise import Columns, Standard, why_rows_not_foldable, without_centre

if TYPE_CHECKING:
    from onchip.train.estimators import Estimator

_LABELS = ("bool", "int64", "float64", "str")  # kinds of class labels that are restored
_MAX_PARAMETERS = 1 << 20  # characters


def save(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a network, or a fitted Classifier, Regressor or scikit-learn pipeline, to a .onnx or .safetensors file.

    The file appears atomically. Of an estimator, an .onnx file also stores its classes, columns and parameters:
    `onchip.load_estimator` restores it, and `onchip run` prints its classes. The scalers of a pipeline become part of
    the network, which then reads raw rows; a .safetensors file holds the network alone.
    """
    save_network(model if isinstance(model, Network) or not hasattr(model, "fit") else estimator_network(model), path)


def estimator_network(model: Any) -> Network:
    """The network of a fitted estimator or pipeline, from raw rows to logits or values, with its description."""
    from onchip.train.estimators import Classifier, Estimator

    steps = [step for _, step in model.steps] if hasattr(model, "steps") else [model]
    *before, last = steps
    if not isinstance(last, Estimator):
        raise InputError(
            "only onchip's estimators can be saved", got=type(last).__name__, expected="Classifier or Regressor",
            hint="onchip.load(...) of an ONNX file that skl2onnx wrote, for other models",
        )  # fmt: skip
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(last)
    net = last.network_
    for step in reversed(before):
        if step not in (None, "passthrough"):
            check_is_fitted(step)
            net = _scaled(net, *_affine(step))
    names = next((step.feature_names_in_ for step in steps if hasattr(step, "feature_names_in_")), ())
    classes = tuple(map(str, last.classes_.tolist())) if isinstance(last, Classifier) else ()
    meaning = net.meaning
    if not meaning.table:
        meaning = replace(meaning, columns=tuple(map(str, names)))
    if net.output.row_size == len(classes):
        meaning = replace(meaning, classes=classes)
    return net.replace(meaning=replace(meaning, estimator=_description(last)))


def _description(estimator: Estimator) -> str:
    """What `load_estimator` needs besides the network, as JSON."""
    parameters = {name: value for name, value in estimator.get_params(deep=False).items() if name != "network"}
    kept = {name: value for name, value in parameters.items() if _is_json(value)}
    labels = ""
    if hasattr(estimator, "classes_"):
        kind = estimator.classes_.dtype.kind
        labels = {"b": "bool", "i": "int64", "u": "int64", "f": "float64"}.get(kind, "str")
    found = {
        "kind": type(estimator).__name__, "parameters": kept, "labels": labels,
        "y_is_flat": bool(getattr(estimator, "_y_is_flat", True)),
        "loss_curve": list(map(float, estimator.loss_curve_)),
    }  # fmt: skip
    return json.dumps(found)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


# -- scalers ---------------------------------------------------------------------------------------------------


def _affine(step: Any) -> tuple[Array, Array]:
    """(D,) float64 mean and factor of a scikit-learn scaler: it computes (x - mean) factor."""
    kind = type(step).__name__
    if kind == "StandardScaler":
        D = step.n_features_in_
        mean = step.mean_ if step.with_mean else np.zeros(D)
        return mean, np.ones(D) if step.scale_ is None else 1 / step.scale_
    if kind == "MinMaxScaler" and not step.clip:
        return -step.min_ / step.scale_, step.scale_
    if kind == "MaxAbsScaler":
        return np.zeros(step.n_features_in_), 1 / step.scale_
    if kind == "RobustScaler":
        D = step.n_features_in_
        mean = np.zeros(D) if step.center_ is None else step.center_
        return mean, np.ones(D) if step.scale_ is None else 1 / step.scale_
    raise InputError(
        "a step of the pipeline cannot be part of a network", got=kind + " with clip" * (kind == "MinMaxScaler"),
        expected="StandardScaler, MinMaxScaler, MaxAbsScaler or RobustScaler",
        hint="convert the pipeline with skl2onnx: onchip.train.skl2onnx_converter.register()",
    )  # fmt: skip


def _scaled(net: Network, mean: Array, factor: Array) -> Network:
    """The network of (x - mean) factor, from x: folded into its first Linear, or with two layers before it."""
    if not why_rows_not_foldable(net) and without_centre(net)[0] is net:
        return Standard(Columns(np.asarray(mean, np.float64), 1 / np.asarray(factor, np.float64))).fold(net)
    (name,) = net.inputs
    nodes, weights, value = [], dict(net.weights), name
    for stem, layer, constant in (("centre", Add(), -mean), ("scale", Mul(), factor)):
        node = free_name(stem, net.types)
        weight = free_name(f"{node}.constant", weights)
        weights[weight] = np.asarray(constant, np.float32).reshape(net.input.row_shape)
        nodes.append(Node(node, layer, (value,), {"constant": weight}))
        value = node
    rest = [replace(node, inputs=tuple(value if each == name else each for each in node.inputs)) for node in net.nodes]
    return net.replace(nodes=[*nodes, *rest], weights=weights)


# -- loading ---------------------------------------------------------------------------------------------------


def load_estimator(path: str | os.PathLike[str], **parameters: Any) -> Any:
    """The Classifier or Regressor in a file that `onchip.save` or `onchip train` wrote, ready to predict.

    parameters  replace those in the file: device="cpu", threads=1

    Of a pipeline it is the estimator at its end, which now reads raw rows. A file without class names is a Regressor.
    `partial_fit` continues from its weights, with a new state of the optimiser.
    """
    from onchip.train.estimators import Classifier, Regressor

    net = load_file(path)
    found = _parse(net.meaning)
    kind = (
        Classifier
        if found.get("kind", "Classifier" if net.meaning.classes else "Regressor") == "Classifier"
        else Regressor
    )
    known = kind().get_params(deep=False)
    stored = {name: _as_given(value) for name, value in found.get("parameters", {}).items() if name in known}
    estimator: Any = kind(**{**stored, **parameters})
    if kind is Classifier:
        if not net.meaning.classes:
            raise FormatError(
                f"{path} stores no classes", got=f"a classifier without names of {net.output}", expected="its classes"
            )
        estimator.classes_ = _labels(net.meaning.classes, found.get("labels", ""))
    estimator.n_features_in_ = net.input.row_size
    if net.meaning.table_columns:
        estimator.feature_names_in_ = np.array([column.name for column in net.meaning.table_columns], object)
    losses = found.get("loss_curve", [])
    estimator.__dict__ |= {
        "network_": net, "_trained": net, "_standard": Standard(), "_state": None, "_trained_as": "", "history_": (),
        "loss_curve_": [float(loss) for loss in losses], "n_iter_": max(1, len(losses)),
        "_y_is_flat": bool(found.get("y_is_flat", net.output.row_size == 1)),
    }  # fmt: skip
    return estimator


def _as_given(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _parse(meaning: Meaning) -> dict[str, Any]:
    """The description of the estimator; {} if there is none."""
    if not meaning.estimator:
        return {}
    try:
        found: Any = json.loads(meaning.estimator) if len(meaning.estimator) <= _MAX_PARAMETERS else None
    except (ValueError, RecursionError):
        found = None
    is_object = isinstance(found, dict) and isinstance(found.get("parameters", {}), dict)
    if is_object and _are_numbers(found.get("loss_curve", [])):
        return dict(found)
    got, expected = show(meaning.estimator), "what onchip.save wrote"
    raise FormatError("the description of the estimator is damaged", got=got, expected=expected)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) for value in values)


def _labels(names: Iterable[str], kind: str) -> Array:
    """The labels from their names: of the kind that was stored, else integers if they all are, else text."""
    names = list(names)
    if not kind:
        kind = "int64" if all(name.isascii() and name.removeprefix("-").isdigit() for name in names) else "str"
    try:
        if kind == "bool":
            return np.array([{"True": True, "False": False}[name] for name in names])
        return np.array(names, str) if kind == "str" else np.array(names).astype(np.dtype(kind))
    except (ValueError, KeyError, TypeError):
        got, expected = f"{kind}: {', '.join(names[:5])}", ", ".join(_LABELS)
        raise FormatError("the classes are not of the stored kind", got=show(got), expected=expected) from None
