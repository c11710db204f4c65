"""Recipes computed on a GPU: the expensive operations as launches. The NumPy evaluators are the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Int64, Output, Scratch, UInt32
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.permute import permute
from onchip.kernels.cuda.common.precision import narrowed
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.common.weights import UNBIASED, narrow_weight, split_weight, spread_taps, tf32_weight
from onchip.kernels.cuda.embedding.token_slices import (
    narrow_tables,
    peak_groups,
    peaks_launch,
    scaled_slices,
    slices_launch,
    split_tables,
    token_slices,
    token_taps,
)
from onchip.kernels.cuda.gemm.simt import SimtGemm
from onchip.kernels.cuda.gemm.sm90 import launch_gemm
from onchip.kernels.cuda.mma.wgmma_tile import WgmmaGemm
from onchip.kernels.cuda.reduction.reduce import reduce_axis
from onchip.kernels.fp8_tables import table_peaks
from onchip.network.recipe import Array, Recipe, as_is, op_name, transposed
from onchip.plan.device import Device
from onchip.plan.rewrites.embedding import token_tables
from onchip.plan.rewrites.linear import merged_weight

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, BLOCKS_PER_SM = 256, 8
LARGEST_HALF = 65520.0  # rounds to infinity in float16 from here on


class Source(NamedTuple):
    """An input of a recipe."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class RecipeLowering:
    """A recipe as launches. Input(i) is source i, Output(0) the result."""

    recipe: Recipe
    sources: tuple[Source, ...]
    device: Device

    def at(self, B: int) -> Steps:
        """Launches for B rows: all rows, or any number if the recipe can be computed in slices."""
        return LOWERINGS[self.recipe.op](self, B)


def _as_is(lowering: RecipeLowering, B: int) -> Steps:
    count, dtypes = B * math.prod(lowering.recipe.shape[1:]), (lowering.sources[0].dtype, lowering.recipe.dtype)
    return Steps((permute(dtypes, (count,), (0,), lowering.device.units, Input(0), Output(0)),) if count else ())


def _transposed(lowering: RecipeLowering, B: int) -> Steps:
    (source,), axes = lowering.sources, dict(lowering.recipe.attributes)["axes"]
    assert isinstance(axes, tuple)
    dtypes, order = (source.dtype, lowering.recipe.dtype), [int(axis) % len(axes) for axis in axes]  # type: ignore[arg-type]
    return Steps((permute(dtypes, source.shape, order, lowering.device.units, Input(0), Output(0)),))


def _token_tables(lowering: RecipeLowering, B: int) -> Steps:
    """rows (V, E) @ taps (K * C_out, E)^T -> (V, K * C_out)."""
    rows, W = lowering.sources
    _, K, C_out = lowering.recipe.shape
    E = rows.shape[1]
    units, taps = lowering.device.units, Scratch(0)
    gemm = SimtGemm(B, K * C_out, E, "fp32", (rows.dtype, lowering.recipe.dtype))
    return Steps(
        (
            permute((W.dtype, "float32"), *_taps(W, K, E), units, Input(1), taps),
            gemm.launch(lowering.device, Input(0), taps, NOTHING, Output(0)),
        ),
        scratch_bytes=4 * K * C_out * E,
    )


