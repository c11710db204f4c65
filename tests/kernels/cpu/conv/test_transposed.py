"""Transposed convolutions with few outputs that the planner has not split into phases, as in training steps."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from onchip.kernels import reference
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.network.build import sequential
from onchip.network.layers import ConvTranspose1d, ConvTranspose2d, Tanh
from onchip.network.types import TensorType

BY_PHASES, BY_TAPS = "windows in", "taps in order"
C = 2 * LANES
# channels, outputs, kernel, layer, sizes of the input; and how it is computed
CASES = {
    "faces": (C, 3, (5, 5), ConvTranspose2d((2, 2), (1, 1, 2, 2)), (8, 9), BY_PHASES),
    "gradient of a convolution": (C, 3, (5, 5), ConvTranspose2d((2, 2), (2, 2, 2, 2), (1, 1)), (4, 5), BY_PHASES),
    "two pixels": (C, 1, (4, 4), ConvTranspose2d((2, 2), (1, 1, 1, 1)), (1, 2), BY_PHASES),
    "stride 1": (C, 3, (3, 5), ConvTranspose2d((1, 1), (1, 2, 1, 2)), (6, 7), BY_PHASES),
    "strides 3 and 2": (C, 2, (6, 5), ConvTranspose2d((3, 2), (1, 1, 2, 2)), (4, 5), BY_PHASES),
    "one tap per phase": (C, 3, (2, 2), ConvTranspose2d((2, 2)), (4, 4), BY_PHASES),
    "a signal": (C, 3, (5,), ConvTranspose1d((2,), (1, 2)), (11,), BY_PHASES),
    "a phase that begins inside": (C, 3, (3, 3), ConvTranspose2d((2, 2), (2, 2, 2, 2), (1, 1)), (5, 5), BY_TAPS),
    "a phase without taps": (C, 3, (1, 1), ConvTranspose2d((2, 2)), (5, 5), BY_TAPS),
    "dilation": (C, 3, (3, 3), ConvTranspose2d((2, 2), (1, 1, 1, 1), (0, 0), (2, 2)), (5, 5), BY_TAPS),
    "odd channels": (C + 1, 3, (5, 5), ConvTranspose2d((2, 2), (1, 1, 2, 2)), (8, 9), BY_TAPS),
    "more outputs": (C, 5, (5, 5), ConvTranspose2d((2, 2), (1, 1, 2, 2)), (8, 9), BY_TAPS),
}


def network(C, N, kernel, layer, sizes, bias=True):
    rng = np.random.default_rng(0)
    weights = {"t.weight": rng.standard_normal((C, N, *kernel), np.float32) / 8}
    weights |= {"t.bias": rng.standard_normal(N, np.float32)} if bias else {}
    return sequential(TensorType(("B", C, *sizes)), [("t", layer), ("h", Tanh())], weights)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bias", [True, False])
def test_the_results_are_those_of_the_reference(case, bias):
    *shapes, how = CASES[case]
    net = network(*shapes, bias=bias)
    engine = onchip.compile(net, "cpu", without=("phases",))
    assert engine.plan.groups[0].claim.kernel == "conv_fused"
    assert engine.plan.groups[0].claim.order.startswith(how)
    x = np.random.default_rng(1).standard_normal((37, *net.input.row_shape), np.float32)
    truth, naive = reference.forward(net, x), reference.forward(net, x, "float32")
    for B in (1, 7, 37):
        got = engine(x[:B])
        assert_error_within(got, truth[:B], naive[:B])
        assert np.array_equal(got, engine(x)[:B])


def test_a_step_trains_through_the_phases():
    """The weight changes from step to step, and the phases with it."""
    net = network(*CASES["faces"][:5])
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((7, *net.input.row_shape)), rng.standard_normal((7, *net.output.row_shape))
    step = onchip.training_step(net, loss="mse", lr=10.0, device="cpu")
    assert any(group.claim.order.startswith(BY_PHASES) for group in step.plan.groups)
    for _ in range(3):
        expected = np.mean((reference.forward(step.network, x) - y) ** 2)
        assert float(step(np.float32(x), np.float32(y))) == pytest.approx(expected, rel=1e-5)
