"""Peers' networks in torch, JAX and Triton: part of the wheel, and imported when they run."""

import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

import onchip
from onchip.bench.peers.framework import framework

ROOT = Path(onchip.__file__).parent.parent.parent


def test_a_missing_framework_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "onchip.bench.peers.frameworks.torch_models", raising=False)
    with pytest.raises(ImportError, match="torch"):
        framework("torch_models")


def test_the_wheel_has_them():
    """`onchip bench model.onnx --peers` runs torch where onchip is installed as a wheel."""
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    found = find_packages(str(ROOT / "src"), exclude=find.get("exclude", ()))
    folders = {path.parent for path in (ROOT / "src" / "onchip" / "bench" / "peers" / "frameworks").rglob("*.py")}
    names = {".".join(folder.relative_to(ROOT / "src").parts) for folder in folders}
    assert names
    assert names <= set(found)
