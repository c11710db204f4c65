"""Updates of parameters on an emulated GPU: every optimiser, with weights and gradients of any dtype."""

import numpy as np
import pytest

from checks import assert_error_within, ulps_of
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.network.graph import Network
from onchip.network.layers import BatchSum, Mul, RunningAverage
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.step import VALUES, add_updates
from onchip.plan.kernel import Job, Refusal
from onchip.plan.plan import values_read, values_written

SHAPES = {"one": (1,), "odd": (3, 5, 7), "more": (1025,)}
GROUPS = {"one": 0.5, "more": 3.0}  # factors of the weight decay
DTYPES = [(weight, gradient) for weight in FLOATS for gradient in FLOATS]


def drawn(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(numpy_dtype(dtype))


def updates(step, decays, weight_dtype, gradient_dtype, scaled=True):
    """Parameters whose gradients are sums over the batch of an input each, and an average of one of them."""
    inputs = {f"{name}.x": TensorType(("B", *shape), gradient_dtype) for name, shape in SHAPES.items()}
    weights = {name: drawn(shape, weight_dtype, i) for i, (name, shape) in enumerate(SHAPES.items())}
    build = StepBuilder([], weights, {**inputs})
    gradients = {name: build.add(f"{name}.grad", BatchSum(), (f"{name}.x",)) for name in SHAPES}
    if scaled:
        scale = build.add_weight("scale", np.array(0.25, numpy_dtype(gradient_dtype)))
        gradients = {
            name: build.add(f"{name}.clipped", Mul(), (g,), {"constant": scale}) for name, g in gradients.items()
        }
    state = add_updates(build, step, gradients, decays)
    average = build.add_weight("average", drawn(SHAPES["odd"], weight_dtype, 7))
    state[average] = build.add("average.new", RunningAverage(0.3), ("odd.grad",), {"average": average})
    arrays = dict(build.weights)
    for i, name in enumerate(state):
        if name.endswith((".velocity", ".first", ".second")):  # no square is negative
            arrays[name] = np.abs(drawn(arrays[name].shape, arrays[name].dtype.name, 20 + i))
    arrays[VALUES] = np.array([0.1, 0.02, 0.9, 0.4, 0.3], np.float32)
    return Network(inputs, tuple(build.nodes), ("one.grad",), arrays, state=state)


@needs_gxx
@pytest.mark.parametrize(("optimiser", "decays", "scaled"), [
    ("sgd", False, False), ("sgd", True, True), ("momentum", True, False), ("nesterov", True, True),
    ("adam", True, True), ("adamw", True, True), ("momentum", GROUPS, True), ("adamw", GROUPS, False),
])  # fmt: skip
@pytest.mark.parametrize(("weight", "gradient"), DTYPES)
def test_every_optimiser(monkeypatch, optimiser, decays, scaled, weight, gradient):
    step = TrainingStep("mse", optimiser, ema=0.9 if scaled else 0.0)
    gpu, net = emulated_gpu(monkeypatch), updates(step, decays, weight, gradient, scaled)
    (claim,) = claims_of(net, "update", start=len(SHAPES))
    rows = tuple(drawn((3, *shape), gradient, 10 + i) for i, shape in enumerate(SHAPES.values()))
    state = {name: net.weights[name] for name in net.state}
    sums = {f"{name}.grad": x.sum(axis=0, keepdims=True) for name, x in zip(SHAPES, rows, strict=True)}
    got = run_claim(gpu, net, claim, *(sums[name] for name in values_read(net, claim)))
    one_row = tuple(sums[f"{name}.grad"] for name in SHAPES)  # their sum is the gradient, rounded
    truth, naive = (reference.run_step(net, one_row, state, of)[1] for of in ("float64", "float32"))
    replaced = {value: name for name, value in net.state.items()}
    for name, array in zip(values_written(net, claim.nodes), got, strict=True):
        of = replaced[name]
        exact = truth[of] if gradient == weight == "float64" else naive[of]
        assert array.dtype == net.weights[of].dtype
        ulps = ulps_of(array.dtype.name if gradient == "float64" else max("float32", array.dtype.name, key=ulps_of))
        assert_error_within(array[0], truth[of], exact, ulps=ulps)


def test_moments_of_another_dtype_are_refused():
    net = updates(TrainingStep("mse", "momentum"), False, "float16", "float16")
    narrow = net.weights["odd.velocity"].astype(np.float16)
    net = net.replace(weights={**net.weights, "odd.velocity": narrow})
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == "update")
    (answer,) = kernel.claims(net, len(SHAPES), H200, Job())
    assert isinstance(answer, Refusal)
    assert "moments and an average of float32" in answer.why
