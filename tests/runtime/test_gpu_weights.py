"""A plan's weights on a GPU: computed once, on GPU or host, and intermediates freed. The kernels are emulated."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels import reference
from onchip.kernels.cuda import KERNELS
from onchip.network.build import sequential
from onchip.network.layers import Linear, ReLU
from onchip.network.recipe import Recipe, as_is, evaluate, materialise, transposed
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan import build_cost
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.plan.rewrites.linear import merged_bias, merged_weight
from onchip.runtime.cuda import weights as weights_module
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.weights import make_weights
from onchip.runtime.engine import Engine
from onchip.runtime.placement import kernels_for

pytestmark = needs_gxx
RATES = build_cost.recipe_rates_of(KERNELS, H200)


@pytest.fixture
def gpu(monkeypatch):
    return emulated_gpu(monkeypatch)


@pytest.fixture
def on_device(monkeypatch):
    monkeypatch.setattr(build_cost, "ON_DEVICE_FROM_US", 0.0)


def arrays(gpu, made):
    return [gpu.download(buffer, np.empty(recipe.shape, numpy_dtype(recipe.dtype))) for recipe, buffer in made.items()]


def chain():
    """W3 (W2 W1), with other recipes of the same weights."""
    weights = {"W1": rows(6, 5, seed=1), "W2": rows(7, 6, seed=2), "W3": rows(4, 7, seed=3), "b": rows(1, 7, seed=4)[0]}
    weights["W21"] = Recipe.of(merged_weight, ("W2", "W1"), (7, 5), "float32", 420)
    weights["W321"] = Recipe.of(merged_weight, ("W3", "W21"), (4, 5), "float32", 280)
    weights["c"] = Recipe.of(merged_bias, ("W21", "e"), (7,))
    weights["e"] = rows(1, 5, seed=5)[0]
    wanted = [
        Recipe.of(as_is, ("W321",), (4, 5)),
        Recipe.of(transposed, ("W21",), (5, 7), axes=(1, 0)),
        Recipe.of(as_is, ("c",), (7,)),
        Recipe.of(as_is, ("b",), (7,)),
        Recipe.of(as_is, ("W321",), (4, 5), "bfloat16"),
    ]
    return weights, wanted


@pytest.mark.parametrize("makes", [{}, RATES], ids=["NumPy", "the GPU"])
def test_a_web_of_recipes(gpu, on_device, makes):
    weights, wanted = chain()
    made = make_weights(gpu, [*wanted, wanted[0]], weights, makes)
    assert list(made) == wanted
    for got, recipe in zip(arrays(gpu, made), wanted, strict=True):
        truth = materialise(recipe, weights)
        assert got.dtype == truth.dtype
        np.testing.assert_allclose(got.astype(float), truth.astype(float), rtol=2**-7 if got.itemsize == 2 else 2**-21)
    assert bool(gpu.driver.launches) == bool(makes)


def test_each_is_made_once_and_only_what_is_wanted_stays(gpu, on_device, monkeypatch):
    weights, wanted = chain()
    evaluated, uploads, before = [], [], len(gpu.driver.memory)
    upload = gpu.upload
    monkeypatch.setattr(gpu, "upload", lambda array: uploads.append(array.shape) or upload(array))
    monkeypatch.setattr(weights_module, "evaluate", lambda r, given: evaluated.append(r.op) or evaluate(r, given))
    made = make_weights(gpu, wanted, weights, RATES)
    assert sum("gemm_simt" in launched.kernel for launched in gpu.driver.launches) == 2
    assert [op.partition(":")[2] for op in evaluated] == ["merged_bias"]
    assert sorted(uploads) == sorted([(7, 6), (6, 5), (4, 7), (7,), (7,)])
    assert len(gpu.driver.memory) - before == len({buffer.pointer for buffer in made.values()}) == len(wanted)
    del made
    assert len(gpu.driver.memory) == before


def test_small_weights_are_numpys(gpu):
    weights, wanted = chain()
    make_weights(gpu, wanted, weights, RATES)
    assert gpu.driver.launches == []


def test_an_engine_of_products(gpu, on_device):
    weights = {
        "a.weight": rows(20, 8001, seed=3) / np.float32(90), "a.bias": rows(1, 20, seed=4)[0],
        "b.weight": rows(3, 20, seed=5),
    }  # fmt: skip
    net = sequential(TensorType(("B", 8001)), [("a", Linear()), ("r", ReLU()), ("b", Linear())], weights)
    kernels = [kernel for kernel in kernels_for(gpu.device) if kernel.name != "gemm_sm90"]  # no cluster runs here
    plan = make_plan(net, gpu.device, kernels, Job(batch=1000))
    (product,) = [group for group in plan.groups if group.claim.kernel in ("gemm_simt", "gemm_mma")]
    part = net.replace(nodes=net.nodes[:2], outputs=("r",))
    engine = Engine(make_plan(part, gpu.device, kernels, Job(batch=1000)), CudaBackend(0), "cuda:0")
    assert product.claim.nodes == ("a", "r")
    x = rows(5, 8001)
    assert_error_within(engine(x), reference.forward(part, x), reference.forward(part, x, "float32"))
