"""Training steps as networks, in float64: gradients and updates are those of the reference, layer by layer."""

import numpy as np
import pytest

from gradient_cases import GRADIENT_CASES
from layer_cases import network, random_inputs
from onchip.errors import InputError
from onchip.kernels import reference
from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    Add,
    ArgMax,
    BatchNorm1d,
    Conv2d,
    Dropout,
    Embedding,
    Floor,
    InputGrad,
    Linear,
    Mul,
    Pow,
    ReLU,
    Reshape,
    Tanh,
    WeightGrad,
)
from onchip.network.training import LOSSES, TrainingStep
from onchip.network.types import TensorType
from onchip.plan.gradient.step import VALUES, averages_of, training_step

TRAINABLE = [case for case in GRADIENT_CASES if not isinstance(case.layer, Dropout)]

GENERIC = {
    "InputGrad": {
        "AvgPool1d", "AvgPool2d", "Gather", "GlobalMax", "GlobalMin", "GroupNorm", "LayerNorm",
        "LinearResize", "LogSoftmax", "MaxPool1d", "MaxPool2d", "NearestResize", "RMSNorm",
        "SequenceMax", "Softmax", "SquaredError", "TopK",
    },
    "WeightGrad": {
        "BatchNorm1d", "BatchNorm2d", "Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d", "Embedding",
        "Linear", "TokenConv",
    },
}  # fmt: skip


def before_each_input(net: Network) -> Network:
    """The network with a trainable factor on every float input, and its output in one axis."""
    nodes, weights, names = [], dict(net.weights), {}
    for name, kind in net.inputs.items():
        if "float" in kind.dtype:
            names[name] = f"{name}.scaled"
            weights[f"{name}.factor"] = np.linspace(0.5, 1.5, kind.row_size).reshape(kind.row_shape)
            nodes.append(Node(names[name], Mul(), (name,), {"constant": f"{name}.factor"}))
    for node in net.nodes:
        inputs = tuple(names.get(value, value) for value in node.inputs)
        nodes.append(Node(node.name, node.layer, inputs, node.weights))
    nodes.append(Node("flat", Reshape(), (net.outputs[0],)))
    return Network(net.inputs, tuple(nodes), ("flat",), weights)


def begin(step: Network) -> dict[str, np.ndarray]:
    return {name: np.asarray(step.weights[name], np.float64) for name in step.state} | values()


def values(lr=1.0, weight_decay=0.0, momentum=0.0, count=1) -> dict[str, np.ndarray]:
    return {VALUES: np.array([lr, weight_decay, momentum, 1 - 0.9**count, 1 - 0.999**count])}


def descent(net, x, target, loss, trainable=lambda name: name not in ("mean", "var"), **options):
    """The loss, and the gradient of every weight: what one step of SGD with lr = 1 subtracts. Batch norms compute as at
    inference."""
    step, B = training_step(net, TrainingStep(loss, **options), trainable=trainable), len(target)
    share = np.full(B, 1.0 if loss == "half_sse" else 1 / B)
    return loss_and_change(step, (*x, target, share))


def loss_and_change(step, rows):
    before = begin(step)
    loss, after = reference.run_step(step, rows, before)
    return loss[0], {name: before[name] - after[name] for name in step.state if name != VALUES}


def assert_close(got, expected, tolerance=1e-11):
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("case", TRAINABLE, ids=str)
def test_every_layer(case, B):
    net, x = before_each_input(network(case, "float64")), random_inputs(case, B, "float64")
    target = np.random.default_rng(3).standard_normal((B, net.output.row_size))
    expected_loss, expected = reference.loss_and_gradients(net, x, target, "mse")
    loss, gradients = descent(net, x, target, "mse")
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    unreached = expected.keys() - gradients.keys()  # no gradient passes a step function or a mask
    assert not any(np.any(expected.pop(name)) for name in unreached)
    assert_close(gradients, expected)


def test_gradients_without_a_rule():
    """The layers whose gradients are generic nodes, InputGrad and WeightGrad: few kernels run these."""
    found = {"InputGrad": set(), "WeightGrad": set()}
    for case in TRAINABLE:
        step = training_step(before_each_input(network(case, "float64")), TrainingStep("mse"))
        for node in step.nodes:
            if isinstance(node.layer, InputGrad | WeightGrad):
                found[node.layer.kind].add(node.layer.of.kind)
    assert found == GENERIC


