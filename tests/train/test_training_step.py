"""A step of training that the caller calls: the bits of `fit`, gradients, and weights that several steps share."""

from __future__ import annotations

import numpy as np
import pytest

import onchip
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.errors import InputError, ShapeError
from onchip.kernels import reference
from onchip.network.build import mlp
from onchip.network.graph import Network, Node
from onchip.network.layers import Linear, ReLU
from onchip.network.types import TensorType
from onchip.train import training_step
from onchip.train.order import epoch_order
from row_steps import images, sentences, weight

N, B = 20, 8
DEVICES = [
    pytest.param("cpu"), pytest.param("emulated", marks=needs_gxx), pytest.param("gpu", marks=pytest.mark.gpu),
]  # fmt: skip


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "emulated":
        emulate_device(monkeypatch)
    return "cpu" if request.param == "cpu" else "cuda"


def data(net: Network, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (N, *net.input.row_shape)
    x = rng.integers(0, 11, shape) if "int" in net.input.dtype else rng.standard_normal(shape).astype(np.float32)
    return x, rng.integers(0, 3, N)


@pytest.mark.parametrize(
    ("make", "options"),
    [(images, {"momentum": 0.9, "clip_norm": 0.5, "weight_decay": 0.01}), (sentences, {"optimiser": "adam"})],
)
def test_a_loop_of_ones_own_has_the_bits_of_fit(device, make, options, monkeypatch):
    """Batch norms, dropouts, a last batch of fewer rows, and a log of losses that is read on the way."""
    monkeypatch.setattr(training_step, "STEPS", 4)
    net = make()
    x, y = data(net)
    options = {"lr": 0.02, "batch_size": B, "seed": 3, "device": device, **options}
    result = onchip.fit(net, x, y, epochs=3, **options)
    step, losses = onchip.training_step(net, **options), []
    for epoch in range(3):
        order = epoch_order(N, 3, epoch)
        losses += [step(x[rows], y[rows]) for rows in np.split(order, range(B, N, B))]
    assert np.array([float(loss) for loss in losses]).tobytes() == result.losses.tobytes()
    trained = step.network
    assert all(array.tobytes() == trained.weights[name].tobytes() for name, array in result.network.weights.items())
    assert step.steps_done == len(losses) == 9


def test_gradients_are_those_of_the_reference_and_change_nothing(device):
    net = mlp(5, 9, 3, activation="GELU")
    x, y = data(net)
    step = onchip.training_step(net, clip_norm=0.001, weight_decay=0.5, device=device)
    gradients = step.gradients(x[:7], y[:7])
    _, exact = reference.loss_and_gradients(net, x[:7], y[:7], "cross_entropy")
    assert gradients.keys() == exact.keys()
    for name, gradient in exact.items():
        np.testing.assert_allclose(gradients[name], gradient, atol=1e-6)
    assert all((array == net.weights[name]).all() for name, array in step.weights.items())
    step(x, y)
    _, exact = reference.loss_and_gradients(step.network, x, y, "cross_entropy")
    np.testing.assert_allclose(step.gradients(x, y)["fc1.weight"], exact["fc1.weight"], atol=1e-6)


def discriminator() -> Network:
    nodes = (Node("d", Linear(), ("x",), {"weight": "d.weight"}),)
    return Network({"x": TensorType(("B", 4))}, nodes, ("d",), {"d.weight": weight(1, 4)})


def generator_and_discriminator() -> Network:
    nodes = (
        Node("g", Linear(), ("z",), {"weight": "g.weight"}), Node("r", ReLU(), ("g",)),
        Node("d", Linear(), ("r",), {"weight": "d.weight"}),
    )  # fmt: skip
    return Network({"z": TensorType(("B", 3))}, nodes, ("d",), {"g.weight": weight(4, 3), "d.weight": weight(1, 4)})


def test_steps_share_weights(device):
    """A discriminator is trained on real and on generated rows, a generator through it: as in one loop of NumPy."""
    rng = np.random.default_rng(1)
    real, z = rng.standard_normal((6, 4)).astype(np.float32), rng.standard_normal((6, 3)).astype(np.float32)
    options = {"loss": "bce_with_logits", "lr": 0.5, "device": device}
    on_real = onchip.training_step(discriminator(), **options)
    through = onchip.training_step(generator_and_discriminator(), trainable="g.*", state=on_real, **options)
    on_fake = onchip.training_step(generator_and_discriminator(), trainable="d.*", state=through, **options)
    ones, zeros = np.ones((6, 1), np.float32), np.zeros((6, 1), np.float32)
    d, g = (np.float64(generator_and_discriminator().weights[name]) for name in ("d.weight", "g.weight"))

    def slope(logits, target):
        return (1 / (1 + np.exp(-logits)) - target) / len(logits)

    for _ in range(3):
        on_real(real, ones)
        d = d - 0.5 * slope(real @ d.T, ones).T @ real
        on_fake(z, zeros)
        fake = np.maximum(z @ g.T, 0)
        d = d - 0.5 * slope(fake @ d.T, zeros).T @ fake
        through(z, ones)
        back = slope(fake @ d.T, ones) @ d * (fake > 0)
        g = g - 0.5 * back.T @ z
    np.testing.assert_allclose(on_real.weights["d.weight"], d, atol=1e-5)
    np.testing.assert_allclose(through.weights["g.weight"], g, atol=1e-5)
    assert through.weights.keys() == {"g.weight"}
    assert (through.gradients(z, ones)["g.weight"] != 0).any()


def test_the_learning_rate_and_the_weights_can_be_set(device):
    net = mlp(5, 3)
    x, y = data(net)
    step = onchip.training_step(net, lr=0.1, device=device)
    first = float(step(x, y))
    step.lr = 1e-30
    after = step.weights
    second = step(x, y)
    assert all((array == after[name]).all() for name, array in step.weights.items())
    step.weights = net.weights
    assert float(step(x, y)) == first != float(second)
    assert f"{second:.3f}" == f"{float(second):.3f}"


def test_averages_are_those_of_fit(device):
    net = images()
    x, y = data(net)
    options = {"lr": 0.02, "batch_size": B, "ema": 0.8, "seed": 3, "device": device}
    result = onchip.fit(net, x, y, epochs=1, **options)
    step = onchip.training_step(net, **options)
    assert onchip.training_step(net, device=device).averages == {}
    for rows in np.split(epoch_order(N, 3, 0), range(B, N, B)):
        step(x[rows], y[rows])
    averages = step.averages
    assert averages
    assert averages.keys() <= result.network.weights.keys()
    assert all(array.tobytes() == result.network.weights[name].tobytes() for name, array in averages.items())
    assert any((array != step.weights[name]).any() for name, array in averages.items())


@pytest.mark.parametrize("stop", [1, 5])
def test_a_step_continues_from_a_checkpoint_with_the_same_bits(device, stop, monkeypatch):
    """Moments, averages, dropouts and a log of losses that is read on the way."""
    monkeypatch.setattr(training_step, "STEPS", 3)
    net = images()
    x, y = data(net)
    options = {"optimiser": "adam", "lr": 0.02, "ema": 0.8, "seed": 3, "device": device}
    whole, first, then = (onchip.training_step(net, **options) for _ in range(3))
    for at in range(7):
        rows = slice(at, at + B)
        whole(x[rows], y[rows])
        if at < stop:
            first(x[rows], y[rows])
            continue
        if at == stop:
            then.resume(first.checkpoint())
            assert then.steps_done == stop
        then(x[rows], y[rows])
    assert then.losses.tobytes() == whole.losses.tobytes()
    expected = whole.checkpoint()
    assert expected.keys() >= whole.weights.keys()
    assert all(array.tobytes() == expected[name].tobytes() for name, array in then.checkpoint().items())


def test_the_checkpoint_of_another_step_is_refused():
    step = onchip.training_step(mlp(5, 3), optimiser="adam", device="cpu")
    for other in (onchip.training_step(mlp(5, 3), device="cpu"), onchip.training_step(mlp(6, 3), device="cpu")):
        with pytest.raises(InputError, match="checkpoint is of another step"):
            step.resume(other.checkpoint())


@pytest.mark.parametrize("make", [lambda: mlp(5, 9, 3), images])
@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_beta1_of_adam(device, make, optimiser):
    """Two steps by hand, also of an MLP, which other kernels train with 0.9."""
    net = make()
    x, y = data(net)
    step = onchip.training_step(net, optimiser=optimiser, beta1=0.5, lr=0.01, device=device)
    name = next(iter(step.gradients(x, y)))
    w, m, s = np.float64(net.weights[name]), 0.0, 0.0
    for t in (1, 2):
        g = step.gradients(x, y)[name].astype(np.float64)
        m, s = 0.5 * m + 0.5 * g, 0.999 * s + 0.001 * g * g
        w = w - 0.01 * (m / (1 - 0.5**t)) / (np.sqrt(s / (1 - 0.999**t)) + 1e-8)
        step(x, y)
    np.testing.assert_allclose(step.weights[name], w, atol=2e-5)
    with pytest.raises(InputError, match="bad beta1"):
        onchip.training_step(net, beta1=1.0)


def test_rows_have_weights(device):
    net = mlp(5, 3)
    x, y = data(net)
    weights = np.arange(N) % 3
    step = onchip.training_step(net, device=device)
    loss, exact = reference.loss_and_gradients(net, x, y, "cross_entropy", row_weights=weights.astype(np.float64))
    np.testing.assert_allclose(step.gradients(x, y, weights=weights)["fc1.weight"], exact["fc1.weight"], atol=1e-6)
    assert float(step(x, y, weights=weights)) == pytest.approx(loss, rel=1e-5)


def test_torch_tensors_of_the_host():
    torch = pytest.importorskip("torch")
    net = mlp(5, 3)
    x, y = data(net)
    steps = [onchip.training_step(net, device="cpu") for _ in range(2)]
    losses = [float(steps[0](x, y)), float(steps[1](torch.from_numpy(x), torch.from_numpy(y)))]
    assert losses[0] == losses[1]


@pytest.mark.gpu
def test_torch_tensors_on_a_gpu():
    torch = pytest.importorskip("torch")
    net = images()
    x, y = data(net)
    host, device = (onchip.training_step(net, momentum=0.9, device="cuda") for _ in range(2))
    on_gpu = torch.from_numpy(x).cuda(), torch.from_numpy(y).cuda()
    for begin in (0, 4, 8, 12, 0):
        rows = slice(begin, begin + 8)
        assert float(host(x[rows], y[rows])) == float(device(*(array[rows].contiguous() for array in on_gpu)))
    with torch.cuda.stream(torch.cuda.Stream()):
        made = torch.from_numpy(x).cuda(non_blocking=True) * 2
        assert float(device(made, on_gpu[1])) == float(host(x * 2, y))
    assert all((array == host.weights[name]).all() for name, array in device.weights.items())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda net, x, y: onchip.training_step(net, epochs=3), InputError, "not an option of a single step"),
        (lambda net, x, y: onchip.training_step(net, trainable="fc9.*"), InputError, "trainable matches no weight"),
        (lambda net, x, y: onchip.training_step(net, state={}), InputError, "bad state"),
        (lambda net, x, y: onchip.training_step(net, device="cpu")(x), InputError, "wrong number of arrays"),
        (lambda net, x, y: onchip.training_step(net, device="cpu")(x, y[:3]), ShapeError, "classes do not fit"),
        (lambda net, x, y: onchip.training_step(net, device="cpu")(x[:0], y[:0]), InputError, "no rows"),
        (
            lambda net, x, y: onchip.training_step(net, device="cpu")(x, y, weights=-y),
            InputError,
            "a sample weight is negative",
        ),
        (lambda net, x, y: onchip.training_step(net, device="cpu")(x, y + 3), InputError, "class is out of range"),
        (
            lambda net, x, y: onchip.training_step(images().replace(outputs=("c",))),
            ShapeError,
            "does not fit the output",
        ),
        (
            lambda net, x, y: onchip.training_step(net.replace(nodes=net.nodes[:0], outputs=("x",))),
            InputError,
            "without",
        ),
    ],
)
def test_bad_input_is_refused(make, error, words):
    net = mlp(5, 3)
    x, y = data(net)
    with pytest.raises(error, match=words):
        make(net, x, y)


