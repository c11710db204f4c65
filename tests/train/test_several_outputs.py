"""Networks with several inputs and outputs: a loss for each, of which the weighted sum is trained."""

from __future__ import annotations

import numpy as np
import pytest

import onchip
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.errors import InputError, ShapeError
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Linear, ReLU, Softmax
from onchip.network.types import TensorType
from onchip.train.order import epoch_order
from row_steps import weight

N, B = 23, 8
LOSSES = {"logits": "cross_entropy", "box": "huber"}
OPTIONS = {
    "loss": LOSSES, "loss_weights": {"box": 0.5}, "optimiser": "adam", "lr": 0.02, "batch_size": B, "epochs": 3,
}  # fmt: skip
DEVICES = [
    pytest.param("cpu"), pytest.param("emulated", marks=needs_gxx), pytest.param("gpu", marks=pytest.mark.gpu),
]  # fmt: skip


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "emulated":
        emulate_device(monkeypatch)
    return "cpu" if request.param == "cpu" else "cuda"


def two_heads() -> Network:
    """Two inputs; outputs of classes and values, and one that no loss reads."""
    nodes = (
        Node("a1", Linear(), ("a",), {"weight": "a1.weight"}), Node("b1", Linear(), ("b",), {"weight": "b1.weight"}),
        Node("sum", Add(), ("a1", "b1")), Node("h", ReLU(), ("sum",)),
        *(Node(name, Linear(), ("h",), {"weight": f"{name}.weight"}) for name in ("logits", "box", "other")),
    )  # fmt: skip
    sizes = {"a1": (6, 5), "b1": (6, 3), "logits": (4, 6), "box": (2, 6), "other": (3, 6)}
    weights = {f"{name}.weight": weight(*shape) for name, shape in sizes.items()}
    inputs = {"a": TensorType(("B", 5)), "b": TensorType(("B", 3))}
    return Network(inputs, nodes, ("logits", "box", "other"), weights, "two heads")


def data(seed: int = 0, n: int = N) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    x = {name: rng.standard_normal((n, size)).astype(np.float32) for name, size in (("a", 5), ("b", 3))}
    return x, {"logits": rng.integers(0, 4, n), "box": 3 * rng.standard_normal((n, 2)).astype(np.float32)}


def of_rows(arrays, rows):
    return {name: array[rows] for name, array in arrays.items()}


def losses_of(net: Network, x, y, row_weights=None) -> tuple[float, float]:
    """The losses in float64: cross-entropy of the logits, Huber loss of the box."""
    w = {name.partition(".")[0]: np.float64(array) for name, array in net.weights.items()}
    h = np.maximum(x["a"] @ w["a1"].T + x["b"] @ w["b1"].T, 0)
    logits, apart = h @ w["logits"].T, np.abs(h @ w["box"].T - y["box"])
    of_classes = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), y["logits"]]
    of_box = np.where(apart < 1, apart**2 / 2, apart - 0.5).mean(axis=1)
    return tuple(float(np.average(each, weights=row_weights)) for each in (of_classes, of_box))


def test_losses_are_summed_with_their_weights(device):
    net, (x, y) = two_heads(), data()
    result = onchip.fit(net, x, y, **OPTIONS | {"lr": 1e-9, "shuffle": False}, device=device)
    of_batches = [losses_of(net, *(of_rows(each, slice(i, i + B)) for each in (x, y))) for i in range(0, N, B)]
    np.testing.assert_allclose(result.losses[:3], [a + b / 2 for a, b in of_batches], rtol=1e-5)
    a, b = losses_of(net, x, y)
    assert result.history[0].output_losses == pytest.approx({"logits": a, "box": b}, rel=1e-5)
    assert result.history[0].loss == pytest.approx(a + b / 2, rel=1e-5)
    assert result.history[0].accuracy is None