def branched() -> Network:
    """Two readers of a value, a weight that two layers share, a frozen table, and a value that the loss ignores."""
    rng = np.random.default_rng(0)
    return Network(
        {"ids": TensorType(("B", 3), "int64"), "x": TensorType(("B", 6), "float64")},
        (
            Node("e", Embedding(), ("ids",), {"weight": "table"}),
            Node("flat", Reshape(), ("e",)),
            Node("a", Linear(), ("flat",), {"weight": "shared", "bias": "bias"}),
            Node("b", Linear(), ("x",), {"weight": "shared"}),
            Node("t", Tanh(), ("a",)),
            Node("unused", ReLU(), ("t",)),
            Node("y", Add(), ("t", "b", "a")),
        ),
        ("y",),
        {
            "table": rng.standard_normal((9, 2)), "shared": rng.standard_normal((4, 6)), "bias": rng.standard_normal(4),
        },
    )  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_a_graph(loss):
    net, rng = branched(), np.random.default_rng(1)
    x = rng.integers(0, 9, (7, 3)), rng.standard_normal((7, 6))
    target = rng.integers(0, 4, 7) if loss == "cross_entropy" else rng.random((7, 4))
    expected_loss, expected = reference.loss_and_gradients(net, x, target, loss)
    value, gradients = descent(net, x, target, loss)
    assert value == pytest.approx(expected_loss, rel=1e-12)
    assert_close(gradients, expected)
    step = training_step(net, TrainingStep(loss), trainable=lambda name: name != "table")
    assert "table" not in step.state
    assert "unused" not in step.types


def test_powers_of_any_sign():
    x = np.array([[-2.0, -0.5, 0.0, 0.0, 1.5, 3.0]])
    exponents = np.array([2.0, 3.0, 2.0, 1.0, 0.5, -1.0])
    nodes = (Node("s", Mul(), ("x",), {"constant": "factor"}), Node("y", Pow(), ("s",), {"constant": "exponents"}))
    weights = {"factor": np.ones(6), "exponents": exponents}
    net = Network({"x": TensorType(("B", 6), "float64")}, nodes, ("y",), weights)
    _, gradients = descent(net, (x,), np.zeros((1, 6)), "half_sse", trainable=lambda name: name == "factor")
    y = x[0] ** exponents
    np.testing.assert_allclose(gradients["factor"], y * exponents * y, rtol=1e-12)  # y b a^(b - 1) x, with a = x


def test_many_readers():
    """Gradients of more readers than a kernel reads values are added a few at a time."""
    nodes = [Node("x.scaled", Mul(), ("x",), {"constant": "factor"})]
    nodes += [Node(f"t{i}", Tanh(), ("x.scaled",)) for i in range(40)]
    total = "t0"
    for i in range(1, 40):
        nodes.append(Node(f"sum{i}", Add(), (total, f"t{i}")))
        total = nodes[-1].name
    net = Network({"x": TensorType(("B", 3), "float64")}, tuple(nodes), (total,), {"factor": np.linspace(0.5, 1, 3)})
    x, target = np.random.default_rng(0).standard_normal((2, 4, 3))
    _, expected = reference.loss_and_gradients(net, x, target, "mse")
    assert_close(descent(net, (x,), target, "mse")[1], expected)
    step = training_step(net, TrainingStep("mse"))
    assert max(len(node.inputs) for node in step.nodes) <= 8


def test_label_smoothing():
    net, rng = mlp(5, 4, 3), np.random.default_rng(1)
    x, y = rng.standard_normal((6, 5)), rng.integers(0, 3, 6)
    _, expected = reference.loss_and_gradients(net, x, y, "cross_entropy", smoothing=0.2)
    _, gradients = descent(net, (x,), y, "cross_entropy", label_smoothing=0.2)
    assert_close(gradients, expected)


def test_derived_weights_are_not_rounded():
    """In float64 the reference transposes the state itself, also of a network of float32."""
    rng = np.random.default_rng(0)
    step = training_step(mlp(5, 4, 3), TrainingStep("mse"))
    x, target, state = rng.standard_normal((6, 5)), rng.standard_normal((6, 3)), begin(step)
    state |= {name: rng.standard_normal(state[name].shape) for name in state if name != VALUES}
    _, after = reference.run_step(step, (x, target, np.full(6, 1 / 6)), state)
    net = mlp(5, 4, 3).replace(weights={name: state[name] for name in state if name != VALUES})
    _, expected = reference.loss_and_gradients(net, x, target, "mse")
    assert_close({name: state[name] - after[name] for name in expected}, expected)


def test_rows_with_shares():
    net, rng = mlp(5, 4, 3), np.random.default_rng(1)
    x, y, weights = rng.standard_normal((6, 5)), rng.integers(0, 3, 6), rng.random(6)
    _, expected = reference.loss_and_gradients(net, x, y, "cross_entropy", row_weights=weights)
    step = training_step(net, TrainingStep("cross_entropy"))
    _, gradients = loss_and_change(step, (x, y, weights / weights.sum()))
    assert_close(gradients, expected)


