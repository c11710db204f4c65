"""Trained weights go back into the torch module that the network was loaded from."""

from __future__ import annotations

import importlib.util
import threading

import numpy as np
import pytest

import onchip
from onchip.errors import InputError

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 6)
        self.convs = nn.ModuleList(nn.Conv1d(6, 5, k) for k in (2, 3))
        self.fc = nn.Linear(10, 3)

    def forward(self, ids):
        x = self.table(ids).transpose(1, 2)
        x = torch.cat([F.relu(conv(x)).amax(dim=2) for conv in self.convs], dim=1)
        return self.fc(F.dropout(x, 0.25, self.training))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.steps = kind(5, 6, batch_first=True, **options)
        self.fc = nn.Linear(12 if options.get("bidirectional") else 6, 3)

    def forward(self, x):
        return self.fc(self.steps(x)[0].mean(1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(20, 8), nn.Parameter(torch.randn(9, 8))  # longer than the rows
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, ids):
        return self.fc(self.block(self.table(ids) + self.places[: ids.shape[1]]).mean(1))


def mlp():
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25),
        nn.Linear(36, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


CASES = {
    "mlp": (mlp, (6,)), "cnn": (cnn, (1, 8, 8)), "text cnn": (TextCNN, 9), "encoder": (Encoder, 7),
    "lstm": (lambda: Recurrent(nn.LSTM), (4, 5)),
    "gru": (lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True), (4, 5)),
    "rnn": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), (4, 5)),
}  # fmt: skip


def rows(shape, n=48):
    """Rows of ids if the shape is their count, else of floats; and classes."""
    rng = np.random.default_rng(1)
    classes = rng.integers(0, 3, n)
    if isinstance(shape, int):
        return (rng.integers(0, 20, (n, shape)), classes)
    return rng.standard_normal((n, *shape)).astype(np.float32), classes


def make(case):
    torch.manual_seed(0)
    build, shape = CASES[case]
    return build(), *rows(shape)


def state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(before, module):
    return {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("case", CASES)
def test_a_trained_network_goes_back(case):
    module, x, y = make(case)
    before = state(module)
    net = onchip.load(module, torch.from_numpy(x[:2]))
    frozen = [name for name in net.weights if "Constant" in name]  # the scale of the encoder's attention
    result = onchip.fit(net, x, y, epochs=2, batch_size=16, lr=0.1, device="cpu", frozen=frozen)
    assert onchip.to_torch(module, result) is module
    assert module.training  # as before
    counters = {name for name in before if name.endswith("num_batches_tracked")}
    assert changed(before, module) == set(before) - counters
    module.eval()
    with torch.no_grad():
        theirs = module(torch.from_numpy(x)).numpy()
        assert np.abs(theirs).max() > 0.1
    ours = onchip.compile(result.network, device="cpu")(x)
    np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
    for parameter in module.parameters():
        assert parameter.requires_grad
        assert parameter.grad_fn is None


def moved(net, skip=("Constant",)):
    """The network with other values of its weights."""
    rng = np.random.default_rng(2)
    named = {name: w for name, w in net.weights.items() if not any(part in name for part in skip)}
    new = {name: (w + rng.uniform(0.1, 0.5, w.shape)).astype(w.dtype) for name, w in named.items()}
    return net.replace(weights={**net.weights, **new})


@pytest.mark.parametrize("case", CASES)
def test_an_untrained_network_changes_nothing(case):
    module, x, _ = make(case)
    before = state(module)
    onchip.to_torch(module, onchip.load(module, torch.from_numpy(x[:2])))
    assert changed(before, module) == set()


def test_the_weights_of_a_training_step_go_back():
    module, x, y = make("mlp")
    step = onchip.training_step(onchip.load(module, x[:2]), lr=0.1, batch_size=16, device="cpu")
    step(x[:16], y[:16])
    onchip.to_torch(module, step)
    for name, tensor in module.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), step.network.weights[name])


