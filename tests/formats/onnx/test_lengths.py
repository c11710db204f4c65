"""Sequences of different lengths: a text network round-trips through ONNX; similar patterns are refused."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import onchip
from onchip.errors import InputError
from onchip.formats.onnx.reader import read_onnx
from onchip.formats.onnx.writer import write_onnx
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import Reshape, SequenceMax
from onchip.network.types import TensorType
from onnx_models import model, numbers, op, refused, run_onnx
from text_networks import NETWORKS, some_lengths, with_lengths


@pytest.mark.parametrize("name", ["two branches", "pads and stride", "one tap, one channel"])
def test_a_text_network_round_trips(tmp_path, name):
    net = with_lengths(NETWORKS[name])
    write_onnx(net, tmp_path / "net.onnx")
    ids = np.random.default_rng(0).integers(0, 2, (40, net.inputs["ids"].row_size)).astype(np.int32)
    given = ids, some_lengths(net, 40)
    truth = reference.forward(net, given)
    np.testing.assert_allclose(run_onnx(tmp_path / "net.onnx", *given)[0], truth, rtol=2e-5, atol=2e-5)
    back = read_onnx(tmp_path / "net.onnx")
    assert [node.layer for node in back.nodes] == [node.layer for node in net.nodes]
    assert np.array_equal(reference.forward(back, given), truth)


def masked(less="ends n", others="first least zero", where="inside x others", axes=(2,), keepdims=0, **constants):
    """Sequences x (N, 3, 4), with lengths as the second input."""
    nodes = [
        op("Unsqueeze", "lengths new", "n"), op("LessOrEqual", less, "inside"), op("LessOrEqual", "window n", "first"),
        op("Where", others, "others"), op("Where", where, "masked"),
        op("ReduceMax", "masked", axes=axes, keepdims=keepdims),
    ]  # fmt: skip
    weights = {
        "new": np.array([1, 2]), "ends": np.array([[[2, 5, 8, 11]]]), "window": np.array([[[2]]]),
        "least": np.float32(-np.inf), "zero": np.float32(0), **constants,
    }  # fmt: skip
    made = model(nodes, weights, ("N", 3, 4))
    made.graph.input.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ("N",)))
    return made


def test_the_nodes_are_one_layer(tmp_path):
    (tmp_path / "model.onnx").write_bytes(masked().SerializeToString())
    (node,) = read_onnx(tmp_path / "model.onnx").nodes
    assert (node.layer, node.inputs) == (SequenceMax(2, 3), ("x", "lengths"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"less": "n ends"}, "cannot use this value"),
        ({"less": "ends x"}, "mixes dtypes"),
        ({"ends": np.array([[[2, 5, 8, 12]]])}, "cannot use this value"),
        ({"ends": np.array([[[[2, 5, 8, 11]]]])}, "the first size must be the batch"),
        ({"ends": np.zeros((1, 1, 0), np.int64)}, "cannot use this value"),
        ({"ends": np.array([[[0, 1, 2, 3]]])}, "cannot use this value"),
        ({"ends": np.array([[[2, 5, 8]]])}, "cannot use this value"),
        ({"window": np.array([[[3]]])}, "cannot use this value"),
        ({"where": "first x others"}, "cannot use this value"),
        ({"axes": (1,)}, "cannot use this value"),
    ],
)
def test_similar_patterns_are_refused(tmp_path, change, word):
    refused(tmp_path, masked(**change), word)


@pytest.mark.parametrize("change", [
    {"least": np.float32(-9)}, {"zero": np.float32(1)}, {"where": "inside x zero"},
    {"where": "inside x zero", "axes": (1,)}, {"where": "inside x zero", "ends": np.array([[[0, 7, 3, 4]]])},
], ids=str)  # fmt: skip
def test_another_mask_is_computed(tmp_path, change):
    made, given = masked(**change), (numbers(40, 3, 4), np.arange(40) % 14)
    (tmp_path / "model.onnx").write_bytes(made.SerializeToString())
    np.testing.assert_array_equal(
        reference.forward(read_onnx(tmp_path / "model.onnx"), given, dtype="float32"), run_onnx(made, *given)[0]
    )


def test_a_mask_of_nonnegative_values_needs_no_maximum(tmp_path):
    nodes = [
        op("Relu", "x", "r"), op("Unsqueeze", "lengths new", "n"), op("Less", "ends n", "inside"),
        op("Where", "inside r zero", "m"), op("ReduceSum", "m two", keepdims=0),
    ]  # fmt: skip
    weights = {"new": np.array([1, 2]), "ends": np.arange(4)[None, None], "zero": np.float32(0), "two": np.array([2])}
    made = model(nodes, weights, ("N", 3, 4))
    made.graph.input.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ("N",)))
    (tmp_path / "model.onnx").write_bytes(made.SerializeToString())
    given = numbers(40, 3, 4), np.arange(40) % 7
    got = reference.forward(read_onnx(tmp_path / "model.onnx"), given)
    np.testing.assert_allclose(got, run_onnx(made, *given)[0], rtol=1e-6)


def test_the_axis_may_stay(tmp_path):
    (tmp_path / "model.onnx").write_bytes(masked(keepdims=1).SerializeToString())
    net = read_onnx(tmp_path / "model.onnx")
    assert [node.layer for node in net.nodes] == [SequenceMax(2, 3), Reshape((3, 1))]


# Common spellings: x is (B, C, P) after a ReLU, n (B,), K the window. Each is a SequenceMax(K).
FORMS = {
    "filled": lambda x, n, K, at: x.masked_fill(~(at[None, None] + K <= n[:, None, None]), 0).amax(2),
    "outside": lambda x, n, K, at: x.masked_fill((at > n[:, None] - K)[:, None], 0).max(2).values,
    "where": lambda x, n, K, at: x.where((at < (n - K + 1)[:, None])[:, None], 0).amax(2, keepdim=True).flatten(1),
    "turned": lambda x, n, K, at: x.where(n[:, None, None] >= at + K, 0).amax(2),
}


@pytest.mark.parametrize(("form", "dtype"), [*((form, "int64") for form in FORMS), ("outside", "int32")])
def test_torch_modules_with_lengths(form, dtype):
    torch = pytest.importorskip("torch")

    class TextCnn(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = torch.nn.Embedding(20, 4)
            self.convs = torch.nn.ModuleList(torch.nn.Conv1d(4, 5, K) for K in (2, 3))

        def forward(self, ids, n):
            x, ends = self.emb(ids).transpose(1, 2), []
            for conv in self.convs:
                y = conv(x).relu()
                ends.append(FORMS[form](y, n, conv.kernel_size[0], torch.arange(y.shape[2])))
            return torch.cat(ends, 1)

    module = TextCnn()
    ids, n = torch.randint(0, 20, (40, 7)), (torch.arange(40) % 10).to(getattr(torch, dtype))
    net = onchip.load(module, (ids, n))
    assert [node.layer for node in net.nodes if isinstance(node.layer, SequenceMax)] == [SequenceMax(2), SequenceMax(3)]
    want = module(ids, n).detach().numpy()
    assert np.allclose(reference.forward(net, (ids.numpy(), n.numpy())), want, atol=1e-6)


def test_a_mask_that_nothing_reads_is_unfinished(tmp_path):
    made = masked()
    made.graph.output[0].name = "masked"
    refused(tmp_path, made, "output 'masked' is part of a layer", "ReduceMax")


def test_windows_past_every_length_cannot_be_written(tmp_path):
    given = {"x": TensorType(("B", 1, 3)), "n": TensorType(("B",), "int32")}
    net = Network(given, (Node("y", SequenceMax(1, 1 << 30), ("x", "n")),), ("y",), {})
    with pytest.raises(InputError, match=r"at most 2,147,483,647") as caught:
        write_onnx(net, tmp_path / "net.onnx")
    assert "safetensors" in str(caught.value)
    assert not (tmp_path / "net.onnx").exists()
    wide = Network({**given, "n": TensorType(("B",), "int64")}, net.nodes, ("y",), {})
    write_onnx(wide, tmp_path / "net.onnx")
    x, n = numbers(3, 1, 3), np.array([0, 1 << 30, 1 << 40])
    assert np.array_equal(run_onnx(tmp_path / "net.onnx", x, n)[0], reference.forward(wide, (x, n), "float32"))
