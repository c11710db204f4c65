"""LayerNorm, RMSNorm and GroupNorm on the CPU: parts of any size, any thread count."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from emulated_engine import one_layer
from onchip.kernels import reference
from onchip.network.layers import GroupNorm, LayerNorm, RMSNorm
from onchip.network.types import TensorType

CASES = [
    (LayerNorm(), (5, 7), ("weight", "bias")), (LayerNorm(2), (3, 8, 12), ("bias",)), (LayerNorm(), (1,), ("weight",)),
    (RMSNorm(), (64,), ("weight",)), (RMSNorm(1), (3, 17), ()), (LayerNorm(), (5000,), ("weight", "bias")),
    (GroupNorm(2), (6, 5, 7), ("weight", "bias")), (GroupNorm(4), (4, 33), ()), (GroupNorm(1), (3, 50, 50), ("bias",)),
]  # fmt: skip


def normed(layer, row, roles, seed=0):
    rng, x_type = np.random.default_rng(seed), TensorType(("B", *row))
    weights = {role: rng.standard_normal(layer.weight_shape(x_type)).astype(np.float32) for role in roles}
    return one_layer(layer, x_type, weights=weights)


@pytest.mark.parametrize(("layer", "row", "roles"), CASES, ids=str)
def test_parts_of_any_size(layer, row, roles):
    net = normed(layer, row, roles)
    engine = onchip.compile(net, "cpu")
    assert engine.plan.groups[0].claim.kernel == "norm"
    x = (np.random.default_rng(1).standard_normal((33, *row)) + 3).astype(np.float32)
    got = engine(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    for B, first in ((1, 0), (2, 7), (7, 26)):
        assert np.array_equal(engine(x[first : first + B]), got[first : first + B])
    assert np.array_equal(onchip.compile(net, "cpu", threads=1)(x), got)
    assert engine(x[:0]).shape == (0, *row)


def test_nan_and_inf_stay_in_their_part():
    x = np.random.default_rng(0).standard_normal((3, 4, 40)).astype(np.float32)
    net = normed(LayerNorm(), (4, 40), ("weight",))
    clean = onchip.compile(net, "cpu")(x)
    x[0, 1, 3], x[2, 3, 39] = np.nan, np.inf
    got = onchip.compile(net, "cpu")(x)
    affected = np.zeros((3, 4), bool)
    affected[0, 1] = affected[2, 3] = True
    assert np.isnan(got[affected]).any(axis=-1).all()
    assert np.array_equal(got[~affected], clean[~affected])


def test_another_dtype_is_refused():
    net = one_layer(LayerNorm(), TensorType(("B", 9), "float64"))
    plan = onchip.compile(net, "cpu").plan
    assert plan.groups[0].claim.kernel == "plain"
    assert "computes on float32, not float64" in str(plan)
