"""dx of max and min along axes on the CPU: of equal values the first, of NaN the first."""

import numpy as np
import pytest

from onchip.kernels.cpu.gradient.extreme_grad import ExtremeGradKernel
from onchip.network.layers import GlobalMax, GlobalMin, InputGrad
from onchip.network.types import TensorType
from onchip.plan.kernel import Job, Refusal
from onchip.runtime.cpu.backend import this_cpu
from step_cases import check_step, one_gradient

SHAPES = [((17,), (1,)), ((3, 17), (-1,)), ((3, 1100), (2,)), ((5, 7, 3), (2,)), ((3, 4, 5), (2, 3)),
          ((40, 130), (1,)), ((3, 4, 5), (1, 2, 3)), ((3, 1, 5), (1, 3))]  # fmt: skip


def gradient_of(layer, row):
    x = TensorType(("B", *row))
    return one_gradient(InputGrad(layer), {"x": x, "dy": layer.infer((x,), {})}, {})


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", [GlobalMax, GlobalMin])
@pytest.mark.parametrize(("row", "axes"), SHAPES, ids=str)
def test_the_first_extreme(kind, row, axes, keep):
    net = gradient_of(kind(axes, keep), row)
    for B in (1, 7, 64):
        rng = np.random.default_rng(B)
        x = rng.integers(-3, 4, (B, *row)).astype(np.float32)
        x[rng.random(x.shape) < 0.05] = np.nan
        dy = rng.standard_normal((B, *net.types["dy"].row_shape), np.float32)
        got = check_step(net, "extreme_grad", (x, dy))["out"]
        assert np.array_equal(got, InputGrad(kind(axes, keep)).forward((x, dy), {}))


def test_axes_that_are_not_adjacent_are_refused():
    (refusal,) = ExtremeGradKernel().claims(gradient_of(GlobalMax((1, 3)), (3, 4, 5)), 0, this_cpu(), Job())
    assert isinstance(refusal, Refusal)
