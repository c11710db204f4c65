"""Check prefix sums against float64, for rows of any length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onchip.bench.cases.inference import PEER_SLACK
from onchip.measure.truth import Verdict, allowed_error
from onchip.network.recipe import Array

WHOLE = 1 << 24  # up to this length all sums are checked; else the last one of each block and all of some blocks
BLOCK = 1 << 12
BLOCKS = 64  # of which every sum is checked
CHUNK = 1 << 24  # values that are added at a time: their float64 copy fits into memory
UNWRITTEN = -1  # stage.poison's value for ints
MAX_UNWRITTEN = 16  # random sums are -1 by chance, one in 2^32


class SampledScanTruth:
    """The prefix sums of x (N,) float32 or int32 at the checked indices, and the allowed error.

    An error is relative to the largest sum so far, |a - b| / max(1, |sum| so far): a random walk returns to zero now
    and then, but its errors do not. onchip may have twice the error of pairwise summation plus a few ulp. A peer's
    baseline error is that of sequential float32 summation. Ints must be exact.
    """

    def __init__(self, x: Array) -> None:
        self._shape, self._dtype = x.shape, x.dtype
        self.indices = verified_indices(len(x))
        self.note = f"checked on {len(self.indices)} sums" if len(self.indices) < len(x) else ""
        is_float = x.dtype.kind == "f"
        sums = sums_at(self.indices, x, "float64" if is_float else "int64", np.cumsum)
        self.y = sums if is_float else sums.astype(x.dtype)  # ints wrap
        self._scale = np.maximum.accumulate(np.maximum(np.abs(self.y.astype(np.float64)), 1))
        self.allowed = self.allowed_peer = 0.0
        if is_float:
            self.allowed = allowed_error(self._error(sums_at(self.indices, x, "float32", pairwise_sums)))
            self.allowed_peer = PEER_SLACK * allowed_error(self._error(naive_sums_at(self.indices, x)))

    def verify(self, got: Array, peer: bool = False) -> Verdict:
        """got: all N sums, written over NaNs or UNWRITTEN."""
        allowed = self.allowed_peer if peer else self.allowed
        if got.shape != self._shape or got.dtype != self._dtype or not _is_written(got):
            return Verdict(float("inf"), allowed)
        return Verdict(self._error(got[self.indices]), allowed)

    def _error(self, got: Array) -> float:
        return float((np.abs(got.astype(np.float64) - self.y) / self._scale).max())


def _is_written(y: Array) -> bool:
    if y.dtype.kind == "f":
        return bool(np.isfinite(y).all())
    return int(np.count_nonzero(y == UNWRITTEN)) <= MAX_UNWRITTEN


def verified_indices(N: int) -> Array:
    """The checked indices, ascending."""
    if N <= WHOLE:
        return np.arange(N)
    ends = np.append(np.arange(BLOCK - 1, N - 1, BLOCK), N - 1)
    picked = np.random.default_rng(2).integers(0, len(ends), BLOCKS - 2)
    blocks = np.unique([0, *picked, len(ends) - 1]) * BLOCK
    inside = (blocks[:, None] + np.arange(BLOCK)).reshape(-1)
    return np.union1d(ends, inside[inside < N])


def sums_at(indices: Array, x: Array, dtype: str, scan: Callable[[Array], Array]) -> Array:
    """The prefix sums of x at these indices, computed in this dtype: in one scan, or block by block."""
    if len(indices) == len(x):
        return scan(x.astype(dtype))
    chunks = (x[i : i + CHUNK] for i in range(0, len(x), CHUNK))
    totals = np.concatenate([np.add.reduceat(c, np.arange(0, len(c), BLOCK), dtype=dtype) for c in chunks])
    ends = scan(totals)
    y = np.empty(len(indices), ends.dtype)
    # The checked indices of a block are contiguous: its last one, or all of them.
    blocks, first, count = np.unique(indices // BLOCK, return_index=True, return_counts=True)
    for block, i, n in zip(blocks, first, count, strict=True):
        if n == 1:
            y[i] = ends[block]
        else:
            prefix = ends[block - 1] if block else ends.dtype.type(0)
            y[i : i + n] = scan(x[block * BLOCK : (block + 1) * BLOCK].astype(dtype)) + prefix
    return y


def naive_sums_at(indices: Array, x: Array) -> Array:
    """As np.cumsum(x)[indices] for floats, but only one chunk of sums is in memory."""
    total, found = x.dtype.type(0), []
    for start in range(0, len(x), CHUNK):
        chunk = x[start : start + CHUNK].copy()
        chunk[0] += total
        y = np.cumsum(chunk)
        total = y[-1]
        first, last = np.searchsorted(indices, [start, start + len(chunk)])
        found.append(y[indices[first:last] - start])
    return np.concatenate(found)


def pairwise_sums(x: Array) -> Array:
    """Prefix sums in x's dtype, each the sum of a few sums over 1, 2, 4, ... values."""
    if len(x) < 2:
        return x.copy()
    y = np.empty_like(x)
    pairs = pairwise_sums(x[: len(x) // 2 * 2].reshape(-1, 2).sum(axis=1, dtype=x.dtype))
    y[0], y[1::2] = x[0], pairs
    y[2::2] = pairs[: len(y[2::2])] + x[2::2]
    return y