def _token_taps(lowering: RecipeLowering, B: int) -> Steps:
    (W,), (N, E) = lowering.sources, lowering.recipe.shape
    dtypes = W.dtype, lowering.recipe.dtype
    return Steps((permute(dtypes, *_taps(W, N // W.shape[0], E), lowering.device.units, Input(0), Output(0)),))


def _tensor_tables(lowering: RecipeLowering, B: int) -> Steps:
    """rows (V, E) @ taps (K * C_out, E)^T on the tensor cores; both are in operand format."""
    rows, _ = lowering.sources
    _, K, C_out = lowering.recipe.shape
    precision = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[rows.dtype]
    dtypes, costs = (rows.dtype, lowering.recipe.dtype), costs_of(lowering.device).wgmma_tile
    gemm = WgmmaGemm(B, K * C_out, rows.shape[1], precision, dtypes, costs=costs)
    return Steps((launch_gemm(gemm, lowering.device.units, Input(0), Input(1), NOTHING, Output(0)),))


def _token_slices(lowering: RecipeLowering, B: int) -> Steps:
    tables, *peaks = lowering.sources
    shape_dtype = tables.shape, tables.dtype
    return Steps((slices_launch(lowering.recipe, shape_dtype, Input(0), Output(0), Input(1) if peaks else None),))


def _table_peaks(lowering: RecipeLowering, B: int) -> Steps:
    (tables,) = lowering.sources
    V, K, C = tables.shape
    groups = peak_groups(V, K)
    maximum = reduce_axis("reduce", "Max", "float32", (1, groups, C), lowering.device.units, Scratch(0))
    return Steps((peaks_launch((tables.shape, tables.dtype), Scratch(0)), maximum), 4 * groups * C)


def _taps(W: Source, K: int, E: int) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """The shape of W, and the permutation to (K, C_out, E).

    W is (C_out, E, K) of a Conv1d, (C_out, K * E) of a Linear.
    """
    return (W.shape, (2, 0, 1)) if len(W.shape) == 3 else ((W.shape[0], K, E), (1, 0, 2))


def _merged_weight(lowering: RecipeLowering, B: int) -> Steps:
    """W2 (D_out, D_mid) @ W1 (D_mid, D_in), accumulated in float64 as NumPy does, rounded once."""
    W2, W1 = lowering.sources
    D_mid, D_in = W1.shape
    units, w1_transposed = lowering.device.units, Scratch(0)
    gemm = SimtGemm(B, D_in, D_mid, "fp64", (W2.dtype, lowering.recipe.dtype))
    return Steps(
        (
            permute((W1.dtype, "float32"), W1.shape, (1, 0), units, Input(1), w1_transposed),
            gemm.launch(lowering.device, Input(0), w1_transposed, NOTHING, Output(0)),
        ),
        scratch_bytes=4 * D_mid * D_in,
    )


def _tf32_splits(lowering: RecipeLowering, B: int) -> Steps:
    (source,) = lowering.sources
    count = math.prod(source.shape)
    splits = 1 + len(lowering.recipe.shape) - len(source.shape)
    launch = _tf32_launch(source.dtype, splits, count, lowering.device.units)
    return Steps((launch,) if count else ())


def _tf32_launch(dtype: str, splits: int, count: int, units: int) -> KernelLaunch:
    scale = int(np.float32(UNBIASED).view(np.uint32))
    return _launch(f"tf32_parts<{ELEMENT_TYPES[dtype]}, {splits}>", count, units, (Int64(count), UInt32(scale)))


def _spread_taps(lowering: RecipeLowering, B: int) -> Steps:
    (source,), channels = lowering.sources, dict(lowering.recipe.attributes)["channels"]
    assert isinstance(channels, int)
    (N, C, *taps), count = source.shape, math.prod(lowering.recipe.shape)
    sizes = map(Int64, (N, C, math.prod(taps), channels))
    launch = _launch(f"spread_taps<{ELEMENT_TYPES[source.dtype]}>", count, lowering.device.units, tuple(sizes))
    return Steps((launch,) if count else ())


def _launch(head: str, count: int, units: int, sizes: tuple[Argument, ...]) -> KernelLaunch:
    blocks = min(-(-count // THREADS), units * BLOCKS_PER_SM)
    return KernelLaunch(Program(SOURCE, head), grid_1d(blocks), (Input(0), Output(0), *sizes), Budget(64))


# Inputs that NumPy's evaluator rejects, checked before the GPU runs.


def _check_half(weight: Array) -> None:
    if weight.size and not max(-float(weight.min()), float(weight.max())) < LARGEST_HALF:
        narrowed(weight, "float16")


CHECKS: Mapping[str, Callable[[Array], None]] = MappingProxyType({op_name(narrow_weight): _check_half})
LOWERINGS: Mapping[str, Callable[[RecipeLowering, int], Steps]] = MappingProxyType({
    op_name(as_is): _as_is,
    op_name(transposed): _transposed,
    op_name(token_tables): _token_tables,
    op_name(merged_weight): _merged_weight,
    op_name(narrow_tables): _tensor_tables,
    op_name(split_tables): _tensor_tables,
    op_name(token_taps): _token_taps,
    op_name(token_slices): _token_slices,
    op_name(scaled_slices): _token_slices,
    op_name(table_peaks): _table_peaks,
    op_name(narrow_weight): _as_is,
    op_name(split_weight): _tf32_splits,
    op_name(tf32_weight): _tf32_splits,
    op_name(spread_taps): _spread_taps,
})  # fmt: skip


class RecipeKernel(CudaKernel):
    """Computes recipes, and claims no layer."""

    name = "recipes"
    layers = ()

    def recipe_rates(self, device: Device) -> Mapping[str, float]:
        costs = costs_of(device).recipes
        return dict.fromkeys(LOWERINGS, 1.0) | {
            op_name(token_tables): costs.token_tables_factor,
            op_name(merged_weight): costs.merged_weight_factor,
            op_name(narrow_tables): costs.narrow_tables_factor,
            op_name(split_tables): costs.split_tables_factor,
        }


INSTANCES = (
    Instance("split", lambda device: _tf32_launch("float32", 2, 1 << 24, device.units)),
    Instance("to tf32", lambda device: _tf32_launch("bfloat16", 1, 1 << 24, device.units)),
    Instance("spread", lambda device: _launch("spread_taps<float>", 1 << 24, device.units, (Int64(1),) * 4)),
)
