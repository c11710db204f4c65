"""Convolutions and pools. ONNX Runtime runs the file; the float64 reference runs the network."""

from __future__ import annotations

import numpy as np
import pytest

from onchip.network.layers import (
    AvgPool2d,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    GlobalMax,
    GlobalMean,
    Identity,
    MaxPool1d,
    MaxPool2d,
)
from onnx_models import check_meaning, model, numbers, op, read

TOLERANCE = 1e-5


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"])
@pytest.mark.parametrize("strides", [[1, 1], [2, 3], [4, 1]])
def test_auto_pad_of_conv_and_pools(tmp_path, auto_pad, strides):
    dilations = [1, 1] if "SAME" in auto_pad else [2, 1]  # ONNX Runtime's limit
    given = {"auto_pad": auto_pad, "strides": strides}
    conv = op("Conv", "x w b", name="c", group=2, dilations=dilations, **given)
    weights = {"w": numbers(6, 2, 3, 2), "b": numbers(6)}
    net = check_meaning(tmp_path, model([conv], weights, ("N", 4, 7, 8)), tolerance=TOLERANCE)
    assert isinstance(net.nodes[0].layer, Conv2d)
    assert dict(net.nodes[0].weights) == {"weight": "w", "bias": "b"}
    pool = op("MaxPool", "x", kernel_shape=[3, 2], dilations=dilations, **given)
    check_meaning(tmp_path, model([pool], x=("N", 4, 7, 8)))
    for count_pads in (0, 1):
        pool = op("AveragePool", "x", kernel_shape=[3, 2], count_include_pad=count_pads, **given)
        check_meaning(tmp_path, model([pool], x=("N", 4, 7, 8)))


def test_same_padding_counts_the_dilation(tmp_path):
    (node,) = read(tmp_path, model([op("Conv", "x w", auto_pad="SAME_LOWER", dilations=[3])], {"w": numbers(1, 1, 2)},
                                   ("N", 1, 9))).nodes  # fmt: skip
    assert node.layer == Conv1d(pads=(2, 1), dilation=(3,))


@pytest.mark.parametrize("opset", [6, 11, 22])
def test_one_axis(tmp_path, opset):
    nodes = [op("Conv", "x w", "c", strides=[2], pads=[2, 1]), op("MaxPool", "c", kernel_shape=[2], strides=[2])]
    proto = model(nodes, {"w": numbers(5, 3, 4)}, ("N", 3, 13), opset)
    net = check_meaning(tmp_path, proto, tolerance=TOLERANCE)
    assert [type(node.layer) for node in net.nodes] == [Conv1d, MaxPool1d]


@pytest.mark.parametrize("given", [
    {}, {"strides": [3, 2]}, {"strides": [3, 2], "output_padding": [1, 1]}, {"strides": [2, 2], "pads": [1, 0, 2, 1]},
    {"strides": [3, 2], "output_shape": [10, 8]}, {"strides": [2, 2], "output_shape": [6, 7]},
    {"strides": [2, 2], "auto_pad": "SAME_UPPER"}, {"strides": [1, 2], "auto_pad": "SAME_LOWER"},
    {"strides": [2, 1], "auto_pad": "VALID"}, {"dilations": [2, 2], "group": 2},
])  # fmt: skip
def test_conv_transpose(tmp_path, given):
    channels = 2 if "group" in given else 4
    proto = model([op("ConvTranspose", "x w b", **given)], {"w": numbers(2, channels, 3, 4), "b": numbers(4)},
                  ("N", 2, 3, 4))  # fmt: skip
    net = check_meaning(tmp_path, proto, tolerance=TOLERANCE)
    assert isinstance(net.nodes[0].layer, ConvTranspose2d)


@pytest.mark.parametrize(("auto_pad", "pads"), [("SAME_UPPER", (0, 1, 1, 1)), ("SAME_LOWER", (1, 1, 0, 1))])
def test_conv_transpose_puts_the_odd_pad_where_the_text_says(tmp_path, auto_pad, pads):
    node = op("ConvTranspose", "x w", strides=[2, 2], auto_pad=auto_pad)
    net = read(tmp_path, model([node], {"w": numbers(2, 4, 3, 4)}, ("N", 2, 3, 4)))
    assert net.nodes[0].layer == ConvTranspose2d(stride=(2, 2), pads=pads)


