import numpy as np
import pytest

from checks import random_mlp, rows
from layer_cases import CASES as LAYER_CASES
from layer_cases import Case as LayerCase
from layer_cases import network as layer_network
from layer_cases import random_inputs
from onchip.bench.cases.inference import Task
from onchip.bench.frame import UnavailableError
from onchip.bench.peers import cpu as peers
from onchip.bench.peers.frameworks.torch_network import FORMS
from onchip.kernels import reference
from onchip.measure.truth import Truth
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    GRU,
    LAYERS,
    LSTM,
    RNN,
    Add,
    Conv2d,
    Embedding,
    GlobalMax,
    Interleave,
    Linear,
    MaxPool2d,
    ReLU,
    TokenConv,
    ToPixels,
)
from onchip.network.types import TensorType
from onchip.runtime.check import DTYPE_ULP
from onchip.workloads import faces, sentiment


def build(name, net, threads=1):
    try:
        with peers.explained(name):
            (forward,) = (make(peers.subject_of(net), threads) for make in peers.INFERENCE[name].values())
    except UnavailableError as reason:
        if "not installed" not in reason.what:
            raise
        pytest.skip(reason.what)
    return forward


# -- peers -------------------------------------------------------------------------------------------------

QUICK_PEERS = [name for name in peers.INFERENCE if name != "torch.compile"]  # it takes ten seconds to compile


@pytest.mark.parametrize("name", QUICK_PEERS)
@pytest.mark.parametrize("output", [None, "Softmax", "LogSoftmax", "Sigmoid", "Tanh", "ReLU", "GELU"])
def test_peers_run_the_same_network(name, output):
    net, x = random_mlp(9, 12, 5, output=output), rows(33, 9)
    before = x.copy()
    run, setting = peers.fastest({"": build(name, net)}, (x,), np.empty((33, 5), np.float32))
    assert Truth(net, x).verify(run()).is_right
    assert setting == "one call"
    assert np.array_equal(x, before)


@pytest.mark.parametrize("name", QUICK_PEERS)
def test_peers_in_chunks(name, monkeypatch):
    monkeypatch.setattr(peers, "trial_seconds", lambda run: len(run()) and next(clock))
    clock = iter([2.0, 1.0])  # chunks are faster
    net, x = random_mlp(9, 12, 5), rows(33, 9)
    run, setting = peers.fastest({"": build(name, net)}, (x,), np.empty((33, 5), np.float32), chunks=(8,))
    assert setting == "7 rows per call"
    assert Truth(net, x).verify(run()).is_right


def test_the_fastest_variant_is_chosen(monkeypatch):
    x = rows(10, 3)
    variants = {"slow": lambda x: x + 1, "quick": lambda x: x + 2}
    monkeypatch.setattr(peers, "trial_seconds", lambda run: next(clock))
    clock = iter([3.0, 3.0, 3.0, 1.0])  # slow whole, slow in chunks, quick whole, quick in chunks
    run, setting = peers.fastest(variants, (x,), np.empty_like(x), chunks=(4,))
    assert setting == "quick, 4 rows per call"
    assert np.array_equal(run(), x + 2)


def test_trials_of_a_slow_peer_are_few(monkeypatch):
    for seconds, runs in ((1e-9, 2), (60.0, 4)):  # the first is not timed
        monkeypatch.setattr(peers, "TRIALS_S", seconds)
        ran = []
        peers.trial_seconds(lambda ran=ran: ran.append(1))
        assert len(ran) == runs


@pytest.mark.parametrize("name", ["torch eager", "onnxruntime"])
def test_peers_run_convolutions_and_tokens(name):
    ids = np.random.default_rng(1).integers(0, 11, (3, 6), dtype=np.int32)
    text = sentiment.network(vocabulary=11, embedding=6, channels=5, kernels=(2, 3), length=6, hidden=(7,))
    for net, x in ((faces.network(latent=7, channels=(6, 5, 3), start=3), rows(3, 7)), (text, ids)):
        assert Truth(net, x).verify(build(name, net)(x)).error < 1e-5


