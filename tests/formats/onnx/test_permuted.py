"""Values between two layers whose batch axis is not first, or merged with attention heads."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
from onnx import helper

from onchip.formats.onnx.ops.base import READERS
from onchip.formats.onnx.reader import parse_model, read_model
from onchip.kernels import reference
from onnx_models import check_meaning, model, numbers, op, refused

STEPS_FIRST = op("Transpose", "x", "t", perm=[1, 0, 2])
ROWS_OF_HEADS = [
    op("Shape", "t", "sizes"), op("Gather", "sizes one", "rows", axis=0), op("Mul", "rows two", "many"),
    op("Unsqueeze", "many zero", "many1"), op("Unsqueeze", "rows zero", "rows1"),
]  # fmt: skip
WEIGHTS = {
    "zero": np.array([0]), "one": np.array(1), "two": np.array(2), "w": numbers(4, 8), "b": numbers(8, seed=1),
    "six": np.array([6]), "four": np.array([4]), "heads": np.array([2]), "v": numbers(5, 8), "c": numbers(5, seed=2),
    "joined": np.array([-1, 8]), "five": np.array([5]),
}  # fmt: skip
HEADS = [
    STEPS_FIRST, op("MatMul", "t w", "p"), op("Add", "b p", "q"), *ROWS_OF_HEADS,
    op("Concat", "six many1 four", "shape1", axis=0), op("Reshape", "q shape1", "apart"),
    op("Transpose", "apart", "h", perm=[1, 0, 2]), op("Concat", "rows1 heads six four", "shape2", axis=0),
    op("Reshape", "h shape2", "split"),
]  # fmt: skip
BACK = [
    op("Transpose", "split", "back", perm=[2, 0, 1, 3]), op("Reshape", "back joined", "flat"),
    op("Gemm", "flat v c", "made", transB=1), op("Concat", "six rows1 five", "shape3", axis=0),
    op("Reshape", "made shape3", "steps"), op("Tanh", "steps", "tanh"), op("Add", "tanh steps", "sum"),
    op("Transpose", "sum", perm=[1, 0, 2]),
]  # fmt: skip


def test_heads_merged_with_the_batch_and_back(tmp_path):
    net = check_meaning(tmp_path, model([*HEADS, op("Identity", "split")], WEIGHTS, ("N", 6, 4)))
    assert [node.layer.kind for node in net.nodes] == ["Linear", "Reshape", "Permute"]
    net = check_meaning(tmp_path, model([*HEADS, *BACK], WEIGHTS, ("N", 6, 4)))
    assert [node.layer.kind for node in net.nodes] == ["Linear", "Linear", "Tanh", "Add"]  # no Permute


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1)])
def test_parts_before_the_batch(tmp_path, sizes):
    """q, k, v = qkv.permute(2, 0, 1, 3), one output each; a part of size above 1 retains its axis."""
    names = [f"part{i}" for i in range(len(sizes))]
    nodes = [
        op("Transpose", "x", "front", perm=[2, 0, 1, 3]),
        helper.make_node("Split", ["front", "sizes"], names, axis=0),
        *(op("Transpose", name, f"{name}_back", perm=[1, 2, 0, 3]) for name in names),
        op("Concat", " ".join(f"{name}_back" for name in reversed(names)), axis=2),
    ]
    net = check_meaning(tmp_path, model(nodes, {"sizes": np.array(sizes)}, ("N", 5, 3, 2)))
    kinds = [node.layer.kind for node in net.nodes]
    assert kinds.count("Slice") == len(sizes)
    assert "Permute" not in kinds  # no Permute


def test_parts_one_by_one(tmp_path):
    """q, k = qk.permute(2, 0, 1, 3).unbind(0), as torch's newer exporter writes it; a Shape reads a part's sizes."""
    nodes = [
        op("Transpose", "x", "front", perm=[2, 0, 1, 3]), op("Slice", "front zero one zero", "q1"),
        op("Squeeze", "q1 zero", "q"), op("Slice", "front one two zero", "k1"), op("Squeeze", "k1 zero", "k"),
        op("Shape", "k1", "sizes", start=1), op("Reshape", "k sizes", "seen"), op("Add", "q seen"),
    ]  # fmt: skip
    places = {name: np.array([place]) for place, name in enumerate(("zero", "one", "two"))}
    net = check_meaning(tmp_path, model(nodes, places, ("N", 5, 2, 3), opset=17))
    assert "Permute" not in [node.layer.kind for node in net.nodes]


UNFINISHED = {
    "more rows than the batch has": ([op("Reshape", "x flat")], "puts the batch first again"),
    "steps": ([STEPS_FIRST, op("Relu", "t")], "puts the batch first again"),
    "joined": ([STEPS_FIRST, op("Reshape", "t flat")], "puts the batch first again"),
    "softmax": ([STEPS_FIRST, op("Softmax", "t", axis=0)], "cannot use this value"),
    "mixed": ([STEPS_FIRST, op("Reshape", "t seven")], "would mix the rows of the batch"),
    "squeezed": ([STEPS_FIRST, op("Squeeze", "t zero")], "can only squeeze 1"),
    "squared": (
        [STEPS_FIRST, *ROWS_OF_HEADS, op("Mul", "rows rows", "r"), op("Reshape", "t r")],
        "depend on the batch",
    ),
}


@pytest.mark.parametrize("case", UNFINISHED)
def test_refused(tmp_path, case):
    nodes, word = UNFINISHED[case]
    weights = WEIGHTS | {"flat": np.array([-1, 4]), "seven": np.array([7, -1])}
    refused(tmp_path, model(nodes, weights, ("N", 6, 4)), word)


@pytest.mark.skipif(not {"LayerNormalization", "Slice"} <= READERS.keys(), reason="nothing reads norms or slices")
def test_a_transformer_that_torch_exports():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    layer = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x, file = torch.randn(3, 5, 8, dtype=torch.float64), io.BytesIO()
    axes = {"x": {0: "B"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about its exporters
        torch.onnx.export(layer, (x,), file, input_names=["x"], dynamic_axes=axes, opset_version=17, dynamo=False)
    net = read_model(parse_model(file.getvalue()))
    with torch.no_grad():
        np.testing.assert_allclose(reference.forward(net, x.numpy()), layer(x).numpy(), rtol=1e-9, atol=1e-9)
