"""Constants repeated per row and files with a fixed batch: read for any number of rows."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.plan.device import H200
from onchip.plan.planner import make_plan
from onnx_models import check_meaning, model, numbers, op, read, refused, rows_of, run_onnx

SIZES = [op("Shape", "x", "s"), op("Slice", "s zero one", "n")]
INTS = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "row": np.array([5, 4])}

FOLDED = {
    "Relu": {}, "Sigmoid": {}, "Tanh": {}, "Softplus": {}, "Softmax": {"axis": 1}, "LogSoftmax": {"axis": -1},
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDED)
def test_layers_on_a_constant_repeated_per_row(tmp_path, kind):
    """Learned queries, broadcast over the batch, then normalised: constants while reading."""
    nodes = [
        *SIZES, op("Concat", "n row", "t", axis=0), op("Expand", "c t", "e"), op(kind, "e", "f", **FOLDED[kind]),
        op("LayerNormalization", "f g b", "l", epsilon=1e-3), op("Add", "x l"),
    ]  # fmt: skip
    weights = {**INTS, "c": numbers(1, 5, 4), "g": numbers(4, seed=1), "b": numbers(4, seed=2)}
    net = check_meaning(tmp_path, model(nodes, weights, ("N", 5, 4)))
    assert [node.layer.kind for node in net.nodes] == ["Add"]


@pytest.mark.parametrize(("opset", "axis"), [(11, 1), (11, 2), (13, 1)])
def test_a_softmax_of_an_older_file(tmp_path, opset, axis):
    nodes = [op("Softmax", "c", "f", axis=axis), op("Mul", "x f")]
    check_meaning(tmp_path, model(nodes, {"c": numbers(1, 5, 4)}, ("N", 5, 4), opset))


@pytest.mark.parametrize("how", ["none", "tanh"])
def test_gelu(tmp_path, how):
    nodes = [op("Gelu", "c", "f", approximate=how), op("Mul", "x f")]
    check_meaning(tmp_path, model(nodes, {"c": numbers(5, 4)}, ("N", 5, 4), 20), tolerance=1e-5)


def test_tiles_of_the_batch(tmp_path):
    nodes = [
        *SIZES, op("Concat", "n two one", "t", axis=0), op("Tile", "c t", "e"), op("Concat", "n row", "u", axis=0),
        op("Reshape", "e u", "f"), op("Sub", "x f"),
    ]  # fmt: skip
    net = check_meaning(tmp_path, model(nodes, {**INTS, "c": numbers(1, 5, 2)}, ("N", 5, 4)))
    assert len(net.nodes) == 1
    nodes[3] = op("Tile", "x t", "e")
    refused(tmp_path, model(nodes, INTS, ("N", 5, 2)), "Tile")


@pytest.mark.parametrize("nodes", [
    [op("Add", "x c")], [op("Concat", "c x", axis=1)], [op("MatMul", "c x")],
    [op("Einsum", "c x", equation="bij,bjk->bik")], [op("Greater", "x c", "m"), op("Where", "m x c")],
], ids=lambda nodes: nodes[0].op_type)  # fmt: skip
def test_a_constant_repeated_for_a_batch_that_is_fixed(tmp_path, nodes):
    same = np.repeat(numbers(1, 4, 4), 3, axis=0)
    net = check_meaning(tmp_path, model(nodes, {"c": same}, (3, 4, 4)), rows=3, tolerance=1e-5)
    assert reference.forward(net, numbers(5, 4, 4)).shape[0] == 5
    refused(tmp_path, model(nodes, {"c": numbers(3, 4, 4)}, (3, 4, 4)))


def attention(B, S=5, heads=2, D=4):
    """As torch writes it with steps first, heads merged with the batch, and all sizes fixed."""
    E = heads * D
    nodes, made = [op("Transpose", "x", "t", perm=[1, 0, 2])], {}
    for name in "qkv":
        nodes += [
            op("MatMul", f"t w{name}", f"{name}1"), op("Reshape", f"{name}1 split", f"{name}2"),
            op("Transpose", f"{name}2", f"{name}3", perm=[1, 0, 2]), op("Reshape", f"{name}3 apart", name),
        ]  # fmt: skip
        made[f"w{name}"] = numbers(E, E, seed=ord(name))
    nodes += [
        op("Transpose", "k", "kt", perm=[0, 1, 3, 2]), op("MatMul", "q kt", "a"), op("Softmax", "a", "p"),
        op("MatMul", "p v", "o"), op("Transpose", "o", "o1", perm=[2, 0, 1, 3]), op("Reshape", "o1 flat", "o2"),
        op("Gemm", "o2 wo", "o3"), op("Reshape", "o3 steps", "o4"), op("Transpose", "o4", "y", perm=[1, 0, 2]),
    ]  # fmt: skip
    made |= {"wo": numbers(E, E, seed=9), "split": np.array([S, B * heads, D]), "apart": np.array([B, heads, S, D])}
    made |= {"flat": np.array([S * B, E]), "steps": np.array([S, B, E])}
    return model(nodes, made, (B, S, E))


@pytest.mark.parametrize("B", [1, 2, 3, 5])
def test_attention_in_a_file_that_fixes_the_batch(tmp_path, B):
    """Also if a size equals the batch, or a batch of 1 fits any position."""
    net = read(tmp_path, attention(B))
    x = numbers(7, 5, 8)
    got = reference.forward(net, x)
    for row in range(7):
        (expected,) = run_onnx(attention(1), x[row : row + 1])
        np.testing.assert_allclose(got[row : row + 1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 3, 2, 5, 1, 6, 4, 7), (0, 7, 6, 5, 4, 3, 2, 1), (0, 2, 4, 6, 1, 3, 5, 7)])
def test_many_axes_move_in_steps(tmp_path, order):
    """As in window attention over images; GPU kernels move six at a time."""
    proto = model([op("Transpose", "x", perm=order)], x=("N", 2, 3, 2, 2, 3, 2, 2))
    net = check_meaning(tmp_path, proto, tolerance=0)
    make_plan(net, H200, KERNELS)


# -- branches ------------------------------------------------------------------------------------------------------


def branch(nodes, output, weights=None):
    made = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    return helper.make_graph(nodes, "branch", [], made, tensors)


def test_an_if_on_sizes_is_one_of_its_branches(tmp_path):
    """As exporters write x.squeeze(1): the axis is removed if its size is 1."""
    then = branch([op("Squeeze", "x one_axis", "s1")], "s1", {"one_axis": np.array([1])})
    other = branch([op("Identity", "x", "s2")], "s2")
    for size in (1, 3):
        nodes = [
            op("Shape", "x", "s"), op("Gather", "s at", "n"), op("Equal", "n at", "is_one"),
            op("If", "is_one", "z", then_branch=then, else_branch=other), op("Relu", "z"),
        ]  # fmt: skip
        net = read(tmp_path, model(nodes, {"at": np.array(1)}, ("N", size, 4)))  # ONNX Runtime reads both branches
        assert net.output.row_shape == ((4,) if size == 1 else (3, 4))
        x = numbers(5, size, 4)
        np.testing.assert_array_equal(reference.forward(net, x), np.maximum(x.squeeze(1) if size == 1 else x, 0))


def test_an_if_on_values_is_refused(tmp_path):
    then, other = branch([op("Relu", "x", "a")], "a"), branch([op("Neg", "x", "b")], "b")
    nodes = [
        op("ReduceSum", "x", "t", keepdims=0), op("Greater", "t zero", "c"),
        op("If", "c", then_branch=then, else_branch=other),
    ]  # fmt: skip
    refused(tmp_path, model(nodes, {"zero": np.array(0, "f4")}), "If (1 node)", "without branches")
    nodes = [op("If", "c", then_branch=branch([op("Det", "x", "a")], "a"), else_branch=other)]
    refused(tmp_path, model(nodes, {"c": np.array(True)}), "Det (1 node)")


def test_a_remainder_of_values(tmp_path):
    check_meaning(tmp_path, model([op("Mod", "x k", fmod=1)], {"k": np.float32(0.75)}))


def test_nested_branches_are_limited(tmp_path):
    inner = branch([op("Relu", "x", "deep0")], "deep0")
    for depth in range(1, 11):
        nodes = [op("If", "c", f"deep{depth}", then_branch=inner, else_branch=inner)]
        inner = branch(nodes, f"deep{depth}")
    refused(tmp_path, model([op("If", "c", then_branch=inner, else_branch=inner)], {"c": np.array(True)}), "branches")


# -- one index per row -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "ids", "axis"), [
    ((5,), (1,), 1), ((5,), (3,), -1), ((5, 4), (2, 4), 1), ((3, 5), (3, 1), 2), ((2, 5, 3), (2, 2, 3), -2),
])  # fmt: skip
def test_gather_elements(tmp_path, x, ids, axis):
    proto = model([op("GatherElements", "x ids", axis=axis)], x=("N", *x))
    proto.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ("N", *ids)))
    net = read(tmp_path, proto)
    given = rows_of(net, 6)
    np.testing.assert_array_equal(reference.forward(net, given, dtype="float32"), run_onnx(proto, *given)[0])


def test_gather_elements_that_are_refused(tmp_path):
    for x, axis in (((2000,), 1), ((5,), 0), ((5, 3), 1)):
        proto = model([op("GatherElements", "x ids", axis=axis)], x=("N", *x))
        shape = ("N", *(1 for _ in x))
        proto.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, shape))
        refused(tmp_path, proto, "GatherElements")


def counted(row, times="size"):
    """x[arange(B), ids] of x (N, *row), as torch exports it."""
    nodes = [
        op("Shape", "x", "s"), op("Gather", "s zero", "n"), op("Range", "zero n one", "r"),
        op("Gather", "s one", "size"),
        op("Flatten", "x", "flat", axis=2), op("Mul", f"r {times}", "first"), op("Add", "ids first", "places"),
        op("Gather", "flat places", "rows", axis=0), op("Shape", "places", "t"), op("Slice", "s two far", "rest"),
        op("Concat", "t rest", "u", axis=0), op("Reshape", "rows u"),
    ]  # fmt: skip
    ints = {"zero": 0, "one": 1, "three": 3, "two": [2], "far": [9]}
    proto = model(nodes, {name: np.array(number) for name, number in ints.items()}, ("N", *row))
    proto.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ("N",)))
    return proto


@pytest.mark.parametrize("row", [(5,), (5, 3), (5, 2, 3)])
def test_indices_through_the_batch(tmp_path, row):
    net = read(tmp_path, counted(row))
    given = rows_of(net, 6)
    np.testing.assert_array_equal(reference.forward(net, given, dtype="float32"), run_onnx(counted(row), *given)[0])


def test_indices_into_other_rows_are_refused(tmp_path):
    refused(tmp_path, counted((5, 3), times="three"), "Gather that computes 'rows'", "must be a constant")
