"""Operators with hostile attributes and constants: each is refused by name, before any allocation."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from onchip.formats.onnx.tensors import make_tensor
from onnx_models import model, numbers, op, refused

BAD_WINDOWS = {
    "kernel": ([op("Conv", "x w", kernel_shape=[2, 2])], "kernel_shape and weight do not fit", "[2, 2]", "[3, 3]"),
    "kernel rank": ([op("Conv", "x w", kernel_shape=[3])], "bad attribute 'kernel_shape'"),
    "negative pads": ([op("Conv", "x w", pads=[0, -1, 0, 0])], "bad pads"),
    "pad count": ([op("Conv", "x w", pads=[1, 1])], "bad attribute 'pads'"),
    "pad floats": ([op("Conv", "x w", pads=[1.0, 1.0, 1.0, 1.0])], "bad attribute 'pads'"),
    "huge pads": ([op("Conv", "x w", pads=[2**30] * 4)], "rows are too large"),
    "huger pads": ([op("Conv", "x w", pads=[2**62] * 4)], "bad attribute 'pads'"),
    "no stride": ([op("Conv", "x w", strides=[0, 1])], "bad window"),
    "negative stride": ([op("MaxPool", "x", kernel_shape=[2, 2], strides=[1, -1])], "bad window"),
    "huge stride": ([op("Conv", "x w", strides=[2**40, 1])], "bad attribute 'strides'"),
    "huge dilation": ([op("Conv", "x w", dilations=[2**31 - 1, 1])], "window exceeds the input"),
    "group": ([op("Conv", "x w", group=2)], "channels do not fit"),
    "no group": ([op("Conv", "x w", group=0)], "bad attribute 'group'"),
    "auto_pad": ([op("Conv", "x w", auto_pad="MOST")], "auto_pad"),
    "value weights": ([op("Conv", "x x")], "input 1 must be a constant"),
    "weight rank": ([op("Conv", "x flat")], "unsupported weight shape"),
    "other rank": ([op("Conv", "x line")], "one, two or three axes"),
    "bias": ([op("Conv", "x w flat")], "bias and weight do not fit"),
    "weight dtype": ([op("Conv", "x wint")], "mixes dtypes"),
    "huge output": ([op("ConvTranspose", "x t", strides=[2**30, 2**30])], "rows are too large"),
    "output_shape": ([op("ConvTranspose", "x t", output_shape=[7])], "output_shape"),
    "huge output_shape": ([op("ConvTranspose", "x t", output_shape=[2**31 - 1] * 2)], "bad output_padding"),
    "no output left": ([op("ConvTranspose", "x t", pads=[9, 9, 9, 9])], "output is empty"),
    "output_padding": ([op("ConvTranspose", "x t", output_padding=[1, 0])], "bad output_padding"),
    "no kernel": ([op("MaxPool", "x")], "kernel_shape"),
    "huge kernel": ([op("MaxPool", "x", kernel_shape=[2**31 - 1] * 2)], "window exceeds the input"),
    "huge kernel and pads": (
        [op("AveragePool", "x", kernel_shape=[2**30] * 2, pads=[2**30 - 1] * 4, strides=[2**30] * 2)],
        "rows are too large",
    ),
    "wide pads": ([op("MaxPool", "x", kernel_shape=[2, 2], pads=[2, 0, 0, 0])], "pads as large as the window"),
    "indices": ([helper.make_node("MaxPool", ["x"], ["m", "y"], kernel_shape=[2, 2])], "output 'y' is missing"),
    "pad mode": ([op("Pad", "x pads", "p", mode="mirror"), op("Conv", "p w")], "bad attribute 'mode'"),
    "pad values": ([op("Pad", "x pads both", "p"), op("Conv", "p w")], "do not fit"),
    "pad the batch": ([op("Pad", "x rows", "p"), op("Conv", "p w")], "rows to the batch"),
    "pad count again": ([op("Pad", "x twice", "p"), op("Conv", "p w")], "bad pads"),
    "pad less": ([op("Pad", "x less", "p"), op("Conv", "p w")], "crop more"),
    "huge pad": ([op("Pad", "x huge")], "rows are too large"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_WINDOWS)
def test_bad_windows(tmp_path, case):
    nodes, *words = BAD_WINDOWS[case]
    weights = {
        "w": numbers(4, 3, 3, 3), "t": numbers(3, 4, 3, 3), "flat": numbers(4, 3), "line": numbers(4, 3, 3),
        "wint": np.ones((4, 3, 3, 3), "i4"), "two": np.float32(2), "twice": np.array([1, 1]),
        "both": np.array([1, -1], np.float32),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "rows": np.array([1, 0, 0, 0, 0, 0, 0, 0]),
        "less": np.array([0, 0, -7, 0, 0, 0, 0, 0]), "huge": np.array([0, 0, 2**40, 0, 0, 0, 0, 2**40]),
    }  # fmt: skip
    refused(tmp_path, model(nodes, weights, ("N", 3, 6, 5)), *words)


def test_windows_over_four_axes(tmp_path):
    x = ("N", 2, 4, 4, 4, 4)
    refused(tmp_path, model([op("MaxPool", "x", kernel_shape=[2] * 4)], x=x), "one, two or three axes")
    refused(tmp_path, model([op("Conv", "x w")], {"w": numbers(4, 2, 2, 2, 2, 2)}, x), "unsupported weight shape")
    refused(tmp_path, model([op("Conv", "x w")], {"w": numbers(4, 2, 0, 2, 2)}, x[:-1]), "none of them 0")
    far = op("Conv", "x w", pads=[2**30, 0, 0, 2**30, 0, 0])
    refused(tmp_path, model([far], {"w": numbers(4, 2, 2, 2, 2)}, x[:-1]), "rows are too large")


# -- constants that grow, impossible shapes ------------------------------------------------------------------------

BAD_FOLDS = {
    "doubling": ([op("Concat", f"c{i} c{i}", f"c{i + 1}", axis=0) for i in range(40)], "too much arithmetic"),
    "broadcast": ([op("Mul", "tall wide", "m"), op("Add", "x m")], "too much arithmetic"),
    "gather": ([op("Gather", "wide places", "g", axis=0), op("Add", "x g")], "too much arithmetic"),
    "cycle": ([op("Shape", "y", "s"), op("Reshape", "x s")], "reads 'y'"),
    "shape of itself": ([op("Reshape", "x s", "r"), op("Shape", "r", "s"), op("Relu", "r")], "must be a constant"),
    "batch times two": ([op("Shape", "x", "s"), op("Mul", "s two", "d"), op("Reshape", "x d")], "depend on the batch"),
    "batch behind": (
        [op("Shape", "x", "s"), op("Slice", "s last first zero back", "t"), op("Reshape", "x t")],
        "first size must be the batch",
    ),
    "batch as axis": ([op("Shape", "x", "s"), op("Squeeze", "x s")], "depend on the batch"),
    "batch added": ([op("Shape", "x", "s"), op("Cast", "s", "f", to=1), op("Add", "x f")], "depend on the batch"),
    "far gather": ([op("Gather", "c seven", "g", axis=0), op("Add", "x g")], "do not fit"),
    "far axis": ([op("Concat", "c c", "g", axis=7), op("Add", "x g")], "do not fit"),
    "unequal concat": ([op("Concat", "c tall", "g", axis=0), op("Add", "x g")], "do not fit"),
    "bad slice": ([op("Slice", "c last zero zero stop", "g"), op("Add", "x g")], "do not fit"),
    "uneven slice": ([op("Slice", "c last none zero", "g"), op("Add", "x g")], "bad slice"),
    "bad reshape": ([op("Reshape", "c seven", "g"), op("Add", "x g")], "do not fit"),
    "two unknown": ([op("Reshape", "c unknown", "g"), op("Add", "x g")], "do not fit"),
    "bad permutation": ([op("Transpose", "c", "g", perm=[1, 0, 0]), op("Add", "x g")], "do not fit"),
    "text permutation": ([op("Transpose", "c", "g", perm="10"), op("Add", "x g")], "bad attribute 'perm'"),
    "divided by zero": ([op("Div", "seven zero", "d"), op("Reshape", "x d")], "divides by zero"),
    "modulo zero": ([op("Mod", "seven zero", "d"), op("Reshape", "x d")], "divides by zero"),
    "endless range": ([op("Range", "seven seven zero", "d"), op("Reshape", "x d")], "do not fit"),
    "long range": ([op("Range", "zero huge two1", "d"), op("Reshape", "x d")], "too much arithmetic"),
    "wide constant": ([op("ConstantOfShape", "square", "d"), op("Add", "x d")], "too much arithmetic"),
    "negative constant": ([op("ConstantOfShape", "last", "d"), op("Add", "x d")], "bad shape"),
    "constant of text": ([op("ConstantOfShape", "seven", "d", value="x"), op("Add", "x d")], "bad attribute 'value'"),
    "constant of two": (
        [op("ConstantOfShape", "seven", "d", value=make_tensor("", np.arange(2))), op("Add", "x d")], "do not fit",
    ),
    "mixed": ([op("Add", "c seven", "g"), op("Add", "x g")], "mixes dtypes"),
    "many axes": ([op("Unsqueeze", "c axes", "g"), op("Add", "x g")], "too many axes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FOLDS)
def test_constants_that_cannot_be_folded(tmp_path, case):
    weights = {
        "c": numbers(4, 4), "c0": numbers(4, 4), "tall": numbers(5000, 1), "wide": numbers(1, 5000),
        "places": np.zeros(5000, np.int64), "two": np.array([2, 2]), "seven": np.array([7]),
        "last": np.array([-1]), "first": np.array([-9]), "zero": np.array([0]), "back": np.array([-1]),
        "stop": np.array([0]), "none": np.array([], np.int64), "unknown": np.array([-1, -1]),
        "axes": np.arange(64), "huge": np.array([2**40]), "square": np.array([2**31, 2**31]), "two1": np.array([2]),
    }  # fmt: skip
    nodes, words = BAD_FOLDS[case]
    refused(tmp_path, model(nodes, weights), words)
