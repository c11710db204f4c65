"""The order in which a training run sees its rows, written down so that any framework can follow it."""

from __future__ import annotations

import numpy as np

from onchip.spec.recipe import Array


def epoch_order(n: int, seed: int, epoch: int) -> Array:
    """Row numbers of epoch 0, 1, ...: `numpy.random.default_rng((seed, epoch)).permutation(n)`.

    Batches are consecutive pieces of it; the last one may be short and is kept. Every epoch's order stands
    by itself, so a run can be taken up at any epoch.
    """
    return np.random.default_rng((seed, epoch)).permutation(n)
