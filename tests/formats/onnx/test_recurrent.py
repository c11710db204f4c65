"""LSTM, GRU and RNN as torch exports them, and unsupported ONNX options."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import onchip
from onchip.formats.onnx.ops.base import READERS
from onchip.kernels import reference
from onchip.network.layers import Recurrent
from onnx_models import check_meaning, model, numbers, op, read, refused

torch = pytest.importorskip("torch")
nn = torch.nn
needs_slices = pytest.mark.skipif("Slice" not in READERS, reason="a direction of two is a Slice, which nothing reads")


class Net(nn.Module):
    """`how` of a recurrent module's outputs y (B, S, H) and last state h (layers, B, H)."""

    def __init__(self, kind, how, batch_first=True, **options):
        super().__init__()
        self.rnn, self.how, self.is_steps_first = kind(4, 3, batch_first=batch_first, **options), how, not batch_first

    def forward(self, x, *states):
        x = x.transpose(0, 1) if self.is_steps_first else x
        y, h = self.rnn(x, states[0].unsqueeze(0)) if states else self.rnn(x)
        return self.how(y, h[0] if isinstance(h, tuple) else h)


CASES = {
    "lstm": (nn.LSTM, lambda y, h: y, {"num_layers": 2, "bidirectional": True}, 2),
    "last step": (nn.GRU, lambda y, h: y[:, -1], {}, 1),
    "first step": pytest.param(nn.GRU, lambda y, h: y[:, 0], {}, 1, marks=needs_slices),
    "last state": (nn.RNN, lambda y, h: h.squeeze(0), {"nonlinearity": "relu"}, 1),
    "last layer": (nn.LSTM, lambda y, h: h[-1], {"num_layers": 2}, 2),
    "no bias": (nn.GRU, lambda y, h: torch.relu(y), {"bias": False, "bidirectional": True}, 1),
    "steps first": (nn.LSTM, lambda y, h: y[-1], {"batch_first": False}, 1),
    "states first": (nn.LSTM, lambda y, h: h.transpose(0, 1), {"num_layers": 2}, 3),
    "both ends": pytest.param(
        nn.LSTM, lambda y, h: torch.cat((h[0], h[1]), 1), {"bidirectional": True}, 1, marks=needs_slices
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "how", "options", "layers"), CASES.values(), ids=CASES)
def test_computes_what_torch_computes(kind, how, options, layers):
    torch.manual_seed(0)
    module, x = Net(kind, how, **options).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    net = onchip.load(module, x)
    assert sum(isinstance(node.layer, Recurrent) for node in net.nodes) == layers
    with torch.no_grad():
        np.testing.assert_allclose(reference.forward(net, x.numpy()), module(x).numpy(), rtol=1e-12, atol=1e-12)


def test_no_permute_remains():
    """The batch moves after the steps and back: only a Linear and a recurrent layer remain."""
    for options in ({}, {"bidirectional": True}):
        net = onchip.load(Net(nn.LSTM, lambda y, h: y, **options), torch.zeros(2, 5, 4))
        assert [node.layer.kind for node in net.nodes] == ["Linear", "LSTM"]


def test_an_initial_state():
    torch.manual_seed(0)
    module = Net(nn.GRU, lambda y, h: y).double()
    xs = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    net = onchip.load(module, xs)
    with torch.no_grad():
        got = reference.forward(net, tuple(x.numpy() for x in xs))
        np.testing.assert_allclose(got, module(*xs).numpy(), rtol=1e-12, atol=1e-12)


def test_an_engine_runs_it():
    torch.manual_seed(0)
    module, x = Net(nn.LSTM, lambda y, h: y[:, -1]), torch.randn(9, 5, 4)
    engine = onchip.compile(onchip.load(module, x[:1]), device="cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["recurrent"]
    with torch.no_grad():
        np.testing.assert_allclose(engine(x.numpy()), module(x).numpy(), rtol=1e-5, atol=1e-6)


# -- ONNX's own ----------------------------------------------------------------------------------------------------

WEIGHTS = {
    "w": numbers(1, 12, 4), "r": numbers(1, 12, 3), "b": numbers(1, 24), "p": numbers(1, 9),
    "one": np.ones((1, 1, 3), "f4"), "lengths": np.array([5], "i4"), "two": numbers(2, 12, 4),
}  # fmt: skip
STEPS_FIRST = op("Transpose", "x", "t", perm=[1, 0, 2])
REFUSED = {
    "the batch is walked along": ([op("LSTM", "x w r")], "batch_first=True"),
    "lengths": ([STEPS_FIRST, op("LSTM", "t w r b lengths")], "variable-length sequences"),
    "peepholes": ([STEPS_FIRST, op("LSTM", "t w r b . . . p")], "has peepholes"),
    "constant initial state": ([STEPS_FIRST, op("LSTM", "t w r b . one")], "constant initial state"),
    "weights": ([STEPS_FIRST, op("LSTM", "t two r")], "its weights do not fit"),
    "clip": ([STEPS_FIRST, op("LSTM", "t w r", clip=1.0)], "has a clip"),
    "activations": ([STEPS_FIRST, op("LSTM", "t w r", activations=["Tanh"] * 3)], "unsupported activations"),
    "direction": ([STEPS_FIRST, op("LSTM", "t w r", direction="up")], "bad direction"),
    "the batch stays behind": ([STEPS_FIRST, op("LSTM", "t w r")], "puts the batch first again"),
    "rows are mixed": ([STEPS_FIRST, op("Reshape", "t shape")], "would mix the rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    nodes, word = REFUSED[case]
    for node in nodes:
        node.input[:] = ["" if name == "." else name for name in node.input]
    weights = WEIGHTS | {"shape": np.array([2, -1])}
    refused(tmp_path, model(nodes, weights, ("B", 5, 4)), word)


def test_rows_first(tmp_path):
    """ONNX's layout 1: (B, S, D_in) in, (B, S, directions, H) out."""
    proto = model([op("LSTM", "x w r b", "made", layout=1), op("Squeeze", "made two")], x=("B", 5, 4), weights={
        name: WEIGHTS[name] for name in "wrb"} | {"two": np.array([2])})  # fmt: skip
    assert [node.layer.kind for node in read(tmp_path, proto).nodes] == ["Linear", "LSTM"]


def test_zeros_broadcast_over_the_batch(tmp_path):
    """The initial state as torch's newer exporter writes it."""
    weights = {
        "none": np.zeros((), np.float32), "layers": np.array([1]), "width": np.array([3]),
        "w": numbers(1, 12, 4), "r": numbers(1, 12, 3),
    }  # fmt: skip
    nodes = [
        op("Shape", "x", "rows", start=0, end=1), op("Concat", "layers rows width", "sizes", axis=0),
        op("Expand", "none sizes", "h"), op("Transpose", "x", "t", perm=[1, 0, 2]),
        helper.make_node("LSTM", ["t", "w", "r", "", "", "h", "h"], ["s"], hidden_size=3),
        op("Squeeze", "s layers", "s1"), op("Transpose", "s1", perm=[1, 0, 2]),
    ]  # fmt: skip
    net = check_meaning(tmp_path, model(nodes, weights, ("N", 5, 4)))
    assert [node.layer.kind for node in net.nodes] == ["Linear", "LSTM"]
    twice = [*nodes[:1], op("Concat", "rows rows width", "sizes", axis=0), *nodes[2:]]
    refused(tmp_path, model(twice, weights, ("N", 5, 4)), "the batch once")