def test_channels_last_runs_the_same_network():
    pytest.importorskip("torch")
    net, x = faces.network(latent=7, channels=(6, 5, 3), start=3), rows(3, 7)
    subject = peers.subject_of(net)
    before = [p.clone() for p in subject.module().parameters()]
    assert Truth(net, x).verify(peers.torch_channels_last(subject, 1)(x)).error < 1e-5
    strides = [(p.stride(), q.stride()) for p, q in zip(subject.module().parameters(), before, strict=True)]
    assert all(now == old for now, old in strides)  # the module is not modified
    image = layer_network(LayerCase(Conv2d(), ((2, 4, 5),), {"weight": (3, 2, 3, 3)}))
    x = rows(3, 2, 4, 5)
    assert Truth(image, x).verify(peers.torch_channels_last(peers.subject_of(image), 1)(x)).error < 1e-5


def test_numpy_runs_only_chains_of_linear_layers():
    with pytest.raises(UnavailableError, match="too long for Permute"):
        build("numpy", faces.network(latent=7, channels=(6, 5, 3), start=3))
    layers = (Node("a", ReLU(), ("x",)), Node("b", Add(), ("a", "x")))
    with pytest.raises(UnavailableError, match="chain of layers"):
        build("numpy", Network({"x": TensorType(("B", 3))}, layers, ("b",), {}))


def test_a_compiler_that_fails_is_unavailable(monkeypatch):
    torch = pytest.importorskip("torch")

    def broken(*_, **__):
        def call(*_):
            raise RuntimeError("\nno C++ compiler\nlong trace")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    net, x = random_mlp(4, 3), rows(2, 4)
    task = Task(2, lambda: x, net.output, lambda: Truth(net, x))
    with pytest.raises(UnavailableError, match=r"torch\.compile .*: no C\+\+ compiler$"):
        task.peer("torch.compile", lambda: {"": peers.torch_compiled(peers.subject_of(net), 1)}, ())


def test_a_peer_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    for name in ("torch eager", "torch.compile", "onnxruntime"):
        for make in peers.INFERENCE[name].values():
            with pytest.raises(UnavailableError, match="is not installed"):
                make(peers.subject_of(random_mlp(4, 3)), 1)


# -- networks as torch modules -----------------------------------------------------------------------------

NO_TORCH = (TokenConv,)  # only a rewrite creates it, and peers get networks before rewrites


def test_all_other_layers_are_supported():
    assert {kind for kind in LAYERS.values() if kind not in FORMS and not getattr(kind, "torch", None)} == set(NO_TORCH)


@pytest.mark.parametrize("case", LAYER_CASES, ids=str)
def test_every_layer_in_torch(case):
    torch = pytest.importorskip("torch")
    from onchip.bench.peers.frameworks.torch_network import torch_module

    net, xs = layer_network(case), random_inputs(case, 3)
    uneven = isinstance(case.layer, Interleave) and len(set(case.rows)) > 1  # also only from a rewrite
    if isinstance(case.layer, NO_TORCH) or uneven:
        with pytest.raises(UnavailableError, match="no torch function"):
            torch_module(net)
        return
    before = [x.copy() for x in xs]
    with torch.inference_mode():
        y = torch_module(net).eval()(*map(torch.from_numpy, xs))
    assert str(y.dtype) == f"torch.{net.output.dtype}"
    got, truth = y.double().numpy(), reference.forward(net, xs)
    assert got.shape == truth.shape
    # The reference computes in float64 for every dtype; torch rounds to the dtype.
    near = 1 if isinstance(case.layer, ToPixels) else 1e-5 + 4 * DTYPE_ULP.get(net.output.dtype, 0)
    np.testing.assert_allclose(got, truth, rtol=0, atol=near)
    assert all(np.array_equal(x, y) for x, y in zip(xs, before, strict=True))