def test_weights_of_one_name_go_back_with_their_bits():
    module, x, _ = make("cnn")
    net = moved(onchip.load(module, x[:2]))
    onchip.to_torch(module, net)
    tensors = module.state_dict()
    for name, array in net.weights.items():
        np.testing.assert_array_equal(tensors[name].numpy(), array)
    assert {name for name in tensors if name not in net.weights} == {"1.num_batches_tracked", "7.num_batches_tracked"}


def test_rows_that_the_network_lacks_stay():
    module, x, _ = make("encoder")
    before = module.places.detach().clone()
    onchip.to_torch(module, moved(onchip.load(module, x[:2])))
    assert torch.equal(module.places[7:], before[7:])
    assert not (module.places[:7] == before[:7]).any()


@pytest.mark.parametrize("case", ["lstm", "gru"])
def test_the_sum_of_two_biases_goes_to_the_first(case):
    module, x, _ = make(case)
    before = state(module)
    onchip.to_torch(module, moved(onchip.load(module, x[:2])))
    added = 24 if case == "lstm" else 12  # a GRU multiplies the third part of its second bias by its gate
    second = module.steps.bias_hh_l0
    assert (second[:added] == 0).all()
    assert not (second[added:] == before["steps.bias_hh_l0"][added:]).any()


@pytest.mark.parametrize("suffix", [".onnx", ".safetensors"])
def test_a_network_from_a_file_goes_back(suffix, tmp_path):
    module, x, _ = make("lstm")
    net = moved(onchip.load(module, x[:2]))
    onchip.save(net, tmp_path / f"net{suffix}")
    onchip.to_torch(module, onchip.load(tmp_path / f"net{suffix}"))
    ours = onchip.compile(net, device="cpu")(x)
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach().numpy(), ours, rtol=1e-5, atol=1e-6)


class Tied(nn.Module):
    """One matrix as an embedding and as the output layer; a buffer, a layer that the forward leaves out."""

    def __init__(self):
        super().__init__()
        self.table, self.out, self.unused = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False), nn.Linear(2, 2)
        self.out.weight = self.table.weight
        self.register_buffer("scale", torch.rand(4) + 1)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, ids):
        return self.out(self.table(ids).mean(1) * self.scale)


def test_tied_weights_buffers_and_unused_layers():
    torch.manual_seed(0)
    module, ids = Tied(), np.arange(12).reshape(3, 4) % 9
    before = state(module)
    net = moved(onchip.load(module, ids))
    onchip.to_torch(module, net)
    assert module.out.weight is module.table.weight
    assert changed(before, module) == {"table.weight", "out.weight", "scale"}
    np.testing.assert_array_equal(module.scale.numpy(), net.weights["scale"])


