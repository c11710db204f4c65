"""Training: loss curves against the float64 reference, same bits, and errors before any work."""

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.errors import InputError, OnchipError, PlanError, ShapeError
from onchip.kernels import reference
from onchip.runtime.cpu import core_count
from onchip.spec.build import mlp
from onchip.spec.layers import Linear, ReLU
from onchip.spec.network import Network, Node
from onchip.spec.types import TensorType
from onchip.train.loop import fit
from onchip.train.order import epoch_order

CASES = {
    # widths, options of the network, loss, rows, batch, lr, momentum
    "digits": ((784, 320, 160, 10), {}, "cross_entropy", 320, 64, 0.03, 0.0),
    "odd widths": ((20, 13, 7, 3), {"activation": "Tanh"}, "cross_entropy", 100, 16, 0.05, 0.9),
    "one layer": ((5, 4), {}, "cross_entropy", 30, 7, 0.1, 0.0),
    "batch 1": ((6, 5, 4), {}, "cross_entropy", 9, 1, 0.05, 0.0),
    "full batch, past a block": (
        (33, 40, 17, 5),
        {"activation": "Sigmoid", "output": "Sigmoid"},
        "half_sse",
        700,
        700,
        1e-3,
        0.5,
    ),
    "no bias": ((9, 8, 7, 6), {"bias": False}, "half_sse", 50, 20, 1e-3, 0.0),
    "ten layers": ((8, 9, 10, 11, 12, 13, 12, 11, 10, 9, 3), {}, "cross_entropy", 64, 32, 0.01, 0.9),
}


def data(case):
    widths, options, loss, n, batch, lr, momentum = CASES[case]
    net, x = random_mlp(*widths, **options), rows(n, widths[0])
    rng = np.random.default_rng(5)
    y = rng.integers(0, widths[-1], n) if loss == "cross_entropy" else rng.random((n, widths[-1]), dtype=np.float32)
    return net, x, y, {"loss": loss, "batch_size": batch, "lr": lr, "momentum": momentum}


def reference_curve(net, x, y, epochs, seed, dtype, *, loss, batch_size, lr, momentum):
    velocity, losses = {}, []
    for epoch in range(epochs):
        order = epoch_order(len(x), seed, epoch)
        for start in range(0, len(x), batch_size):
            batch = order[start : start + batch_size]
            value, gradients = reference.loss_and_gradients(net, x[batch], y[batch], loss, dtype)
            losses.append(value)
            net = reference.sgd_step(net, velocity, gradients, lr, momentum)
    return np.array(losses), net


@pytest.mark.parametrize("case", CASES)
def test_loss_curve_and_weights_follow_the_reference(case):
    net, x, y, options = data(case)
    result = fit(net, x, y, epochs=3, seed=7, device="cpu", **options)
    truth, trained = reference_curve(net, x, y, 3, 7, "float64", **options)
    naive, naive_net = reference_curve(net, x, y, 3, 7, "float32", **options)
    eps = np.finfo(np.float32).eps
    assert result.losses.shape == truth.shape
    assert np.abs(result.losses - truth).max() <= 2 * np.abs(naive - truth).max() + 8 * eps * np.abs(truth).max()
    assert np.abs(truth[0] - truth[-1]) > 0  # the curve moves, so following it means something
    for name, w in trained.weights.items():
        allowed = 3 * np.abs(naive_net.weights[name] - w).max() + 8 * eps * np.abs(w).max()
        assert np.abs(result.network.weights[name] - w).max() <= allowed, name


@pytest.mark.parametrize("case", ["digits", "full batch, past a block", "odd widths"])
def test_same_bits_run_to_run_and_whatever_the_threads(case):
    net, x, y, options = data(case)
    before = {name: w.copy() for name, w in net.weights.items()}
    runs = [fit(net, x, y, epochs=2, device="cpu", threads=t, **options) for t in (1, core_count(), core_count())]
    for other in runs[1:]:
        assert np.array_equal(other.losses, runs[0].losses)
        for name in net.weights:
            assert np.array_equal(other.network.weights[name], runs[0].network.weights[name])
    for name, w in before.items():
        assert np.array_equal(net.weights[name], w)  # the network handed in is not touched


