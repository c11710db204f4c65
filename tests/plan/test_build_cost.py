"""Where derived weights are computed, by NumPy or by a device's kernels, and the estimated cost."""

import pytest

from onchip.kernels import cpu, cuda
from onchip.network.recipe import Recipe, as_is, op_name, transposed
from onchip.plan.build_cost import (
    build_us,
    device_recipes,
    host_us,
    recipe_rates_of,
)
from onchip.plan.device import H200
from onchip.plan.host_costs import HOST
from onchip.plan.rewrites.embedding import token_tables
from onchip.plan.rewrites.linear import merged_bias, merged_weight
from takers import CPU, stored

V, E, C, K = 21_635, 64, 64, 3
TABLES = Recipe.of(token_tables, ("emb", "W"), (V, K, C), "float32", 2 * V * E * K * C)
WEIGHTS = {"emb": stored(V, E), "W": stored(C, E, K), "T": TABLES}
GPU_MAKES = recipe_rates_of(cuda.KERNELS, H200)


def test_what_devices_make_is_told_by_their_kernels():
    assert {op_name(op) for op in (token_tables, merged_weight, as_is, transposed)} <= GPU_MAKES.keys()
    assert all(0 < rate <= H200.flops["fp16"] / H200.flops["fp32"] for rate in GPU_MAKES.values())
    assert recipe_rates_of(cpu.KERNELS, CPU) == recipe_rates_of(cuda.KERNELS, CPU) == {}


def test_numpy_multiplies_and_writes():
    flop, nbytes = 2 * V * E * K * C, 4 * V * K * C
    assert build_us([TABLES], WEIGHTS, CPU, {}) == pytest.approx(
        (flop / CPU.flops["fp32"] + nbytes / HOST.write_bandwidth) * 1e6
    )
    assert host_us(TABLES, WEIGHTS) == pytest.approx((flop / HOST.gemm_flops + nbytes / HOST.write_bandwidth) * 1e6)
    assert host_us(Recipe.of(as_is, ("emb",), (V, E)), WEIGHTS) == 0  # nothing is written
    assert host_us(Recipe.of(as_is, ("emb",), (V, E), "float16"), WEIGHTS) > 0


def test_a_gpu_makes_large_tables_itself():
    assert device_recipes([TABLES], WEIGHTS, GPU_MAKES) == {TABLES}
    there, here = (build_us([TABLES], WEIGHTS, H200, makes) for makes in (GPU_MAKES, {}))
    upload = 4 * (V * E + C * E * K) / HOST.copy_bandwidth * 1e6
    work = TABLES.flop / (GPU_MAKES[TABLES.op] * H200.flops["fp32"]) * 1e6  # more than the bytes take
    assert there == pytest.approx(upload + work + H200.launch_us)
    assert here == pytest.approx(host_us(TABLES, WEIGHTS) + TABLES.nbytes / HOST.copy_bandwidth * 1e6)
    assert here > 10 * there


def test_small_ones_and_other_dtypes_are_numpys():
    small = Recipe.of(token_tables, ("emb", "W"), (9, 3, 4), "float32", 2 * 9 * 8 * 3 * 4)
    weights = {"emb": stored(9, 8), "W": stored(4, 8, 3)}
    assert device_recipes([small], weights, GPU_MAKES) == set()
    wide = Recipe.of(as_is, ("x",), (10**6,), "float64")
    assert device_recipes([wide], {"x": stored(10**6)}, GPU_MAKES) == set()
    other = Recipe.of(merged_bias, ("W", "b"), (4000,), "float32", 10**12)
    assert device_recipes([other], {"W": stored(4000, 9), "b": stored(9)}, GPU_MAKES) == set()


def test_what_is_made_of_something_there_is_made_there():
    half = Recipe.of(as_is, ("T",), TABLES.shape, "float16")
    tiny = Recipe.of(as_is, ("T",), TABLES.shape)
    assert device_recipes([half, tiny], WEIGHTS, GPU_MAKES) == {TABLES, half, tiny}
    # Its sources are not counted again, nor copied.
    assert build_us([half], WEIGHTS, H200, GPU_MAKES) < TABLES.nbytes / HOST.copy_bandwidth * 1e6


def test_equal_recipes_and_sources_are_paid_once():
    again = Recipe.of(token_tables, ("emb", "W"), (V, K, C), "float32", 2 * V * E * K * C)
    assert build_us([TABLES, again], WEIGHTS, H200, GPU_MAKES) == build_us([TABLES], WEIGHTS, H200, GPU_MAKES)
    weights = {**WEIGHTS, "W5": stored(C, E, 5)}
    more = Recipe.of(token_tables, ("emb", "W5"), (V, 5, C), "float32", 2 * V * E * 5 * C)
    both = build_us([TABLES, more], weights, H200, GPU_MAKES)
    each = sum(build_us([one], weights, H200, GPU_MAKES) for one in (TABLES, more))
    assert each - both == pytest.approx(4 * V * E / HOST.copy_bandwidth * 1e6)


def test_what_the_host_reads_comes_back():
    weights = {"W2": stored(4096, 4096), "W1": stored(4096, 4096), "b": stored(4096)}
    weights["W"] = merged = Recipe.of(merged_weight, ("W2", "W1"), (4096, 4096), "float32", 2 * 4096**3)
    bias = Recipe.of(merged_bias, ("W", "b"), (4096,), "float32", 2 * 4096**2)
    alone = build_us([merged], weights, H200, GPU_MAKES)
    both = build_us([merged, bias], weights, H200, GPU_MAKES)
    back = (merged.nbytes + bias.nbytes) / HOST.copy_bandwidth * 1e6
    assert both - alone == pytest.approx(back + host_us(bias, weights))


def test_nothing_costs_nothing():
    assert build_us([], {}, H200, GPU_MAKES) == 0