def test_gradients_are_those_of_finite_differences(device):
    net, (x, y) = two_heads(), data()
    options = {name: value for name, value in OPTIONS.items() if name != "epochs"}
    gradients = onchip.training_step(net, **options, device=device).gradients(x, y)
    assert gradients.keys() == net.weights.keys() - {"other.weight"}
    for name, gradient in gradients.items():
        for at in np.ndindex(gradient.shape):
            moved = []
            for step in (1e-6, -1e-6):
                array = np.float64(net.weights[name])
                array[at] += step
                a, b = losses_of(net.replace(weights={**net.weights, name: array}), x, y)
                moved.append(a + b / 2)
            assert gradient[at] == pytest.approx((moved[0] - moved[1]) / 2e-6, abs=2e-5)


def test_a_loop_of_ones_own_has_the_bits_of_fit(device):
    net, (x, y) = two_heads(), data()
    result = onchip.fit(net, x, y, **OPTIONS, seed=2, device=device)
    options = {name: value for name, value in OPTIONS.items() if name != "epochs"}
    step, losses = onchip.training_step(net, **options, seed=2, device=device), []
    for epoch in range(3):
        for rows in np.split(epoch_order(N, 2, epoch), range(B, N, B)):
            some_x, some_y = of_rows(x, rows), of_rows(y, rows)
            forms = [(some_x, some_y), (tuple(some_x.values()), [*some_y.values()]),
                     (*some_x.values(), *some_y.values())]  # fmt: skip
            losses.append(step(*forms[epoch]))
    assert np.array([float(loss) for loss in losses]).tobytes() == result.losses.tobytes()
    assert (result.network.weights["other.weight"] == net.weights["other.weight"]).all()
    assert (result.gpu_busy is None) == (result.gpu_bytes == 0) == (device == "cpu")
    assert result.gpu_busy is None or 0 < result.gpu_busy <= 1
    assert result.process_bytes > 2**24


def test_validation_weighs_rows_and_reports_every_output(device):
    net, (x, y) = two_heads(), data()
    held_x, held_y = data(seed=1, n=9)
    weights = np.arange(N) % 3
    result = onchip.fit(
        net, tuple(x.values()), tuple(y.values()), **OPTIONS | {"lr": 1e-9, "batch_size": N}, sample_weight=weights,
        validation_data=(held_x, held_y), patience=2, device=device,
    )  # fmt: skip
    (a, b), (held_a, held_b) = losses_of(net, x, y, weights), losses_of(net, held_x, held_y)
    last = result.history[0]
    assert last.output_losses == pytest.approx({"logits": a, "box": b}, rel=1e-5)
    assert last.validation_output_losses == pytest.approx({"logits": held_a, "box": held_b}, rel=1e-5)
    assert last.validation_loss == pytest.approx(held_a + held_b / 2, rel=1e-5)


