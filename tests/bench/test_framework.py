"""A wheel has no networks of torch, JAX and Triton: the error says where they are."""

import sys

import pytest

from onchip.bench.frame import UnavailableError
from onchip.bench.peers.cpu import subject_of
from onchip.bench.peers.framework import framework
from onchip.network.build import mlp


def test_without_the_source_tree_the_error_names_it(monkeypatch):
    """UnavailableError: the benchmark skips the peer with this reason."""
    for name in [name for name in sys.modules if name.startswith("onchip.bench.peers.frameworks")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onchip.bench.peers.frameworks", None)
    for load in (subject_of(mlp(2, 1)).module, lambda: framework("triton_mlp")):
        with pytest.raises(UnavailableError, match="not in the wheel: pip install -e"):
            load()


def test_another_missing_module_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "onchip.bench.peers.frameworks.torch_models", raising=False)
    with pytest.raises(ImportError, match="torch"):
        framework("torch_models")
