"""Shared by the tests of engines on a GPU: the array libraries, and an engine."""

import importlib
import os
import warnings

import pytest

from gpu_networks import NET
from onchip.runtime.engine import compile


def library(name):
    """A GPU array library, if it is installed and sees the GPU. Its warnings are ignored."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"{name} is not installed")


@pytest.fixture(scope="module")
def torch():
    found = library("torch")
    if not found.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return found


@pytest.fixture(scope="module")
def cupy():
    return library("cupy")


@pytest.fixture(scope="module")
def jax():
    found = library("jax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if found.default_backend() != "gpu":
            pytest.skip("JAX sees no GPU")
    return found


@pytest.fixture(scope="module")
def engine():
    return compile(NET, device="cuda")
