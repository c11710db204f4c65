"""Operators on constants and shapes, evaluated while reading."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from onchip.formats.onnx.tensors import make_tensor
from onchip.network.layers import Linear, Permute, Reshape
from onchip.network.types import TensorType
from onnx_models import check_meaning, model, numbers, op, read

INTS = {name: np.array(n) for name, n in (("zero", 0), ("one", 1), ("two", 2))}
LISTS = {name: np.array([n]) for name, n in (("first", 0), ("second", 1), ("third", 2), ("rest", -1), ("far", 2**62))}
FLAT = [op("Gather", "s zero", "n"), op("Unsqueeze", "n first", "u")]

CHAINS = {
    "view(size(0), -1)": ([op("Shape", "x", "s"), *FLAT, op("Concat", "u rest", "t", axis=0)], (12,)),
    "shape[:1]": (
        [op("Shape", "x", "s"), op("Slice", "s first second", "u"), op("Concat", "u rest", "t", axis=0)], (12,),
    ),
    "Shape(end=1)": ([op("Shape", "x", "u", end=1), op("Concat", "u rest", "t", axis=0)], (12,)),
    "a product of sizes": (
        [
            op("Shape", "x", "s"), *FLAT, op("Gather", "s one", "h"), op("Gather", "s two", "w"),
            op("Mul", "h w", "hw"), op("Unsqueeze", "hw first", "v"), op("Concat", "u v", "t", axis=0),
        ],
        (12,),
    ),
    "sizes halved": (
        [
            op("Shape", "x", "s"), *FLAT, op("Gather", "s two", "w"), op("Div", "w two", "half"),
            op("Unsqueeze", "half first", "v"), op("Concat", "u v second rest", "t", axis=0),
        ],
        (2, 1, 6),
    ),
    "casts and squeezes": (
        [
            op("Shape", "x", "s"), op("Cast", "s", "i", to=TensorProto.INT32),
            op("Cast", "i", "l", to=TensorProto.INT64),
            op("Slice", "l first second", "n"), op("Squeeze", "n first", "m"), op("Reshape", "m rest", "u"),
            op("Concat", "u rest", "t", axis=0),
        ],
        (12,),
    ),
    "everything behind": (
        [op("Shape", "x", "s"), op("Slice", "s second far", "r"), op("Concat", "rest r second", "t", axis=0)],
        (3, 4, 1),
    ),
    "less and more": (
        [
            op("Shape", "x", "s"), *FLAT, op("Gather", "s one", "h"), op("Sub", "h one", "g"), op("Add", "g one", "h2"),
            op("Unsqueeze", "h2 first", "v"), op("Concat", "u v rest", "t", axis=0),
        ],
        (3, 4),
    ),
    "what is left over": (
        [
            op("Shape", "x", "s"), *FLAT, op("Gather", "s two", "w"), op("Mod", "w two", "m"), op("Add", "m one", "a"),
            op("Unsqueeze", "a first", "v"), op("Concat", "u v rest", "t", axis=0),
        ],
        (1, 12),
    ),
    "its own shape": ([op("Shape", "x", "s"), op("Identity", "s", "t")], (3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("rows", ["N", 5])
def test_shapes_with_the_batch_first(tmp_path, chain, rows):
    nodes, row_shape = CHAINS[chain]
    net = check_meaning(tmp_path, model([*nodes, op("Reshape", "x t", name="r")], {**INTS, **LISTS}, (rows, 3, 4)))
    assert net.output == TensorType(("B", *row_shape))
    assert [type(node.layer) for node in net.nodes] == [Reshape]


def test_sizes_before_opset_13(tmp_path):
    nodes = [
        op("Shape", "x", "s"), op("Slice", "s", "n", starts=[0], ends=[1]), op("Squeeze", "n", "m", axes=[0]),
        op("Unsqueeze", "m", "u", axes=[0]), op("Concat", "u rest", "t", axis=0), op("Reshape", "x t"),
    ]  # fmt: skip
    assert check_meaning(tmp_path, model(nodes, LISTS, ("N", 3, 4), opset=9)).output == TensorType(("B", 12))


def test_a_transposed_weight_retains_its_name(tmp_path):
    w = numbers(3, 4)
    nodes = [op("Transpose", "fc.weight", "t", perm=[1, 0]), op("MatMul", "x t")]
    net = check_meaning(tmp_path, model(nodes, {"fc.weight": w}))
    np.testing.assert_array_equal(net.weights["fc.weight"], w)
    nodes = [op("Reshape", "fc.weight shape", "r"), op("Transpose", "r", "t"), op("MatMul", "x t")]
    net = check_meaning(tmp_path, model(nodes, {"fc.weight": w.reshape(-1), "shape": np.array([3, 4])}))
    np.testing.assert_array_equal(net.weights["fc.weight"], w)
    nodes = [op("Identity", "a", "fc.weight"), op("Gemm", "x fc.weight", transB=1)]  # equal weights, written once
    assert list(check_meaning(tmp_path, model(nodes, {"a": w})).weights) == ["fc.weight"]


def test_arithmetic_of_weights(tmp_path):
    nodes = [
        op("Mul", "v g", "w"), op("Cast", "b", "bias", to=TensorProto.FLOAT), op("Sqrt", "var", "std"),
        op("Div", "bias std", "c"), op("Slice", "c first third first", "d"), op("Gather", "d order", "e", axis=0),
        op("Gemm", "x w e"),
    ]  # fmt: skip
    weights = {"v": numbers(4, 2), "g": numbers(1, 2), "b": numbers(3, dtype="float64"), "var": abs(numbers(3)),
               "order": np.array([1, 0]), **LISTS}  # fmt: skip
    net = check_meaning(tmp_path, model(nodes, weights), tolerance=1e-5)
    assert [type(node.layer) for node in net.nodes] == [Linear]


def test_positions_and_zeros_are_folded(tmp_path):
    nodes = [
        op("Shape", "x", "s"), op("Gather", "s one", "n"), op("Range", "zero n one", "places"),
        op("Gather", "table places", "p", axis=0), op("ConstantOfShape", "first", "nothing"),
        op("ConstantOfShape", "third", "c", value=make_tensor("", np.array([3.5], np.float32))),
        op("Add", "x p", "q"), op("Slice", "c first second", "d"), op("Mul", "q d"),
    ]  # fmt: skip
    net = check_meaning(tmp_path, model(nodes, {"table": numbers(9, 4), **INTS, **LISTS}, ("N", 3, 4)))
    assert [node.layer.kind for node in net.nodes] == ["Add", "Mul"]
    np.testing.assert_array_equal(net.weights["p"], numbers(9, 4)[:3])


def test_slices_backwards(tmp_path):
    nodes = [op("Slice", "c start end first step", "d"), op("Add", "x d")]
    for start, end in ((-1, -(2**62)), (3, -9), (2, 0)):
        weights = {"c": numbers(4), "start": np.array([start]), "end": np.array([end]), "step": np.array([-1])}
        if (start, end) == (2, 0):
            weights["c"] = numbers(7)
            weights["start"], weights["end"] = np.array([5]), np.array([1])
        check_meaning(tmp_path, model(nodes, {**weights, **LISTS}))


def test_squeeze_unsqueeze_and_transpose_of_values(tmp_path):
    nodes = [op("Unsqueeze", "x axes", "u"), op("Squeeze", "u two", "s"), op("Transpose", "s", perm=[0, 3, 1, 2])]
    weights = {"axes": np.array([-1, 1]), "two": np.array([1])}
    net = check_meaning(tmp_path, model(nodes, weights, ("N", 3, 4)))
    assert net.output == TensorType(("B", 1, 3, 4))
    assert net.nodes[-1].layer == Permute((0, 3, 1, 2))
    net = check_meaning(tmp_path, model([op("Squeeze", "x")], x=("N", 1, 3, 1)))
    assert net.output == TensorType(("B", 3))
    old = [op("Unsqueeze", "x", "u", axes=[1]), op("Squeeze", "u", axes=[1])]
    assert check_meaning(tmp_path, model(old, x=("N", 3), opset=7)).output == TensorType(("B", 3))


def test_casts_to_the_same_dtype(tmp_path):
    nodes = [op("Cast", "x", "c", to=TensorProto.FLOAT), op("CastLike", "half c", "h"), op("Mul", "c h")]
    net = read(tmp_path, model(nodes, {"half": np.float64(0.5)}))
    assert [node.layer.kind for node in net.nodes] == ["Mul"]
    assert net.weights["h"].dtype == np.float32


REDUCED = ("ReduceSum", "ReduceProd", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2")


@pytest.mark.parametrize("kind", REDUCED)
def test_reductions_of_weights(tmp_path, kind):
    for axes, keep in (([0], 1), ([-1], 0), (None, 1)):
        attributes = {} if axes is None else {"axes": axes}
        nodes = [op(kind, "w", "r", keepdims=keep, **attributes), op("Mul", "x r")]
        net = check_meaning(tmp_path, model(nodes, {"w": numbers(4, 4)}, opset=12), tolerance=1e-5)
        assert [node.layer.kind for node in net.nodes] == ["Mul"]


@pytest.mark.parametrize("upper", [0, 1])
def test_triangles_of_weights(tmp_path, upper):
    for k in (-1, 0, 2):
        nodes = [op("Trilu", "w k", "t", upper=upper), op("Add", "x t")]
        net = check_meaning(tmp_path, model(nodes, {"w": numbers(3, 4), "k": np.array(k)}, ("N", 3, 4)))
        assert [node.layer.kind for node in net.nodes] == ["Add"]


def test_weights_that_are_split_and_cut(tmp_path):
    split = helper.make_node("Split", ["w"], ["a", "b"], axis=-1)
    nodes = [split, op("Clip", "a low", "c"), op("Clip", "b  high", "d"), op("Mul", "x c", "e"), op("Add", "e d")]
    weights = {"w": numbers(8), "low": np.float32(-0.3), "high": np.float32(0.2)}
    nodes[2].input[:] = ["b", "", "high"]
    net = check_meaning(tmp_path, model(nodes, weights))
    assert [node.layer.kind for node in net.nodes] == ["Mul", "Add"]
    old = [op("Clip", "w", "c", min=-0.3, max=0.2), op("Mul", "x c")]
    check_meaning(tmp_path, model(old, {"w": numbers(4)}, opset=10))
