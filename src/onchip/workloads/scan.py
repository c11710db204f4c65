"""scan: the prefix sum of a long row, y[i] = x[0] + ... + x[i]. No weights, one addition per element."""

from __future__ import annotations

import numpy as np

from onchip.network.build import sequential
from onchip.network.graph import Network
from onchip.network.layers import CumSum
from onchip.network.recipe import Array
from onchip.network.types import BATCH, TensorType

ELEMENTS = 1 << 24  # elements per row


def network(N: int = ELEMENTS) -> Network:
    return sequential(TensorType((BATCH, N)), [("sums", CumSum())], {}, name="scan")


def inputs(N: int = ELEMENTS, seed: int = 1) -> Array:
    """(N,) float32, standard normal."""
    return np.random.default_rng(seed).standard_normal(N, dtype=np.float32)
