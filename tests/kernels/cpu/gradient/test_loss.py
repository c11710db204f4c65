"""Losses on the CPU: alone, their gradients, and all of a step's loss in one launch."""

import numpy as np
import pytest

from onchip.errors import InputError
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    AbsoluteError,
    BatchSum,
    BinaryCrossEntropy,
    Correct,
    CrossEntropy,
    HuberLoss,
    InputGrad,
    Mul,
    SquaredError,
)
from onchip.network.types import TensorType
from step_cases import bind, check_step, run

ELEMENTWISE = [SquaredError(), SquaredError(is_mean=True), BinaryCrossEntropy(), AbsoluteError(), HuberLoss()]
LOSSES = [CrossEntropy(), CrossEntropy(0.1), *ELEMENTWISE]
PARTS = {"loss": ("losses",), "gradient": ("dx",), "step": ("losses", "shared", "total", "dx")}
BATCHES = [0, 1, 5, 64, 300]


def network(layer, row, which, class_dtype="int64"):
    is_classes = isinstance(layer, CrossEntropy)
    x, target = TensorType(("B", *row)), TensorType(("B",), class_dtype) if is_classes else TensorType(("B", *row))
    inputs = {"x": x, "target": target, "given": TensorType(("B",)), "share": TensorType(("B",))}
    losses = "given" if which == "gradient" else "losses"
    nodes = {
        "losses": Node("losses", layer, ("x", "target")),
        "shared": Node("shared", Mul(), ("losses", "share")),
        "total": Node("total", BatchSum(), ("shared",)),
        "dx": Node("dx", InputGrad(layer, 0), ("x", "target", losses, "share")),
    }
    outputs = ("total", "dx") if which == "step" else PARTS[which]
    weights = {"s": np.zeros(1, np.float32)}
    return Network(inputs, tuple(nodes[name] for name in PARTS[which]), outputs, weights, state={"s": ""})


def rows(layer, row, B, class_dtype="int64"):
    rng = np.random.default_rng(B)
    x, other = (3 * rng.standard_normal((B, *row), np.float32) for _ in range(2))
    target = rng.integers(0, row[0], B).astype(class_dtype) if isinstance(layer, CrossEntropy) else other
    if isinstance(layer, BinaryCrossEntropy):
        target = np.clip(other, 0, 1)
    if isinstance(layer, AbsoluteError):
        target[rng.integers(0, 2, target.shape) > 0] = 0  # often equal
        x[rng.integers(0, 2, x.shape) > 0] = 0
    return x, target, rng.random(B, np.float32), rng.random(B, np.float32) / max(1, B)


def correct(N, class_dtype="int64"):
    inputs = {"y": TensorType(("B", N)), "classes": TensorType(("B",), class_dtype)}
    node = Node("losses", Correct(), ("y", "classes"))
    return Network(inputs, (node,), ("losses",), {"s": np.zeros(1, np.float32)}, state={"s": ""})


def rows_of_equal_elements(B, N, class_dtype="int64"):
    """Two or three elements per row are often equal; half of the classes are right."""
    rng = np.random.default_rng(N)
    y = rng.integers(0, 3, (B, N)).astype(np.float32)
    return y, np.where(rng.integers(0, 2, B), y.argmax(1), rng.integers(0, N, B)).astype(class_dtype)


@pytest.mark.parametrize("B", BATCHES)
@pytest.mark.parametrize("which", PARTS)
@pytest.mark.parametrize("row", [(1,), (10,), (1003,)], ids=str)
@pytest.mark.parametrize("layer", LOSSES, ids=str)
def test_losses(layer, row, which, B):
    net = network(layer, row, which)
    bound = bind(net, "loss", 64)
    assert len(bound.plan.groups) == 1
    check_step(net, "loss", rows(layer, row, B))


@pytest.mark.parametrize("which", PARTS)
@pytest.mark.parametrize("layer", ELEMENTWISE, ids=str)
def test_losses_of_images(layer, which):
    row = (3, 5, 7)
    check_step(network(layer, row, which), "loss", rows(layer, row, 9))


def test_narrow_classes():
    layer, row = CrossEntropy(), (7,)
    check_step(network(layer, row, "step", "int32"), "loss", rows(layer, row, 9, "int32"))