@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "nesterov", "adam", "adamw"])
@pytest.mark.parametrize("weight_decay", [0.01, {"c.weight": 0.01, "l.bias": 0.03, "l.weight": 0.02}], ids=type)
def test_steps_of_an_optimiser(optimiser, clip_norm, weight_decay):
    net = sequential(
        TensorType(("B", 2, 5, 5), "float64"),
        [("c", Conv2d()), ("r", ReLU()), ("f", Reshape()), ("l", Linear())],
        {"c.weight": weight(3, 2, 3, 3), "c.bias": weight(3), "l.weight": weight(4, 27), "l.bias": weight(4)},
    )
    decays, decay = (weight_decay, 1.0) if isinstance(weight_decay, dict) else (True, weight_decay)
    lr, momentum = 0.1, 0.9 if optimiser in ("momentum", "nesterov") else 0.0
    step = training_step(net, TrainingStep("cross_entropy", optimiser, clip_norm=clip_norm), decays=decays)
    expected, moments, state, rng = net, {}, begin(step), np.random.default_rng(2)
    for count in range(1, 5):
        x, y = rng.standard_normal((6, 2, 5, 5)), rng.integers(0, 4, 6)
        loss, gradients = reference.loss_and_gradients(expected, x, y, "cross_entropy")
        if clip_norm:
            gradients = reference.clip_gradients(gradients, clip_norm)
        if optimiser in ("adam", "adamw"):
            expected = reference.adam_step(expected, moments, gradients, lr, count, weight_decay, optimiser == "adamw")
        else:
            how = lr, momentum, weight_decay, optimiser == "nesterov"
            expected = reference.sgd_step(expected, moments, gradients, *how)
        state |= values(lr, decay, momentum, count)
        (got,), state = reference.run_step(step, (x, y, np.full(6, 1 / 6)), state)
        assert got == pytest.approx(loss, rel=1e-12)
        assert_close({name: state[name] for name in net.weights}, dict(expected.weights))


def test_averages_of_the_weights():
    net, rng, ema = mlp(5, 4, 3), np.random.default_rng(3), 0.8
    step = training_step(net, TrainingStep("mse", "adam", ema=ema), trainable=lambda name: name != "fc1.bias")
    averages, state, expected = (
        averages_of(step),
        begin(step),
        {name: w.astype(np.float64) for name, w in net.weights.items()},
    )
    assert averages == {name: f"{name}.average" for name in net.weights if name != "fc1.bias"}
    for count in range(1, 4):
        state |= values(0.1, 0.0, 0.0, count)
        rows = rng.standard_normal((6, 5)), rng.standard_normal((6, 3)), np.full(6, 1 / 6)
        _, state = reference.run_step(step, rows, state)
        for name in averages:
            expected[name] = ema * expected[name] + (1 - ema) * state[name]
    assert_close({name: state[average] for name, average in averages.items()}, {n: expected[n] for n in averages})
    assert averages_of(training_step(net, TrainingStep("mse"))) == {}


def test_a_batch_norms_statistics_have_no_other_average():
    layers = [("l", Linear()), ("n", BatchNorm1d()), ("r", ReLU()), ("o", Linear())]
    weights = {"l.weight": weight(4, 5), "o.weight": weight(3, 4)}
    weights |= {f"n.{role}": np.abs(weight(4)) + 0.5 for role in ("mean", "var", "weight", "bias")}
    step = training_step(sequential(TensorType(("B", 5), "float64"), layers, weights), TrainingStep("mse", ema=0.9))
    assert set(averages_of(step)) == {"l.weight", "n.weight", "n.bias", "o.weight"}


@pytest.mark.parametrize("ema", [1.0, -0.1, "0.9", float("nan")])
def test_an_average_that_is_none(ema):
    with pytest.raises(InputError, match="bad ema"):
        TrainingStep("mse", ema=ema)


def weight(*shape):
    return np.random.default_rng(shape).standard_normal(shape) / 3


def test_what_cannot_be_trained():
    rows = TensorType(("B", 5), "float64")
    no_gradient = sequential(
        rows,
        [("l", Linear()), ("a", ArgMax()), ("e", Embedding())],
        {"l.weight": weight(4, 5), "e.weight": weight(4, 2)},
    )
    with pytest.raises(InputError, match=r"layer 'a' .* has no gradient"):
        training_step(no_gradient, TrainingStep("half_sse"))
    behind = training_step(no_gradient, TrainingStep("half_sse"), trainable=lambda name: name == "e.weight")
    assert set(behind.state) == {"e.weight", VALUES}
    with pytest.raises(InputError, match="nothing to train"):
        training_step(sequential(rows, [("t", Tanh())], {}), TrainingStep("half_sse"))
    with pytest.raises(InputError, match="nothing to train"):
        training_step(mlp(5, 3), TrainingStep("half_sse"), trainable=lambda name: False)
    flat = sequential(rows, [("l", Linear()), ("f", Floor())], {"l.weight": weight(4, 5)})
    with pytest.raises(InputError, match="no gradient reaches a trainable weight"):
        training_step(flat, TrainingStep("half_sse"))
    taken = Network({"target": rows}, (Node("y", Linear(), ("target",), {"weight": "w"}),), ("y",), {"w": weight(3, 5)})
    with pytest.raises(InputError, match="is called 'target'"):
        training_step(taken, TrainingStep("half_sse"))
