"""What several tests need: random networks and rows, and the one way to compare with the truth."""

from __future__ import annotations

import os

import numpy as np

from onchip.kernels import reference
from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.network.types import numpy_dtype


def random_mlp(*widths: int, seed: int = 0, **options: object) -> Network:
    """An MLP whose biases are not zero, so that a forgotten bias shows."""
    net = mlp(*widths, seed=seed, **options)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed + 1000)
    weights = {
        name: rng.standard_normal(w.shape, dtype=np.float32) / 4 if name.endswith("bias") else w
        for name, w in net.weights.items()
    }
    return net.replace(weights=weights)


def rows(B: int, *shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((B, *shape), dtype=np.float32)


def narrow_numbers(dtype: str, *shape: int, seed: int = 1) -> np.ndarray:
    """Ints of all sizes; floats whose sums are exact in float32."""
    rng, kind = np.random.default_rng(seed), numpy_dtype(dtype)
    if "float" in dtype:
        return rng.integers(-3, 4, shape).astype(kind)
    return rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, shape, kind, endpoint=True)


def narrow_sums(net: Network, x: np.ndarray) -> np.ndarray:
    """The one output of a network, rounded once."""
    return reference.forward(net, x).astype(numpy_dtype(net.types[net.outputs[0]].dtype))


def assert_error_within(got, truth, baseline, factor: float = 2.0, ulps: float = 4.0) -> None:
    """got may be off by at most `factor` times the baseline's worst error plus a few ulp of the largest value."""
    got, truth, baseline = (np.asarray(a, np.float64) for a in (got, truth, baseline))
    assert got.shape == truth.shape, f"shape {got.shape}, expected {truth.shape}"
    if truth.size == 0:
        return
    assert np.array_equal(np.isnan(got), np.isnan(truth)), "NaNs in other places"
    scale = np.nanmax(np.abs(truth))
    allowed = factor * np.nanmax(np.abs(baseline - truth)) + ulps * np.finfo(np.float32).eps * max(scale, 1e-30)
    error = np.abs(got - truth)
    worst = np.unravel_index(np.nanargmax(error), error.shape)
    assert error[worst] <= allowed, (
        f"worst at {tuple(map(int, worst))}: got {got[worst]}, truth {truth[worst]}, "
        f"off by {error[worst]:.3g}, {error[worst] / allowed:.2f} times what is allowed"
    )


def ulps_of(dtype: str) -> float:
    """A few units in the last place of a dtype, in those of float32; of float64, some for sums in another order."""
    bits = {"float32": 0, "float16": 13, "bfloat16": 16, "float64": -25}
    return float(4 * 2.0 ** bits[dtype])


def read_terminal(leader: int) -> bytes:
    """All that is written to a terminal until its other end is closed."""
    seen = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:  # Linux says so when it is
            piece = b""
        if not piece:
            os.close(leader)
            return seen
        seen += piece


def assert_refused(ran, folder, *words) -> None:
    """A command said what is wrong, with these words among others, and left no file."""
    assert ran.code == 2
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert all(label in ran.err for label in ("got:", "expected:", "try:")), ran.err
    for word in words:
        assert word in ran.err
    assert [*folder.glob("y.*"), *folder.glob("*.tmp"), *folder.glob(".*")] == []


class Rows:
    """An array as a source; remembers what was asked for."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.requested = []

    def __len__(self):
        return len(self.array)

    def read(self, start, stop):
        self.requested.append((start, stop))
        return self.array[start:stop].copy()
