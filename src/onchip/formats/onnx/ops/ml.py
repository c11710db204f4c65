"""Operators of ai.onnx.ml, as skl2onnx exports scikit-learn's scalers, linear models and networks.

A classifier returns its label as int64 and its probabilities as (B, classes) in the order of its classes, with or
without a ZipMap. A string label is returned as its class index.
"""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.permuted import AxisView
from onchip.network.layers import Add, Cast, Concat, Embedding, Layer, Linear, Mul, Reshape, Sigmoid, Softmax
from onchip.network.reading import show
from onchip.network.recipe import Array

_TRANSFORMS: dict[str, Layer | None] = {"NONE": None, "LOGISTIC": Sigmoid(), "SOFTMAX": Softmax(-1)}
_NORMS = {"MAX": ("", "ReduceMax"), "L1": ("Abs", "ReduceSum"), "L2": ("", "ReduceL2")}
_AXES_ARE_INPUTS = {"ReduceSum": 13}  # opset from which a reduction's axes are inputs; 18 for the others
_LEAST = np.finfo(np.float32).tiny  # replaces a norm of 0, so that such a row is unchanged


@reads("ai.onnx.ml.Scaler")
def read_scaler(graph: GraphReader, op: Op) -> None:
    """(x - offset) * scale"""
    x = _floats(graph, op)
    offset, scale = (_numbers(op, name, (1, _width(graph, op, x))) for name in ("offset", "scale"))
    if offset.any():
        x = graph.add_step(op, Add(), (x,), {"constant": graph.weight(f"{op.outputs[0]}_offset", -offset)})
    graph.add(op, Mul(), (x,), {"constant": graph.weight(f"{op.outputs[0]}_scale", scale)})


@reads("ai.onnx.ml.Normalizer")
def read_normalizer(graph: GraphReader, op: Op) -> None:
    norm = _text(op, "norm", "MAX")
    if norm not in _NORMS:
        raise FormatError(f"{op}: no such norm", got=show(norm), expected=", ".join(_NORMS))
    floats = _floats(graph, op)
    made_by = graph.nodes.get(floats)
    if norm == "L1" and made_by is not None and isinstance(made_by.layer, Softmax):
        graph.pass_on(op)  # its sum is 1
        return
    x = magnitudes = graph.part_value(op, floats)
    first, reduction = _NORMS[norm]
    if first:
        magnitudes = graph.part(op, first, [x])
    if graph.opset < _AXES_ARE_INPUTS.get(reduction, 18):
        norms = graph.part(op, reduction, [magnitudes], axes=[1], keepdims=1)
    else:
        norms = graph.part(op, reduction, [magnitudes, graph.part_constant(op, np.array([1]))], keepdims=1)
    if norm != "MAX":  # the maximum is signed
        norms = graph.part(op, "Max", [norms, graph.part_constant(op, np.array(_LEAST, np.float32))])
    _bind_part(graph, op, graph.part(op, "Div", [x, norms]))


@reads("ai.onnx.ml.LinearRegressor")
def read_linear_regressor(graph: GraphReader, op: Op) -> None:
    _bind_part(graph, op, graph.part_value(op, _transformed(graph, op, _linear(graph, op, op.attribute("targets", 1)))))


@reads("ai.onnx.ml.LinearClassifier")
def read_linear_classifier(graph: GraphReader, op: Op) -> None:
    names: list[object] = op.attribute("classlabels_strings", [])
    labels = op.sizes("classlabels_ints", []) or list(range(len(names)))
    scores = _linear(graph, op, len(labels))
    if graph.readers[op.outputs[0]]:
        index = graph.part(op, "ArgMax", [graph.part_value(op, scores)], axis=1, keepdims=0)
        _bind_part(graph, op, graph.part_value(op, _labels(graph, op, index, np.array(labels, np.int64))))
    if len(op.outputs) > 1 and graph.readers[op.outputs[1]]:
        graph.bind_output(op, 1, _transformed(graph, op, scores))


@reads("ai.onnx.ml.ZipMap")
def read_zip_map(graph: GraphReader, op: Op) -> None:
    graph.pass_on(op)