def test_it_learns():
    x = rows(600, 10)
    y = (x[:, 0] > x[:, 1]).astype(np.int64)
    result = fit(mlp(10, 32, 2), x, y, epochs=40, lr=0.1, device="cpu")
    assert (reference.forward(result.network, x).argmax(1) == y).mean() > 0.97
    assert result.epoch_losses[-1] < 0.3 * result.epoch_losses[0]


def test_progress_is_told():
    seen = []
    fit(
        mlp(4, 3), rows(100, 4), np.zeros(100, np.int64), epochs=2, batch_size=30, device="cpu", on_progress=seen.append
    )
    assert (seen[-1].epoch, seen[-1].step, seen[-1].steps) == (2, 4, 4)
    assert all(p.samples_per_s > 0 and np.isfinite(p.loss) for p in seen)


def test_a_bias_that_two_layers_share_is_refused():
    weights = {"w1": rows(4, 4), "w2": rows(4, 4, seed=2), "b": rows(1, 4, seed=3)[0]}
    nodes = (
        Node("a", Linear(), ("x",), {"weight": "w1", "bias": "b"}),
        Node("r", ReLU(), ("a",)),
        Node("c", Linear(), ("r",), {"weight": "w2", "bias": "b"}),
    )
    net = Network({"x": TensorType(("B", 4))}, nodes, ("c",), weights)
    with pytest.raises(PlanError, match="weights of its own"):
        fit(net, rows(8, 4), np.zeros(8, np.int64), epochs=1, device="cpu")


def test_the_order_is_the_documented_one():
    assert np.array_equal(epoch_order(10, 3, 2), np.random.default_rng((3, 2)).permutation(10))
    assert sorted(epoch_order(10, 3, 2)) == list(range(10))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y": np.array([0, 1, 2, 5])}, InputError, "class is out of range"),
        ({"y": np.array([0, 1, -1, 1])}, InputError, "-1 in row 2"),
        ({"y": np.zeros(3, np.int64)}, ShapeError, "classes do not fit"),
        ({"y": np.zeros(4, np.float32)}, ShapeError, "classes do not fit"),
        ({"y": [0, 1, 2, 0]}, ShapeError, "not an array"),
        ({"x": np.zeros((4, 5))}, ShapeError, "dtype"),
        ({"x": np.zeros((4, 6), np.float32)}, ShapeError, "shape"),
        ({"x": np.zeros((0, 5), np.float32), "y": np.zeros(0, np.int64)}, InputError, "nothing to train on"),
        ({"loss": "hinge"}, InputError, "unknown loss"),
        ({"loss": "half_sse"}, ShapeError, "targets do not fit"),
        ({"lr": 0.0}, InputError, "learning rate"),
        ({"lr": float("nan")}, InputError, "learning rate"),
        ({"momentum": 1.0}, InputError, "momentum"),
        ({"batch_size": 0}, InputError, "batch size"),
        ({"epochs": 0}, InputError, "epochs"),
        ({"threads": 10_000}, InputError, "threads"),
        ({"net": mlp(5, 3, output="Softmax")}, PlanError, "train without it"),
    ],
)
def test_bad_input_is_refused(change, error, message):
    arguments = {"net": mlp(5, 3), "x": rows(4, 5), "y": np.array([0, 1, 2, 0]), "device": "cpu", "epochs": 1} | change
    net, x, y = (arguments.pop(name) for name in ("net", "x", "y"))
    with pytest.raises(error, match=message) as caught:
        fit(net, x, y, **arguments)
    assert isinstance(caught.value, OnchipError)
