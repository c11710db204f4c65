"""docs/add-a-layer.md and docs/add-a-kernel.md, followed: their layer and kernels in a package of their own."""

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import onchip
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, emulate_device, one_layer, run_claim
from onchip.errors import KernelError, PlanError
from onchip.kernels import reference
from onchip.kernels.cpu import INFERENCE
from onchip.kernels.cpu import KERNELS as CPU_KERNELS
from onchip.kernels.cpu.microkernels.loops import loop_of
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.layers import layers_header, struct_of
from onchip.kernels.pointwise import operation_of
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import LAYERS, Activation, Elementwise, ElementwiseGrad, Ordered
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cpu.backend import this_cpu
from onchip.runtime.cpu.step import CpuStep
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.kernel_check import DEVICES
from onchip.runtime.cuda.nvrtc import compile_program
from onchip.runtime.cuda.step import CudaStep
from onchip.runtime.engine import Engine
from onchip.runtime.placement import plan

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(python|cuda)\n(.*?)^```", re.MULTILINE | re.DOTALL)
X = np.random.default_rng(0).standard_normal((300, 7, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package `extra`: layer.py; bare.py, the layer without its expressions; and its kernels: cube.cu with its host
    side cube.py, on_cpu.py."""
    folder = tmp_path_factory.mktemp("extra")
    (layer,) = (text for _, text in BLOCK.findall((DOCS / "add-a-layer.md").read_text()))
    (_, kernel), (_, host), (_, on_cpu) = BLOCK.findall((DOCS / "add-a-kernel.md").read_text())
    bare = re.sub(r"    (cuda|cpu) = .*\n", "", layer).replace("Activation", "Elementwise")
    files = {
        "__init__.py": "", "layer.py": layer, "bare.py": bare, "cube.cu": kernel,
        "cube.py": f"from extra.bare import Cube\n{host}", "on_cpu.py": f"from extra.bare import Cube\n{on_cpu}",
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
    return one_layer(package("bare").Cube(), TensorType(("B", 7, 5)))


def cubes(package):
    """Networks with the layer: alone; in a chain; after a gemm, which fuses it."""
    cube = package("layer").Cube()
    steps = [("a", LAYERS["Sin"]()), ("b", cube), ("c", LAYERS["Abs"]()), ("d", cube)]
    return {
        "alone": one_layer(cube, TensorType(("B", 7, 5))),
        "chain": sequential(TensorType(("B", 35)), steps, {}),
        "gemm": onchip.mlp(35, 16, 8, activation=cube.kind),
    }


def kernels_of(plan):
    return [group.claim.label for group in plan.groups]


@pytest.mark.parametrize(
    ("case", "kernel"),
    [("alone", "rowwise<Cube>"), ("chain", "pointwise<Sin,Cube,Abs>"), ("gemm", "mlp_fused<35,16,8,Cube>")],
)
def test_it_is_compiled_on_the_cpu(package, case, kernel):
    net = cubes(package)[case]
    x = X.reshape(300, *next(iter(net.inputs.values())).row_shape)
    engine = onchip.compile(net, "cpu")
    assert kernels_of(engine.plan) == [kernel]
    np.testing.assert_allclose(engine(x), reference.forward(net, x), rtol=2e-5, atol=1e-4)
    assert np.array_equal(engine(x[:7]), engine(x)[:7])


@needs_gxx
@pytest.mark.parametrize("B", [1, 300])
@pytest.mark.parametrize(
    ("case", "kernel"),
    [("alone", "pointwise<Cube>"), ("chain", "pointwise<Sin,Cube,Abs>"), ("gemm", "mlp_fused<35,16,8,Cube>")],
)
def test_it_is_compiled_on_an_emulated_gpu(package, monkeypatch, case, kernel, B):
    net = cubes(package)[case]
    x = X.reshape(300, *next(iter(net.inputs.values())).row_shape)[:B]
    (claim,) = (each for each in claims_of(net, kernel.partition("<")[0]) if each.label == kernel and not each.reads)
    got = run_claim(emulated_gpu(monkeypatch), net, claim, x)
    np.testing.assert_allclose(got, reference.forward(net, x), rtol=2e-5, atol=1e-4)


def test_it_is_fused_and_compiles_for_a_gpu(package):
    pytest.importorskip("cuda.bindings")
    (group,) = make_plan(cubes(package)["gemm"], H200, KERNELS, Job()).groups
    assert group.claim.label == "mlp_tensor_core<35,16,8,Cube>"
    for launch in group.claim.facts.at(1024).launches:
        assert compile_program(launch.program, "sm_90a").spill_bytes == 0


@needs_gxx
def test_its_gradient_is_compiled(package, monkeypatch):
    cube, row = package("layer").Cube(), TensorType(("B", 5))
    net = Network({"x": row, "dy": row}, (Node("dx", ElementwiseGrad(cube), ("x", "dy")),), ("dx",), {})
    gpu, (x, dy) = emulate_device(monkeypatch), (X[:, 0], X[:, 1])
    for step in CpuStep(plan(net, "cpu"), 2), CudaStep(gpu, plan(net, "cuda", Job(batch=300))):
        assert kernels_of(step.plan) == ["pointwise<ElementwiseGrad>"]
        np.testing.assert_allclose(step.run({"x": x, "dy": dy}, 300)["dx"], 3 * x**2 * dy, rtol=1e-5)


def test_other_programs_stay_as_they_are(package):
    """A user's layer does not change the sources of kernels that do not use it."""
    op = operation_of(package("layer").Cube())
    assert op.struct in layers_header(f"pointwise<{struct_of(op)}>")
    assert "Cube" not in layers_header("pointwise<ReLU>")


def test_two_layers_of_one_name_are_told_apart(package):
    class Cube(Activation):
        cuda = cpu = "x * x * x + offset"
        function = derivative = None

    first, second = operation_of(package("layer").Cube()), operation_of(Cube())
    assert first.struct != second.struct


@needs_gxx
def test_layers_with_attributes_and_of_two_values(package, monkeypatch):
    @dataclass(frozen=True, eq=False, repr=False)
    class Bump(Activation):
        height: float = 2.0
        width: float = 0.5
        cuda = "height / (1 + x * x / width)"
        cpu = cuda

        def function(self, x):
            return self.height / (1 + x * x / self.width)

        derivative = None

    class Excess(Ordered):
        cuda = "a > 2 * b ? a - 2 * b : 0"
        cpu = "a - 2 * b if a > 2 * b else 0"

        def function(self, a, b):
            return np.maximum(a - 2 * b, 0)

    row = TensorType(("B", 5))
    nodes = (
        Node("a", Bump(), ("x",)), Node("b", Excess(), ("z", "a")), Node("c", Excess(), ("b",), {"first": "w"}),
        Node("d", Bump(width=3.0), ("c",)),
    )  # fmt: skip
    net = Network({"x": row, "z": row}, nodes, ("b", "d"), {"w": np.arange(5, dtype=np.float32)})
    xs = X[:7, :1].reshape(7, 5), X[:7, 1:2].reshape(7, 5) * 4
    expected = reference.forward(net, xs)
    gpu = emulated_gpu(monkeypatch)
    engines = onchip.compile(net, "cpu"), Engine(make_plan(net, gpu.device, KERNELS, Job()), CudaBackend(), "cuda:0")
    for engine in engines:
        assert kernels_of(engine.plan) == ["pointwise<Bump,Excess>"]
        for got, truth in zip(engine(*xs), expected, strict=True):
            np.testing.assert_allclose(got, truth, rtol=1e-5, atol=1e-6)


def test_mistakes_are_reported(package):
    class Unknown(Elementwise):
        cpu = "exponent(x)"
        function = derivative = None

    with pytest.raises(KernelError, match="unknown names") as error:
        loop_of(Unknown())
    assert "exponent" in str(error.value)
    assert "exponential" in str(error.value)
    with pytest.raises(TypeError, match="needs the expressions"):

        class Half(Activation):
            cpu = "x"

    with pytest.raises(TypeError, match="derive it from Activation"):

        class Other(LAYERS["ReLU"]):
            cuda = cpu = "x"

    @dataclass(frozen=True, eq=False, repr=False)
    class Scaled(Ordered):
        scale: float
        cpu = "scale * a * b"
        function = None

    with pytest.raises(TypeError, match="at most 0 attributes"):
        loop_of(Scaled(2.0))


def test_without_expressions_it_runs_in_numpy(package, net):
    assert [group.claim.kernel for group in onchip.compile(net, "cpu").plan.groups] == ["plain"]
    np.testing.assert_allclose(onchip.compile(net, "cpu")(X), X.astype(np.float64) ** 3, rtol=1e-6)
    with pytest.raises(PlanError):
        make_plan(net, H200, KERNELS, Job())


def test_its_gradient_is_that_of_finite_differences(package):
    layer, x = package("layer").Cube(), X[:3].astype(np.float64)
    y, step = layer.forward((x,), {}), 1e-6
    (dx,), _ = layer.backward((x,), {}, y, np.ones_like(y))
    np.testing.assert_allclose((layer.forward((x + step,), {}) - y) / step, dx, atol=1e-4)


def test_its_kernel_runs_on_the_cpu(package, monkeypatch, net):
    kernel = package("on_cpu").CubeKernel()
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
    net = one_layer(package("bare").Cube(), TensorType(("B", 7, 5), dtype))
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
    net = one_layer(package("bare").Cube(), TensorType(("B", 7), "float16"))
    with pytest.raises(PlanError, match="computes on float32, float64"):
        make_plan(net, H200, (kernel,), Job())


def test_it_joins_a_network(package):
    """Between layers of the project, on the CPU and in a plan for a GPU."""
    layers = [("a", LAYERS["Tanh"]()), ("b", package("bare").Cube()), ("c", LAYERS["ReLU"]())]
    net = sequential(TensorType(("B", 64)), layers, {})
    plan = make_plan(net, H200, (package("cube").CubeKernel(), *KERNELS), Job())
    assert "cube" in [group.claim.kernel for group in plan.groups]
    assert make_plan(net, this_cpu(), CPU_KERNELS).groups
