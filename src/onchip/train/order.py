"""The row order of a training run, specified so that any framework can reproduce it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from onchip.network.recipe import Array

_THREADS = 4
_HELD_OUT = 2**31  # instead of an epoch: a separate generator


def epoch_order(n: int, seed: int, epoch: int) -> Array:
    """Row indices of epoch 0, 1, ...: `numpy.random.default_rng((seed, epoch)).permutation(n)`.

    Batches are consecutive slices; a short last batch is kept. Each order depends only on (seed, epoch), so a run can
    resume at any epoch.
    """
    return np.random.default_rng((seed, epoch)).permutation(n)


def epoch_orders(n: int, seed: int, epochs: Sequence[int]) -> list[Array]:
    """The epoch_order of each epoch, computed in parallel: a permutation can take as long as an epoch on the device."""
    if len(epochs) <= 1:
        return [epoch_order(n, seed, epoch) for epoch in epochs]
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        return list(pool.map(lambda epoch: epoch_order(n, seed, epoch), epochs))


def hold_out(n: int, share: float, seed: int) -> tuple[Array, Array]:
    """Row indices to train on and to validate on, both ascending.

    The validation rows are the first round(share n), at least 1, of
    `numpy.random.default_rng((seed, 2**31)).permutation(n)`; none for a share of 0.
    """
    count = max(1, round(share * n)) if share else 0
    held = np.zeros(n, bool)
    held[np.random.default_rng((seed, _HELD_OUT)).permutation(n)[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)
