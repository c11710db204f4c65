"""The gradients of the weights of convolutions on the CPU: any geometry, many and few channels, images and pixels."""

import numpy as np
import pytest

from onchip.network.graph import Network
from onchip.network.layers import (
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    TransposedConvolution,
    WeightGrad,
)
from onchip.network.types import TensorType
from step_cases import bind, check_step, one_gradient, run

# layer, a row of x, the weight
CASES = [
    (Conv1d(), (3, 9), (5, 3, 2)),
    (Conv1d(), (7, 300), (65, 7, 4)),
    (Conv1d((3,), (1, 2), (2,)), (3, 20), (4, 3, 3)),
    (Conv1d((2,), (5, 0)), (3, 400), (4, 3, 9)),
    (Conv2d(), (1, 14, 15), (6, 1, 5, 5)),
    (Conv2d(pads=(2, 2, 2, 2)), (2, 14, 15), (17, 2, 5, 5)),
    (Conv2d(), (20, 6, 5), (33, 20, 3, 2)),
    (Conv2d((2, 3), (1, 1, 0, 0), (2, 1), 2), (4, 8, 9), (6, 2, 3, 2)),
    (Conv2d((2, 2), (3, 0, 0, 3)), (2, 5, 6), (130, 2, 2, 3)),
    (Conv2d((1, 1), (1, 1, 1, 1), groups=6), (6, 12, 13), (6, 1, 3, 3)),
    (Conv2d((1, 3)), (2, 3, 500), (4, 2, 3, 3)),
    (Conv2d(), (3, 4, 6), (5, 3, 4, 6)),
    (Conv2d(), (2, 40, 1), (3, 2, 1, 1)),
    (ConvTranspose1d((3,), (0, 1), (2,)), (2, 5), (2, 3, 2)),
    (ConvTranspose1d((1,), (0, 0)), (9, 5), (9, 3, 4)),
    (ConvTranspose2d((2, 2), (2, 2, 2, 2), (1, 1)), (18, 5, 4), (18, 4, 5, 5)),
    (ConvTranspose2d((1, 2), (1, 0, 0, 1), (2, 1), (3, 1), 2), (4, 3, 5), (4, 2, 2, 3)),
]


def network(layer, row, shape) -> Network:
    x, weight = TensorType(("B", *row)), np.zeros(shape, np.float32)
    y = layer.infer((x,), {"weight": TensorType(shape)})
    return one_gradient(WeightGrad(layer, "weight"), {"x": x, "dy": y}, {"weight": weight})


def rows(net: Network, B: int):
    rng = np.random.default_rng(B)
    return tuple(rng.standard_normal((B, *kind.row_shape), np.float32) for kind in net.inputs.values())


@pytest.mark.parametrize("B", [0, 1, 5, 64])
@pytest.mark.parametrize(("layer", "row", "shape"), CASES, ids=str)
def test_any_geometry(layer, row, shape, B):
    net = network(layer, row, shape)
    check_step(net, "conv_weight_grad", rows(net, B))


def test_a_large_batch():
    net = network(*CASES[4])
    check_step(net, "conv_weight_grad", rows(net, 300))


@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[15]], ids=str)
def test_nan_stays_in_its_map(case):
    net = network(*case)
    x, dy = rows(net, 5)
    bound = bind(net, "conv_weight_grad", 5)
    clean = run(bound, (x, dy))["out"]
    (x if isinstance(case[0], TransposedConvolution) else dy)[3, 2] = np.nan
    got = run(bound, (x, dy))["out"]
    assert np.isnan(got[0, 2]).all()
    assert np.array_equal(np.delete(got, 2, 1), np.delete(clean, 2, 1))


@pytest.mark.parametrize("case", [CASES[5], CASES[15]], ids=str)
def test_no_pixel_outside_an_image_is_read(case):
    """Images between others of infinity: rows of pads are zeros, not what is stored next to the image."""
    net = network(*case)
    bound, (x, dy) = bind(net, "conv_weight_grad", 1), rows(net, 1)
    alone = run(bound, (x, dy))["out"]
    framed = [np.full((3, *array.shape[1:]), np.inf, np.float32) for array in (x, dy)]
    for frame, array in zip(framed, (x, dy), strict=True):
        frame[1:2] = array
    assert np.array_equal(run(bound, tuple(frame[1:2] for frame in framed))["out"], alone)


def test_another_dtype_is_refused():
    x = TensorType(("B", 3, 9), "float64")
    weights = {"weight": np.zeros((5, 3, 2))}
    net = one_gradient(WeightGrad(Conv1d(), "weight"), {"x": x, "dy": TensorType(("B", 5, 8), "float64")}, weights)
    assert "conv_weight_grad" in [refusal.kernel for refusal in bind(net, "plain", 3).plan.refusals]


@pytest.mark.parametrize("maps", [1, 16, 17, 32, 33, 48, 49, 64, 65, 97, 113])
def test_any_number_of_maps(maps):
    net = network(Conv1d(), (3, 9), (maps, 3, 2))
    check_step(net, "conv_weight_grad", rows(net, 7))
