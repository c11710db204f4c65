"""The gradient of a Linear's weight on the CPU: any widths, any number of rows, several vectors per row."""

import numpy as np
import pytest

from onchip.kernels.cpu.gemm.weight_grad import SUM_ROWS
from onchip.network.layers import Linear, WeightGrad
from onchip.network.types import TensorType
from step_cases import bind, check_step, one_gradient, run


def network(D_in, D_out, *before):
    x, y = TensorType(("B", *before, D_in)), TensorType(("B", *before, D_out))
    weights = {"weight": np.zeros((D_out, D_in), np.float32)}
    return one_gradient(WeightGrad(Linear(), "weight"), {"x": x, "dy": y}, weights)


def rows(B, D_in, D_out, *before, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((B, *before, D), np.float32) for D in (D_in, D_out))


@pytest.mark.parametrize("B", [0, 1, 5, 64, 300])
@pytest.mark.parametrize(("D_in", "D_out"), [(1, 1), (3, 61), (17, 5), (33, 60), (49, 130), (64, 6), (200, 121)])
def test_any_widths(D_in, D_out, B):
    check_step(network(D_in, D_out), "weight_grad", rows(B, D_in, D_out))


@pytest.mark.parametrize("B", [1, 7, 40])
def test_several_vectors_per_row(B):
    check_step(network(13, 9, 3, 5), "weight_grad", rows(B, 13, 9, 3, 5))


@pytest.mark.parametrize("B", [2 * 8 * SUM_ROWS - 1, 2 * 8 * SUM_ROWS, 5000])
def test_many_rows_are_summed_in_parts(B):
    check_step(network(19, 7), "weight_grad", rows(B, 19, 7))


def test_nan_stays_in_its_column():
    x, dy = rows(9, 70, 8)
    bound = bind(network(70, 8), "weight_grad", 9)
    clean = run(bound, (x, dy))["out"]
    x[3, 65] = np.nan
    got = run(bound, (x, dy))["out"]
    assert np.isnan(got[..., 65]).all()
    assert np.array_equal(np.delete(got, 65, -1), np.delete(clean, 65, -1))


def test_another_dtype_is_refused():
    x, y = TensorType(("B", 3), "float64"), TensorType(("B", 2), "float64")
    weights = {"weight": np.zeros((2, 3))}
    net = one_gradient(WeightGrad(Linear(), "weight"), {"x": x, "dy": y}, weights)
    assert "weight_grad" in [refusal.kernel for refusal in bind(net, "plain", 3).plan.refusals]
