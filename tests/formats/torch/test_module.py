"""Torch modules become networks that compute what torch computes, for any batch size."""

from __future__ import annotations

import collections
import ctypes
import math
import sys
import threading
import warnings
from typing import NamedTuple

import numpy as np
import pytest

import onchip
from onchip.errors import InputError
from onchip.formats.torch import module as torch_module
from onchip.kernels import reference

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 6)
        self.convs = nn.ModuleList(nn.Conv1d(6, 5, k) for k in (2, 3, 4))
        self.fc = nn.Linear(15, 3)

    def forward(self, ids):
        x = self.table(ids).transpose(1, 2)
        x = torch.cat([F.relu(conv(x)).max(dim=2)[0] for conv in self.convs], dim=1)
        return self.fc(F.dropout(x, 0.5, self.training))


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 4, 5, padding=2), nn.Conv2d(4, 6, 3)
        self.fc1, self.fc2 = nn.Linear(6 * 3 * 3, 10), nn.Linear(10, 4)

    def forward(self, x):
        x = F.max_pool2d(torch.tanh(self.c1(x)), 2)
        x = F.avg_pool2d(torch.tanh(self.c2(x)), 2)
        x = x.view(x.size(0), -1)
        return F.log_softmax(self.fc2(torch.sigmoid(self.fc1(x))), dim=1)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.SiLU(),
            nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4),
        )  # fmt: skip
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = F.leaky_relu(x + self.body(x), 0.2)
        return self.head(x.mean(dim=(2, 3))), F.adaptive_max_pool2d(x, 1).flatten(1)


class Generator(nn.Module):
    """DCGAN's, with a view first."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(10, 8 * 4 * 4)
        self.layers = nn.Sequential(
            nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 5, 2, 2, output_padding=1, bias=False),
            nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z):
        return self.layers(self.project(z).reshape(-1, 8, 4, 4))


class Mixer(nn.Module):
    """Two inputs, Linear over three axes, both GELUs, computed sizes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("scale", torch.rand(5, 1) + 1)

    def forward(self, x, y):
        h = F.gelu(self.up(x)) * self.scale
        h = x + self.down(F.gelu(h, approximate="tanh")) - y.unsqueeze(1)
        return h.permute(0, 2, 1).reshape(x.shape[0], h.shape[1] * h.shape[2]) / 3


def autoencoder():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6), nn.LeakyReLU(), nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(), nn.ConvTranspose2d(4, 1, 2, stride=2), nn.Sigmoid(),
    )  # fmt: skip


