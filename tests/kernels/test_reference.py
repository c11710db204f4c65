"""The truth itself: gradients against finite differences, layers against their definitions."""

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.kernels import reference
from onchip.spec.build import sequential
from onchip.spec.layers import LAYERS, Linear, LogSoftmax, ReLU, Reshape, Sigmoid, Softmax, Tanh
from onchip.spec.types import TensorType


def test_every_layer_has_a_forward_and_a_backward():
    assert set(reference.FORWARD) == set(LAYERS.values())
    assert set(reference.BACKWARD) == set(LAYERS.values())


@pytest.mark.parametrize(
    "layer", [ReLU(), Sigmoid(), Tanh(), Softmax(), LogSoftmax(), Softmax(1), Reshape((2, 6))], ids=str
)
def test_layer_gradient_matches_finite_differences(layer):
    rng = np.random.default_rng(0)
    x, probe = rng.standard_normal((3, 4, 3)), rng.standard_normal((3, 4, 3))
    forward = reference.FORWARD[type(layer)]
    y = forward(layer, x, {})
    dx, _ = reference.BACKWARD[type(layer)](layer, x, {}, y, probe.reshape(y.shape))
    assert_gradient(lambda v: float((forward(layer, v, {}) * probe.reshape(y.shape)).sum()), x, dx)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (3, 5)], ids=["rows", "vectors in a row"])
def test_linear_gradient_matches_finite_differences(bias, shape):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, *shape))
    w = {"weight": rng.standard_normal((3, 5))}
    if bias:
        w["bias"] = rng.standard_normal(3)
    y = reference.linear(Linear(), x, w)
    probe = rng.standard_normal(y.shape)
    dx, dw = reference.linear_back(Linear(), x, w, y, probe)
    assert dw.keys() == w.keys()
    assert_gradient(lambda v: float((reference.linear(Linear(), v, w) * probe).sum()), x, dx)
    for role in w:
        assert_gradient(
            lambda v, role=role: float((reference.linear(Linear(), x, {**w, role: v}) * probe).sum()), w[role], dw[role]
        )


@pytest.mark.parametrize("loss", ["cross_entropy", "half_sse"])
def test_network_gradient_matches_finite_differences(loss):
    net = random_mlp(5, 7, 3, activation="Tanh")
    x = rows(6, 5).astype(np.float64)
    target = np.array([0, 1, 2, 2, 1, 0]) if loss == "cross_entropy" else rows(6, 3, seed=2).astype(np.float64)
    _, gradients = reference.loss_and_gradients(net, x, target, loss)
    assert gradients.keys() == net.weights.keys()
    for name in net.weights:

        def value(w, name=name):
            changed = net.replace(weights={**net.weights, name: w})
            return reference.loss_and_gradients(changed, x, target, loss)[0]

        assert_gradient(value, net.weights[name].astype(np.float64), gradients[name])


def assert_gradient(function, x, gradient, step=1e-6):
    measured = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        measured[index] = (function(up) - function(down)) / (2 * step)
    np.testing.assert_allclose(gradient, measured, rtol=1e-5, atol=1e-7)


def test_definitions():
    x = np.array([[-800.0, -1.0, 0.0, 2.0, 800.0]])
    np.testing.assert_allclose(reference.sigmoid(Sigmoid(), x, {}), [[0, 1 / (1 + np.e), 0.5, 1 / (1 + np.exp(-2)), 1]])
    assert reference.softmax(Softmax(), x, {}).sum() == pytest.approx(1)
    np.testing.assert_allclose(np.exp(reference.log_softmax(LogSoftmax(), x, {})), reference.softmax(Softmax(), x, {}))
    assert np.isnan(reference.relu(ReLU(), np.array([[np.nan]]), {})).all()
    assert np.isnan(reference.sigmoid(Sigmoid(), np.array([[np.nan]]), {})).all()


def test_reshape_of_no_rows():
    net = sequential(TensorType(("B", 2, 6)), [("flat", Reshape((-1,)))], {})
    assert reference.forward(net, np.zeros((0, 2, 6))).shape == (0, 12)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_narrow_types_cost_more_the_narrower_they_are(dtype):
    net, x = random_mlp(16, 32, 4), rows(50, 16)
    truth = reference.forward(net, x)
    error = np.abs(reference.forward(net, x, dtype) - truth).max()
    low, high = {
        "float32": (1e-8, 1e-5),
        "float16": (1e-4, 2e-2),
        "bfloat16": (1e-3, 2e-1),
        "float8_e4m3fn": (1e-2, 3),
    }[dtype]
    assert low < error < high


def test_sgd_step_follows_its_formula():
    net = random_mlp(3, 2)
    w = net.weights["fc1.weight"].astype(np.float64)
    velocity, g = {}, np.ones((2, 3))
    net = reference.sgd_step(net, velocity, {"fc1.weight": g}, lr=0.1, momentum=0.5)
    net = reference.sgd_step(net, velocity, {"fc1.weight": g}, lr=0.1, momentum=0.5)
    np.testing.assert_allclose(net.weights["fc1.weight"], w - 0.1 * 1 - 0.1 * 1.5)