class Causal(nn.Module):
    """Two norms with equal values, and a mask of infinities."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(4)
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))

    def forward(self, x):
        y = self.first(x)
        return self.second(x + torch.softmax(y @ y.mT + self.mask, -1) @ y)


def test_equal_parameters_and_masks():
    module = Causal()
    net = moved(onchip.load(module, torch.randn(2, 5, 4)), skip=("Constant", "mask"))
    onchip.to_torch(module, net)
    for name, parameter in module.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), net.weights[name])
    assert (module.mask == torch.full((5, 5), -torch.inf).triu(1)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_are_kept(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 3)).to(dtype)  # more elements than fp16 counts
    net = moved(onchip.load(module, torch.zeros(2, 60, dtype=dtype)))
    onchip.to_torch(module, net)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == dtype
        np.testing.assert_array_equal(parameter.detach().double().numpy(), net.weights[name].astype(np.float64))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x, *, shift):
        return self.fc(x) + shift


class FromDict(Named):
    def forward(self, both):
        return super().forward(both["x"], shift=both["shift"])


@pytest.mark.parametrize("build", [Named, FromDict])
def test_arguments_by_keyword(build):
    module, example = build(), {"x": np.ones((2, 3), np.float32), "shift": np.ones((2, 2), np.float32)}
    net = moved(onchip.load(module, example))
    onchip.to_torch(module, net)
    np.testing.assert_array_equal(module.fc.weight.detach().numpy(), net.weights["fc.weight"])


def test_wrapped_modules_and_those_that_cannot_be_copied():
    module, x, _ = make("mlp")
    net = moved(onchip.load(module, x[:2]))
    wrapped = nn.DataParallel(module)
    assert onchip.to_torch(wrapped, net) is wrapped
    np.testing.assert_array_equal(module[0].weight.detach().numpy(), net.weights["0.weight"])
    module.lock = threading.Lock()
    again = moved(net)
    onchip.to_torch(module, again)
    np.testing.assert_array_equal(module[0].weight.detach().numpy(), again.weights["0.weight"])


class Untraceable(nn.Module):
    """An operator that only the newer exporter has."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        return torch.logaddexp(self.fc(x), x[:, :4])


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="not installed: onnxscript")
def test_through_the_newer_exporter():
    module = Untraceable()
    net = moved(onchip.load(module, torch.ones(2, 6)))
    onchip.to_torch(module, net)
    for name, parameter in module.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), net.weights[name])


# -- errors --------------------------------------------------------------------------------------------------------


def refused(module, trained, match):
    before = state(module)
    with pytest.raises(InputError, match=match) as caught:
        onchip.to_torch(module, trained)
    assert changed(before, module) == set()
    assert caught.value.got
    assert caught.value.expected
    assert caught.value.hint


def test_networks_of_other_modules():
    module, x, _ = make("mlp")
    net = onchip.load(module, x[:2])
    refused(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), net, r"weight \[9, 6\][\s\S]*weight \[8, 6\]")
    refused(nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)), net, "was not loaded from this module")
    refused(nn.Sequential(nn.Linear(6, 3)), net, r"was not loaded[\s\S]*layers output")
    refused(nn.ReLU(), net, "was not loaded from this module ReLU")
    refused(Named(), net, r"inputs input\n")
    refused(module, onchip.mlp(6, 9, 3), "was not loaded")


def test_no_module_and_no_network():
    module, x, _ = make("mlp")
    net = onchip.load(module, x[:2])
    with pytest.raises(InputError, match=r"not a torch module[\s\S]*to_torch\(module, result\)"):
        onchip.to_torch(net, module)
    refused(module, module, "not a network")


class Computes(nn.Module):
    """Weights that are no parameters: exp(g), and a constant."""

    def __init__(self, of):
        super().__init__()
        self.g, self.of = nn.Parameter(torch.rand(3)), of
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x) * self.of(self)


COMPUTED = {
    "exp": (lambda module: module.g.exp(), r"results of its parameters[\s\S]*no g\n"),
    "twice": (lambda module: module.g * 2, "results of its parameters"),
    "sum": (lambda module: module.g + module.fc.bias, "results of its parameters"),
    "constant": (lambda module: torch.tensor([0.5, 1, 2]), "constants of its forward"),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_weights_that_are_no_parameters(case):
    of, match = COMPUTED[case]
    module = Computes(of)
    net = onchip.load(module, torch.ones(2, 3))
    (name,) = set(net.weights) - set(module.state_dict())
    refused(
        module, moved(net, skip=()), rf"cannot go back to module Computes: {name}\n[\s\S]*{match}[\s\S]*frozen='{name}"
    )
    onchip.to_torch(module, moved(net, skip=(name,)))  # as after training with frozen=
    assert module.fc.weight.mean() > 0.1


class TwoLayouts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return (x @ self.w).relu() @ self.w.T


def test_a_parameter_that_was_trained_as_two_weights():
    module = TwoLayouts()
    net = onchip.load(module, torch.ones(2, 3))
    onchip.to_torch(module, net)
    refused(module, moved(net), r"parameter 'w' has several values[\s\S]*weights w, w_2")
