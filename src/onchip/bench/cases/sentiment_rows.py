"""Input sentences of the sentiment benchmarks, and their references."""

from __future__ import annotations

import numpy as np

from onchip.kernels import reference
from onchip.measure.truth import Rows, Truth, as_inputs, naive_run
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.runtime.check import with_rounded_tables


def random_ids(net: Network, N: int) -> Array:
    V = net.weights["emb.weight"].shape[0]
    return np.random.default_rng(1).integers(0, V, (N, *net.input.row_shape), dtype=np.int32)


def zipf_ids(net: Network, N: int, a: float = 1.0) -> Array:
    """Zipf-distributed ids: token i is drawn in proportion to 1 / (i + 1)^a."""
    V = net.weights["emb.weight"].shape[0]
    share = 1 / np.arange(1, V + 1) ** a
    return np.random.default_rng(1).choice(V, (N, *net.input.row_shape), p=share / share.sum()).astype(np.int32)


VERIFIED = 8  # sentences checked on a GPU
IDS = {"random ids": random_ids, "Zipf ids": zipf_ids}


def exact_truth(net: Network, x: Array, dtype: str = "float32") -> Truth:
    """The float64 reference, with the baseline error of a naive run in this dtype."""
    return Truth(*_used_tokens(net, x), dtype)


def naive(net: Network, x: Array, dtype: str) -> Array:
    """Run in this dtype, one layer at a time."""
    return naive_run(*_used_tokens(net, x), dtype)


class Truths:
    """Cached references: most jobs check the same sentences, and a float64 run takes a second per four."""

    def __init__(self) -> None:
        self._cached: dict[tuple[Network, bytes], dict[str, Truth]] = {}

    def __call__(self, net: Network, rows: Rows, dtype: str) -> Truth:
        (x,) = as_inputs(rows)
        by_dtype = self._cached.setdefault((net, x.tobytes()), {})
        if dtype not in by_dtype:
            known = next(iter(by_dtype.values()), None)
            by_dtype[dtype] = exact_truth(net, x, dtype) if known is None else known.measured_by(naive(net, x, dtype))
        return by_dtype[dtype]


def rounded_table_truth(truth: Truth, net: Network, x: Array, tables: str, dtype: str = "float32") -> Truth:
    """The same reference; the baseline error is that of a naive run in this dtype on rounded tables."""
    small, ids = _used_tokens(net, x)
    return truth.measured_by(naive_run(with_rounded_tables(small, tables), ids, dtype))


def _used_tokens(net: Network, x: Array) -> tuple[Network, Array]:
    small, (ids,) = reference.with_used_tokens(net, (x,))
    return small, ids
