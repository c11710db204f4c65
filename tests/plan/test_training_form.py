"""Batch norms and dropouts in training: gradients against finite differences, statistics, and the random numbers."""

import numpy as np
import pytest

from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchNorm1d, BatchNorm2d, Conv2d, Dropout, DropoutMask, Linear, Reshape, Tanh
from onchip.network.layers.batch import philox
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.gradient.step import VALUES, training_step
from onchip.plan.gradient.training_form import DRAW


def weight(*shape):
    return np.random.default_rng(shape).standard_normal(shape) / 2


def normed() -> Network:
    """Norms over pixels and over rows, one without weight and bias, and two dropouts."""
    norm = {f"n.{role}": np.abs(weight(3)) + 0.1 for role in ("weight", "bias", "mean", "var")}
    bare = {f"m.{role}": np.abs(weight(4)) for role in ("mean", "var")}
    layers = [
        ("c", Conv2d(), {"weight": "c.weight"}),
        ("n", BatchNorm2d(), {role: f"n.{role}" for role in ("weight", "bias", "mean", "var")}),
        ("t", Tanh(), {}),
        ("d", Dropout(0.25), {}),
        ("f", Reshape(), {}),
        ("l", Linear(), {"weight": "l.weight"}),
        ("m", BatchNorm1d(1e-3), {"mean": "m.mean", "var": "m.var"}),
        ("e", Dropout(0.5), {}),
        ("y", Linear(), {"weight": "y.weight"}),
    ]
    nodes, value = [], "x"
    for name, layer, weights in layers:
        nodes.append(Node(name, layer, (value,), weights))
        value = name
    weights = {"c.weight": weight(3, 2, 2, 2), "l.weight": weight(4, 27), "y.weight": weight(2, 4), **norm, **bare}
    return Network({"x": TensorType(("B", 2, 4, 4), "float64")}, tuple(nodes), ("y",), weights)


def begin(step: Network) -> dict[str, np.ndarray]:
    values = {VALUES: np.array([1.0, 0, 0, 1, 1]), DRAW: np.array([5, 3])}
    return {name: np.asarray(step.weights[name], np.float64) for name in step.state} | values


def test_gradients_are_finite_differences():
    step, rng = training_step(normed(), TrainingStep("mse")), np.random.default_rng(0)
    rows = rng.standard_normal((6, 2, 4, 4)), rng.standard_normal((6, 2)), np.full(6, 1 / 6)
    state = begin(step)
    (loss,), after = reference.run_step(step, rows, state)
    trained = [name for name in state if name.endswith(("weight", "bias"))]
    assert trained == ["c.weight", "n.weight", "n.bias", "l.weight", "y.weight"]
    for name in trained:
        gradient = state[name] - after[name]
        for at in np.ndindex(gradient.shape):
            moved = [state[name].copy(), state[name].copy()]
            for array, by in zip(moved, (1e-5, -1e-5), strict=True):
                array[at] += by
            up, down = (reference.run_step(step, rows, state | {name: array})[0][0] for array in moved)
            assert gradient[at] == pytest.approx((up - down) / 2e-5, abs=1e-7 * max(1, abs(loss))), f"{name}{at}"


def test_running_statistics():
    net = normed()
    step, rng = training_step(net, TrainingStep("mse")), np.random.default_rng(0)
    x, target = rng.standard_normal((6, 2, 4, 4)), rng.standard_normal((6, 2))
    state = begin(step)
    _, after = reference.run_step(step, (x, target, np.full(6, 1 / 6)), state)
    values = reference.forward_all(net, x)["c"]
    mean, var = values.mean(axis=(0, 2, 3)), values.var(axis=(0, 2, 3), ddof=1)
    np.testing.assert_allclose(after["n.mean"], 0.9 * state["n.mean"] + 0.1 * mean, rtol=1e-12)
    np.testing.assert_allclose(after["n.var"], 0.9 * state["n.var"] + 0.1 * var, rtol=1e-12)


def test_a_frozen_norm_computes_as_at_inference():
    step = training_step(normed(), TrainingStep("mse"), trainable=lambda name: "mean" not in name)
    assert not {"n.mean", "m.mean"} & set(step.state)
    assert {"n.weight", "n.bias"} < set(step.state)
    assert "n.mean" not in step.types


def words_of(counter, key):
    """Philox4x32-10 of one counter, as Salmon et al. define it."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            second >> 32 ^ counter[1] ^ key[0], second & 0xFFFFFFFF, first >> 32 ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_philox():
    known = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]  # of Random123's known answers
    assert words_of([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]) == known
    assert philox(0, 0, 0, 4).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    seed, step, number = 0x1234567890ABCDEF, 77, 5
    expected = [w for i in range(3) for w in words_of([i, 0, step, number], [seed & 0xFFFFFFFF, seed >> 32])]
    assert philox(seed, step, number, 10).tolist() == expected[:10]
    assert philox(-1, 0, 0, 4).tolist() == words_of([0, 0, 0, 0], [0xFFFFFFFF, 0xFFFFFFFF])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_what_a_dropout_keeps(p):
    x, layer = np.ones((1000, 20), np.float32), DropoutMask(p, 2)
    mask = layer.forward((x,), {"draw": np.array([1, 2])})
    assert mask.dtype == np.float32
    assert set(np.unique(mask)) <= {np.float32(0), np.float32(1 / (1 - p))}
    assert mask.mean() == pytest.approx(1, abs=5 * (p / (1 - p) / x.size) ** 0.5)
    others = [DropoutMask(p, 3), {"draw": np.array([1, 3])}, {"draw": np.array([2, 2])}]
    for other in others:
        again = (other if isinstance(other, DropoutMask) else layer).forward(
            (x,), other if isinstance(other, dict) else {"draw": np.array([1, 2])}
        )
        assert p == 0 or not np.array_equal(again, mask)


def test_dropouts_have_their_own_numbers():
    step = training_step(normed(), TrainingStep("mse"))
    numbers = [node.layer.number for node in step.nodes if isinstance(node.layer, DropoutMask)]
    assert numbers == [0, 1]
    assert step.state[DRAW] == ""