@reads("ai.onnx.ml.ArrayFeatureExtractor")
def read_array_feature_extractor(graph: GraphReader, op: Op) -> None:
    """Columns of a value, or the labels (1, B) for class indices (B, 1)."""
    if graph.is_constant(op, 1):
        columns = graph.constant(op, 1).reshape(-1)
        _bind_part(graph, op, graph.part(op, "Gather", [op.inputs[0], graph.part_constant(op, columns)], axis=-1))
        return
    count = graph.text_count(op, 0)
    classes = np.arange(count) if count else graph.constant(op, 0).reshape(-1)
    index = graph.value(op, 1)
    if graph.types[index].row_size != 1 or graph.one_row:
        raise FormatError(f"{op}: one label per row", got=str(graph.types[index]), expected="[B] or [B, 1]")
    if classes.dtype.kind not in "iu":
        raise FormatError(f"{op}: labels must be ints or strings", got=classes.dtype.name, expected="int64")
    label = _labels(graph, op, op.inputs[1], classes.astype(np.int64))
    graph.begin(op, AxisView.permuted(label, (*graph.types[label].shape[:1], 1), (1, 0)))


@reads("ai.onnx.ml.FeatureVectorizer")
def read_feature_vectorizer(graph: GraphReader, op: Op) -> None:
    values = tuple(_floats(graph, op, index) for index in range(len(op.inputs)))
    graph.add(op, Concat(1), values)


def _floats(graph: GraphReader, op: Op, index: int = 0) -> str:
    """The rows as float32: these operators convert every input."""
    x = graph.value(op, index)
    if graph.one_row or len(graph.types[x].shape) != 2:
        raise FormatError(f"{op} needs rows", got=str(graph.types[x]), expected="[B, features]")
    return x if graph.types[x].dtype == "float32" else graph.add_step(op, Cast("float32"), (x,))


def _width(graph: GraphReader, op: Op, x: str) -> int:
    return graph.types[x].row_shape[0]


def _text(op: Op, name: str, default: str) -> str:
    value = op.attributes.get(name, default.encode())
    return value.decode(errors="replace") if isinstance(value, bytes) else show(value)


def _numbers(op: Op, name: str, counts: tuple[int, ...]) -> Array:
    values: list[object] = op.attribute(name, [])
    if len(values) not in counts:
        expected = " or ".join(map(str, counts))
        raise FormatError(f"{op}: wrong number of {name}", got=str(len(values)), expected=expected)
    return np.array(values, np.float32)


def _linear(graph: GraphReader, op: Op, outputs: int) -> str:
    x = _floats(graph, op)
    width = _width(graph, op, x)
    coefficients = _numbers(op, "coefficients", (outputs * width,)).reshape(outputs, width)
    roles = {"weight": graph.weight(f"{op.outputs[0]}_coefficients", coefficients)}
    if op.attributes.get("intercepts"):
        roles["bias"] = graph.weight(f"{op.outputs[0]}_intercepts", _numbers(op, "intercepts", (outputs,)))
    return graph.add_step(op, Linear(), (x,), roles)


def _transformed(graph: GraphReader, op: Op, scores: str) -> str:
    how = _text(op, "post_transform", "NONE")
    if how not in _TRANSFORMS:
        raise FormatError(f"{op}: no such post_transform", got=show(how), expected=", ".join(_TRANSFORMS))
    layer = _TRANSFORMS[how]
    return scores if layer is None else graph.add_step(op, layer, (scores,))


def _labels(graph: GraphReader, op: Op, index: str, classes: Array) -> str:
    """The labels (B,) for the class indices under the ONNX name `index`."""
    value = graph.value(Op(op.kind, op.name, (index,), op.outputs, {}))
    if graph.types[value].row_shape:
        value = graph.add_step(op, Reshape(()), (value,))
    if np.array_equal(classes, np.arange(len(classes))):
        return value
    table = {"weight": graph.weight(f"{op.outputs[0]}_classes", classes[:, None])}
    return graph.add_step(op, Reshape(()), (graph.add_step(op, Embedding(), (value,), table),))


def _bind_part(graph: GraphReader, op: Op, part: str) -> None:
    """Bind the node's first output to the value of an intermediate operator."""
    graph.bind_output(op, 0, graph.value(Op(op.kind, op.name, (part,), op.outputs, {})))
