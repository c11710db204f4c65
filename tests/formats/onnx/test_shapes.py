"""Dynamic axes of an ONNX file: set by the caller, propagated through the graph, named if missing."""

from __future__ import annotations

import ast
import re

import numpy as np
import pytest
from onnx import helper

import onchip
from onchip.errors import InputError
from onchip.network.build import mlp
from onnx_models import F32, check_meaning, model, numbers, op, read, refused


def two_inputs(first, second):
    proto = model([op("Add", "x mask")], x=first)
    proto.graph.input.append(helper.make_tensor_value_info("mask", F32, second))
    return proto


@pytest.mark.parametrize("open_size", ["H", None, -1, 0, "?"])
def test_every_kind_of_dynamic_axis(tmp_path, open_size):
    proto = model([op("Relu", "x")], x=("N", 3, open_size, open_size))
    net = check_meaning(tmp_path, proto, shapes={"x": ("B", 3, 5, 5)}) if open_size else None
    net = net or read(tmp_path, proto, {"x": ("B", 3, 5, 5)})  # ONNX Runtime treats 0 as a size
    assert net.inputs["x"].shape == ("B", 3, 5, 5)


def test_placeholders_other_than_symbols_may_have_different_sizes(tmp_path):
    for mark in ("?", "-1", "None", None):
        proto = model([op("Relu", "x")], x=(mark, 3, mark, mark))
        assert read(tmp_path, proto, {"x": ("B", 3, 5, 7)}).inputs["x"].row_shape == (3, 5, 7)


def test_no_shape_at_all(tmp_path):
    proto = model([op("Relu", "x")], x=None)
    assert read(tmp_path, proto, {"x": ("B", 4)}).inputs["x"].shape == ("B", 4)
    message = refused(tmp_path, proto, "input 'x' has no shape")
    assert "--shape x=B,3,224,224" in message


@pytest.mark.parametrize("shape", [("B", 7), ("rows", 7), (4, 7), ["B", np.int64(7)]])
def test_the_batch_is_any_string_or_the_number_that_the_file_is_for(tmp_path, shape):
    proto = model([op("Relu", "x")], x=("N", "W"))
    for shapes in ({"x": shape}, shape):  # one input needs no name
        assert read(tmp_path, proto, shapes).inputs["x"].shape == ("B", 7)
    fixed = model([op("Relu", "x")], x=(4, "W"))
    assert read(tmp_path, fixed, {"x": shape}).inputs["x"].shape == ("B", 7)


def test_a_number_for_the_batch_is_one_of_the_graph(tmp_path):
    """A graph exported for 4 rows has the 4 in its constants."""
    proto = model([op("Reshape", "x to")], {"to": np.array([4, 2, 3])}, x=("N", "W"))
    refused(tmp_path, proto, "the first size must be the batch", shapes={"x": ("B", 6)})
    assert read(tmp_path, proto, {"x": (4, 6)}).output.row_shape == (2, 3)


