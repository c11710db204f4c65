"""Gradients of elementwise layers in the pointwise kernels of both devices, against float64."""

from functools import partial

import numpy as np
import pytest

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BUILT_IN,
    ELU,
    GELU,
    Add,
    Ceil,
    Clip,
    Cos,
    Elementwise,
    ElementwiseGrad,
    Exp,
    Floor,
    HardSigmoid,
    LeakyReLU,
    Log,
    Mul,
    ReLU,
    Round,
    Sign,
    Sin,
)
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.runtime.cpu.step import CpuStep
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.step import CudaStep
from onchip.runtime.placement import plan

OTHERS = (ReLU, Exp, Log, Sin, Cos, Ceil, Floor, Round, Sign)  # their gradients are other layers, or there is none
EXAMPLES = {
    LeakyReLU: (LeakyReLU(0.2),), Clip: (Clip(-0.5, 0.75), Clip(high=0.25), Clip(low=-0.75)), ELU: (ELU(), ELU(0.3)),
    GELU: (GELU(), GELU("tanh")), HardSigmoid: (HardSigmoid(), HardSigmoid(1 / 6, 0.4)),
}  # fmt: skip
LAYERS = [
    layer
    for kind in BUILT_IN
    if issubclass(kind, Elementwise) and kind not in OTHERS
    for layer in EXAMPLES.get(kind) or (kind(),)
]
ULPS = {"float32": 8, "float64": 64}  # of dy, or of the result if that is larger; float64: of the reference, too


def every_order(layer: Elementwise, dtype: str) -> Network:
    """The gradient of two values; of dy, then v, that the layer before it computed; and in a sum."""
    given = TensorType(("B", 5), dtype)
    nodes = (
        Node("a", ElementwiseGrad(layer), ("v", "dy")),
        Node("u", Mul(), ("dy",), {"constant": "one"}),
        Node("b", ElementwiseGrad(layer), ("v", "u")),
        Node("w", Mul(), ("v",), {"constant": "one"}),
        Node("c", ElementwiseGrad(layer), ("w", "dy")),
        Node("d", Add(), ("c", "b")),
    )
    return Network({"v": given, "dy": given}, nodes, ("a", "b", "c", "d"), {"one": np.ones((), numpy_dtype(dtype))})


def assert_right(layer: Elementwise, dtype: str, run) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-8, 8, 2000), rng.uniform(-1, 1, 2000), [0.0, 3.0, -3.0, 20.0, -20.0]])
    if layer.kind == "Sqrt":
        x = np.abs(x) + 0.01
    x = x[x != 0] if layer.kind == "Reciprocal" else x
    x = x[: len(x) // 5 * 5].astype(dtype)
    v = layer.function(x) if layer.grad_of == "y" else x
    dy = rng.standard_normal(x.shape).astype(dtype)
    a, b, c, d = run(every_order(layer, dtype))(v.reshape(-1, 5), dy.reshape(-1, 5))
    wide = v.astype(np.float64)
    truth = dy * layer.derivative(wide, wide)
    allowed = ULPS[dtype] * np.finfo(dtype).eps * np.maximum(np.abs(dy), np.abs(truth))
    error = np.abs(a.reshape(-1) - truth) - allowed
    assert error.max() <= 0, (x[error.argmax()], a.reshape(-1)[error.argmax()], truth[error.argmax()])
    np.testing.assert_array_equal(b, a)
    np.testing.assert_array_equal(c, a)
    np.testing.assert_array_equal(d, a + a)


def planned(net: Network, device: str) -> Plan:
    made = plan(net, device, Job(batch=1000))
    assert [group.claim.kernel for group in made.groups] == ["pointwise"], str(made)
    return made


def results(step: CpuStep | CudaStep, v: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    outputs = step.run({"v": v, "dy": dy}, len(v))
    return [outputs[name] for name in "abcd"]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_on_the_cpu(layer):
    assert_right(layer, "float32", lambda net: partial(results, CpuStep(planned(net, "cpu"), 2)))


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_in_cuda_kernels(monkeypatch, layer, dtype):
    gpu = emulate_device(monkeypatch)
    assert_right(layer, dtype, lambda net: partial(results, CudaStep(gpu, planned(net, "cuda"))))


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_on_a_gpu(layer):
    assert_right(layer, "float32", lambda net: partial(results, CudaStep(Gpu.get(), planned(net, "cuda"))))
