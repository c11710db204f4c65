"""The truth itself: gradients against finite differences, whole networks, dtypes. (Layers: the other files here.)"""

import numpy as np
import pytest

from checks import random_mlp, rows
from layer_cases import CASES, network, random_inputs
from onchip.errors import InputError
from onchip.kernels import reference
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    LAYERS,
    AbsoluteError,
    Add,
    ArgMax,
    ArgMin,
    ArgTopK,
    BinaryCrossEntropy,
    Concat,
    CrossEntropy,
    CumSum,
    Embedding,
    GlobalMean,
    HuberLoss,
    Linear,
    Mod,
    Reshape,
    SquaredError,
    Tanh,
    ToInts,
    ToPixels,
)
from onchip.network.training import LOSSES
from onchip.network.types import TensorType


def test_every_layer_but_steps_has_a_gradient():
    steps = {type(case.layer) for case in CASES if not case.layer.is_differentiable}
    assert steps == {ToPixels, ArgMax, ArgMin, ArgTopK, ToInts, Mod}


def test_every_layer_is_differentiated_below():
    assert {type(case.layer) for case in CASES} == set(LAYERS.values())


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if case.layer.is_differentiable], ids=str)
def test_layer_gradient_matches_finite_differences(case, B):
    net, given = network(case, "float64"), random_inputs(case, B, "float64")
    (node,), layer = net.nodes, case.layer
    xs, w = tuple(given[int(name[1:])] for name in node.inputs), dict(net.weights)
    y = layer.forward(xs, w)
    probe = np.random.default_rng(2).standard_normal(y.shape)
    dxs, dw = layer.backward(xs, w, y, probe)
    assert len(dxs) == len(xs)
    for i, (x, dx) in enumerate(zip(xs, dxs, strict=True)):
        if case.takes_ints(i):
            assert dx is None
            continue
        assert dx.dtype == x.dtype
        assert_gradient(lambda v, i=i: float((layer.forward((*xs[:i], v, *xs[i + 1 :]), w) * probe).sum()), x, dx)
    assert dw.keys() == w.keys() - {*layer.constants}
    for role in dw:
        assert_gradient(
            lambda v, role=role: float((layer.forward(xs, {**w, role: v}) * probe).sum()), w[role], dw[role]
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_widens_float32(case):
    net, given = network(case), random_inputs(case, 2)
    xs = tuple(given[int(name[1:])] for name in net.nodes[0].inputs)
    y = case.layer.forward(xs, net.weights)
    assert y.dtype == (net.output.dtype if not case.layer.is_differentiable else "float32")
    if case.layer.is_differentiable:
        dxs, dw = case.layer.backward(xs, net.weights, y, y)
        assert {gradient.dtype for gradient in (*dxs, *dw.values()) if gradient is not None} == {np.dtype("float32")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_rows(case):
    net = network(case)
    assert reference.forward(net, random_inputs(case, 0)).shape == (0, *net.output.row_shape)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_a_batch_whose_rows_weigh_nothing_changes_nothing(loss, dtype):
    net, x = random_mlp(4, 3), rows(2, 4)
    target = np.array([0, 2]) if loss == "cross_entropy" else np.zeros((2, 3), np.float32)
    value, gradients = reference.loss_and_gradients(net, x, target, loss, dtype, np.zeros(2, np.float32))
    assert value == 0
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("loss", LOSSES)
def test_network_gradient_matches_finite_differences(loss):
    net = random_mlp(5, 7, 3, activation="Tanh")
    x = rows(6, 5).astype(np.float64)
    target = np.array([0, 1, 2, 2, 1, 0]) if loss == "cross_entropy" else rows(6, 3, seed=2).astype(np.float64)
    target = np.clip(target, 0, 1) if loss == "bce_with_logits" else target
    _, gradients = reference.loss_and_gradients(net, x, target, loss)
    assert gradients.keys() == net.weights.keys()
    for name in net.weights:

        def value(w, name=name):
            changed = net.replace(weights={**net.weights, name: w})
            return reference.loss_and_gradients(changed, x, target, loss)[0]

        assert_gradient(value, net.weights[name].astype(np.float64), gradients[name])


@pytest.mark.parametrize(
    "layer",
    [
        CrossEntropy(), CrossEntropy(0.3), SquaredError(), SquaredError(is_mean=True), BinaryCrossEntropy(),
        AbsoluteError(), HuberLoss(),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_of_losses_match_finite_differences(layer):
    """By the output and, if it has a gradient, by the target."""
    y, target, dy = (3 * rows(4, 5, seed=seed).astype(np.float64) for seed in range(3))
    xs = (y, np.array([0, 4, 2, 2])) if isinstance(layer, CrossEntropy) else (y, target)
    gradients, _ = layer.backward(xs, {}, layer.forward(xs, {}), dy[:, 0])
    assert gradients[0] is not None
    for i, gradient in enumerate(gradients):
        if gradient is not None:

            def value(x, i=i):
                return float(layer.forward((*xs[:i], x, *xs[i + 1 :]), {}) @ dy[:, 0])

            assert_gradient(value, xs[i], gradient)


def test_losses_where_they_have_no_derivative_or_overflow():
    y, target = np.array([[0.0, 2.0, -1.0, 1.0]], np.float32), np.array([[0.0, 2.0, 0.0, 0.0]], np.float32)
    one = np.ones(1, np.float32)
    assert AbsoluteError().backward((y, target), {}, one, one)[0][0].tolist() == [[0, 0, -0.25, 0.25]]
    assert HuberLoss().forward((y, target), {}) == 0.25
    y, target = np.array([[1e4, 1e4, -1e4, -1e4]], np.float32), np.array([[1.0, 0.0, 1.0, 0.0]], np.float32)
    assert BinaryCrossEntropy().forward((y, target), {}) == 5e3
    assert BinaryCrossEntropy().backward((y, target), {}, one, one)[0][0].tolist() == [[0, 0.25, -0.25, 0]]


def assert_gradient(function, x, gradient, step=1e-6):
    measured = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        measured[index] = (function(up) - function(down)) / (2 * step)
    np.testing.assert_allclose(gradient, measured, rtol=1e-5, atol=1e-7)


# -- several inputs and outputs, ints between floats -------------------------------------------------------


def tokens_and_numbers():
    """ids (B, 3) and x (B, 4): a running sum of ids, looked up, beside x; logits and their bytes."""
    rng = np.random.default_rng(0)
    weights = {"table": rng.standard_normal((40, 5)), "w": rng.standard_normal((3, 9)), "c": rng.standard_normal(3)}
    nodes = (
        Node("sums", CumSum(), ("ids",)),
        Node("looked_up", Embedding(), ("sums",), {"weight": "table"}),
        Node("mean", GlobalMean((1,)), ("looked_up",)),
        Node("both", Concat(), ("mean", "x")),
        Node("act", Tanh(), ("both",)),
        Node("fc", Linear(), ("act",), {"weight": "w"}),
        Node("logits", Add(), ("fc", "fc"), {"constant": "c"}),
        Node("bytes", ToPixels(), ("logits",)),
    )
    inputs = {"ids": TensorType(("B", 3), "int32"), "x": TensorType(("B", 4), "float64")}
    net = Network(inputs, nodes, ("logits", "bytes"), weights)
    x = (rng.integers(0, 13, (6, 3)).astype(np.int32), rng.standard_normal((6, 4)))
    return net, x


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_several_inputs_and_outputs(dtype):
    net, (ids, x) = tokens_and_numbers()
    logits, pixels = reference.forward(net, (ids, x), dtype)
    assert pixels.dtype == np.uint8
    values = reference.forward_all(net, (ids, x), dtype)
    assert values["sums"].dtype == np.int32
    np.testing.assert_array_equal(values["sums"], np.cumsum(ids, axis=1))
    both = np.concatenate((net.weights["table"][np.cumsum(ids, axis=1)].mean(axis=1), x), axis=1)
    expected = 2 * np.tanh(both) @ net.weights["w"].T + net.weights["c"]
    np.testing.assert_allclose(logits, expected, atol={"float64": 1e-13, "float32": 1e-5, "bfloat16": 0.2}[dtype])
    assert logits.dtype == (np.float64 if dtype == "float64" else np.float32)


def test_gradients_pass_through_several_values_and_stop_at_ids():
    net, x = tokens_and_numbers()
    net = net.replace(outputs=("logits",))
    classes = np.array([0, 1, 2, 2, 1, 0])
    _, gradients = reference.loss_and_gradients(net, x, classes, "cross_entropy")
    assert gradients.keys() == net.weights.keys()
    for name in net.weights:

        def value(w, name=name):
            changed = net.replace(weights={**net.weights, name: w})
            return reference.loss_and_gradients(changed, x, classes, "cross_entropy")[0]

        assert_gradient(value, net.weights[name], gradients[name])


def test_a_layer_without_a_gradient_is_named():
    net, x = tokens_and_numbers()
    with pytest.raises(InputError, match=r"layer 'bytes' \(ToPixels\) has no gradient"):
        reference.loss_and_gradients(net.replace(outputs=("bytes",)), x, np.zeros((6, 3)), "half_sse")
    with pytest.raises(InputError, match="2 outputs"):
        reference.loss_and_gradients(net, x, np.zeros((6, 3)), "half_sse")


def test_another_number_of_inputs():
    net, x = tokens_and_numbers()
    with pytest.raises(InputError, match="wrong number of inputs") as caught:
        reference.forward(net, x[0])
    assert "ids, x" in str(caught.value)


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
