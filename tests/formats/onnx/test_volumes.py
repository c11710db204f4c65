"""Windows over three axes. ONNX Runtime runs the file; the float64 reference runs the network."""

from __future__ import annotations

import pytest

from onnx_models import check_meaning, model, numbers, op, refused

TOLERANCE = 1e-5
X = ("N", 4, 5, 7, 6)


@pytest.mark.parametrize("given", [
    {}, {"strides": [2, 3, 1]}, {"pads": [1, 2, 0, 0, 1, 2]}, {"dilations": [2, 1, 2], "strides": [1, 2, 2]},
    {"group": 2, "pads": [1] * 6}, {"group": 4, "strides": [2, 2, 2]}, {"auto_pad": "SAME_UPPER", "strides": [1, 4, 3]},
])  # fmt: skip
@pytest.mark.parametrize("kernel", [(3, 2, 3), (1, 3, 2), (3, 1, 1), (1, 1, 1)])
def test_conv(tmp_path, given, kernel):
    weights = {"w": numbers(8, 4 // given.get("group", 1), *kernel), "b": numbers(8)}
    check_meaning(tmp_path, model([op("Conv", "x w b", **given)], weights, X), tolerance=TOLERANCE)


@pytest.mark.parametrize("given", [
    {}, {"strides": [2, 3, 2]}, {"strides": [2, 3, 2], "output_padding": [1, 2, 1]}, {"pads": [1, 1, 0, 0, 1, 2]},
    {"dilations": [2, 1, 3], "strides": [1, 2, 2]}, {"group": 2, "strides": [3, 1, 2], "pads": [0, 1, 1, 1, 0, 1]},
    {"strides": [2, 4, 2], "output_padding": [1, 3, 0]}, {"strides": [2, 2, 2], "output_shape": [9, 14, 12]},
])  # fmt: skip
@pytest.mark.parametrize("kernel", [(2, 2, 2), (3, 2, 4)])
def test_conv_transpose(tmp_path, given, kernel):
    weights = {"w": numbers(4, 3, *kernel), "b": numbers(3 * given.get("group", 1))}
    check_meaning(tmp_path, model([op("ConvTranspose", "x w b", **given)], weights, X), tolerance=TOLERANCE)


@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("kernel", [[2, 3, 2], [3, 1, 2], [1, 2, 2]])
@pytest.mark.parametrize("pads", [[0] * 6, [0, 0, 1, 0, 0, 1]])
def test_pools(tmp_path, ceil, kernel, pads):
    given = {"kernel_shape": kernel, "strides": [2, 3, 2], "pads": pads, "ceil_mode": ceil}
    check_meaning(tmp_path, model([op("MaxPool", "x", **given)], x=X))
    for count_pads in (0, 1):
        check_meaning(tmp_path, model([op("AveragePool", "x", count_include_pad=count_pads, **given)], x=X))


def test_zeros_before_it(tmp_path):
    nodes = [op("Pad", "x p", "q"), op("Conv", "q w", strides=[1, 2, 1])]
    weights = {"p": numbers(10).astype("i8") * 0 + [0, 0, 1, 2, 0, 0, 0, 0, 1, 1], "w": numbers(2, 4, 3, 3, 3)}
    net = check_meaning(tmp_path, model(nodes, weights, X), tolerance=TOLERANCE)
    assert [node.layer.kind for node in net.nodes].count("Pad") == 1


def test_four_axes_are_refused(tmp_path):
    proto = model([op("Conv", "x w", name="c")], {"w": numbers(2, 4, 1, 1, 1, 1)}, ("N", 4, 2, 2, 2, 2))
    refused(tmp_path, proto, "node 'c' (Conv)", "3 to 5 axes")


def test_too_many_planes_are_refused(tmp_path):
    weights = {"w": numbers(1, 1, 200, 1, 2)}
    refused(tmp_path, model([op("Conv", "x w", pads=[9999, 0, 0, 0, 0, 0])], weights, ("N", 1, 5, 2, 2)), "planes")
    refused(tmp_path, model([op("ConvTranspose", "x w")], weights, ("N", 1, 5, 2, 2)), "planes")