def small_mobilenet():
    """Depthwise and pointwise convolutions with ReLU6, as in mobile networks."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12), nn.Hardtanh(-0.3, 0.9),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4),
    )  # fmt: skip


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.GELU(), nn.Dropout(), nn.Linear(9, 4), nn.Softmax(dim=1))


CASES = {
    "mlp": (mlp, [(3, 4)]), "textcnn": (TextCNN, ["ids"]), "lenet": (LeNet, [(1, 16, 16)]),
    "autoencoder": (autoencoder, [(1, 8, 12)]), "residual": (Residual, [(4, 6, 5)]), "dcgan": (Generator, [(10,)]),
    "mixer": (Mixer, [(5, 6), (6,)]), "mobilenet": (small_mobilenet, [(3, 10, 9)]),
}  # fmt: skip


def make(case, dtype=torch.float64):
    torch.manual_seed(0)
    build, shapes = CASES[case]
    module = build().to(dtype)
    for norm in module.modules():  # as after training
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.normal_(norm.weight)
    return module, shapes


def rows(shapes, B, dtype=torch.float64):
    return tuple(
        torch.randint(0, 30, (B, 9)) if shape == "ids" else torch.randn(B, *shape, dtype=dtype) for shape in shapes
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("example", [1, 2])
def test_computes_what_torch_computes(case, example):
    module, shapes = make(case)
    net = onchip.load(module, rows(shapes, example))
    module.eval()
    for B in (1, 2, 7):
        xs = rows(shapes, B)
        with torch.no_grad():
            expected = module(*xs)
        got = reference.forward(net, tuple(x.numpy() for x in xs))
        if not isinstance(expected, tuple):
            got, expected = (got,), (expected,)
        for mine, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_weights_keep_their_names_and_bits(case):
    module, shapes = make(case, torch.float32)
    net = onchip.load(module, rows(shapes, 2, torch.float32))
    named = {name: tensor.numpy() for name, tensor in module.state_dict().items() if "num_batches" not in name}
    kept = {name: array for name, array in net.weights.items() if name in named}
    assert set(kept) == set(named)
    for name, array in kept.items():
        np.testing.assert_array_equal(array, named[name])
    others = set(net.weights) - set(named)  # constants in forward
    assert all(net.weights[name].size == 1 for name in others)


def test_gelu_silu_and_norms_are_single_layers():
    kinds = {}
    for case in ("mixer", "residual"):
        module, shapes = make(case)
        kinds[case] = [node.layer.kind for node in onchip.load(module, rows(shapes, 2)).nodes]
    assert kinds["mixer"].count("GELU") == 2
    assert kinds["residual"].count("BatchNorm2d") == 2
    assert "SiLU" in kinds["residual"]


def test_an_engine_runs_it():
    module, shapes = make("lenet", torch.float32)
    engine = onchip.compile(onchip.load(module, rows(shapes, 1, torch.float32)), device="cpu")
    (x,) = rows(shapes, 5, torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(engine(x.numpy()), module.eval()(x).numpy(), rtol=1e-4, atol=1e-5)


def test_arrays_and_lists_are_examples_too():
    module, _ = make("mixer", torch.float32)
    x, y = np.zeros((2, 5, 6), np.float32), np.zeros((2, 6), np.float32)
    net = onchip.load(module, [x, y])
    assert (list(net.inputs), net.name) == (["x", "y"], "Mixer")
    assert onchip.load(make("mlp", torch.float32)[0], np.zeros((1, 3, 4), np.float32)).input.row_shape == (3, 4)


class Pair(NamedTuple):
    scores: torch.Tensor
    hidden: tuple


class Named(nn.Module):
    """A parameter with the name of an argument, and what `give` returns of both arguments."""

    def __init__(self, give):
        super().__init__()
        self.fc, self.tokens, self.give = nn.Linear(3, 3), nn.Parameter(torch.ones(3)), give

    def forward(self, tokens, mask):
        return self.give(self.fc(tokens * self.tokens) + mask, mask)


NAMED = {
    "a tensor": (lambda y, mask: y, ["output"]),
    "a tuple": (lambda y, mask: (y, y.exp(), None), ["output0", "output1"]),
    "a dict": (lambda y, mask: {"scores": y, "fc.weight": y.exp()}, ["scores", "fc.weight"]),
    "fields": (lambda y, mask: Pair(y, (y.exp(), {"a b": y.sin()})), ["scores", "hidden.0", "hidden.1.a b"]),
    "torch's own fields": (lambda y, mask: y.max(1), ["values", "indices"]),
    "names of arguments": (lambda y, mask: {"tokens": y, "mask": mask}, ["tokens_2", "mask_2"]),
    "the same twice": (lambda y, mask: [y, y], ["output0", "output1"]),
}


@pytest.mark.parametrize("case", NAMED)
def test_inputs_are_called_as_arguments_and_outputs_as_keys(tmp_path, case):
    give, outputs = NAMED[case]
    module = Named(give)
    net = onchip.load(module, (torch.zeros(1, 3), torch.zeros(1, 3)))
    assert (list(net.inputs), list(net.outputs)) == (["tokens", "mask"], outputs)
    assert set(net.weights) <= set(module.state_dict())
    for suffix in (".onnx", ".safetensors"):
        onchip.save(net, tmp_path / f"net{suffix}")
        again = onchip.load(tmp_path / f"net{suffix}")
        assert (list(again.inputs), list(again.outputs)) == (["tokens", "mask"], outputs)


def test_unnamed_arguments():
    class Sum(nn.Module):
        def forward(self, first, /, *rest):
            return sum(rest, first)

    def names(module, count):
        return list(onchip.load(module, (torch.zeros(1, 3),) * count).inputs)

    assert names(Sum(), 3) == ["first", "rest0", "rest1"]
    assert names(Sum(), 2) == ["first", "rest"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch versions deprecate this form
        assert names(torch.jit.trace(Sum(), (torch.zeros(1, 3),) * 2), 2) == ["x0", "x1"]
    assert names(nn.Sequential(nn.Linear(3, 2)), 1) == ["input"]


def test_the_module_is_left_as_it_was(recwarn):
    module, shapes = make("residual")
    module.train()
    module.body[1].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    onchip.load(module, rows(shapes, 2))
    assert module.training
    assert not module.body[1].training
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert not recwarn


class Counting(nn.Module):
    """A forward with side effects: an attribute, a list, a buffer."""

    def __init__(self):
        super().__init__()
        self.fc, self.calls, self.seen = nn.Linear(3, 2), 0, []
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        self.total += 1
        return self.fc(x)


def test_side_effects_of_the_forward_stay_in_a_copy():
    module = Counting()
    onchip.load(module, torch.ones(2, 3))
    assert (module.calls, module.seen, float(module.total)) == (0, [], 0)
    module.lock = threading.Lock()  # prevents a copy
    onchip.load(module, torch.ones(2, 3))
    assert float(module.total) == 0


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.table = nn.Linear(3, 4), nn.Embedding(9, 4)

    def forward(self, dense, ids, scale=None, shift=None):
        y = self.fc(dense) - self.table(ids)
        return y if shift is None else y + shift


class FeatureDict(Features):
    def forward(self, features):
        return super().forward(**features)


@pytest.mark.parametrize("build", [Features, FeatureDict])
def test_an_example_by_keyword(build):
    torch.manual_seed(0)
    module = build().double()
    example = {"ids": torch.tensor([1, 8]), "dense": torch.randn(2, 3).double(), "shift": np.ones((2, 4))}
    net = onchip.load(module, collections.UserDict(example))
    assert list(net.inputs) == list(example)
    assert "forward" not in vars(module)
    got = reference.forward(net, tuple(np.asarray(x) for x in example.values()))
    given = {name: torch.as_tensor(x) for name, x in example.items()}
    truth = module(given) if build is FeatureDict else module(**given)
    np.testing.assert_allclose(got, truth.detach().numpy(), rtol=1e-12)


def test_keywords_of_replaced_functions():
    assert list(onchip.load(nn.EmbeddingBag(9, 4), {"input": torch.ones(2, 3, dtype=torch.int64)}).inputs) == ["input"]


# -- errors --------------------------------------------------------------------------------------------------------


def test_no_example_and_bad_examples():
    module, _ = make("mlp", torch.float32)
    with pytest.raises(InputError, match=r"needs an example[\s\S]*onchip\.load\(module"):
        onchip.load(module)
    for example in ((), torch.tensor(1.0), torch.zeros(0, 3, 4), (torch.zeros(2, 3), torch.zeros(3, 3))):
        with pytest.raises(InputError, match="bad example for module Sequential"):
            onchip.load(module, example)
    with pytest.raises(InputError, match="torch cannot trace module Sequential"):
        onchip.load(module, torch.zeros(2, 5, 5))


def test_examples_other_than_tensors():
    dense = torch.ones(2, 3)
    for example in ({"dense": dense}, {"dense": dense, "id": dense}, {3: dense}):
        with pytest.raises(InputError, match=r"forward\(dense, ids, "):
            onchip.load(Features(), example)
    for example in ("text", object(), ({"dense": dense},), [[1.0, "a"]], {"dense": {"x": dense}}):
        with pytest.raises(InputError, match=r"module Features[\s\S]*by keyword"):
            onchip.load(Features(), example)


@pytest.mark.filterwarnings("ignore")  # torch's deprecation of its quantisation
def test_a_quantised_module_is_refused():
    module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)), {nn.Linear})
    with pytest.raises(InputError, match=r"quantized::[\s\S]*float model"):
        onchip.load(module, torch.ones(2, 4))


def test_missing_operators_name_themselves(capfd):
    class Odd(nn.Module):
        def forward(self, x):
            return torch.linalg.det(torch.linalg.det(x))

    with pytest.raises(InputError, match=r"module Odd[\s\S]*Det \(2 nodes") as caught:
        onchip.load(Odd(), torch.zeros(2, 3, 3, 4, 4))
    assert "Conv" in str(caught.value)  # and lists what is supported

    class Bessel(nn.Module):
        def forward(self, x):
            return torch.special.i0(x)

    with pytest.raises(InputError, match=r"cannot trace module Bessel\n.*aten::i0"):
        onchip.load(Bessel(), torch.zeros(2, 5))
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr() == ("", "")  # torch prints its graph by default

    class Rows(nn.Module):
        def forward(self, x):
            return x.sum(dim=0)

    with pytest.raises(InputError, match=r"module Rows: [\s\S]*ReduceSum"):
        onchip.load(Rows(), torch.zeros(2, 5))


class Drops(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


class Mixes(nn.Module):
    def forward(self, x):
        return x.reshape(3, -1)


@pytest.mark.parametrize("module", [Drops(), Mixes(), nn.BatchNorm1d(3, track_running_stats=False)])
def test_hints_do_not_suggest_an_export(module):
    with pytest.raises(InputError) as caught:
        onchip.load(module, torch.ones(2, 3))
    assert caught.value.hint
    assert "export" not in str(caught.value)


def test_not_a_model_and_no_torch(monkeypatch):
    for odd in (5, None, object()):
        with pytest.raises(InputError, match="not a model"):
            onchip.load(odd)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(torch_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'onchip\[torch\]'"):
        onchip.load(5, np.zeros(3))


def test_weights_beyond_two_gibibytes():
    class Wide(nn.Module):
        def state_dict(self):
            return {"w": torch.empty(700_000_000, device="meta")}

    with pytest.raises(InputError, match=r"module Wide[\s\S]*2,800,000,000 B"):
        onchip.load(Wide(), torch.zeros(1, 2))


def test_a_bag_of_embeddings_is_their_mean():
    torch.manual_seed(0)
    module = nn.Sequential(nn.EmbeddingBag(30, 6), nn.Linear(6, 3)).double()
    ids = torch.randint(0, 30, (4, 9))
    net = onchip.load(module, ids)
    assert [node.layer.kind for node in net.nodes] == ["Embedding", "GlobalMean", "Linear"]
    assert "forward" not in vars(module[0])
    with torch.no_grad():
        np.testing.assert_allclose(reference.forward(net, ids.numpy()), module(ids).numpy(), rtol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_decomposed_attention_equals_attention(bias):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, bias=bias).double().eval()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        truth = layer(x)
        with torch_module._standard_forwards(torch, layer):
            assert "forward" in vars(layer.self_attn)
            np.testing.assert_allclose(layer(x).numpy(), truth.numpy(), rtol=1e-12, atol=1e-12)
            mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
            masked = [
                layer(x, mask),
                layer(x, mask < 0),
                layer(x, src_key_padding_mask=x[..., 0] > 1),
            ]  # the last: whole
            mixed = [layer.self_attn(x, x, x), layer.self_attn(x, x, x, average_attn_weights=False)]
        truth = [layer(x, mask), layer(x, mask < 0), layer(x, src_key_padding_mask=x[..., 0] > 1)]
        for got, want in zip(masked, truth, strict=True):
            np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-12, atol=1e-12)
        truth = [layer.self_attn(x, x, x), layer.self_attn(x, x, x, average_attn_weights=False)]
        for (y, weights), (want, wanted) in zip(mixed, truth, strict=True):
            np.testing.assert_allclose(y.numpy(), want.numpy(), rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(weights.numpy(), wanted.numpy(), rtol=1e-12, atol=1e-12)
    assert "forward" not in vars(layer.self_attn)


class Causal(nn.Module):
    """Causal attention with RMS norms."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("hidden", torch.triu(torch.ones(5, 5), 1).bool())

    def forward(self, x):
        x = self.norm(x)
        y, _ = self.attention(x, x, x, attn_mask=self.hidden)
        return y + nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True) + x @ x.mT @ x


