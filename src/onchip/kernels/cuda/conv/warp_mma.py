"""Weights as mma.sync fragments: the host side of conv/warp_mma.cuh."""

from __future__ import annotations

import math

import numpy as np

from onchip.kernels.cuda.common.precision import round_up
from onchip.kernels.cuda.common.weights import multiplied_weight
from onchip.network.recipe import Array, Recipe

THREADS = 256
PART = 32  # K elements per partial sum in fp32
COLUMNS = 8  # per fragment


def even_share(n: int, most: int) -> int:
    """The largest size up to `most` that splits n into chunks of about equal size."""
    return math.ceil(n / math.ceil(n / most))


def fragment_shape(K: int, N: int, per_word: int) -> tuple[int, int]:
    """Shape of (K, N) as fragments: (steps * tiles of 8 columns, elements per tile)."""
    steps = round_up(K, COLUMNS * per_word) // (COLUMNS * per_word)
    return steps * (round_up(N, COLUMNS) // COLUMNS), 64 * per_word


def in_fragments(matrix: Array, per_word: int) -> Array:
    """(K, N), zero-padded, as mma.sync B fragments: (steps * tiles of 8 columns, elements per tile).

    Lane (g, q) = (lane / 4, lane % 4) has column g, and 32-bit words q and q + 4 of the column's 8 per step.
    """
    K, N = matrix.shape
    steps, tiles = -(-K // (8 * per_word)), -(-N // COLUMNS)
    full = np.zeros((steps * 8 * per_word, tiles * COLUMNS), matrix.dtype)
    full[:K, :N] = matrix
    split = full.reshape(steps, 2, 4, per_word, tiles, COLUMNS)  # step, word, q, element, tile, g
    return split.transpose(0, 4, 5, 2, 1, 3).reshape(steps * tiles, 64 * per_word)


def multiplied_fragments(arranged: Recipe, precision: str) -> Recipe:
    """Fragments in the precision's type; 3xTF32: all high halves, then all low ones."""
    rows, size = arranged.shape
    return multiplied_weight(arranged, (rows, size), precision)
