"""Gradients of pools on the CPU: any window, and of equal values the first."""

import numpy as np
import pytest

from layer_cases import CASES
from onchip.kernels.window import POOLS
from onchip.network.layers import AvgPool1d, AvgPool2d, InputGrad, MaxPool1d, MaxPool2d
from onchip.network.types import TensorType
from step_cases import check_step, one_gradient

POOLS_AND_ROWS = [(case.layer, case.rows[0]) for case in CASES if isinstance(case.layer, POOLS)]
POOLS_AND_ROWS += [  # windows that overlap, that leave gaps, that are all of x; planes larger than a task
    (MaxPool2d((2, 2)), (4, 6, 5)), (MaxPool2d((3, 3), (2, 2), (1, 1, 1, 1)), (8, 7, 6)),
    (MaxPool1d((2,), (5,)), (3, 13)), (AvgPool2d((3, 3), (1, 1), (1, 1, 1, 1)), (4, 5, 5)),
    (AvgPool2d((4, 3)), (2, 4, 3)), (AvgPool1d((1,), (3,)), (1, 8)), (MaxPool2d((2, 2)), (1, 90, 91)),
    (MaxPool2d((3, 2), (1, 3), (2, 0, 1, 1), (3, 2), True), (4, 11, 9)),
]  # fmt: skip


def check(pool, x):
    kind = TensorType(("B", *x.shape[1:]))
    y = pool.forward((x,), {})
    dy = np.random.default_rng(1).standard_normal(y.shape, np.float32)
    inputs, xs = ({"x": kind, "y": pool.infer((kind,), {})}, (x, y)) if pool.needs_y else ({"x": kind}, (x,))
    inputs["dy"] = pool.infer((kind,), {})
    return check_step(one_gradient(InputGrad(pool), inputs, {}), "pool_grad", (*xs, dy))["out"], dy


@pytest.mark.parametrize(("pool", "row"), POOLS_AND_ROWS, ids=str)
def test_windows_of_any_shape(pool, row):
    for B in (0, 1, 7, 33):
        check(pool, np.random.default_rng(B).standard_normal((B, *row), np.float32))


@pytest.mark.parametrize(("pool", "row"), [each for each in POOLS_AND_ROWS if each[0].needs_y], ids=str)
def test_the_first_of_equal_values(pool, row):
    x = np.random.default_rng(0).integers(0, 2, (33, *row)).astype(np.float32)
    x[3] = -np.inf  # as in the padding
    check(pool, x)


def test_a_window_with_nan_has_no_maximum():
    x = np.random.default_rng(0).standard_normal((7, 3, 6, 6), np.float32)
    x[2, 1, 3, 3] = np.nan
    dx, dy = check(MaxPool2d((2, 2)), x)
    assert not dx[2, 1, 2:4, 2:4].any()
    assert np.count_nonzero(dx) == dy.size - 1
