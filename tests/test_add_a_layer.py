"""docs/add-a-layer.md and docs/add-a-kernel.md, followed: their layer and kernels in a package of their own."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import onchip
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import one_layer, run_claim
from onchip.errors import PlanError
from onchip.kernels import reference
from onchip.kernels.cpu import INFERENCE
from onchip.kernels.cpu import KERNELS as CPU_KERNELS
from onchip.kernels.cuda import KERNELS
from onchip.network.build import sequential
from onchip.network.layers import LAYERS
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cpu.backend import this_cpu
from onchip.runtime.cuda.kernel_check import DEVICES
from onchip.runtime.cuda.nvrtc import compile_program

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(python|cuda)\n(.*?)^```", re.MULTILINE | re.DOTALL)
X = np.random.default_rng(0).standard_normal((300, 7, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package `extra`: layer.py, cube.cu and its host side cube.py, on_cpu.py."""
    folder = tmp_path_factory.mktemp("extra")
    (layer,) = (text for _, text in BLOCK.findall((DOCS / "add-a-layer.md").read_text()))
    (_, kernel), (_, host), (_, on_cpu) = BLOCK.findall((DOCS / "add-a-kernel.md").read_text())
    files = {
        "__init__.py": "", "layer.py": layer, "cube.cu": kernel,
        "cube.py": f"from extra.layer import Cube\n{host}", "on_cpu.py": f"from extra.layer import Cube\n{on_cpu}",
    }  # fmt: skip
    (folder / "extra").mkdir()
    for name, text in files.items():
        (folder / "extra" / name).write_text(text)
    before = dict(LAYERS)
    sys.path.insert(0, str(folder))
    yield lambda name: importlib.import_module(f"extra.{name}")
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "extra"]:
        del sys.modules[name]
    LAYERS.clear()
    LAYERS.update(before)


@pytest.fixture
def net(package):
    return one_layer(package("layer").Cube(), TensorType(("B", 7, 5)))


def test_the_layer_runs_in_numpy(package, net):
    assert [group.claim.kernel for group in onchip.compile(net, "cpu").plan.groups] == ["plain"]
    np.testing.assert_allclose(onchip.compile(net, "cpu")(X), X.astype(np.float64) ** 3, rtol=1e-6)


def test_its_gradient_is_that_of_finite_differences(package):
    layer, x = package("layer").Cube(), X[:3].astype(np.float64)
    y, step = layer.forward((x,), {}), 1e-6
    (dx,), _ = layer.backward((x,), {}, y, np.ones_like(y))
    np.testing.assert_allclose((layer.forward((x + step,), {}) - y) / step, dx, atol=1e-4)


def test_its_kernel_runs_on_the_cpu(package, monkeypatch, net):
    kernel = package("on_cpu").CubeOnCpu()
    monkeypatch.setattr("onchip.kernels.cpu.INFERENCE", (kernel, *INFERENCE))
    monkeypatch.setattr("onchip.kernels.cpu.KERNELS", (kernel, *CPU_KERNELS))
    engine = onchip.compile(net, "cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["cube"]
    np.testing.assert_allclose(engine(X), X.astype(np.float64) ** 3, rtol=1e-6)
    assert np.array_equal(engine(X[:7]), engine(X)[:7])


@needs_gxx
@pytest.mark.parametrize("B", [1, 7, 300])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_its_kernel_runs_on_an_emulated_gpu(package, monkeypatch, dtype, B):
    net = one_layer(package("layer").Cube(), TensorType(("B", 7, 5), dtype))
    plan = make_plan(net, H200, (package("cube").CubeKernel(), *KERNELS), Job())
    (group,) = plan.groups
    assert group.claim.label == "cube<Cube>"
    x = X[:B].astype(dtype)
    got = run_claim(emulated_gpu(monkeypatch), net, group.claim, x)
    np.testing.assert_allclose(got, reference.forward(net, x), rtol=1e-6)


def test_its_kernel_compiles(package):
    pytest.importorskip("cuda.bindings")
    for each in package("cube").INSTANCES:
        launch = each.launch(DEVICES["sm_90a"])
        assert compile_program(launch.program, "sm_90a").registers <= launch.budget.registers


def test_other_dtypes_are_refused(package):
    kernel = package("cube").CubeKernel()
    net = one_layer(package("layer").Cube(), TensorType(("B", 7), "float16"))
    with pytest.raises(PlanError, match="computes on float32, float64"):
        make_plan(net, H200, (kernel,), Job())


def test_it_joins_a_network(package):
    """Between layers of the project, on the CPU and in a plan for a GPU."""
    layers = [("a", LAYERS["Tanh"]()), ("b", package("layer").Cube()), ("c", LAYERS["ReLU"]())]
    net = sequential(TensorType(("B", 64)), layers, {})
    plan = make_plan(net, H200, (package("cube").CubeKernel(), *KERNELS), Job())
    assert "cube" in [group.claim.kernel for group in plan.groups]
    assert make_plan(net, this_cpu(), CPU_KERNELS).groups
