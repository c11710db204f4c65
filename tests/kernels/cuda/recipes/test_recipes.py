"""Recipes computed on a GPU against NumPy, the reference: emulated on the host, and on a GPU."""

import numpy as np
import pytest

from checks import assert_error_within, rows
from emulated_cuda import emulated_gpu, needs_gxx
from onchip.errors import InputError
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.weights import narrow_weight, split_weight, spread_taps, tf32_weight
from onchip.kernels.cuda.embedding.token_slices import narrow_tables, sliced, split_tables, token_slices, token_taps
from onchip.kernels.cuda.recipes.recipes import LOWERINGS
from onchip.kernels.fp8_tables import peaks_of
from onchip.network.recipe import Recipe, as_is, evaluate, materialise, op_name, transposed
from onchip.network.types import numpy_dtype
from onchip.plan import build_cost
from onchip.plan.device import H200
from onchip.plan.rewrites.embedding import token_tables
from onchip.plan.rewrites.linear import merged_weight
from onchip.runtime.cuda import weights as weights_module
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.weights import make_weights

F32, F16, BF16, F8 = "float32", "float16", "bfloat16", "float8_e4m3fn"
MAKES = build_cost.recipe_rates_of(KERNELS, H200)

# recipe, shapes and dtypes of its sources "0", "1", ..
CASES = {
    "to float16": (Recipe.of(as_is, ("0",), (77, 5), F16), [((77, 5), F32)]),
    "from bfloat16": (Recipe.of(as_is, ("0",), (301,), F32), [((301,), BF16)]),
    "to bfloat16": (Recipe.of(as_is, ("0",), (3, 4, 7), BF16), [((3, 4, 7), F16)]),
    "turned": (Recipe.of(transposed, ("0",), (33, 65), F32, axes=(1, 0)), [((65, 33), F32)]),
    "three axes": (Recipe.of(transposed, ("0",), (5, 7, 6), F16, axes=(2, 0, 1)), [((7, 6, 5), F32)]),
    "four axes": (Recipe.of(transposed, ("0",), (5, 3, 4, 2), F32, axes=(3, 1, 2, 0)), [((2, 3, 4, 5), F32)]),
    "in place": (Recipe.of(transposed, ("0",), (2, 3), F32, axes=(0, 1)), [((2, 3), F32)]),
    "tables of a Conv1d": (
        Recipe.of(token_tables, ("0", "1"), (130, 3, 17), F32, 1), [((130, 20), F32), ((17, 20, 3), F32)],
    ),
    "tables of a Linear": (
        Recipe.of(token_tables, ("0", "1"), (9, 4, 33), F32, 1), [((9, 6), F32), ((33, 24), F32)],
    ),
    "tables of long sums": (
        Recipe.of(token_tables, ("0", "1"), (3, 2, 5), F32, 1), [((3, 1500), F32), ((5, 1500, 2), F32)],
    ),
    "taps of a Conv1d": (Recipe.of(token_taps, ("0",), (51, 20), F16, E=20), [((17, 20, 3), F32)]),
    "taps of a Linear": (Recipe.of(token_taps, ("0",), (132, 6), F32, E=6), [((33, 24), F32)]),
    "slices": (sliced("0", (130, 3, 72), F16), [((130, 3, 72), F32)]),
    "slices of odd channels": (sliced("0", (127, 2, 33), F32), [((127, 2, 33), F32)]),
    "slices of 8 bits": (sliced("0", (130, 3, 272), F8), [((130, 3, 272), F32)]),
    "slices of 8 bits, odd channels": (sliced("0", (7, 2, 131), F8), [((7, 2, 131), F16)]),
    "largest of channels": (peaks_of("0", 300), [((400, 3, 300), BF16)]),
    "largest of a channel": (peaks_of("0", 1), [((1, 1, 1), F32)]),
    "slices of halves": (sliced("0", (1, 5, 65), BF16), [((1, 5, 65), BF16)]),
    "merged": (Recipe.of(merged_weight, ("0", "1"), (65, 30), F32, 1), [((65, 44), F32), ((44, 30), F32)]),
    "halves": (Recipe.of(narrow_weight, ("0",), (33, 7), F16), [((33, 7), F32)]),
    "split": (Recipe.of(split_weight, ("0",), (2, 65, 31), F32), [((65, 31), F32)]),
    "split halves": (Recipe.of(split_weight, ("0",), (2, 300), F32), [((300,), BF16)]),
    "to tf32": (Recipe.of(tf32_weight, ("0",), (65, 31), F32), [((65, 31), F32)]),
    "taps of a Conv2d": (
        Recipe.of(spread_taps, ("0",), (5, 6 * 8), F32, channels=8), [((5, 3, 2, 3), F32)],
    ),
    "taps of a Conv1d in float16": (
        Recipe.of(spread_taps, ("0",), (9, 4 * 32), F16, channels=32), [((9, 32, 4), F16)],
    ),
    "merged halves": (Recipe.of(merged_weight, ("0", "1"), (7, 30), F32, 1), [((7, 44), F16), ((44, 30), BF16)]),
}  # fmt: skip