def test_a_killed_run_resumes_with_the_same_bits(tmp_path):
    """In the middle of an epoch, whose losses of each output are kept."""
    net, (x, y) = two_heads(), data()
    whole = onchip.fit(net, x, y, **OPTIONS, validation=0.2, device="cpu")

    def end(progress):
        if (progress.epoch, progress.step) == (2, 1):
            raise KeyboardInterrupt

    kept = {**OPTIONS, "validation": 0.2, "device": "cpu", "checkpoint": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        onchip.fit(net, x, y, **kept, checkpoint_every=0, on_progress=end, debug=True)  # debug: one step at a time
    resumed = onchip.fit(net, x, y, **kept, resume=True)
    assert resumed.losses.tobytes() == whole.losses.tobytes()
    for ours, theirs in zip(resumed.history, whole.history, strict=True):
        assert ours.output_losses == theirs.output_losses
        assert ours.validation_output_losses == theirs.validation_output_losses


def test_one_loss_of_several_outputs_counts_correct_predictions():
    net, (x, y) = two_heads(), data()
    options = {**OPTIONS, "loss": {"logits": "cross_entropy"}, "loss_weights": None, "device": "cpu"}
    result = onchip.fit(net, x, y["logits"], **options, validation=0.3)
    last = result.history[-1]
    assert 0 <= last.accuracy <= 1
    assert 0 <= last.validation_accuracy <= 1
    assert last.output_losses is None
    by_name = onchip.fit(net, x, {"logits": y["logits"]}, **options, validation=0.3)
    assert by_name.losses.tobytes() == result.losses.tobytes()


def test_a_loss_by_name_of_the_only_output_is_that_loss():
    net = onchip.mlp(5, 4, 3)
    x, y = data()[0]["a"], data()[1]["logits"] % 3
    named = onchip.fit(net, {"x": x}, {net.outputs[0]: y}, loss={net.outputs[0]: "cross_entropy"}, device="cpu")
    assert named.losses.tobytes() == onchip.fit(net, x, y, device="cpu").losses.tobytes()
    assert named.history[-1].accuracy is not None


X, Y = data()


@pytest.mark.parametrize(
    ("x", "y", "given", "error", "words"),
    [
        (X["a"], Y, {}, InputError, r"do not fit the inputs(?s:.)*got: +one ndarray(?s:.)*each input: a, b"),
        ({"a": X["a"]}, Y, {}, InputError, "do not fit the inputs"),
        (X, Y["box"], {}, InputError, "do not fit the trained outputs"),
        (X, {**Y, "other": Y["box"]}, {}, InputError, "got: +logits, box, other"),
        (X, Y, {"loss": {"logits": "cross_entropy", "boxes": "mse"}}, InputError, "did you mean box"),
        (X, Y, {"loss": {"logits": "cross_entropy", "box": "hubert"}}, InputError, "unknown loss of 'box'"),
        (X, Y, {"loss": {"logits": "cross_entropy", "box": "half_sse"}}, InputError, "half_sse is a sum"),
        (X, Y, {"loss": {}}, InputError, "bad loss"),
        (X, Y, {"loss_weights": {"other": 1}}, InputError, "loss_weights names an unknown output"),
        (X, Y, {"loss_weights": {"box": 0}}, InputError, "bad loss weights"),
        (X, Y, {"loss_weights": {"box": np.nan}}, InputError, "bad loss weights"),
        (X, Y, {"class_weight": "balanced"}, InputError, "class_weight is for a network with one output"),
        (X, {**Y, "logits": Y["logits"] + 4}, {}, InputError, "output 'logits': a class is out of range"),
        (X, {**Y, "box": Y["box"][:, :1]}, {}, ShapeError, "output 'box': targets do not fit"),
        (X, {**Y, "box": Y["box"] * np.inf}, {}, InputError, "output 'box': targets are not finite"),
        ({**X, "b": X["b"][:-1]}, Y, {}, ShapeError, "different numbers of rows"),
        ({**X, "b": X["b"] * np.nan}, Y, {}, InputError, "rows of 'b' are not finite"),
        ({**X, "b": X["b"][:, :2]}, Y, {}, ShapeError, "'b': input has the wrong shape"),
        (X, Y, {"label_smoothing": 0.1, "loss": {"box": "mse"}}, InputError, "label_smoothing is for classes"),
    ],
)
def test_bad_input_is_refused_before_the_first_step(x, y, given, error, words):
    with pytest.raises(error, match=words):
        onchip.fit(two_heads(), x, y, **OPTIONS | given, device="cpu", on_progress=pytest.fail)


def test_an_output_that_its_loss_computes_is_named():
    net = two_heads()
    nodes = (*net.nodes, Node("shares", Softmax(), ("logits",)))
    net = net.replace(nodes=nodes, outputs=("shares", "box"))
    with pytest.raises(InputError, match="cross_entropy expects logits"):
        onchip.training_step(net, loss={"shares": "cross_entropy", "box": "mse"}, device="cpu")
