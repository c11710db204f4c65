"""Slices, splits, gathers, pads, tiles, resizes and norms of ONNX files, as ONNX Runtime computes them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from onchip.formats.onnx.ops.base import Op
from onchip.formats.onnx.ops.norm_parts import NORM, join_norms
from onchip.network.layers import Add, Gather, GroupNorm, LayerNorm, NearestResize, Pad, ReLU, Reshape, RMSNorm, Slice
from onnx_models import check_meaning, model, numbers, op, read, refused

CONSTANTS = {
    "one": np.array([1]), "two": np.array([2]), "far": np.array([2**62]),
    "axes": np.array([1, -1]), "from": np.array([-1, 1]), "to": np.array([-99, 4]),
    "steps": np.array([-2, 2]), "index": np.array(2), "table": np.array([[2, 0], [-1, 0]]),
    "zero": np.array([0]), "ends": np.array([2**62, 2]), "both": np.array([0, 1]), "shape": np.array([1, 1, 4, 1]),
    "pads": np.array([0, 0, 1, 2, 0, 0, 2, 1]), "half": np.float32(0.5), "repeats": np.array([1, 2, 1, 3]),
    "scales": np.array([1, 1, 2, 1.5], "f4"), "token": numbers(1, 2, 4, 5, seed=3),
    "w3": numbers(3, seed=1), "w5": numbers(5, seed=2), "w45": numbers(4, 5, seed=4), "w1": numbers(1, seed=5),
    "w6": numbers(6, seed=6),
}  # fmt: skip
IMAGE = ("N", 3, 4, 5)
# nodes, opset, the layers
CASES = {
    "slice": ([op("Slice", "x from to axes steps")], 17, [Slice]),
    "slice of old": ([op("Slice", "x", axes=[2, 3], starts=[1, -3], ends=[-1, 9])], 9, [Slice]),
    "all rows": ([op("Slice", "x both ends both")], 17, [Slice]),
    **{
        f"to {end}": ([op("Slice", "x", starts=[start, 1, start], ends=[end] * 3, axes=[0, 1, 3])], 9, [Slice])
        for start, end in ((0, 10**9), (0, 2**31 - 1), (0, 2**63 - 1), (-(10**9), 2**62))
    },
    "all of it": ([op("Slice", "x", starts=[0] * 4, ends=[10**9] * 4, output="s"), op("Relu", "s")], 9, [ReLU]),
    "index": ([op("Gather", "x index", axis=2)], 17, [Slice, Reshape]),
    "table": ([op("Gather", "x table", axis=-2)], 17, [Gather, Reshape]),
    "reflect": ([op("Pad", "x pads", "p", mode="reflect"), op("MaxPool", "p", kernel_shape=[2, 2])], 17, None),
    "edge": ([op("Pad", "x pads", mode="edge")], 17, [Pad]),
    "a number": ([op("Pad", "x pads half")], 17, [Pad]),
    "pad and SAME": (
        [op("Pad", "x pads", "p"), op("AveragePool", "p", kernel_shape=[2, 2], auto_pad="SAME_UPPER")], 17, None,
    ),
    "tile": ([op("Tile", "x repeats")], 17, None),
    "expand": ([op("ReduceMax", "x", "m", axes=[2]), op("Expand", "m shape", "e"), op("Expand", "e pick")], 17, None),
    "token": ([op("Shape", "x", "s", end=1), op("Concat", "s rest", "e", axis=0), op("Expand", "token e", "t"),
               op("Concat", "t x t", axis=1)], 17, [Pad, Pad, Add]),
    "upsample": ([op("Upsample", "x scales")], 9, [NearestResize]),
    "resize of 10": ([op("Resize", "x scales", mode="linear")], 10, None),
    "depth": ([op("Concat", "x x x x", "c", axis=1), op("DepthToSpace", "c", blocksize=2)], 17, None),
    "depth CRD": ([op("Concat", "x x x x", "c", axis=1), op("DepthToSpace", "c", blocksize=2, mode="CRD")], 17, None),
    "space": ([op("Concat", "x x", "c", axis=3), op("SpaceToDepth", "c", blocksize=2)], 17, None),
    "layer norm": ([op("LayerNormalization", "x w45 w5", axis=2, epsilon=1e-3)], 17, [LayerNorm]),
    "rms norm": ([op("RMSNormalization", "x w1")], 23, [RMSNorm]),
    "instance norm": ([op("InstanceNormalization", "x w3 w3")], 17, [GroupNorm]),
    "group norm": ([op("Concat", "x x", "c", axis=1), op("GroupNormalization", "c w6 w6", num_groups=3)], 21, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_meaning(tmp_path, case):
    nodes, opset, kinds = CASES[case]
    constants = {**CONSTANTS, "pick": np.array([1, 1, 1, 1]), "rest": np.array([2, 4, 5])}
    used = {name: constants[name] for node in nodes for name in node.input if name in constants}
    net = check_meaning(tmp_path, model(nodes, used, IMAGE, opset), tolerance=1e-6)
    if kinds is not None:
        assert [type(node.layer) for node in net.nodes] == kinds


@pytest.mark.parametrize(("opset", "sizes"), [(11, [1, 3]), (13, None), (17, None), (18, "num")])
def test_split(tmp_path, opset, sizes):
    attributes = {"num_outputs": 2} if sizes == "num" else {"split": sizes} if sizes else {}
    inputs, weights = (["x", "s"], {"s": np.array([1, 3])}) if opset == 17 else (["x"], {})
    node = helper.make_node("Split", inputs, ["a", "b"], axis=2, **attributes)
    net = check_meaning(tmp_path, model([node, op("Relu", "b")], weights, IMAGE, opset, outputs=("a", "y")))
    assert [node.layer.kind for node in net.nodes] == ["Slice", "Slice", "ReLU"]


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("how", ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"])
def test_resize(tmp_path, mode, how):
    given = {"mode": mode, "coordinate_transformation_mode": how}
    nodes = [op("Resize", "x", "r", nearest_mode="floor", **given), op("Resize", "r", nearest_mode="ceil", **given)]
    nodes[0].input[:] = ["x", "", "scales"]
    nodes[1].input[:] = ["r", "", "", "sizes"]
    weights = {"scales": CONSTANTS["scales"], "sizes": np.array([2, 3, 6, 9])}
    proto = model(nodes, weights, (2, 3, 4, 5), 17)  # sizes include the batch
    check_meaning(tmp_path, proto, rows=2, tolerance=1e-5)


def test_a_group_has_one_scale_before_opset_21(tmp_path):
    nodes, weights = [op("GroupNormalization", "x w w", num_groups=3)], {"w": numbers(3)}
    (node,) = read(tmp_path, model(nodes, weights, ("N", 6, 4), 18)).nodes
    assert isinstance(node.layer, GroupNorm)
    net = read(tmp_path, model(nodes, weights, ("N", 6, 4), 18))
    assert np.array_equal(net.weights[node.weights["weight"]], np.repeat(weights["w"], 2))


def test_expand_to_a_computed_shape(tmp_path):
    """As `x[:, :1].expand(-1, 3, -1, -1)` is exported: sizes below 0 are replaced."""
    nodes = [
        op("Slice", "x zero one one", "f"), op("Equal", "wanted minus", "e"), op("Where", "e ones wanted", "s"),
        op("Expand", "f s"),
    ]  # fmt: skip
    weights = {
        "zero": np.array([0]), "one": np.array([1]), "wanted": np.array([-1, 3, -1, -1]), "minus": np.array([-1] * 4),
        "ones": np.array([1] * 4),
    }  # fmt: skip
    check_meaning(tmp_path, model(nodes, weights, IMAGE))


SQUARES = {"pow": [op("Pow", "d p2", "q")], "product": [op("Mul", "d d", "q")]}
QUOTIENTS = {
    "div": [op("Div", "d s")], "reciprocal": [op("Reciprocal", "s", "r"), op("Mul", "r d")],
    "one by": [op("Div", "p1 s", "r"), op("Mul", "d r")],
}  # fmt: skip


@pytest.mark.parametrize("quotient", QUOTIENTS)
@pytest.mark.parametrize("axes", [[-1], [2, 3], [1]], ids=str)
@pytest.mark.parametrize("is_centred", [True, False])
def test_norms_as_separate_nodes(tmp_path, quotient, axes, is_centred):
    opset = 17 if quotient == "div" else 18
    numbers_of = {"p1": np.float32(1), "p2": np.float32(2), "eps": np.float32(1e-3)}
    given = {} if opset == 17 else {"a": np.array(axes)}
    attributes = {"axes": axes} if opset == 17 else {}
    over = "" if opset == 17 else " a"
    first = [op("ReduceMean", f"x{over}", "m", **attributes), op("Sub", "x m", "d")]
    first = first if is_centred else [op("Relu", "x", "d")]
    nodes = [
        *first, *SQUARES["pow" if is_centred else "product"], op("ReduceMean", f"q{over}", "v", **attributes),
        op("Add", "v eps", "w"), op("Sqrt", "w", "s"), *QUOTIENTS[quotient],
    ]  # fmt: skip
    net = check_meaning(tmp_path, model(nodes, {**numbers_of, **given}, IMAGE, opset), tolerance=1e-5)
    norm = ["LayerNorm" if is_centred else "RMSNorm"]
    turned = ["Permute", *norm, "Permute"] if axes == [1] else norm
    assert [node.layer.kind for node in net.nodes] == ([] if is_centred else ["ReLU"]) + turned


def test_what_only_looks_like_a_norm_stays():
    def parts(last, **attributes):
        mean = Op("ReduceMean", "", ("q",), ("v",), {"axes": [1], **attributes})
        squares, root = Op("Mul", "", ("x", "x"), ("q",), {}), Op("Sqrt", "", ("w",), ("s",), {})
        return [squares, mean, Op("Add", "", ("v", "eps"), ("w",), {}), root, last]

    def joined(ops, outputs=("y",)):
        return [op.kind for op in join_norms(ops, outputs, lambda name: np.float32(1e-3) if name == "eps" else None)]

    quotient = Op("Div", "", ("x", "s"), ("y",), {})
    kinds = ["Mul", "ReduceMean", "Add", "Sqrt"]
    assert joined(parts(quotient)) == [NORM]
    assert joined(parts(quotient), ("y", "v")) == ["Mul", "ReduceMean", NORM]  # the variance has another reader
    assert joined(parts(Op("Div", "", ("z", "s"), ("y",), {}))) == [*kinds, "Div"]  # the squares are of another value
    assert joined(parts(Op("Div", "", ("s", "x"), ("y",), {}))) == [*kinds, "Div"]
    assert joined(parts(quotient, keepdims=0)) == [*kinds, "Div"]


BAD = {
    "rows": ([op("Slice", "x one two zero")], "mix the rows"),
    "some rows": ([op("Slice", "x zero million zero")], "mix the rows"),
    "last rows": ([op("Slice", "x minus far zero")], "mix the rows"),
    "no step": ([op("Slice", "x one two one zero")], "bad slice"),
    "gather rows": ([op("Gather", "x one")], "mix the rows"),
    "gather far": ([op("Gather", "x far", axis=1)], "bad indices"),
    "tile rows": ([op("Tile", "x many")], "repeat the batch"),
    "expand rows": ([op("Expand", "x many")], "repeat the batch"),
    "expand": ([op("Expand", "x wide")], "shapes do not fit"),
    "resize rows": ([op("Resize", "x", mode="nearest")], "input 3 must be a constant"),
    "huge": ([op("Tile", "x huge")], "rows are too large"),
    "blocks": ([op("DepthToSpace", "x", blocksize=2)], "bad blocks"),
    "groups": ([op("GroupNormalization", "x w3 w3", num_groups=2)], "do not divide into groups"),
    "scale": ([op("LayerNormalization", "x w3")], "do not fit"),
    "constants of rows": ([op("Concat", "rows x", axis=1)], "bad constant"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(tmp_path, case):
    nodes, words = BAD[case]
    constants = {
        **CONSTANTS, "many": np.array([2, 1, 1, 1]), "wide": np.array([1, 3, 4, 7]), "rows": numbers(2, 3, 4, 5),
        "huge": np.array([1, 2**20, 2**20, 1]), "million": np.array([10**6]), "minus": np.array([-5]),
    }  # fmt: skip
    used = {name: constants[name] for node in nodes for name in node.input if name in constants}
    refused(tmp_path, model(nodes, used, IMAGE, 21), words)


def test_pads_that_no_window_absorbs_stay(tmp_path):
    net = read(tmp_path, model([op("Pad", "x pads")], {"pads": CONSTANTS["pads"]}, IMAGE))
    assert [node.layer for node in net.nodes] == [Pad((0, 1, 2, 0, 2, 1))]
    nodes = [op("Pad", "x pads", "p"), op("Conv", "p w", "c"), op("Mul", "p p", "m")]
    net = read(tmp_path, model(nodes, {"pads": CONSTANTS["pads"], "w": numbers(2, 3, 2, 2)}, IMAGE, outputs=("c", "m")))
    assert [node.layer.kind for node in net.nodes] == ["Pad", "Conv2d", "Mul"]
    assert net.nodes[1].inputs == ("x",)


def test_concat_with_a_constant_is_a_pad_and_an_add(tmp_path):
    net = read(tmp_path, model([op("Concat", "token x", axis=1)], {"token": CONSTANTS["token"]}, IMAGE))
    assert [type(node.layer) for node in net.nodes] == [Pad, Add]