@pytest.mark.parametrize("layer", ELEMENTWISE, ids=str)
def test_large_outputs_and_nan_stay_in_their_row(layer):
    """Also where exp overflows: the loss of a logit of 1e4 with the target 1 is 0, with the target 0 it is 1e4."""
    x, target, given, share = rows(layer, (7,), 6)
    x[1], target[1] = (-1e4, -100, 100, 1e4, 1e4, 0, -0.0), (0, 1, 0, 1, 0, 1, 0)
    for which in ("loss", "gradient", "step"):
        net = network(layer, (7,), which)
        check_step(net, "loss", (x, target, given, share))
    net = network(layer, (7,), "gradient")
    clean = check_step(net, "loss", (x, target, given, share))["dx"]
    x[3, 2] = np.nan
    got = run(bind(net, "loss", 6), (x, target, given, share))["dx"]
    assert np.array_equal(np.isnan(got), np.isnan(x))
    assert np.array_equal(np.delete(got, 3, 0), np.delete(clean, 3, 0))


def test_large_logits_and_nan_stay_in_their_row():
    layer, row = CrossEntropy(), (7,)
    x, target, given, share = rows(layer, row, 6)
    x[1] += 1e6
    net = network(layer, row, "gradient")
    clean = check_step(net, "loss", (x, target, given, share))["dx"]
    x[3, 2] = np.nan
    got = run(bind(net, "loss", 6), (x, target, given, share))["dx"]
    assert np.isnan(got[3]).all()
    assert np.array_equal(np.delete(got, 3, 0), np.delete(clean, 3, 0))


@pytest.mark.parametrize("wrong", [-1, 7])
@pytest.mark.parametrize("which", PARTS)
def test_a_class_out_of_range_is_refused(which, wrong):
    layer = CrossEntropy()
    x, target, *others = rows(layer, (7,), 6)
    target[4] = wrong
    with pytest.raises(InputError, match="class"):
        run(bind(network(layer, (7,), which), "loss", 6), (x, target, *others))


@pytest.mark.parametrize("class_dtype", ["int64", "int32"])
@pytest.mark.parametrize("N", [1, 2, 10, 1003])
def test_correct_rows(N, class_dtype):
    """Of equal largest elements the first counts; a row with a NaN, or with a class that does not exist, is wrong."""
    y, classes = rows_of_equal_elements(300, N, class_dtype)
    net = correct(N, class_dtype)
    got = check_step(net, "loss", (y, classes))["losses"]
    y[7, N - 1], classes[8], classes[9] = np.nan, -1, N
    expected = (y.argmax(1) == classes).astype(np.float32)
    assert 0 < expected.sum() < 300 or N == 1
    expected[7] = 0
    assert np.array_equal(np.delete(got, [7, 8, 9]), np.delete(expected, [7, 8, 9]))
    assert np.array_equal(check_step(net, "loss", (y, classes))["losses"], expected)


def test_correct_rows_of_a_batch():
    nodes = Node("losses", Correct(), ("y", "classes")), Node("total", BatchSum(), ("losses",))
    net = correct(4).replace(nodes=nodes, outputs=("total",))
    y, classes = rows_of_equal_elements(300, 4)
    assert check_step(net, "batch_sums", (y, classes))["total"] == (y.argmax(1) == classes).sum()


def test_a_loss_that_is_read_elsewhere_is_its_own_launch():
    net = network(CrossEntropy(), (7,), "step")
    net = Network(net.inputs, net.nodes, ("total", "dx", "losses"), net.weights, state=net.state)
    assert len(bind(net, "loss", 6).plan.groups) == 4
    check_step(net, "loss", rows(CrossEntropy(), (7,), 6))


def test_the_gradient_of_a_target_is_refused():
    layer = SquaredError()
    inputs = {name: TensorType(("B", 3)) for name in ("x", "target")} | {n: TensorType(("B",)) for n in ("loss", "dy")}
    nodes = (Node("dt", InputGrad(layer, 1), tuple(inputs)),)
    net = Network(inputs, nodes, ("dt",), {"s": np.zeros(1, np.float32)}, state={"s": ""})
    assert "loss" in [refusal.kernel for refusal in bind(net, "plain", 6).plan.refusals]