@pytest.mark.parametrize("opset", [10, 12, 19, 22])
@pytest.mark.parametrize("ceil", [0, 1])
def test_pools(tmp_path, opset, ceil):
    given = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1], "ceil_mode": ceil}
    net = check_meaning(tmp_path, model([op("MaxPool", "x", **given)], x=("N", 2, 8, 6), opset=opset))
    assert net.nodes[0].layer == MaxPool2d((3, 2), (2, 2), (1, 0, 1, 1), ceil=bool(ceil))
    proto = model([op("AveragePool", "x", count_include_pad=1, **given)], x=("N", 2, 8, 6), opset=opset)
    net = check_meaning(tmp_path, proto)
    assert net.nodes[0].layer == AvgPool2d((3, 2), (2, 2), (1, 0, 1, 1), ceil=bool(ceil), count_pads=True)
    if opset >= 19:
        given |= {"dilations": [2, 1]}
        check_meaning(tmp_path, model([op("AveragePool", "x", **given)], x=("N", 2, 8, 6), opset=opset))


@pytest.mark.parametrize("row", [(3, 5), (3, 5, 4), (3, 5, 4, 2)])
def test_global_pools(tmp_path, row):
    net = check_meaning(tmp_path, model([op("GlobalMaxPool", "x", "m"), op("GlobalAveragePool", "x")],
                                        x=("N", *row), outputs=("m", "y")))  # fmt: skip
    axes = tuple(range(2, len(row) + 1))
    assert [node.layer for node in net.nodes] == [GlobalMax(axes, True), GlobalMean(axes, True)]


@pytest.mark.parametrize("kind", ["ReduceMax", "ReduceMean"])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("axes", [[1], [-1], [2, 1], [1, -1]])
@pytest.mark.parametrize("opset", [7, 17, 18, 20])
def test_reductions(tmp_path, kind, keep, axes, opset):
    if opset < 18:
        proto = model([op(kind, "x", axes=axes, keepdims=keep)], x=("N", 3, 4, 2), opset=opset)
    else:
        proto = model([op(kind, "x a", keepdims=keep)], {"a": np.array(axes)}, ("N", 3, 4, 2), opset)
    net = check_meaning(tmp_path, proto)
    assert net.nodes[0].layer.keep == bool(keep)


def test_a_reduction_over_nothing(tmp_path):
    proto = model([op("ReduceMean", "x", noop_with_empty_axes=1)], x=("N", 3), opset=18)
    (node,) = check_meaning(tmp_path, proto).nodes
    assert node.layer == Identity()


# -- Pad -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [6, 10, 11, 17, 18])
def test_zeros_before_a_convolution_become_its_pads(tmp_path, opset):
    pads = [0, 0, 1, 2, 0, 0, 3, 0]
    conv = op("Conv", "p w", pads=[1, 1, 0, 0])
    weights = {"w": numbers(4, 3, 3, 3)}
    if opset < 11:
        pad = op("Pad", "x", "p", pads=pads)
    else:
        pad, weights = op("Pad", "x a", "p"), {**weights, "a": np.array(pads)}
    if opset >= 18:
        pad, weights["a"] = op("Pad", "x a  axes", "p"), np.array([1, 2, 3, 0])
        pad.input[:] = ["x", "a", "", "axes"]
        weights["axes"] = np.array([2, -1])
    net = check_meaning(tmp_path, model([pad, conv], weights, ("N", 3, 6, 5), opset), tolerance=TOLERANCE)
    assert [node.layer for node in net.nodes] == [Conv2d(pads=(2, 3, 3, 0))]


def test_zeros_before_a_mean_are_counted(tmp_path):
    weights = {"a": np.array([0, 0, 1, 0, 0, 0, 1, 1]), "zero": np.float32(0)}
    nodes = [op("Pad", "x a zero", "p"), op("AveragePool", "p", kernel_shape=[2, 3])]
    net = check_meaning(tmp_path, model(nodes, weights, ("N", 3, 6, 5)))
    assert [node.layer for node in net.nodes] == [AvgPool2d((2, 3), (1, 1), (1, 0, 1, 1), count_pads=True)]
    nodes = [
        op("Pad", "x a zero", "p"),
        op("AveragePool", "p", kernel_shape=[3, 3], pads=[1, 1, 0, 0], count_include_pad=1),
    ]
    check_meaning(tmp_path, model(nodes, weights, ("N", 3, 6, 5)))


def test_a_pad_with_two_readers_and_an_empty_one(tmp_path):
    weights = {"a": np.array([0, 0, 1, 1]), "w": numbers(2, 3, 3), "v": numbers(2, 3, 2)}
    weights["a"] = np.array([0, 0, 1, 0, 0, 1])
    nodes = [op("Pad", "x a", "p"), op("Conv", "p w", "c"), op("Conv", "p v")]
    net = check_meaning(tmp_path, model(nodes, weights, ("N", 3, 6), outputs=("c", "y")), tolerance=TOLERANCE)
    assert [node.layer.pads for node in net.nodes] == [(1, 1), (1, 1)]
    nodes = [op("Pad", "x a", "p"), op("Relu", "p")]
    net = check_meaning(tmp_path, model(nodes, {"a": np.zeros(6, np.int64)}, ("N", 3, 6)))
    assert len(net.nodes) == 1
