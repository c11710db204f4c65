"""Modules that cannot be traced, wrapped ones, and arguments and outputs of every kind."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import onchip
from onchip.errors import InputError
from onchip.formats.torch import exporter as torch_export
from onchip.kernels import reference

torch = pytest.importorskip("torch")
nn = torch.nn
has_onnxscript = pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="not installed: onnxscript")


class Parts(nn.Module):
    """Operators that tracing lacks, after a layer with weights; two inputs, one keyword-only."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x, *, shift):
        y = torch.logaddexp(self.fc(x), shift)
        return torch.trunc(y * 4), torch.diff(y, dim=1)


class Lgamma(nn.Module):
    def forward(self, x):
        return torch.lgamma(x)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, *, mask=None):
        return self.fc(x) if mask is None else self.fc(x) * mask


class Needs(Masked):
    def forward(self, x, *, mask):
        return super().forward(x, mask=mask)


class Returns(nn.Module):
    def __init__(self, *more):
        super().__init__()
        self.fc, self.more = nn.Linear(3, 3), more

    def forward(self, x):
        return {"loss": None, "y": self.fc(x), "hidden": (x * 2, *self.more)}


def computes_the_same(net, module, *inputs):
    with torch.no_grad():
        made = module.eval()(*inputs)
    made = made if isinstance(made, tuple) else (made,)
    got = reference.forward(net, tuple(x.numpy() for x in inputs))
    for ours, theirs in zip(got if isinstance(got, tuple) else (got,), made, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)


@has_onnxscript
def test_operators_that_tracing_lacks_use_the_newer_exporter():
    torch.manual_seed(0)
    module, example = Parts(), {"x": torch.randn(2, 6), "shift": torch.randn(2, 4)}
    net = onchip.load(module, example)
    assert list(net.weights)[:2] == ["fc.weight", "fc.bias"]
    assert list(net.inputs) == ["x", "shift"]
    xs = {"x": torch.randn(5, 6), "shift": torch.randn(5, 4)}  # other batch sizes
    with torch.no_grad():
        truth = module(**xs)
    for ours, theirs in zip(reference.forward(net, tuple(x.numpy() for x in xs.values())), truth, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)


@has_onnxscript
def test_if_both_exporters_fail_both_reasons_are_shown(capfd):
    with pytest.raises(InputError) as caught:
        onchip.load(Lgamma(), torch.ones(2, 5))
    first, second = caught.value.got.split("; ", 1)
    assert len(first) <= len(second)
    assert "aten::lgamma" in caught.value.got
    assert "prims.lgamma" in caught.value.got
    assert capfd.readouterr() == ("", "")


def test_without_onnxscript_its_install_is_named(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        torch_export.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else found(name)
    )
    with pytest.raises(InputError, match="aten::lgamma") as caught:
        onchip.load(Lgamma(), torch.ones(2, 5))
    assert "pip install 'onchip[torch]'" in caught.value.hint


def test_branches_on_values_are_refused_by_both():
    class Few(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[0] > 2 else x

    class Branch(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    for module in (Few(), Branch()):
        with pytest.raises(InputError, match="torch cannot trace module"):
            onchip.load(module, torch.ones(2, 3))


def test_keyword_only_arguments():
    x, mask = torch.randn(2, 3), torch.rand(2, 3)
    computes_the_same(onchip.load(module := Masked(), x), module, x)
    net = onchip.load(module := Needs(), {"x": x, "mask": mask})
    assert list(net.inputs) == ["x", "mask"]
    truth = module(x, mask=mask).detach().numpy()
    np.testing.assert_allclose(reference.forward(net, (x.numpy(), mask.numpy())), truth, rtol=1e-5, atol=1e-6)
    for example in (x, (x, mask)):
        with pytest.raises(InputError, match="keyword-only arguments") as caught:
            onchip.load(module, example)
        assert "onchip.load(module, {'x': .., 'mask': ..})" in caught.value.hint


def test_none_outputs_are_ignored_and_other_non_tensors_refused():
    net = onchip.load(Returns(None), torch.randn(2, 3))
    assert len(net.outputs) == 2
    with pytest.raises(InputError, match="returns a non-tensor") as caught:
        onchip.load(Returns(None, "kept"), torch.randn(2, 3))
    assert caught.value.got == "str 'kept'"


def compiled(module):
    return torch.compile(module, backend="eager")  # no code generator, which takes seconds to load


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("wrap", [
    compiled, nn.DataParallel, lambda module: compiled(nn.DataParallel(module)), torch.jit.script,
], ids=["compile", "DataParallel", "both", "script"])  # fmt: skip
def test_wrapped_modules(wrap):
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(2, 3)
    net = onchip.load(wrap(module), x)
    assert list(net.weights) == ["0.weight", "0.bias"]  # the module's names, without the wrapper's prefix
    computes_the_same(net, module, x)


def test_a_module_that_compiles_itself():
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(2, 3)
    module.compile(backend="eager")
    assert list(onchip.load(module, x).weights) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("wrap", [
    nn.utils.parametrizations.weight_norm,
    lambda module: module.register_forward_hook(lambda module, given, made: made * 2) and module,
], ids=["weight_norm", "hook"])  # fmt: skip
def test_parametrizations_and_hooks(wrap):
    torch.manual_seed(0)
    module, x = nn.Linear(3, 4), torch.randn(2, 3)
    module = wrap(module)
    computes_the_same(onchip.load(module, x), module, x)
