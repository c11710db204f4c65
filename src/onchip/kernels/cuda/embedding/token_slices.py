"""Host side of embedding/token_slices.cu: folded embedding tables in the sliced layout of token_max."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from onchip.errors import PlanError
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Int64, Output, Scratch, UInt32
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.program import EVERY_CHIP, Budget, Instance, KernelLaunch, Program, grid_1d
from onchip.kernels.fp8_tables import FP8, in_fp8, peaks_of
from onchip.network.recipe import Array, Recipe, recipe_op, sliced_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device

SOURCE = Path(__file__).with_suffix(".cu")
ROW_BYTES, ROWS, THREADS = 128, 128, 256  # as in token_slices.cu
FP8_ARCHITECTURES = tuple(arch for arch in EVERY_CHIP if arch not in ("sm_80", "sm_86"))
MAX_TAPS = 128  # of fp8 tables: sums of up to 128 taps stay finite in float16
STORED = ELEMENT_TYPES | {FP8: "e4m3"}
BUDGET = Budget(registers=64)
MAX_ROW_GROUPS = 512  # row groups of table_peaks
MAX_TOKENS = (1 << 31) - 1  # row indices are 32-bit


def slice_channels(dtype: str) -> int:
    """Channels per slice: one cache line."""
    return ROW_BYTES // DTYPE_BYTES[dtype]


def slice_count(C: int, dtype: str) -> int:
    return math.ceil(C / slice_channels(dtype))


def sliced(tables: str | Recipe, shape: tuple[int, int, int], dtype: str) -> Recipe:
    """Recipe that slices tables of shape (V, K, C)."""
    V, K, C = shape
    width = slice_channels(dtype)
    if dtype == FP8:
        sliced_shape = slice_count(C, dtype), K, V + 1, width
        return Recipe.of(scaled_slices, (tables, peaks_of(tables, C)), sliced_shape, dtype, width=width)
    return Recipe.of(token_slices, (tables,), (slice_count(C, dtype), K, V + 1, width), dtype, width=width)


@recipe_op
def token_slices(tables: Array, width: int) -> Array:
    """(V, K, C) -> (slices, K, V + 1, width): row V and channels from C on are zero."""
    V, K, C = tables.shape
    slices = np.zeros((math.ceil(C / width), K, V + 1, width), tables.dtype)
    for i, target in enumerate(slices):
        channels = tables[:, :, i * width : (i + 1) * width]
        target[:, :V, : channels.shape[2]] = channels.transpose(1, 0, 2)
    return slices


@recipe_op
def scaled_slices(tables: Array, peaks: Array, width: int) -> Array:
    """(V, K, C) -> (slices, K, V + 1, width) in fp8, each channel times LARGEST / its peak; NaN if not finite."""
    return token_slices(in_fp8(tables, peaks), width)


@recipe_op
def token_taps(W: Array, E: int) -> Array:
    """W (C_out, E, K) of a Conv1d or (C_out, K * E) of a Linear -> (K * C_out, E): one row per tap and channel."""
    taps = W.transpose(2, 0, 1) if W.ndim == 3 else W.reshape(len(W), -1, E).transpose(1, 0, 2)
    return np.ascontiguousarray(taps).reshape(-1, E)


@sliced_op
def narrow_tables(rows: Array, taps: Array, K: int) -> Array:
    """rows (V, E) and taps (K * C_out, E) in 16 bits -> (V, K, C_out), accumulated in float32."""
    return _gemm(rows.astype(np.float32), taps.astype(np.float32), K)


@sliced_op
def split_tables(rows: Array, taps: Array, K: int) -> Array:
    """rows (V, E) and taps (2, K * C_out, E), split in TF32 high and low (gemm/sm90.py) -> (V, K, C_out)."""
    return _gemm(rows, taps.sum(axis=0), K)


def _gemm(rows: Array, taps: Array, K: int) -> Array:
    y: Array = rows @ taps.T
    return y.reshape(len(rows), K, -1)


def slices_launch(
    recipe: Recipe, source: tuple[tuple[int, ...], str], x: Argument, y: Argument, peaks: Argument | None = None
) -> KernelLaunch:
    """Slice tables x, of shape and dtype `source`, into y as `recipe` describes; fp8 needs the channels' `peaks`."""
    (V, K, C), dtype = source
    chunks = math.ceil((V + 1) / ROWS)
    program = Program(SOURCE, f"token_slices<{ELEMENT_TYPES[dtype]}, {STORED[recipe.dtype]}>")
    sizes = Int64(V), UInt32(K), UInt32(C), UInt32(chunks)
    return KernelLaunch(program, grid_1d(recipe.shape[0] * K * chunks), (x, peaks or NOTHING, y, *sizes), BUDGET)


def peaks_launch(source: tuple[tuple[int, ...], str], y: Argument) -> KernelLaunch:
    """Compute per-channel peaks of each row group, (peak_groups, C); source: shape and dtype of the tables."""
    (V, K, C), dtype = source
    groups, blocks = peak_groups(V, K), math.ceil(C / THREADS)
    sizes = Int64(V * K), Int64(C), UInt32(groups), UInt32(blocks)
    program = Program(SOURCE, f"table_peaks<{ELEMENT_TYPES[dtype]}>")
    return KernelLaunch(program, grid_1d(groups * blocks), (Input(0), y, *sizes), BUDGET)


def peak_groups(V: int, K: int) -> int:
    """Row groups of peaks_launch."""
    return min(MAX_ROW_GROUPS, V * K)


def _instance(x_dtype: str, y_dtype: str) -> Instance:
    shape = (1000, 3, 100)
    recipe = sliced("tables", shape, y_dtype)

    def launch(device: Device) -> KernelLaunch:
        if y_dtype == FP8:
            check_fp8(device)
        return slices_launch(recipe, (shape, x_dtype), Input(0), Output(0))

    return Instance(f"{x_dtype} to {y_dtype}", launch)


def check_fp8(device: Device) -> None:
    if device.arch not in FP8_ARCHITECTURES:
        raise PlanError(f"8-bit tables need {', '.join(FP8_ARCHITECTURES)}", got=device.arch)


INSTANCES = (
    _instance("float32", "float16"), _instance("float32", "float32"), _instance("float32", "bfloat16"),
    _instance("float16", "float16"), _instance("bfloat16", "bfloat16"), _instance("float16", FP8),
    _instance("float32", FP8),
    Instance("peaks", lambda device: peaks_launch(((1000, 3, 100), "float16"), Scratch(0))),
)  # fmt: skip