def test_causal_attention():
    torch.manual_seed(0)
    module, x = Causal().double().eval(), torch.randn(3, 5, 8, dtype=torch.float64)
    net = onchip.load(module, x)
    assert [node.layer.kind for node in net.nodes].count("RMSNorm") == 1
    with torch.no_grad():
        np.testing.assert_allclose(reference.forward(net, x.numpy()), module(x).numpy(), rtol=1e-10, atol=1e-10)


class Scaled(nn.Module):
    """Uses sizes as ints: row sizes are constants, the batch size is not."""

    def __init__(self, axis):
        super().__init__()
        self.axis = axis

    def forward(self, x):
        for _ in range(int(x.shape[self.axis]) // 2):
            x = torch.relu(x) - 0.5 if x.shape[self.axis] > 1 else x
        return x / math.sqrt(x.shape[self.axis])


def test_sizes_of_a_row_are_constants():
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    for axis in (1, -1):
        net = onchip.load(Scaled(axis), x)
        np.testing.assert_allclose(reference.forward(net, x.numpy()), Scaled(axis)(x).numpy(), rtol=1e-12)
    with pytest.raises(InputError, match=r"module Scaled\n.*batch size"):
        onchip.load(Scaled(0), x)


FICKLE = {
    "branch": lambda x: x if x.sum() > 0 else -x, "factor": lambda x: x * float(x[0, 0]),
    "numpy": lambda x: x * float(x.numpy().max()), "list": lambda x: x * x[0].tolist()[0],
}  # fmt: skip


@pytest.mark.parametrize("case", FICKLE)
def test_what_depends_on_values_is_refused(case):
    class Fickle(torch.nn.Module):
        def forward(self, x):
            return FICKLE[case](x)

    with pytest.raises(InputError, match=r"module Fickle\n.*Converting a tensor"):
        onchip.load(Fickle(), torch.ones(2, 3))


class Guarded(nn.Module):
    """Reads sizes in a trace, values only outside of one."""

    def __init__(self, is_traced):
        super().__init__()
        self.is_traced = is_traced

    def forward(self, x):
        if int(x.shape[1]) > 2 and not self.is_traced():
            assert x.abs().max() < 1e6
        return x * int(x.shape[1])


@pytest.mark.parametrize("guard", [torch.jit.is_tracing, torch.onnx.is_in_onnx_export, torch._C._get_tracing_state])
def test_values_read_only_outside_of_a_trace(guard):
    net = onchip.load(Guarded(guard), torch.ones(2, 3))
    np.testing.assert_array_equal(reference.forward(net, np.ones((1, 3))), [[3, 3, 3]])
    with pytest.raises(InputError, match=r"to a Python boolean.*test_module.py, line"):
        onchip.load(Guarded(lambda: False), torch.ones(2, 3))


class HalfEnds(nn.Module):
    """Half-precision inputs and outputs, float32 inside; ids are cast to floats."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, x, ids):
        y = torch.tanh(self.fc(x.float()) + ids.to(torch.float32))
        return y.half(), y.double()


def test_casts():
    torch.manual_seed(0)
    module, x, ids = HalfEnds(), torch.randn(4, 5).half(), torch.randint(0, 9, (4, 3))
    net = onchip.load(module, (x, ids))
    assert [net.types[name].dtype for name in (*net.inputs, *net.outputs)] == ["float16", "int64", "float16", "float64"]
    truth = module(x, ids)
    for got, wanted in zip(onchip.compile(net, device="cpu")(x.numpy(), ids.numpy()), truth, strict=True):
        wanted = wanted.detach().numpy()
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got.astype(np.float64), wanted, atol=1e-3 if got.dtype == np.float16 else 1e-6)


class Cells(nn.Module):
    """Adaptive pools with cells of unequal size, of all three ranks."""

    def forward(self, x, y, z):
        means = F.adaptive_avg_pool2d(x, (3, None)), F.adaptive_avg_pool1d(y, 4), nn.AdaptiveAvgPool3d((2, 1, 3))(z)
        most = F.adaptive_max_pool2d(x, 2), nn.AdaptiveMaxPool1d(3)(y), F.adaptive_max_pool3d(z, (2, 2, 3))
        even = F.adaptive_avg_pool2d(x[..., :4, :4], 2), F.adaptive_max_pool2d(x[..., :4, :4], (2, 1))
        return *means, *most, *even


class Functions(nn.Module):
    def forward(self, x, y):
        shuffled = F.channel_shuffle(x, 2) + nn.ChannelShuffle(3)(x)
        return shuffled, F.pairwise_distance(x, y, eps=0.5), nn.PairwiseDistance(eps=0.25, keepdim=True)(x, y)


class Products(nn.Module):
    def forward(self, x, y):
        weight = torch.arange(24.0, dtype=x.dtype).reshape(2, 3, 4).cos()
        running = torch.cumprod(y, 1), x.cumprod(-1)
        return F.bilinear(x, y, weight, weight[:, 0, 0]), torch.diag_embed(x), *running


class Chosen(nn.Module):
    """One step per row, then a squeeze: exporters write an If."""

    def forward(self, x, n):
        return x.gather(1, (n - 1).view(-1, 1, 1).expand(-1, 1, 4)).squeeze(1)


class Indexed(nn.Module):
    def forward(self, x, n):
        return x[torch.arange(x.size(0)), n - 1]


@pytest.mark.parametrize(("build", "shapes"), [
    (Cells, [(2, 7, 5), (3, 9), (2, 3, 5, 4)]), (Functions, [(6, 5, 4), (6, 5, 4)]),
    (Products, [(3,), (4,)]),
])  # fmt: skip
def test_functions_that_the_exporter_lacks(build, shapes):
    net = onchip.load(build(), rows(shapes, 2))
    xs = rows(shapes, 3)
    for got, expected in zip(reference.forward(net, tuple(x.numpy() for x in xs)), build()(*xs), strict=True):
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-9, atol=1e-9)
    assert "avg" in F.adaptive_avg_pool2d.__name__  # torch is restored


@pytest.mark.parametrize("build", [Chosen, Indexed])
def test_a_step_for_each_row(build):
    x, n = torch.randn(4, 6, 4), torch.tensor([1, 6, 3, 2])
    x[:, 3:] = torch.where(
        torch.arange(4)[:, None, None] == 1, x[:, 3:], torch.tensor(float("nan"))
    )  # steps that no row selects
    engine = onchip.compile(onchip.load(build(), (torch.zeros(1, 6, 4), torch.ones(1, dtype=torch.int64))), "cpu")
    np.testing.assert_array_equal(engine(x.numpy(), n.numpy()), build()(x, n).numpy())
    with pytest.raises(InputError, match="id -1"):
        engine(x.numpy(), np.zeros(4, np.int64))


class TwoPlaces(nn.Module):
    """Ids that are 0, 1, .. in the example are still ids, not row indices."""

    def forward(self, x, n):
        return x[n, n]


def test_ids_equal_to_row_indices_stay_ids():
    with pytest.raises(InputError):
        onchip.load(TwoPlaces(), (torch.zeros(2, 6, 4), torch.arange(2)))
