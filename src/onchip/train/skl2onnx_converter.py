"""A converter for skl2onnx: pipelines with a Classifier or a Regressor become ONNX models as any other pipeline.

from onchip.train.skl2onnx_converter import register
register()
model = skl2onnx.to_onnx(pipeline, X[:1].astype(np.float32), options={"zipmap": False})
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onchip.errors import InputError, MissingPackageError
from onchip.formats.onnx.writer import onnx_model


def register() -> None:
    """Teach skl2onnx about onchip's estimators, in this process."""
    try:
        from skl2onnx import update_registered_converter
    except ModuleNotFoundError:
        raise MissingPackageError("converting a pipeline", "skl2onnx", "skl2onnx") from None
    from onchip.train.estimators import Classifier, Regressor

    options = {"zipmap": [True, False, "columns"], "nocl": [True, False], "output_class_labels": [False, True]}
    update_registered_converter(
        Classifier, "OnchipClassifier", _classifier_shapes, _convert_classifier, options=options
    )
    update_registered_converter(Regressor, "OnchipRegressor", _regressor_shapes, _convert_regressor)


def _classifier_shapes(operator: Any) -> None:
    from skl2onnx.common.data_types import FloatTensorType, Int64TensorType, StringTensorType

    rows, classes = operator.inputs[0].type.shape[0], operator.raw_operator.classes_
    is_text = classes.dtype.kind not in "biu"
    operator.outputs[0].type = (StringTensorType if is_text else Int64TensorType)([rows])
    operator.outputs[1].type = FloatTensorType([rows, len(classes)])


def _regressor_shapes(operator: Any) -> None:
    from skl2onnx.common.data_types import FloatTensorType

    operator.outputs[0].type = FloatTensorType(
        [operator.inputs[0].type.shape[0], operator.raw_operator.network_.output.row_size]
    )


def _convert_classifier(scope: Any, operator: Any, container: Any) -> None:
    logits = _add_network(scope, operator, container)
    classes = operator.raw_operator.classes_
    is_text = classes.dtype.kind not in "biu"
    values = [str(label).encode() for label in classes.tolist()] if is_text else [int(label) for label in classes]
    best = scope.get_unique_variable_name("best")
    labels = scope.get_unique_variable_name("classes")
    kind = 8 if is_text else 7  # TensorProto's STRING and INT64
    container.add_initializer(labels, kind, [len(classes)], values)
    name = scope.get_unique_operator_name
    container.add_node("Softmax", logits, operator.outputs[1].full_name, name=name("Softmax"), op_version=13, axis=-1)
    container.add_node("ArgMax", logits, best, name=name("ArgMax"), op_version=13, axis=1, keepdims=0)
    container.add_node("Gather", [labels, best], operator.outputs[0].full_name, name=name("Gather"), op_version=13)


def _convert_regressor(scope: Any, operator: Any, container: Any) -> None:
    values = _add_network(scope, operator, container)
    name = scope.get_unique_operator_name("Identity")
    container.add_node("Identity", values, operator.outputs[0].full_name, name=name, op_version=13)


def _add_network(scope: Any, operator: Any, container: Any) -> str:
    """Add the nodes and weights of the network; returns the name of its output (B, D_out)."""
    import onnx
    from onnx import numpy_helper

    net = operator.raw_operator.network_
    if len(net.input.row_shape) != 1:
        got, hint = str(net.input), "onchip.save for other networks"
        raise InputError("skl2onnx converts rows (n, D)", got=got, expected="a network of such rows", hint=hint)
    model = onnx_model(net)
    version = next(entry.version for entry in model.opset_import if entry.domain == "")
    (source,) = net.inputs
    names = {source: operator.inputs[0].full_name}
    for tensor in model.graph.initializer:
        names[tensor.name] = scope.get_unique_variable_name(tensor.name)
        array = numpy_helper.to_array(tensor)
        container.add_initializer(names[tensor.name], tensor.data_type, list(tensor.dims), array.ravel().tolist())
    for node in model.graph.node:
        inputs = [names.get(value, value) for value in node.input]
        outputs = [names.setdefault(value, scope.get_unique_variable_name(value)) for value in node.output]
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        name = scope.get_unique_operator_name(node.op_type)
        container.add_node(
            node.op_type, inputs, outputs, op_domain=node.domain, name=name, op_version=version, **attributes
        )
    (output,) = [names[value.name] for value in model.graph.output]
    if len(net.output.row_shape) == 1:
        return str(output)
    flat, shape = scope.get_unique_variable_name("flat"), scope.get_unique_variable_name("shape")
    container.add_initializer(shape, 7, [2], np.array([-1, net.output.row_size]).tolist())
    container.add_node("Reshape", [output, shape], flat, name=scope.get_unique_operator_name("Reshape"), op_version=13)
    return str(flat)