def test_pools_that_extend_past_the_end():
    torch = pytest.importorskip("torch")
    from onchip.bench.peers.frameworks.torch_network import torch_module

    rng = np.random.default_rng(0)
    for pads in ((0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 1, 1), (2, 2, 2, 2), (0, 1, 2, 0)):
        for ceil in (False, True):
            layer = MaxPool2d((3, 3), (2, 3), pads, ceil=ceil)
            for H, W in ((4, 5), (7, 6), (5, 8)):
                net = layer_network(LayerCase(layer, ((2, H, W),)))
                x = -1 - rng.random((2, 2, H, W), dtype=np.float32)  # a pad of 0 would win
                got = torch_module(net)(torch.from_numpy(x)).numpy()
                assert np.array_equal(got, reference.forward(net, x, "float32")), (layer, H, W)


def test_relu_overwrites_only_values_with_one_reader():
    torch = pytest.importorskip("torch")
    from onchip.bench.peers.frameworks.torch_network import torch_module

    weights = {"w": np.random.default_rng(0).standard_normal((4, 4), dtype=np.float32)}
    x = rows(5, 4)

    def run(*nodes, outputs):
        net = Network({"x": TensorType(("B", 4))}, nodes, outputs, weights)
        module = torch_module(net)
        names = {getattr(node.target, "__name__", "") for node in module.graph.nodes}
        with torch.inference_mode():
            y = module(torch.from_numpy(x))
        truth = reference.forward(net, x)
        for got, want in zip(y, truth, strict=True) if len(outputs) > 1 else ((y, truth),):
            np.testing.assert_allclose(got.numpy(), want, atol=1e-5)
        return "relu_" in names

    linear, relu = Node("a", Linear(), ("x",), {"weight": "w"}), Node("r", ReLU(), ("a",))
    assert run(linear, relu, outputs=("r",))
    assert not run(linear, relu, Node("s", Add(), ("a", "r")), outputs=("s",))  # a has two readers
    assert not run(linear, relu, outputs=("a", "r"))  # a is an output
    assert not run(Node("r", ReLU(), ("x",)), outputs=("r",))  # x is the caller's


def test_parameters_are_in_node_order():
    pytest.importorskip("torch")
    from onchip.bench.peers.frameworks.torch_network import torch_module

    net = faces.network(latent=3, channels=(4, 2), start=2)
    names = [name for node in net.nodes for name in node.weights.values()]
    shapes = [tuple(p.shape) for p in torch_module(net).parameters()]
    assert shapes == [net.weights[name].shape for name in names]


def test_a_shared_table_is_one_parameter():
    pytest.importorskip("torch")
    from onchip.bench.peers.frameworks.torch_network import torch_module

    nodes = (
        Node("a", Embedding(), ("ids",), {"weight": "t"}), Node("b", Embedding(), ("ids",), {"weight": "t"}),
        Node("c", Add(), ("a", "b")), Node("y", GlobalMax((-1,)), ("c",)),
    )  # fmt: skip
    net = Network({"ids": TensorType(("B", 3), "int32")}, nodes, ("y",), {"t": rows(5, 4)})
    assert len(list(torch_module(net).parameters())) == 1


@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
def test_a_linear_before_a_recurrent_layer_becomes_its_input_weights(kind):
    torch = pytest.importorskip("torch")
    from onchip.bench.peers.frameworks.torch_network import torch_module

    H, rng = 3, np.random.default_rng(0)
    width = 2 * kind.gates * H
    weights = {"w": rows(width, 5), "b": rows(1, width, seed=2)[0], "r": rows(2, width // 2, H, seed=3)}
    nodes = (
        Node("gates", Linear(), ("x",), {"weight": "w", "bias": "b"}),
        Node("y", kind("bidirectional"), ("gates",), {"recurrence": "r"}),
    )
    net = Network({"x": TensorType(("B", 4, 5))}, nodes, ("y",), weights)
    module, x = torch_module(net), rng.standard_normal((3, 4, 5), dtype=np.float32)
    assert not any("linear" in str(node.target) for node in module.graph.nodes)
    with torch.inference_mode():
        np.testing.assert_allclose(module(torch.from_numpy(x)).numpy(), reference.forward(net, x), atol=1e-5)
    two_readers = net.replace(outputs=("y", "gates"))
    assert any("linear" in str(node.target) for node in torch_module(two_readers).graph.nodes)
