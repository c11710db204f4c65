"""NVTX ranges of recorded calls and trainings, with a fake package."""

import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

import onchip
from checks import random_mlp, rows
from fake_cuda import Array, FakeDriver, fake_gpu
from gpu_networks import two_groups
from onchip.kernels.cuda.mlp.fused import MlpFusedKernel
from onchip.measure.profile import profile
from onchip.network.build import sequential
from onchip.network.layers import CumSum
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.planner import make_plan
from onchip.runtime import nvtx_ranges
from onchip.runtime.arrays.adapters import DlpackArrays
from onchip.runtime.cuda import activities
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.cupti import CuptiError
from onchip.runtime.engine import Engine, compile


@pytest.fixture(autouse=True)
def _forgets():
    nvtx_ranges._annotate.cache_clear()
    yield
    nvtx_ranges._annotate.cache_clear()


@pytest.fixture
def ranges(monkeypatch):
    """Each range, with those that are open around it."""
    made, open_now = [], []

    @contextmanager
    def annotate(name, domain):
        assert domain == "onchip"
        made.append((*open_now, name))
        open_now.append(name)
        yield
        open_now.pop()

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    yield made
    assert not open_now


def test_a_call_on_the_cpu(ranges):
    """Kernels run in compiled code, in which no range begins."""
    engine = compile(random_mlp(4, 5, 3), device="cpu")
    engine(rows(3, 4))
    assert ranges == []
    with profile():
        engine(rows(3, 4))
    assert ranges == [("mlp, 3 rows",)]


def test_kernels_that_python_launches(ranges):
    net = sequential(TensorType(("B", 3), "float64"), [("s", CumSum(1)), ("t", CumSum(1))], {}, name="sums")
    engine = compile(net, device="cpu")
    with profile() as found:
        engine(np.ones((1200, 3)))
    labels = [group.claim.label for group in engine.plan.groups]
    assert ranges == [("sums, 1,200 rows",), *(("sums, 1,200 rows", label) for label in labels)]
    assert {kernel.kernel for kernel in found.engines[0].kernels} == set(labels)


@pytest.fixture
def gpu(monkeypatch):
    def none():
        raise CuptiError("not in this test")

    monkeypatch.setattr(activities, "_activities", none)
    yield fake_gpu(monkeypatch, FakeDriver())
    DlpackArrays.release_all()


def test_a_call_on_a_gpu(gpu, ranges):
    """All launches of a chunk are one graph launch."""
    plan = make_plan(two_groups(), H200, [MlpFusedKernel()])
    engine = Engine(plan, CudaBackend(0), "cuda:0")
    labels = ", ".join(group.claim.label for group in plan.groups)
    for run in (lambda: engine(rows(7, 6)), lambda: engine(Array(gpu, rows(7, 6)))):
        with profile():
            run()
        assert ranges == [("network, 7 rows",), ("network, 7 rows", labels)]
        ranges.clear()
        run()
        assert ranges == []


def test_the_phases_of_a_training(ranges):
    X, Y = rows(30, 4), np.arange(30) % 3
    onchip.fit(random_mlp(4, 5, 3), X, Y, epochs=1, batch_size=10, device="cpu")
    assert ranges == []
    with profile() as found:
        onchip.fit(random_mlp(4, 5, 3), X, Y, epochs=1, batch_size=10, device="cpu")
    names = [name for (name,) in ranges]
    assert names == [span.name for span in found.recorded_trainings[0].phases]
    assert "steps" in names


def test_nothing_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)  # importing it raises ImportError
    with nvtx_ranges.named_range("a"):
        pass


def test_a_call_that_is_not_recorded_does_not_import_it():
    code = (
        "import numpy as np, onchip, sys; e = onchip.compile('decode', device='cpu'); e(np.zeros((3, 72), np.float32));"
        "print('nvtx' in sys.modules, 'onchip.runtime.nvtx_ranges' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "False False\n"