def test_a_weight_that_another_step_holds_as_a_constant_is_not_trained():
    net = generator_and_discriminator()
    first = onchip.training_step(net, loss="mse", trainable="d.*", device="cpu")
    with pytest.raises(InputError, match=r"(?s)holds 'g.weight' as a constant.*this step first"):
        onchip.training_step(net, loss="mse", trainable="g.*", state=first)


def test_a_weight_of_another_shape_is_not_shared():
    first = onchip.training_step(mlp(5, 3), device="cpu")
    with pytest.raises(InputError, match=r"differ in weight 'fc1.weight'"):
        onchip.training_step(mlp(6, 3), state=first)


def test_the_network_of_a_step_has_averages(device):
    net = images()
    x, y = data(net)
    options = {"lr": 0.05, "ema": 0.6, "batch_size": B, "device": device}
    result = onchip.fit(net, x, y, epochs=2, shuffle=False, **options)
    step = onchip.training_step(net, **options)
    for begin in (0, 8, 16, 0, 8, 16):
        step(x[begin : begin + B], y[begin : begin + B])
    trained = step.network
    assert all(array.tobytes() == trained.weights[name].tobytes() for name, array in result.network.weights.items())
    assert (step.weights["b.weight"] != trained.weights["b.weight"]).any()


class DlpackArray:
    """An array of another library, of the host."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.shape = array, array.shape

    def __dlpack__(self, **how):
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize(
    "given",
    [
        lambda x, y: (DlpackArray(x), DlpackArray(y)),
        lambda x, y: (x, y.astype(np.int32)),
        lambda x, y: (x, y.astype(np.uint8)),
        lambda x, y: (np.float64(x), y),
        lambda x, y: (np.asfortranarray(x), y),
    ],
)
def test_arrays_of_the_host_are_converted_as_by_fit(device, given, monkeypatch):
    monkeypatch.setenv("ONCHIP_QUIET", "1")
    net = mlp(5, 3)
    x, y = data(net)
    steps = [onchip.training_step(net, device=device) for _ in range(2)]
    assert float(steps[0](*given(x, y))) == float(steps[1](x, y))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda step, x, y: step(x, y + 3), "class is out of range"),
        (lambda step, x, y: step(x * np.nan, y), "rows are not finite"),
        (lambda step, x, y: step.gradients(x * np.inf, y), "rows are not finite"),
        (lambda step, x, y: step(x, np.eye(3, dtype=np.float32)[y]), r"y.argmax\(axis=1\): these are one-hot"),
        (lambda step, x, y: step(x, y.astype(np.float32)), "classes do not fit"),
        (lambda step, x, y: step(x[:, :4], y), "input has the wrong shape"),
        (lambda step, x, y: step(x, y, weights=np.full(N, np.inf)), "negative or not finite"),
        (lambda step, x, y: step(x, y, weights="abc"), "sample weights do not fit"),
        (lambda step, x, y: step(x, y, weights=np.zeros(N)), "all row weights are zero"),
        (lambda step, x, y: setattr(step, "weights", 3), "bad weights"),
        (lambda step, x, y: onchip.training_step(mlp(5, 3), trainable=3), "bad trainable"),
        (lambda step, x, y: onchip.training_step(mlp(5, 3), trainable=[]), "bad trainable"),
    ],
)
def test_bad_arrays_change_nothing(make, words):
    step = onchip.training_step(net := mlp(5, 3), device="cpu")
    x, y = data(net)
    with pytest.raises(InputError, match=words):
        make(step, x, y)
    assert step.steps_done == 0
    assert all((array == net.weights[name]).all() for name, array in step.weights.items())


@pytest.mark.parametrize("bad", [-1.0, 2.0])
def test_targets_beyond_0_to_1_are_refused(bad):
    net = mlp(5, 3)
    step = onchip.training_step(net, loss="bce_with_logits", device="cpu")
    x, _ = data(net)
    step(x, np.ones((N, 3), bool))
    with pytest.raises(InputError, match="a target is out of range"):
        step(x, np.full((N, 3), bad, np.float32))
