"""ONNX models in a line, and what they mean: shared by the tests of the ONNX reader and writer."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import settings
from onnx import TensorProto, helper

from onchip.errors import FormatError
from onchip.formats.onnx.reader import read_onnx
from onchip.formats.onnx.tensors import make_tensor
from onchip.kernels import reference
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    GELU,
    Add,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    ConvTranspose2d,
    CumSum,
    GlobalMax,
    LeakyReLU,
    Linear,
    LogSoftmax,
    MaxPool2d,
    Permute,
    ReLU,
    Reshape,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from onchip.network.types import TensorType, numpy_dtype

SETTINGS = settings(max_examples=40)
F32 = TensorProto.FLOAT


def numbers(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))


def op(kind, inputs, output="y", name="", **attributes):
    return helper.make_node(kind, inputs.split(), [output], name, **attributes)


def model(nodes, weights=None, x=("N", 4), opset=17, outputs=("y",), element=F32, input_weights=False):
    """An ONNX model with the input x; weights are initializers, and graph inputs too if `input_weights`."""
    tensors = [make_tensor(name, np.asarray(array)) for name, array in (weights or {}).items()]
    inputs = [helper.make_tensor_value_info("x", element, x)]
    if input_weights:
        inputs += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in tensors]
    made = [helper.make_tensor_value_info(name, element, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, made, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def read(tmp_path, proto, shapes=None) -> Network:
    path = tmp_path / "model.onnx"
    path.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
    return read_onnx(path, shapes)


def run_onnx(source, *rows) -> list[np.ndarray]:
    """What ONNX Runtime makes of a model or a file, an array for each of its inputs."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    data = source.SerializeToString() if isinstance(source, onnx.ModelProto) else str(source)
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([given.name for given in session.get_inputs()], rows, strict=True)))


def rows_of(net, B=5, seed=7) -> tuple[np.ndarray, ...]:
    """Random rows for each input: ids below 5 where it holds ints."""
    rng, rows = np.random.default_rng(seed), []
    for given in net.inputs.values():
        shape = (B, *given.row_shape)
        x = rng.standard_normal(shape) if "float" in given.dtype else rng.integers(0, 5, shape)
        rows.append(x.astype(numpy_dtype(given.dtype)))
    return tuple(rows)


def check_meaning(tmp_path, proto, rows=5, tolerance=2e-6, shapes=None) -> Network:
    """The network that is read computes what ONNX Runtime computes."""
    net = read(tmp_path, proto, shapes)
    xs = rows_of(net, rows)
    expected = run_onnx(proto, *xs)
    values = reference.forward_all(net, xs)
    for name, truth in zip(net.outputs, expected, strict=True):
        assert values[name].shape == truth.shape
        np.testing.assert_allclose(values[name], truth, rtol=tolerance, atol=tolerance)
    return net


def refused(tmp_path, proto, *words, shapes=None):
    """The message, which has the file's name and these words in it."""
    with pytest.raises(FormatError) as caught:
        read(tmp_path, proto, shapes)
    for word in ("model.onnx", *words):
        assert word in str(caught.value), caught.value
    return str(caught.value)


def every_layer(dtype="float32") -> Network:
    weights = {"a.weight": numbers(3, 4, seed=1), "a.bias": numbers(3, seed=2), "b.weight": numbers(5, 3, seed=3),
               "c.weight": numbers(6, 10, seed=4), "c.bias": numbers(6, seed=5)}  # fmt: skip
    layers = [
        ("shape", Reshape((2, 4))), ("a", Linear()), ("relu", ReLU()), ("b", Linear()), ("soft", Softmax(1)),
        ("flat", Reshape()), ("c", Linear()), ("tanh", Tanh()), ("sigmoid", Sigmoid()), ("out", LogSoftmax()),
    ]  # fmt: skip
    arrays = {name: array.astype(numpy_dtype(dtype)) for name, array in weights.items()}
    return sequential(TensorType(("B", 8), dtype), layers, arrays)


def image_layers(dtype="float32") -> Network:
    """Windows, norms, activations of several nodes, and a sum at the end."""
    weights = {
        "conv.weight": numbers(4, 3, 3, 3, seed=1), "conv.bias": numbers(4, seed=2), "up.weight": numbers(4, 2, 3, 2),
        **{f"norm.{role}": abs(numbers(4, seed=i)) for i, role in enumerate(("weight", "bias", "mean", "var"))},
        "sum.constant": numbers(9, seed=3),
    }  # fmt: skip
    layers = [
        ("conv", Conv2d((2, 1), (1, 0, 1, 1))), ("norm", BatchNorm2d()), ("leaky", LeakyReLU(0.2)),
        ("up", ConvTranspose2d((2, 2), (1, 0, 0, 1), (1, 0))),
        ("max", MaxPool2d((3, 2), (2, 2), (1, 0, 1, 1), ceil=True)), ("gelu", GELU()), ("tanh", GELU("tanh")),
        ("silu", SiLU()), ("mean", AvgPool2d((2, 2), count_pads=True)), ("turn", Permute((0, 2, 3, 1))),
        ("top", GlobalMax((2,))), ("scan", CumSum(1, reverse=True)), ("flat", Reshape()),
    ]  # fmt: skip
    arrays = {name: array.astype(numpy_dtype(dtype)) for name, array in weights.items()}
    net = sequential(TensorType(("B", 3, 9, 8), dtype), layers, arrays)
    arrays["sum.constant"] = np.resize(arrays["sum.constant"], net.output.row_shape)
    nodes = (
        *net.nodes,
        Node("sum", Add(), ("flat", "flat"), {}),
        Node("last", Add(), ("sum",), {"constant": "sum.constant"}),
    )
    return net.replace(nodes=nodes, outputs=("last",), weights=arrays)