def test_sizes_propagate_through_computed_shapes(tmp_path):
    """Shape, Gather, Concat, Reshape, Resize by sizes, Range, ConstantOfShape, Expand: as exporters write them."""
    nodes = [
        op("Conv", "x w", "c", pads=[1, 1, 1, 1], strides=[2, 2]),
        op("Shape", "x", "s"), op("Slice", "s two four", "hw"),
        op("Shape", "c", "cs"), op("Slice", "cs zero two", "bc"), op("Concat", "bc hw", "sizes", axis=0),
        helper.make_node("Resize", ["c", "", "", "sizes"], ["r"], mode="nearest",
                         coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        op("Gather", "s i3", "width"), op("Range", "i0 width i1", "places"), op("Cast", "places", "at", to=F32),
        op("Add", "r at", "moved"), op("ConstantOfShape", "hw", "ones", value=helper.make_tensor("v", F32, [1], [2.0])),
        op("Mul", "moved ones", "scaled"),
        op("Concat", "b1 c1 hw", "like", axis=0), op("Expand", "bias like", "spread"),
        op("Add", "scaled spread", "sum"),
        op("Concat", "bc minus", "flat", axis=0), op("Reshape", "sum flat", "y"),
    ]  # fmt: skip
    weights = {
        "w": numbers(4, 3, 3, 3), "two": np.array([2]), "four": np.array([4]), "zero": np.array([0]),
        "i0": np.array(0), "i1": np.array(1), "i3": np.array(3), "minus": np.array([-1]),
        "b1": np.array([1]), "c1": np.array([4]), "bias": numbers(1, 4, 1, 1),
    }  # fmt: skip

    proto = model(nodes, weights, x=("N", 3, "H", "W"))
    # The file's value_info is ignored: it has symbols.
    proto.graph.value_info.append(helper.make_tensor_value_info("c", F32, ("N", 4, "H2", "W2")))
    net = check_meaning(tmp_path, proto, shapes={"x": ("B", 3, 10, 14)})
    assert net.output.row_shape == (4, 140)


def test_a_symbol_has_one_size_everywhere(tmp_path):
    proto = two_inputs(("N", "seq"), ("N", "seq"))
    for shapes in ({"x": ("B", 9)}, {"mask": ("B", 9)}, {"x": ("B", 9), "mask": ("B", 9)}):
        net = check_meaning(tmp_path, proto, shapes=shapes)
        assert [given.shape for given in net.inputs.values()] == [("B", 9), ("B", 9)]
    refused(tmp_path, proto, "two sizes for 'seq'", "9 and 8", shapes={"x": ("B", 9), "mask": ("B", 8)})
    square = model([op("Relu", "x")], x=("N", "S", "S"))
    refused(tmp_path, square, "two sizes for 'S'", "4 and 5", shapes={"x": ("B", 4, 5)})


@pytest.mark.parametrize("shape", [("B", 4, 5), (2, 3, 5), ("B", 5), ("B", 3, 5, 5)])
def test_what_contradicts_the_file(tmp_path, shape):
    proto = model([op("Relu", "x")], x=(1, 3, "W"))
    refused(tmp_path, proto, "wrong shape for input 'x'", "(1, 3, W)", shapes={"x": shape})


@pytest.mark.parametrize("shape", [("B", -1), ("B", 0), ("B", None), ("B", "W"), ("B", 2.5), (), "B,4", 5, (None, 4)])
def test_invalid_shapes(tmp_path, shape):
    proto = model([op("Relu", "x")], x=("N", "W"))
    refused(tmp_path, proto, "bad shape for input 'x'", "'B' for the batch", shapes={"x": shape})


def test_invalid_names(tmp_path):
    proto = two_inputs(("N", "seq"), ("N", 1))
    refused(tmp_path, proto, "'masks'", "did you mean mask?", shapes={"masks": ("B", 1)})
    refused(tmp_path, proto, "needs the name", "'x', 'mask'", "shapes={'x': ('B', 4)}", shapes=("B", 4))


def test_the_message_names_every_dynamic_axis_and_its_line_works(tmp_path):
    proto = two_inputs(("N", 3, "H", None), ("N", 1, "H", "W"))
    message = refused(
        tmp_path, proto, "only the batch may be dynamic", "input 'x': axis 2 ('H'), axis 3;",
        "input 'mask': axis 2 ('H'), axis 3 ('W')", "--shape x=B,3,224,224 --shape mask=B,1,224,224",
    )  # fmt: skip
    shapes = ast.literal_eval(re.search(r"shapes=(\{.*?\})", message)[1])
    assert read(tmp_path, proto, shapes).inputs["mask"].row_shape == (1, 224, 224)
    assert "input 'mask'" not in refused(tmp_path, two_inputs(("N", "W"), ("N", 1)), "input 'x': axis 1 ('W')")
    # A symbol that another input determines needs no size.
    assert "axis 2" not in refused(tmp_path, proto, "axis 3", shapes={"mask": ("B", 1, 5, 5)})


def test_load_accepts_shapes_only_for_onnx_files(tmp_path):
    proto = model([op("Relu", "x")], x=("N", "W"))
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    assert onchip.load(tmp_path / "model.onnx", shapes={"x": ("B", 3)}).inputs["x"].row_shape == (3,)
    onchip.save(net := mlp(2, 2), tmp_path / "net.safetensors")
    for other in (net, "decode", "Decode", tmp_path / "net.safetensors"):
        with pytest.raises(InputError, match="dynamic axes of an ONNX file"):
            onchip.load(other, shapes={"x": ("B", 3)})
