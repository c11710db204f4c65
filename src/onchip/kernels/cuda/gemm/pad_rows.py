"""Zero-padding of rows for kernels that load by TMA: the host side of gemm/pad_rows.cu."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.common.arguments import Argument, Input, Int64, Output, UInt32
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, grid_1d
from onchip.network.recipe import Array, rearranging_op

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = ("sm_90a",)
CHUNK_BYTES = 16  # padded rows are multiples of this
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
THREADS, BLOCKS_PER_SM = 256, 8


def padded(K: int, item_bytes: int) -> int:
    """K elements, padded to whole 16-byte chunks."""
    return -(-K * item_bytes // CHUNK_BYTES) * CHUNK_BYTES // item_bytes


@rearranging_op
def padded_rows(weight: Array, K: int) -> Array:
    """The weight (N, less than K) zero-padded to (N, K)."""
    return np.pad(weight, ((0, 0), (0, K - weight.shape[1])))


def pad_rows(M: int, row_bytes: int, units: int, x: Argument, y: Argument) -> KernelLaunch:
    """Copies x (M, row_bytes) to y (M, row_bytes padded with zeros)."""
    word_bytes = math.gcd(CHUNK_BYTES // 2, row_bytes)
    chunks = -(-row_bytes // CHUNK_BYTES)
    lanes = min(5, (chunks - 1).bit_length())
    blocks = min(-(-(M << lanes) // THREADS), units * BLOCKS_PER_SM)
    return KernelLaunch(
        Program(SOURCE, f"pad_rows<{WORDS[word_bytes]}>"), replace(grid_1d(blocks), overlaps=True),
        (x, y, Int64(M), Int64(row_bytes // word_bytes), Int64(chunks), UInt32(lanes)), Budget(64),
    )  # fmt: skip


INSTANCES = tuple(
    Instance(f"rows of {size} B", lambda device, size=size: pad_rows(5248, size, device.units, Input(0), Output(0)))  # type: ignore[misc]
    for size in (200, 1002, 3, 12)
)