@pytest.fixture(params=[pytest.param("emulated", marks=needs_gxx), pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    """Every recipe that a GPU can compute is computed there, however small."""
    monkeypatch.setattr(build_cost, "ON_DEVICE_FROM_US", 0.0)
    if request.param == "cuda":
        return Gpu.get(0)
    return emulated_gpu(monkeypatch)


def given_of(case):
    recipe, sources = CASES[case]
    arrays = [rows(*shape, seed=i).astype(numpy_dtype(dtype)) for i, (shape, dtype) in enumerate(sources)]
    return recipe, {str(i): array for i, array in enumerate(arrays)}


def made_there(gpu, recipe, weights):
    """A recipe computed on the GPU, as an array."""
    (buffer,) = make_weights(gpu, [recipe], weights, MAKES).values()
    return gpu.download(buffer, np.empty(recipe.shape, numpy_dtype(recipe.dtype)))


def test_every_operation_has_a_case():
    assert LOWERINGS.keys() == MAKES.keys()
    by_tensor_cores = {op_name(narrow_tables), op_name(split_tables)}  # which are not emulated
    assert LOWERINGS.keys() - by_tensor_cores == {recipe.op for recipe, _ in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_both_evaluators_agree(gpu, case):
    recipe, weights = given_of(case)
    got, truth = made_there(gpu, recipe, weights), materialise(recipe, weights)
    if recipe.op == op_name(token_tables):
        wide = evaluate(recipe, list(weights.values()))
        table, W = (array.astype(np.float64) for array in weights.values())
        assert_error_within(got, token_tables(table, W), baseline=wide)
    elif recipe.op == op_name(merged_weight):
        np.testing.assert_allclose(got, truth, rtol=2**-23)  # rounded once, of sums in another order
    else:
        assert got.tobytes() == truth.tobytes()


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0].slice_axis == 0])
def test_slices_of_the_first_source_make_slices(case):
    recipe, weights = given_of(case)
    first, *others = weights.values()
    whole, n = materialise(recipe, weights), len(first)
    for part in (slice(0, n // 2), slice(n // 2, n)):
        sliced = Recipe(recipe.op, recipe.sources, (part.stop - part.start, *recipe.shape[1:]), recipe.dtype)
        np.testing.assert_allclose(
            evaluate(sliced, [first[part], *others]).astype(float), whole[part].astype(float), rtol=1e-4, atol=1e-5
        )


def test_split_numbers_of_every_size(gpu):
    """Bits of every exponent: the smallest, the largest, infinities. The bits of a NaN are up to the GPU."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    bits[:6] = 0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000
    weights = {"0": bits.view(np.float32)}
    for op, shape in ((split_weight, (2, len(bits))), (tf32_weight, (len(bits),))):
        recipe = Recipe.of(op, ("0",), shape, F32)
        with np.errstate(over="ignore"):
            truth = materialise(recipe, weights)
        got, numbers = made_there(gpu, recipe, weights), ~np.isnan(truth)
        assert np.array_equal(np.isnan(got), ~numbers)
        assert np.array_equal(got[numbers].view(np.uint32), truth[numbers].view(np.uint32))


@pytest.mark.parametrize("largest", [65_520.0, 1e9, -65_520.0])
def test_a_number_too_large_for_float16_is_an_error_there_too(gpu, largest):
    recipe, weights = given_of("halves")
    for other in (0.0, np.inf, np.nan):
        weights["0"][3, 4], weights["0"][0, 0] = largest, other
        with pytest.raises(InputError, match="too large for float16"):
            made_there(gpu, recipe, weights)
    weights["0"][3, 4], weights["0"][0, 0] = 65_519.0, np.inf
    assert np.array_equal(made_there(gpu, recipe, weights), weights["0"].astype(np.float16))


@pytest.mark.parametrize("slice_bytes", [1, 5000, 1 << 20])
def test_what_is_only_in_between_is_made_in_slices(gpu, monkeypatch, slice_bytes):
    tables, weights = given_of("tables of a Conv1d")
    half = Recipe.of(as_is, (tables,), tables.shape, F16)
    whole = made_there(gpu, half, weights)
    monkeypatch.setattr(weights_module, "SLICE_BYTES", slice_bytes)
    taken, allocate = [], gpu.allocate
    monkeypatch.setattr(gpu, "allocate", lambda nbytes, *more: taken.append(nbytes) or allocate(nbytes, *more))
    assert made_there(gpu, half, weights).tobytes() == whole.tobytes()
    scratch, row = 4 * 17 * 20 * 3, 4 * 3 * 17
    assert set(taken) == {scratch, max(row, slice_bytes // row * row) if slice_bytes < tables.nbytes else tables.nbytes}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_tables_of_the_tensor_cores(dtype):
    V, E, C, K = 5_001, 264, 136, 3
    weights = {"rows": rows(V, E), "W": rows(C, E, K, seed=2)}
    taps = Recipe.of(token_taps, ("W",), (K * C, E), dtype, E=E)
    if dtype == F32:
        made, sources = split_tables, ("rows", Recipe.of(split_weight, (taps,), (2, K * C, E)))
    else:
        made, sources = narrow_tables, (Recipe.of(as_is, ("rows",), (V, E), dtype), taps)
    tables = Recipe.of(made, sources, (V, K, C), dtype, 2 * V * E * C * K, K=K)
    got = made_there(Gpu.get(0), tables, weights)
    rounded = [array.astype(numpy_dtype(dtype)) for array in weights.values()]
    exact = token_tables(*(array.astype(float) for array in rounded))
    naive = token_tables(*(array.astype(np.float32) for array in rounded)).astype(numpy_dtype(dtype))
    assert_error_within(got, exact, baseline=naive)
    slices = made_there(Gpu.get(0), sliced(tables, tables.shape, dtype), weights)
    assert slices.tobytes() == token_slices(got, slices.shape[-1]).tobytes()


@pytest.mark.gpu
def test_tables_as_large_as_real_ones(monkeypatch):
    V, E, C, K = 21_635, 256, 128, 5
    weights = {"0": rows(V, E), "1": rows(C, E, K, seed=2)}
    tables = Recipe.of(token_tables, ("0", "1"), (V, K, C), F32, 2 * V * E * C * K)
    got = made_there(Gpu.get(0), tables, weights)
    some = np.r_[0:100, V - 100 : V]
    truth = token_tables(weights["0"][some].astype(float), weights["1"].astype(float))
    assert_error_within(got[some], truth, baseline=token_tables(weights["0"][some], weights["1"]))
    half = Recipe.of(as_is, (tables,), tables.shape, BF16)
    monkeypatch.setattr(weights_module, "SLICE_BYTES", 1 << 20)
    assert made_there(Gpu.get(0), half, weights).tobytes() == got.astype(numpy_dtype(BF16)).tobytes()
