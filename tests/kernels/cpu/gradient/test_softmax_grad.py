"""dx of softmax and log-softmax on the CPU: rows and columns of any length."""

import numpy as np
import pytest

from onchip.network.layers import InputGrad, LogSoftmax, Softmax
from onchip.network.types import TensorType
from step_cases import check_step, one_gradient

SHAPES = [
    ((3, 11), -1), ((1,), 1), ((40,), 1), ((1100,), 1), ((8195,), 1), ((3, 5, 7), 1), ((5, 4, 2), -2), ((9, 130), 1),
]  # fmt: skip


@pytest.mark.parametrize("B", [0, 1, 7, 64])
@pytest.mark.parametrize("kind", [Softmax, LogSoftmax])
@pytest.mark.parametrize(("row", "axis"), SHAPES, ids=str)
def test_dx(kind, row, axis, B):
    x, rng = TensorType(("B", *row)), np.random.default_rng(B)
    net = one_gradient(InputGrad(kind(axis)), {"y": x, "dy": x}, {})
    y = kind(axis).forward((3 * rng.standard_normal((B, *row), np.float32),), {})
    check_step(net, "softmax_grad", (y, rng.standard_normal((B, *row), np.float32)))
