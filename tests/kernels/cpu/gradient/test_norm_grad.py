"""dx of row norms on the CPU: segments of any size, with and without weights."""

import numpy as np
import pytest

from onchip.network.layers import GroupNorm, InputGrad, LayerNorm, RMSNorm
from onchip.network.types import TensorType
from step_cases import check_step, one_gradient

CASES = [
    (LayerNorm(), (3, 12), True), (LayerNorm(), (17,), True), (RMSNorm(1), (5, 40), True), (RMSNorm(), (3,), False),
    (LayerNorm(1), (2, 511), False), (LayerNorm(1), (2, 51), True), (RMSNorm(), (8195,), True),
    (GroupNorm(2), (6, 3, 5), True), (GroupNorm(3), (3, 8), False), (GroupNorm(1), (4, 50, 42), True),
]  # fmt: skip


@pytest.mark.parametrize("B", [0, 1, 7, 64])
@pytest.mark.parametrize(("layer", "row", "has_weight"), CASES, ids=str)
def test_dx(layer, row, has_weight, B):
    x, rng = TensorType(("B", *row)), np.random.default_rng(B)
    roles = [role for role in ("weight", "bias") if has_weight and role in layer.optional]
    weights = {role: rng.standard_normal(layer.weight_shape(x), np.float32) for role in roles}
    net = one_gradient(InputGrad(layer), {"x": x, "dy": x}, weights)
    values = rng.standard_normal((B, *row), np.float32) + 2, rng.standard_normal((B, *row), np.float32)
    check_step(net, "norm_grad", values)
