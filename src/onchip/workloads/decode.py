"""decode: a tiny decoder run on every pixel (72-64-64-4, ReLU, no bias), millions of rows per frame.

71 inputs, stored in 72 columns; the last column is zero.
"""

from __future__ import annotations

import numpy as np

from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.network.recipe import Array

WIDTHS = (72, 64, 64, 4)
SIGNALS = 71
ROWS = (12_800, 2_097_152)  # the two jobs: 5x5 and 100x100 views


def network(seed: int = 0) -> Network:
    return mlp(*WIDTHS, bias=False, seed=seed, name="decode")


def inputs(B: int, seed: int = 1) -> Array:
    """(B, 72) float32 rows: random inputs, zero in the last column."""
    x = np.random.default_rng(seed).standard_normal((B, WIDTHS[0]), dtype=np.float32)
    x[:, SIGNALS:] = 0
    return x
