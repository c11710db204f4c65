"""Weights that a training step derives from its state in one launch, against NumPy: emulated, and on a GPU."""

import numpy as np
import pytest

from checks import rows
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.kernels.cuda.common.weights import narrow_weight, split_weight, spread_taps, tf32_weight
from onchip.kernels.cuda.recipes.derived import BLOCK_ELEMENTS, MAX_WEIGHTS, DerivedLowering, derivation_of
from onchip.network.recipe import Recipe, as_is, materialise, transposed
from onchip.network.types import numpy_dtype
from onchip.plan.build_cost import dtype_of, shape_of
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.gpu import Gpu

F64, F32, F16, BF16 = "float64", "float32", "float16", "bfloat16"
WEIGHTS = {
    "w": rows(65, 33),
    "taps": rows(5, 3, 2, 3),
    "half": rows(7, 30, seed=1).astype(np.float16),
    "bf16": rows(9, 8, seed=2).astype(numpy_dtype(BF16)),
    "double": rows(6, 11, seed=3).astype(np.float64),
    "long": rows(3 * BLOCK_ELEMENTS + 1, seed=4),
}
TURNED = Recipe.of(transposed, ("w",), (33, 65), F32, axes=(1, 0))
RECIPES = {
    "turned": TURNED,
    "turned, float16": Recipe.of(transposed, ("w",), (33, 65), F16, axes=(1, 0)),
    "turned, then bfloat16": Recipe.of(as_is, (TURNED,), (33, 65), BF16),
    "turned, then float64": Recipe.of(transposed, ("w",), (33, 65), F64, axes=(1, 0)),
    "turned twice": Recipe.of(transposed, (TURNED,), (65, 33), F32, axes=(1, 0)),
    "to tf32": Recipe.of(tf32_weight, ("w",), (65, 33), F32),
    "split": Recipe.of(split_weight, (TURNED,), (2, 33, 65), F32),
    "padded taps": Recipe.of(spread_taps, ("taps",), (5, 6 * 8), F32, channels=8),
    "padded taps, bfloat16": Recipe.of(spread_taps, ("taps",), (5, 6 * 8), BF16, channels=8),
    "turned halves": Recipe.of(transposed, ("half",), (30, 7), F16, axes=(1, 0)),
    "turned bfloat16": Recipe.of(transposed, ("bf16",), (8, 9), BF16, axes=(1, 0)),
    "turned doubles": Recipe.of(transposed, ("double",), (11, 6), F64, axes=(1, 0)),
    "several blocks": Recipe.of(narrow_weight, ("long",), (3 * BLOCK_ELEMENTS + 1,), F16),
}
NONE = {
    "from float64": Recipe.of(transposed, ("double",), (11, 6), F32, axes=(1, 0)),
    "from float16": Recipe.of(as_is, ("half",), (7, 30), F32),
    "rounded twice": Recipe.of(tf32_weight, (Recipe.of(as_is, ("w",), (65, 33), BF16),), (65, 33), F32),
}


@pytest.fixture(params=[pytest.param("emulated", marks=needs_gxx), pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    return Gpu.get(0) if request.param == "cuda" else emulated_gpu(monkeypatch)


def derived(gpu, recipes):
    """These weights, computed by one lowering."""
    entries, inputs = [], []
    for recipe in recipes:
        found = derivation_of(recipe, WEIGHTS)
        assert found is not None
        source, index = len(inputs), -1
        inputs.append(gpu.upload(materialise(found.source, WEIGHTS)))
        if found.rearrangements:
            index = len(inputs)
            inputs.append(gpu.upload(found.indices(shape_of(found.source, WEIGHTS))))
        entries.append((found.kind, found.count, source, index))
    arrays = [np.full(recipe.shape, 77, numpy_dtype(recipe.dtype)) for recipe in recipes]
    outputs = [gpu.upload(array) for array in arrays]
    steps = BoundSteps(gpu, DerivedLowering(tuple(entries)).at(1))
    with gpu:
        steps.enqueue([each.pointer for each in inputs], [each.pointer for each in outputs], 0, gpu.stream)
        gpu.synchronise()
    return [gpu.download(buffer, array) for buffer, array in zip(outputs, arrays, strict=True)]


@pytest.mark.parametrize("name", RECIPES)
def test_one(gpu, name):
    (got,) = derived(gpu, [RECIPES[name]])
    assert got.tobytes() == materialise(RECIPES[name], WEIGHTS).tobytes()


def test_all_in_one_launch(gpu):
    for got, recipe in zip(derived(gpu, RECIPES.values()), RECIPES.values(), strict=True):
        assert got.tobytes() == materialise(recipe, WEIGHTS).tobytes()


def test_more_than_a_launch_holds(gpu):
    for got in derived(gpu, [RECIPES["turned"]] * (MAX_WEIGHTS + 1)):
        assert got.tobytes() == materialise(RECIPES["turned"], WEIGHTS).tobytes()


@pytest.mark.parametrize("name", NONE)
def test_other_recipes_are_none(name):
    assert derivation_of(NONE[name], WEIGHTS) is None


def test_dtypes_of_sources():
    assert {dtype_of(recipe.sources[0], WEIGHTS) for recipe in RECIPES.values()} == {F64, F32, F16, BF16}
